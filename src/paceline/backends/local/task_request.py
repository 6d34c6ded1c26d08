"""Sends a request about tasks to the captain of a run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.agent.net import task_request
from paceline.agent.net.frames import Message
from paceline.view.files import run_folders


def ask_captain(folder: Path, request: Message, seconds: float) -> Iterator[Message]:
    """As agent.net.task_request does."""
    captain = run_folders.info(folder).get("captain")
    if captain is None:
        return iter(())
    return task_request.ask_captain(captain, str(folder / "tls"), "member", request, seconds)
