"""Which snapshots count: those on the newest chain of generations. Pure.

Each generation leaves one record that names the snapshot it began from. A process that was presumed dead may still
commit, but its snapshot is later than the one that its successor began from, and so no part of the chain. What a run
was started from is of generation 0; its record is made before anything else is, and says whose the place is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.storage.manifest import VERSION, Damaged, Id, read_object


@dataclass(frozen=True)
class Record:
    generation: int
    parent: Id | None  # the snapshot it began from; None: from nothing
    by: str = ""  # which captain: no two records are the same; of generation 0, which run

    def to_bytes(self) -> bytes:
        parent = None if self.parent is None else {"step": self.parent.step, "generation": self.parent.generation}
        words = {"version": VERSION, "generation": self.generation, "parent": parent, "by": self.by}
        return json.dumps(words).encode()


def parse(data: bytes, name: str) -> Record:
    found = read_object(data, name)
    try:
        parent = found["parent"]
        id = None if parent is None else Id(int(parent["step"]), int(parent["generation"]))
        record = Record(int(found["generation"]), id, str(found["by"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{name} is no record of a generation: {error}") from None
    if record.parent is not None and record.parent.generation >= record.generation:
        raise Damaged(f"{name} is no record of a generation: it began from a later one")
    return record


def counted(records: Mapping[int, Record], committed: Iterable[Id]) -> list[Id]:
    """Newest first.

    >>> records = {1: Record(1, None), 2: Record(2, Id(10, 1))}
    >>> [(id.step, id.generation) for id in counted(records, [Id(10, 1), Id(15, 1), Id(12, 2)])]
    [(12, 2), (10, 1)]
    """
    by_generation: dict[int, list[Id]] = {}
    for each in committed:
        by_generation.setdefault(each.generation, []).append(each)
    found: list[Id] = []
    generation, last = max(records, default=0), None
    while generation in records or generation == 0:
        own = by_generation.get(generation, [])
        found += sorted((each for each in own if last is None or each.step <= last), reverse=True)
        parent = records[generation].parent if generation else None
        if parent is None:
            break
        generation, last = parent.generation, parent.step
    return found
