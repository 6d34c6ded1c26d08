"""Runs one server, and ends it with the process that wanted it, however that one ends. Standard library only.

Told to end (SIGTERM), it asks the server to end and keeps its folder. When the process above is gone, it kills the
server and removes the folder, since nobody else will. When it is itself killed, the kernel kills the server.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys

END_S = 10.0  # Azurite writes down what it knows when it is asked to end; one that takes longer hangs


def main(above: int, folder: str, command: list[str]) -> int:
    asked, asks = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(asks, b"."))
    # By pid and not by a pipe: a process forked from the one above would hold the pipe open.
    parent = os.pidfd_open(above) if os.getppid() == above else None
    if parent is None or os.getppid() != above:
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    server = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL)
    ready, _, _ = select.select([asked, parent, os.pidfd_open(server.pid)], [], [])
    if parent in ready:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    elif asked in ready:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
