"""What the next agent of a host must know: its generation, and what a captain that has lost its notes asks for."""

from __future__ import annotations

import json
import os

from paceline.agent import generation_numbers
from paceline.agent.captain import events as ev
from paceline.agent.net.codec import data_location
from paceline.agent.net.frames import WireError
from paceline.agent.net.messages import read_records, records_to_list
from paceline.agent.run_files import replace_text
from paceline.storage.json_values import read_json
from paceline.storage.regular_files import open_regular


class HostNotes:
    """Values that are kept in files. If one cannot be written, for example because the disk is full, only this agent
    has it. What a captain would reject is not read: the host could not join."""

    def __init__(self, folder: str, host: str) -> None:
        self._prefix = f"{folder}/logs/.{host}"
        self.generation = self._read_generation()  # the newest of this host
        self.data = self._read_data()  # the location of the ingested data
        self.records = self._read_records()  # records of generations that may not be in the store

    def update(self, generation: int, data: str, records: tuple[ev.GenerationRecord, ...]) -> None:
        """Empty values change nothing."""
        if generation and generation != self.generation and not self.is_outdated(generation):
            self.generation = generation
            self._write("generation", str(generation))
        if records and records != self.records:
            self.records = records
            self._write("records", json.dumps(records_to_list(records)))
        self.update_data(data)

    def is_outdated(self, generation: int) -> bool:
        """Whether this host has seen a later generation."""
        return generation_numbers.is_outdated(generation, self.generation)

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
            generation = int(self._read("generation"))
        except (OSError, ValueError):
            return 0
        return generation if 0 < generation <= generation_numbers.MOST else 0

    def _read_data(self) -> str:
        try:
            return data_location(self._read("data").decode("utf-8", "surrogatepass").rstrip("\n"))
        except (OSError, ValueError):
            return ""

    def _read_records(self) -> tuple[ev.GenerationRecord, ...]:
        try:
            return read_records(read_json(f"{self._prefix}.records"))
        except (OSError, ValueError, WireError):
            return ()

    def _read(self, name: str) -> bytes:
        """Tasks can write to the folder: the file may be a pipe."""
        with os.fdopen(open_regular(f"{self._prefix}.{name}", follow=True), "rb") as file:
            return file.read()
