"""Which generation wrote what for TensorBoard, in a file; hosts on one machine share it, as they share the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Callable

from paceline.agent.journal import replace
from paceline.storage.curves import alone


@dataclass
class Told:
    generation: int = 0  # the last that has begun
    old: dict[str, int] = field(default_factory=dict)  # files whose writers are gone -> of which generation
    # Generation -> the step it goes on from, and the furthest that training is known to have come before.
    after: dict[int, tuple[int, int]] = field(default_factory=dict)


class Notes:
    """An agent that is started again finds them, too."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self) -> Told:
        try:
            with open(self._path) as file:
                data = json.load(file)
            after = {int(generation): (int(step), int(last)) for generation, (step, last) in data["after"].items()}
            return Told(int(data["generation"]), {str(p): int(g) for p, g in data["old"].items()}, after)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Told()

    def begin(self, generation: int, after: tuple[int, int] | None, files: Callable[[], Iterable[str]]) -> bool:
        """Whether this is the first to say so. `files`: those that are there, and whose writers are gone."""
        with alone(os.path.dirname(self._path)):
            told = self.read()
            if generation <= told.generation:
                return False
            for path in files():
                told.old.setdefault(path, generation - 1)
            if after is not None:
                told.after[generation] = after
            told.generation = generation
            self._write(told)
        return True

    def add(self, paths: Iterable[str]) -> None:
        """Files of an earlier life of this host."""
        paths = list(paths)
        with alone(os.path.dirname(self._path)):
            told = self.read()
            for path in paths:
                told.old.setdefault(path, 0)
            if paths:
                self._write(told)

    def _write(self, told: Told) -> None:
        replace(self._path, {"generation": told.generation, "old": told.old, "after": told.after})


def notes_path(folder: str) -> str:
    return f"{folder}/.curves.json"
