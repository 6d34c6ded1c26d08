"""Asks the captain of a run on this machine to stop."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.agent.net import stop_request


def ask_to_stop(folder: Path, reason: str, timeout: float = 5.0, interrupt: bool = False) -> bool:
    """True: the captain has confirmed that it stops the run. `interrupt`: tasks receive SIGINT before SIGTERM."""
    try:
        captain = json.loads((folder / "run.json").read_text())["captain"]
    except (OSError, ValueError, KeyError):
        return False
    return stop_request.ask_to_stop(captain, str(folder / "tls"), "member", reason, timeout, interrupt)
