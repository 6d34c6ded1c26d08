"""Writes events.jsonl, a second file with what is uploaded of it, and reserves disk space for the end of the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Callable

from paceline.agent.event_file import FREQUENT, EventFile, read_sums
from paceline.agent.limited_log import LimitedLog
from paceline.agent.redaction import Redactor
from paceline.agent.run_files import Echo, stamp

RESERVE = 256 * 1024  # bytes
MOST_UNWRITTEN = 500  # events
UPLOADED = "events.uploaded.jsonl"  # is appended to, as an upload requires
UPLOADED_LIMIT = 64 * 1024 * 1024  # bytes; the oldest are deleted first, usually long after they were uploaded
STEP_EVERY_S = 600.0  # seconds between two steps of a task that are uploaded
CLOCK_SHIFT_S = 1.0  # seconds by which the clock differs from the time that has passed; less is corrected gradually


class EventLog:
    def __init__(
        self, folder: str, echo: Echo | None, print_error: Callable[[str], None], redact: Redactor | None = None
    ) -> None:
        """`echo`: the run is on a cluster; its files may be uploaded."""
        self._file = EventFile(folder, print_error)
        self._uploaded = None if echo is None else LimitedLog(f"{folder}/{UPLOADED}", print_error, UPLOADED_LIMIT)
        self._uploaded_at: dict[Any, float] = {}  # task -> when a step of it was added to that file
        self._last_steps: dict[Any, bytes] = {}  # task -> its last step, if it is not in that file
        self._reserve_path = f"{folder}/.reserve"
        self._unwritten: list[tuple[bytes, Mapping[str, Any]]] = []  # events that did not fit on the disk
        self._echo = echo
        self._redact = redact or Redactor()
        self._clock_offset = _clock_offset()
        self.goodput, self.resources = read_sums(folder)  # of the whole run, also if this captain has restarted

    def write(self, kind: str, generation: int, fields: Mapping[str, Any]) -> None:
        """If the clock was set, or the machine was suspended, since the last event, an event about that comes first:
        readers then know how much time has passed between the two."""
        before, self._clock_offset = self._clock_offset, _clock_offset()
        shift = self._clock_offset - before
        if abs(shift) >= CLOCK_SHIFT_S:
            self._write("clock-changed", generation, {"shift_s": round(shift, 3)})
        self._write(kind, generation, fields)

    def _write(self, kind: str, generation: int, fields: Mapping[str, Any]) -> None:
        event = {"at": stamp(), "event": kind, "generation": generation, **self._redact.texts(fields)}
        line = json.dumps(event).encode() + b"\n"
        self.goodput.add(event)
        self.resources.add(event)
        if kind in FREQUENT:
            self._file.write(line, event)
        else:
            self._write_or_keep(line, event)
        if self._echo is not None:
            self._echo.write(line)
        if self._uploaded is not None:
            for each in self._to_upload(line, event):
                self._uploaded.write(each)

    def _to_upload(self, line: bytes, event: Mapping[str, Any]) -> list[bytes]:
        """Everything but most of the steps, of which there may be one per second and task, for weeks."""
        task, now = event.get("task"), time.monotonic()
        if event["event"] == "resources":
            return []  # the report has their sums
        if event["event"] == "task-exited":
            return [*filter(None, [self._last_steps.pop(task, b"")]), line]
        if event["event"] != "step":
            return [line]
        if now - self._uploaded_at.get(task, -STEP_EVERY_S) < STEP_EVERY_S:
            self._last_steps[task] = line
            return []
        self._uploaded_at[task] = now
        self._last_steps.pop(task, None)
        return [line]

    def _write_or_keep(self, line: bytes, event: Mapping[str, Any]) -> None:
        """Unlike frequent events, others are written later if the disk is full now: `status` shows what they tell."""
        if self._unwritten:
            self._file.try_again()  # the disk may have space again
        lines = [*self._unwritten, (line, event)]
        while lines and self._file.write(*lines[0]):
            del lines[0]
        self._unwritten = lines[:MOST_UNWRITTEN]

    def reserve_space(self) -> None:
        """Reserve space that is released at the end, so that the report can be written to a full disk."""
        try:
            with open(self._reserve_path, "wb") as file:
                file.write(b"\0" * RESERVE)
        except OSError:
            pass

    def release_space(self) -> None:
        try:
            os.unlink(self._reserve_path)
        except OSError:
            pass
        self._file.try_again()


def _clock_offset() -> float:
    """Constant, unless the clock is set. The monotonic clock also stands still while the machine is suspended."""
    return time.time() - time.monotonic()
