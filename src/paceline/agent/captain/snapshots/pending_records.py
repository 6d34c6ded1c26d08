"""Records of generations that are not in the store yet. They are written in order, because each may name a snapshot of
the generation before it, and nothing of a generation is committed before its record is written. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.transfers import requests as req

PAUSE = 2.0  # seconds between requests to a store that fails
WARNING = "cannot write to the snapshot store; training continues, but no snapshot is committed until this works"


class PendingRecords:
    def __init__(self, instruct: Callable[[ins.Instruction], None], emit: Callable[..., None]) -> None:
        self._instruct, self._emit = instruct, emit
        self._records: list[req.BeginGeneration] = []  # oldest first
        self._send_at: float | None = 0.0  # None: the request was sent
        self._has_warned = False
        self.written = 0  # the newest generation known to have its record in the store
        self.error = ""  # why the last attempt failed

    def __len__(self) -> int:
        return len(self._records)

    @property
    def newest(self) -> int:
        """The newest generation whose record is written or owed."""
        return max([self.written, *(record.generation for record in self._records)])

    def for_members(self) -> tuple[ev.GenerationRecord, ...]:
        """What members keep, in case this captain and its notes are lost."""
        return tuple(ev.GenerationRecord(each.generation, each.parent, each.by) for each in self._records)

    def add(self, record: req.BeginGeneration, now: float) -> None:
        if not self._records:
            self._send_at = now
        self._records.append(record)

    def replace(self, records: Iterable[req.BeginGeneration], now: float) -> None:
        self._records, self._send_at = list(records), now

    def learn_written(self, generation: int) -> None:
        """The store lists this generation as its newest. Its own record is sent again, if it is owed: if another
        captain has written a different one, the store refuses it."""
        self.written = max(self.written, generation)
        self._records = [record for record in self._records if record.generation >= generation]

    def advance(self, now: float) -> None:
        if self._records and self._send_at is not None and now >= self._send_at:
            self._send_at = None
            self._instruct(ins.AskStore(self._records[0]))

    def on_answered(self, request: req.BeginGeneration, answer: req.Answer, now: float) -> req.GenerationBegun | None:
        """None: it is still owed, or was not."""
        if not self._records or request.generation != self._records[0].generation:
            return None
        self._send_at = now
        if isinstance(answer, req.Failure):
            self.error, self._send_at = answer.text, now + PAUSE
            if not self._has_warned:
                self._has_warned = True
                self._emit("warning", text=f"{WARNING}: {answer.text}")
            return None
        assert isinstance(answer, req.GenerationBegun)
        self.error, self._has_warned = "", False
        self.written = max(self.written, self._records.pop(0).generation)
        return answer

    # ---- notes for the next captain

    def to_notes(self) -> list[dict[str, Any]]:
        return [req.request_to_object(record) for record in self._records]

    def load_notes(self, notes: Any) -> None:
        """Earlier versions noted one record, or None."""
        entries = notes if isinstance(notes, list) else [] if notes is None else [notes]
        records = [req.read_request(entry) for entry in entries]
        self._records = [record for record in records if isinstance(record, req.BeginGeneration)]
