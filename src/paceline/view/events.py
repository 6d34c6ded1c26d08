"""Reads the events of a run from events.jsonl, even while they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.view.tail import Tail

KINDS = (
    "run-started", "member-joined", "member-lost", "waiting", "ingest-started", "ingest-done", "ingest-skipped",
    "ingest-failed", "generation-formed", "task-started", "step", "saved", "committed", "evaluated", "task-exited",
    "hang", "stacks", "restart", "recovered", "spare-ready", "captain-returned", "note", "warning", "ending",
    "run-ended",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    at: str
    kind: str
    generation: int
    data: dict[str, Any]

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def text(self, key: str) -> str:
        value = self.data.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> float:
        return number(self.data.get(key)) or 0

    def names(self, key: str) -> list[str]:
        value = self.data.get(key)
        return [str(name) for name in value] if isinstance(value, list) else []


def parse(line: bytes | str) -> Event | None:
    """Parse a line; None if it is not an event (incomplete or damaged)."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("event"), str) or not isinstance(data.get("at"), str):
        return None
    generation = data.get("generation")
    return Event(data["at"], data["event"], generation if isinstance(generation, int) else 0, data)


def read(folder: Path) -> Iterator[Event]:
    """All events so far, oldest first."""
    tail = follow(folder)
    try:
        while lines := tail.read():
            yield from filter(None, map(parse, lines))
    finally:
        tail.close()


def follow(folder: Path) -> Tail:
    return Tail(folder / "events.jsonl")


def seconds(at: str) -> float | None:
    """The time of an event as seconds since 1970."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return None


def number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
