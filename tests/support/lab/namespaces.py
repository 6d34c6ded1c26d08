"""Processes in their own namespaces, which all end together with the first of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

# Append more namespace options, then the command that becomes PID 1.
NEW = ("unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
STARTED_S = 60.0


def first_process(unshare: subprocess.Popen[bytes]) -> int:
    """PID 1 of the new namespace, by its pid in our namespace."""
    until = time.monotonic() + STARTED_S
    while unshare.poll() is None and time.monotonic() < until:
        if children := Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.005)
    raise ProcessLookupError(f"{unshare.args!r} has no process")


def kill(unshare: subprocess.Popen[bytes]) -> None:
    """Sends SIGKILL to PID 1, which ends all processes of the namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(first_process(unshare), signal.SIGKILL)


def end(unshare: subprocess.Popen[bytes], limit: float) -> None:
    """Like kill(), and waits: the kernel reports the exit of PID 1 only after all other processes have ended."""
    kill(unshare)
    unshare.wait(limit)
