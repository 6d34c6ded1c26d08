"""What the next agent of a host must know: its generation, and what a captain that has lost its notes asks for."""

from __future__ import annotations

import json

from paceline.agent.captain import events as ev
from paceline.agent.net.frames import WireError
from paceline.agent.net.messages import read_records, records_to_list
from paceline.agent.run_files import replace_text


class HostNotes:
    """Values that are kept in files. If one cannot be written, for example because the disk is full, only this agent
    has it."""

    def __init__(self, folder: str, host: str) -> None:
        self._prefix = f"{folder}/logs/.{host}"
        self.generation = self._read_generation()  # the highest of this host: numbers only increase
        self.data = self._read_data()  # the location of the ingested data
        self.records = self._read_records()  # records of generations that may not be in the store

    def update(self, generation: int, data: str, records: tuple[ev.GenerationRecord, ...]) -> None:
        """Empty values change nothing."""
        if generation > self.generation:
            self.generation = generation
            self._write("generation", str(generation))
        if records and records != self.records:
            self.records = records
            self._write("records", json.dumps(records_to_list(records)))
        self.update_data(data)

    def update_data(self, data: str) -> None:
        if data and data != self.data:
            self.data = data
            self._write("data", data)

    def _write(self, name: str, text: str) -> None:
        try:
            replace_text(f"{self._prefix}.{name}", text)
        except OSError:
            pass

    def _read_generation(self) -> int:
        try:
            with open(f"{self._prefix}.generation") as file:
                return int(file.read())
        except (OSError, ValueError):
            return 0

    def _read_data(self) -> str:
        try:
            with open(f"{self._prefix}.data", encoding="utf-8", errors="surrogatepass") as file:
                return file.read().rstrip("\n")
        except (OSError, ValueError):
            return ""

    def _read_records(self) -> tuple[ev.GenerationRecord, ...]:
        try:
            with open(f"{self._prefix}.records") as file:
                return read_records(json.load(file))
        except (OSError, ValueError, RecursionError, WireError):
            return ()
