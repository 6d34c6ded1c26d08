"""The result of evaluating a committed snapshot: a record next to its manifest, written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.storage.snapshots.manifest import INVALID_FIELDS, VERSION, Damaged, read_object

NAME = "evaluation.json"
MOST_BYTES = 256 * 1024


@dataclass(frozen=True)
class Evaluation:
    task: str  # name of the evaluator
    metrics: Mapping[str, float] = field(default_factory=dict)
    at: str = ""

    def to_bytes(self) -> bytes:
        fields = {"version": VERSION, "task": self.task, "at": self.at, "metrics": dict(self.metrics)}
        return json.dumps(fields).encode()


def parse(data: bytes, name: str) -> Evaluation:
    """`name`: for error messages."""
    fields = read_object(data, name)
    try:
        metrics = {str(key): float(value) for key, value in fields["metrics"].items()}
        return Evaluation(str(fields["task"]), metrics, str(fields["at"]))
    except INVALID_FIELDS as error:
        raise Damaged(f"{name} is not a valid evaluation: {error!r}") from None
