"""The captain's notes in captain.json: what the next captain of the run has to know."""

from __future__ import annotations

import json
from typing import Any

from paceline.agent import machine
from paceline.agent.captain.state_machine import Captain
from paceline.agent.run_files import replace_text, stamp

SAVE_EVERY = 5.0  # seconds between saves of changes that members could report, too


class CaptainNotes:
    def __init__(self, folder: str, now: float) -> None:
        self._path = f"{folder}/captain.json"
        self._boot = machine.boot_id()
        notes = self._read()
        self.is_new = not notes  # the run has had no captain before, or its notes are lost
        self.started: str = notes.get("started") or stamp()
        self.captain: dict[str, Any] | None = notes.get("captain")
        # After a reboot, the clock restarts at 0: the time without a captain is unknown and ignored.
        self.clock_offset: float = now - notes["now"] if notes and notes["boot"] != self._boot else 0.0
        self._saved_state = ""
        self._saved_at = 0.0
        self._milestone: tuple[object, ...] = ()

    def _read(self) -> dict[str, Any]:
        try:
            with open(self._path) as file:
                notes: dict[str, Any] = json.load(file)
                return notes
        except (OSError, ValueError):
            return {}

    def save_if_due(self, captain: Captain, now: float, is_tick: bool) -> None:
        """On a milestone, or at a tick: members that rejoin report what happened since."""
        if (is_tick and now - self._saved_at > SAVE_EVERY) or captain.milestone() != self._milestone:
            self.save(captain, now)

    def save(self, captain: Captain, now: float) -> None:
        self._milestone = captain.milestone()
        self._saved_at = now
        state = json.dumps(captain.to_notes())
        if state == self._saved_state:
            return
        head = json.dumps({"started": self.started, "boot": self._boot, "now": now})
        try:
            replace_text(self._path, f'{head[:-1]}, "captain": {state}}}')
            self._saved_state = state
        except OSError:
            pass  # a full disk: the next captain learns what it can from its members
