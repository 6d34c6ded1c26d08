"""Taking turns at a place, so that of several runs one makes the data: a row of records, of which the last counts.

Each record is created only if absent. Whoever has the turn says so again with the next number; one who has not said so
for a while is taken to be gone, and who comes next takes the next number. Clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any, Callable

from paceline.storage.manifest import VERSION, Damaged, read_object
from paceline.storage.store import Store, StoreError

AGAIN_S = 10.0  # between two words of who has the turn
GONE_S = 60.0  # without a word: it is gone
_BYTES = 64 * 1024
_RECORD = re.compile(r"[0-9]{8}\.json")


class Lost(Exception):
    """Another has taken the turn, as this one was taken to be gone."""


@dataclass(frozen=True)
class Record:
    number: int
    run: str  # empty: nobody has the turn
    by: str  # no two who take turns are the same
    process: str = ""  # where it is known whether it lives


class Turns:
    def __init__(
        self, store: Store, folder: str, run: str, clock: Callable[[], float] = time.monotonic, process: str = ""
    ) -> None:
        """`folder`: of the records. `process`: of whoever takes the turn, empty: this one."""
        self._store, self._folder = store, folder
        self._run, self._by, self._process = run, os.urandom(8).hex(), process or this_process()
        self._clock = clock
        self._seen: tuple[Record | None, float] = None, 0.0  # the last, and since when
        self._own = 0  # the number of our last record

    def take(self) -> str | None:
        """None: it is our turn. Else the run that has it; ask again."""
        last = self._last()
        if last != self._seen[0]:
            self._seen = last, self._clock()
        silent = self._clock() - self._seen[1]
        if last is not None and last.run and last.by != self._by and not _dead(last.process) and silent < GONE_S:
            return last.run
        number = 0 if last is None else last.number
        if not self._store.create(self._name(number + 1), self._words(number + 1, self._run)):
            return self.take() if number < 10**8 - 2 else self._run
        self._own = number + 1
        self._forget(number)
        return None

    def renew(self) -> None:
        """Lost: it is our turn no more."""
        data = self._words(self._own + 1, self._run)
        if not self._store.create(self._name(self._own + 1), data):
            raise Lost("another run took it over, as this one had not been heard of")
        self._own += 1
        self._forget(self._own - 1)

    def leave(self) -> None:
        """The record that nobody has the turn stays: who was taken to be gone finds that it is not its turn."""
        self._store.create(self._name(self._own + 1), self._words(self._own + 1, ""))
        self._forget(self._own)

    def _last(self) -> Record | None:
        for name in reversed(self._store.names(f"{self._folder}/")):
            if not _RECORD.fullmatch(name.rpartition("/")[2]):
                continue
            data = self._store.read(name, _BYTES)
            if data is None:
                return self._last()  # the next is there by now
            return _parse(data, name)
        return None

    def _forget(self, number: int) -> None:
        if number > 0:
            try:
                self._store.delete(self._name(number))
            except StoreError:
                pass  # it does not count any more

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.json"

    def _words(self, number: int, run: str) -> bytes:
        words = {"version": VERSION, "number": number, "run": run, "by": self._by, "process": self._process}
        return json.dumps(words).encode()


def _parse(data: bytes, name: str) -> Record:
    found: dict[str, Any] = read_object(data, name)
    try:
        return Record(int(found["number"]), str(found["run"]), str(found["by"]), str(found["process"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{name} is no record of a turn: {error}") from None


def this_process() -> str:
    """Which start of which machine, which container, and which process there; empty where that cannot be told."""
    try:
        return f"{_machine()} {os.getpid()} {_begun(os.getpid())}"
    except (OSError, IndexError):
        return ""


def _dead(process: str) -> bool:
    """Whether it is known to be gone: it was a process of this machine."""
    try:
        machine, pid, begun = process.rsplit(" ", 2)
        if machine != _machine():
            return False
        return _begun(int(pid)) != begun
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _begun(pid: int) -> str:
    """A number is used again, and then by a process that has begun later."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
