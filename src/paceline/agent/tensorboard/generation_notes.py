"""A file that records which generation wrote which TensorBoard files; hosts on one machine share file and folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Callable

from paceline.agent.run_files import replace
from paceline.storage.json_values import read_json
from paceline.storage.snapshots.manifest import INVALID_FIELDS
from paceline.storage.tensorboard_event_files import alone


@dataclass
class Notes:
    generation: int = 0  # the last that has begun
    old: dict[str, int] = field(default_factory=dict)  # files without a writer -> their generation
    # Generation -> the step it resumes from, and the furthest step known to have been reached before.
    after: dict[int, tuple[int, int]] = field(default_factory=dict)


class GenerationNotes:
    """Reads and writes the file, which also outlives the agent."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self) -> Notes:
        try:
            data = read_json(self._path)
            after = {int(generation): (int(step), int(last)) for generation, (step, last) in data["after"].items()}
            return Notes(int(data["generation"]), {str(p): int(g) for p, g in data["old"].items()}, after)
        except (OSError, *INVALID_FIELDS):
            return Notes()

    def begin(self, generation: int, after: tuple[int, int] | None, files: Callable[[], Iterable[str]]) -> bool:
        """Returns whether this is the first host to begin it. `files`: lists the files that no longer have a writer."""
        with alone(os.path.dirname(self._path)):
            notes = self.read()
            if generation <= notes.generation:
                return False
            for path in files():
                notes.old.setdefault(path, generation - 1)
            if after is not None:
                notes.after[generation] = after
            notes.generation = generation
            self._write(notes)
        return True

    def add(self, paths: Iterable[str]) -> None:
        """Adds files of an earlier instance of this host."""
        paths = list(paths)
        with alone(os.path.dirname(self._path)):
            notes = self.read()
            for path in paths:
                notes.old.setdefault(path, 0)
            if paths:
                self._write(notes)

    def _write(self, notes: Notes) -> None:
        replace(self._path, {"generation": notes.generation, "old": notes.old, "after": notes.after})


def notes_path(folder: str) -> str:
    return f"{folder}/.curves.json"
