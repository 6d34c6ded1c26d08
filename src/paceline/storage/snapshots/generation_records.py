"""The records of a run's generations in a store. They never change; only the captain of the newest one may write."""

from __future__ import annotations

import re

from paceline.storage.snapshots import chain
from paceline.storage.snapshots.chain import Record
from paceline.storage.stores.protocol import Store

KEPT = 20  # of the newest generations, whether they have committed snapshots or not
_MOST_BYTES = 64 * 1024
_NAME = re.compile(r"[0-9]{8,}\.json")


class Superseded(Exception):
    """Another captain has started this generation, or a later one."""


class GenerationRecords:
    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._prefix = f"{run}/generations/"
        self._records: dict[str, Record] = {}

    def is_empty(self) -> bool:
        return not self._names()

    def read_all(self) -> dict[int, Record]:
        """Except that of generation 0, which names the owner of the location."""
        names = self._names()
        self._records = {name: self._records[name] for name in names if name in self._records}
        for name in names:
            if name not in self._records and (data := self._store.read(name, _MOST_BYTES)) is not None:
                self._records[name] = chain.parse(data, name)  # if it is damaged, fail: the chain would be a guess
        return {record.generation: record for record in self._records.values() if record.generation}

    def owner(self) -> str | None:
        """The token of the run that has claimed the location."""
        name = self._name(0)
        data = self._store.read(name, _MOST_BYTES)
        return None if data is None else chain.parse(data, name).by

    def write_owner(self, token: str) -> None:
        """Unless there is one."""
        self._store.create(self._name(0), Record(0, None, token).to_bytes())

    def write(self, record: Record) -> bool:
        """False: this captain, or an earlier one with the same id, has written it before."""
        name, data = self._name(record.generation), record.to_bytes()
        if self._store.create(name, data):
            return True
        if self._store.read(name, _MOST_BYTES) != data:
            raise Superseded(f"another captain has started generation {record.generation}")
        return False

    def check_newest(self, generation: int) -> None:
        newest = max(self._names(), default="")
        if newest > self._name(generation):
            raise Superseded(f"a generation later than {generation} exists: {newest}")

    def delete_before(self, generation: int) -> None:
        """Not that of generation 0."""
        oldest = self._name(max(0, generation))
        for name in self._names():
            if self._name(0) < name < oldest:
                self._store.delete(name)

    def delete_all(self) -> None:
        self._store.clear(self._prefix)

    def _names(self) -> list[str]:
        """Ignores other files, such as those that a file manager or a network share leaves there."""
        return [name for name in self._store.names(self._prefix) if _NAME.fullmatch(name[len(self._prefix) :])]

    def _name(self, generation: int) -> str:
        return f"{self._prefix}{generation:08d}.json"
