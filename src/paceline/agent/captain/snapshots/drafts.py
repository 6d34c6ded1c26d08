"""Snapshots on hosts: which tasks have saved a part, which host holds it, and whether it is in the store. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from paceline.agent.captain import events as ev
from paceline.agent.run_files import stamp
from paceline.storage.snapshots.manifest import File, Manifest, Part, SnapshotId

MOST_NAMED = 8  # tasks in a message
# Of metrics, and of versions; a host sends at most 100 of each, whose names have at most 100 characters.
MOST_ENTRIES, LONGEST_NAME = 1000, 1000
Value = TypeVar("Value")


@dataclass
class DraftPart:
    """The part of a snapshot that one task has saved."""

    host: str
    is_held: bool = True  # whether the host still has it
    stored: Part | None = None  # set once it is in the store
    files: list[File] = field(default_factory=list)  # received so far, until the list is complete
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Draft:
    """A snapshot whose parts are on hosts; it may be committed, too."""

    snapshot: SnapshotId
    part_count: int  # the number of tasks that save a part
    since: float
    parts: dict[str, DraftPart] = field(default_factory=dict)  # by task
    stall: float = 0.0  # seconds for which training waited for it
    failure: str = ""  # why the last attempt to commit it failed
    is_hopeless: bool = False  # a retry will not help soon
    is_resend: bool = False  # the store had it and lost it

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for part in self.parts.values() for name, value in part.metrics.items()}

    @property
    def versions(self) -> dict[str, str]:
        return {name: value for part in self.parts.values() for name, value in part.versions.items()}

    @property
    def is_complete(self) -> bool:
        return len(self.parts) >= self.part_count

    @property
    def is_on_hosts(self) -> bool:
        """Whether hosts have all of it, so that tasks can resume from it without the store."""
        return self.is_complete and all(part.is_held for part in self.parts.values())

    def manifest(self, run: str, world_size: int, parts: Sequence[Part]) -> Manifest:
        """`parts`: as they are in the store."""
        return Manifest(run, self.snapshot, world_size, tuple(parts), self.metrics, self.versions, stamp())

    def shortage(self) -> str:
        """Why it is incomplete, for a message."""
        names = sorted(self.parts)
        others = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
        return f"it needs {self.part_count} parts, but only {', '.join(names[:MOST_NAMED])}{others} saved one"

    def add(self, saved: ev.PartSaved) -> None:
        part = self.parts.get(saved.task)
        if part is None or part.host != saved.host:
            part = self.parts[saved.task] = DraftPart(saved.host)
        part.is_held = True
        part.metrics, part.versions = first_entries(saved.metrics), first_entries(saved.versions)
        self.stall = max(self.stall, saved.stall)


def first_entries(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """Members choose the names: the memory of the captain, and the size of manifests, are limited."""
    return dict(islice(((name, value) for name, value in values.items() if len(name) <= LONGEST_NAME), MOST_ENTRIES))
