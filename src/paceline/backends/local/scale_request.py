"""Asks the supervisor of a run on this machine to start the hosts that its captain wants."""

from __future__ import annotations

import os
import platform
import signal
from contextlib import suppress
from pathlib import Path

from paceline.view.files import run_folders


def start_hosts(folder: Path) -> None:
    """Only after the captain has accepted a request: a supervisor of an earlier version would end at the signal."""
    info = run_folders.info(folder)
    if run_folders.alive(folder) and info.get("machine") == platform.node() and "supervisor" in info:
        with suppress(ProcessLookupError):  # the run has just ended
            os.kill(info["supervisor"], signal.SIGUSR1)
