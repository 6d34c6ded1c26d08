"""A word with the captain of a run on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.agent import control


def ask_to_stop(folder: Path, reason: str, timeout: float = 5.0) -> bool:
    """True when the captain has said that it stops the run."""
    try:
        captain = json.loads((folder / "run.json").read_text())["captain"]
    except (OSError, ValueError, KeyError):
        return False
    return control.ask_to_stop(captain, str(folder / "tls"), "member", reason, timeout)
