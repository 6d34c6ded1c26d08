"""Runs one server and ends it with the parent process, however the parent ends. Standard library only.

On SIGTERM, it terminates the server and keeps its folder. When the parent process has ended, it kills the server and
removes the folder, since nothing else will. When it is itself killed, the kernel kills the server.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys

END_S = 10.0  # Azurite saves its state when it is terminated; if it takes longer, it hangs


def main(parent_pid: int, folder: str, command: list[str]) -> int:
    sigterm_read, sigterm_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(sigterm_write, b"."))
    # A pidfd and not a pipe: other children of the parent process would keep a pipe open.
    parent = os.pidfd_open(parent_pid) if os.getppid() == parent_pid else None
    if parent is None or os.getppid() != parent_pid:
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    server = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL)
    ready, _, _ = select.select([sigterm_read, parent, os.pidfd_open(server.pid)], [], [])
    if parent in ready:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    elif sigterm_read in ready:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
