"""Asks the captain of a run on this machine to stop."""

from __future__ import annotations

from pathlib import Path

from paceline.agent.net import stop_request
from paceline.view.files import run_folders


def ask_to_stop(folder: Path, reason: str, timeout: float = 5.0, interrupt: bool = False) -> bool:
    """True: the captain has confirmed that it stops the run. `interrupt`: tasks receive SIGINT before SIGTERM."""
    captain = run_folders.info(folder).get("captain")
    if captain is None:
        return False
    return stop_request.ask_to_stop(captain, str(folder / "tls"), "member", reason, timeout, interrupt)
