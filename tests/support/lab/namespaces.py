"""Processes that live in namespaces of their own, and end all together with the first of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

# Words may follow: more namespaces, then the command that becomes PID 1.
NEW = ("unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
STARTED_S = 5.0


def first_process(unshare: subprocess.Popen[bytes]) -> int:
    """PID 1 of the new namespace, by its number here."""
    until = time.monotonic() + STARTED_S
    while unshare.poll() is None and time.monotonic() < until:
        if children := Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.005)
    raise ProcessLookupError(f"{unshare.args!r} has no process")


def kill(unshare: subprocess.Popen[bytes]) -> None:
    """SIGKILL for PID 1, and so for all."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(first_process(unshare), signal.SIGKILL)


def end(unshare: subprocess.Popen[bytes], limit: float) -> None:
    """As kill(), and wait: the kernel reports the death of a PID 1 only after that of all others."""
    kill(unshare)
    unshare.wait(limit)
