"""Writes events.jsonl, and reserves disk space for the end of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Callable

from paceline.agent.redaction import Redactor
from paceline.agent.run_files import Appender, Echo, stamp

RESERVE = 256 * 1024  # bytes
MOST_UNWRITTEN = 500  # events


class EventLog:
    def __init__(
        self, folder: str, echo: Echo | None, print_error: Callable[[str], None], redact: Redactor | None = None
    ) -> None:
        self._file = Appender(f"{folder}/events.jsonl", print_error)
        self._reserve_path = f"{folder}/.reserve"
        self._unwritten: list[bytes] = []  # events that did not fit on the disk
        self._echo = echo
        self._redact = redact or Redactor()

    def write(self, kind: str, generation: int, fields: Mapping[str, Any]) -> None:
        event = {"at": stamp(), "event": kind, "generation": generation, **self._redact.texts(fields)}
        line = json.dumps(event).encode() + b"\n"
        if kind == "step":
            self._file.write(line)
        else:
            self._write_or_keep(line)
        if self._echo is not None:
            self._echo.write(line)

    def _write_or_keep(self, line: bytes) -> None:
        """Unlike steps, other events are written later if the disk is full now: `status` shows what they tell."""
        if self._unwritten:
            self._file.try_again()  # the disk may have space again
        lines = [*self._unwritten, line]
        while lines and self._file.write(lines[0]):
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
