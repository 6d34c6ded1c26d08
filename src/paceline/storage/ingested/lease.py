"""A lease in a store, so that only one of several runs builds the data: numbered records, of which the last is valid.

Each record is created only if it does not exist. The holder renews its lease with the next number; a holder that has
not renewed for a while is presumed dead, and another run takes the next number. Clocks of two machines are never
compared.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any, Callable

from paceline.storage.snapshots.manifest import INVALID_FIELDS, VERSION, Damaged, read_object
from paceline.storage.stores.protocol import Store, StoreError

AGAIN_S = 10.0  # seconds between two renewals
GONE_S = 60.0  # seconds without a renewal after which the holder is presumed dead
_BYTES = 64 * 1024
_RECORD = re.compile(r"[0-9]{8}\.json")


class LeaseLost(Exception):
    """Another run has acquired the lease, as this one was presumed dead."""


@dataclass(frozen=True)
class Record:
    number: int
    run: str  # empty: the lease is free
    by: str  # unique id of the holder
    process: str = ""  # process of the holder; on the same machine, this shows whether it is alive


class Lease:
    def __init__(
        self, store: Store, folder: str, run: str, clock: Callable[[], float] = time.monotonic, process: str = ""
    ) -> None:
        """`folder`: contains the records. `process`: the holder's process; empty: this process."""
        self._store, self._folder = store, folder
        self._run, self._by, self._process = run, os.urandom(8).hex(), process or this_process()
        self._clock = clock
        self._last_seen: tuple[Record | None, float] = None, 0.0  # the last record, and when it was first seen
        self._own = 0  # number of our last record

    def acquire(self) -> str | None:
        """None: acquired. Otherwise the run that holds the lease; try again."""
        last = self._last()
        if last != self._last_seen[0]:
            self._last_seen = last, self._clock()
        silent = self._clock() - self._last_seen[1]
        if last is not None and last.run and last.by != self._by and not _is_dead(last.process) and silent < GONE_S:
            return last.run
        number = 0 if last is None else last.number
        if not self._store.create(self._name(number + 1), self._record(number + 1, self._run)):
            return self.acquire() if number < 10**8 - 2 else self._run
        self._own = number + 1
        self._delete(number)
        return None

    def renew(self) -> None:
        """LeaseLost: another run has acquired the lease."""
        data = self._record(self._own + 1, self._run)
        if not self._store.create(self._name(self._own + 1), data):
            raise LeaseLost("another run has acquired the lease, as this one had not renewed it in time")
        self._own += 1
        self._delete(self._own - 1)

    def release(self) -> None:
        """The record of a free lease stays: a holder that was presumed dead will see that it has lost the lease."""
        self._store.create(self._name(self._own + 1), self._record(self._own + 1, ""))
        self._delete(self._own)

    def _last(self) -> Record | None:
        for name in reversed(self._store.names(f"{self._folder}/")):
            if not _RECORD.fullmatch(name.rpartition("/")[2]):
                continue
            data = self._store.read(name, _BYTES)
            if data is None:
                return self._last()  # it was replaced in the meantime
            return _parse(data, name)
        return None

    def _delete(self, number: int) -> None:
        if number > 0:
            try:
                self._store.delete(self._name(number))
            except StoreError:
                pass  # a leftover record has no effect

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.json"

    def _record(self, number: int, run: str) -> bytes:
        fields = {"version": VERSION, "number": number, "run": run, "by": self._by, "process": self._process}
        return json.dumps(fields).encode()


def _parse(data: bytes, name: str) -> Record:
    fields: dict[str, Any] = read_object(data, name)
    try:
        return Record(int(fields["number"]), str(fields["run"]), str(fields["by"]), str(fields["process"]))
    except INVALID_FIELDS as error:
        raise Damaged(f"{name} is not a valid lease record: {error!r}") from None


def this_process() -> str:
    """Identifies the machine's boot, the container and the process; empty if that is unknown."""
    try:
        return f"{_machine()} {os.getpid()} {_start_time(os.getpid())}"
    except (OSError, IndexError):
        return ""


def _is_dead(process: str) -> bool:
    """Whether it is known to be dead: it was a process on this machine."""
    try:
        machine, pid, started = process.rsplit(" ", 2)
        if machine != _machine():
            return False
        return _start_time(int(pid)) != started
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str:
    """Tells apart processes that had the same pid one after the other."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
