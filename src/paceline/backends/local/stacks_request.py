"""Asks the captain of a run on this machine for the stacks of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.agent.net import stacks_request
from paceline.agent.net.frames import Message
from paceline.view import run_folders


def ask_for_stacks(folder: Path, tasks: Sequence[str], seconds: float) -> Iterator[Message]:
    """As agent.net.stacks_request does."""
    captain = run_folders.info(folder).get("captain")
    if captain is None:
        return iter(())
    return stacks_request.ask_for_stacks(captain, str(folder / "tls"), "member", tasks, seconds)
