"""The captain's notes in captain.json: what the next captain of the run has to know."""

from __future__ import annotations

import json
from typing import Any, Callable

from paceline.agent.captain.state_machine import Captain
from paceline.agent.net.codec import is_finite
from paceline.agent.net.frames import WireError
from paceline.agent.run_files import replace_text, stamp
from paceline.storage import boots
from paceline.storage.json_values import read_json
from paceline.storage.snapshots.manifest import INVALID_FIELDS

DAMAGED = "captain.json is damaged: the new captain recovers the state of the run from its members and from the store"
SAVE_EVERY = 5.0  # seconds between saves of changes that members could report, too


class CaptainNotes:
    def __init__(self, folder: str, now: float) -> None:
        self._path = f"{folder}/captain.json"
        self._boot = boots.boot_id()
        self.problem = ""
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
        """{}: there are none, or `problem` says why they cannot be used."""
        try:
            notes = read_json(self._path)
            types: dict[str, Any] = {"started": str, "boot": str, "captain": dict}
            is_valid = isinstance(notes, dict) and all(isinstance(notes.get(name), types[name]) for name in types)
            if is_valid and is_finite(notes.get("now")):
                return dict(notes)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            pass
        self.problem = DAMAGED
        return {}

    def restored(self, make: Callable[[dict[str, Any] | None], Captain]) -> Captain:
        """The captain that continues from the notes. `make`: creates a captain from notes, or without any."""
        if self.captain is not None:
            try:
                captain = make(self.captain)
                json.dumps(captain.to_notes())
                return captain
            except (*INVALID_FIELDS, IndexError, WireError):
                self.problem, self.is_new, self.captain = DAMAGED, True, None
        return make(None)

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
