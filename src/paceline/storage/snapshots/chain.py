"""Which snapshots are current: those on the chain of the newest generation. Pure.

Each generation has one record that names the snapshot it started from. A process that was presumed dead may still
commit, but its snapshot is later than the one its successor started from, and so not on the chain. The snapshot that a
run was started from has generation 0; the record of generation 0 is created first, and names the run that owns the
location.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.storage.snapshots.manifest import INVALID_FIELDS, VERSION, Damaged, SnapshotId, read_object


@dataclass(frozen=True)
class Record:
    generation: int
    parent: SnapshotId | None  # the snapshot it started from; None: from scratch
    by: str = ""  # id of the captain, which makes each record unique; in generation 0, of the run

    def to_bytes(self) -> bytes:
        parent = None if self.parent is None else {"step": self.parent.step, "generation": self.parent.generation}
        fields = {"version": VERSION, "generation": self.generation, "parent": parent, "by": self.by}
        return json.dumps(fields).encode()


def parse(data: bytes, name: str) -> Record:
    fields = read_object(data, name)
    try:
        parent = fields["parent"]
        id = None if parent is None else SnapshotId(int(parent["step"]), int(parent["generation"]))
        record = Record(int(fields["generation"]), id, str(fields["by"]))
    except INVALID_FIELDS as error:
        raise Damaged(f"{name} is not a valid record of a generation: {error!r}") from None
    if record.parent is not None and record.parent.generation >= record.generation:
        raise Damaged(f"{name} is not a valid record of a generation: its parent is not older")
    return record


def current(records: Mapping[int, Record], committed: Iterable[SnapshotId]) -> list[SnapshotId]:
    """Newest first.

    >>> records = {1: Record(1, None), 2: Record(2, SnapshotId(10, 1))}
    >>> [(id.step, id.generation) for id in current(records, [SnapshotId(10, 1), SnapshotId(15, 1), SnapshotId(12, 2)])]
    [(12, 2), (10, 1)]
    """
    by_generation: dict[int, list[SnapshotId]] = {}
    for id in committed:
        by_generation.setdefault(id.generation, []).append(id)
    chain: list[SnapshotId] = []
    generation, last = max(records, default=0), None
    while generation in records or generation == 0:
        own = by_generation.get(generation, [])
        chain += sorted((id for id in own if last is None or id.step <= last), reverse=True)
        parent = records[generation].parent if generation else None
        if parent is None:
            break
        generation, last = parent.generation, parent.step
    return chain
