"""What an evaluator said of a committed snapshot: a record beside its manifest, written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.storage.manifest import VERSION, Damaged, read_object

NAME = "evaluation.json"
MOST_BYTES = 256 * 1024


@dataclass(frozen=True)
class Evaluation:
    task: str  # which evaluator
    metrics: Mapping[str, float] = field(default_factory=dict)
    at: str = ""

    def to_bytes(self) -> bytes:
        words = {"version": VERSION, "task": self.task, "at": self.at, "metrics": dict(self.metrics)}
        return json.dumps(words).encode()


def parse(data: bytes, name: str) -> Evaluation:
    """`name`: for the words of an error."""
    found = read_object(data, name)
    try:
        metrics = {str(key): float(value) for key, value in found["metrics"].items()}
        return Evaluation(str(found["task"]), metrics, str(found["at"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{name} is no evaluation: {error}") from None
