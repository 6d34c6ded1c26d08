"""Brings what a run has kept at its place into a folder here, as a run on this machine leaves it."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.agent.journal import replace
from paceline.plan import CAPTAIN
from paceline.storage.kept import Kept
from paceline.view import runs
from paceline.view.places import NoPlace, Source

AT_ONCE = 8  # pieces that are read at once
LATELY = 100_000  # lines
_LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) g(\d+) ")
_EVENT = re.compile(rb'\{"at": "([^"]+)"')

Moment = tuple[int, bytes]


def bring(kept: Kept, folder: Path, hosts: Iterable[str]) -> None:
    """What these hosts have written. What the folder holds already stays, each line once."""
    for host in hosts:
        with TemporaryDirectory(prefix=".kept-", dir=folder) as scratch:
            for name in _fetch(kept, host, Path(scratch)):
                _put(Path(scratch, name), folder, name)


def look_at(source: Source, folder: Path) -> None:
    """Events, plan and report of a run that this machine need not know, into an empty folder."""
    bring(source.kept, folder, [CAPTAIN])
    if not (folder / "events.jsonl").exists():
        raise NoPlace(f"{source.where} holds snapshots alone: only a run on a cluster keeps there what it writes")
    replace(str(folder / "run.json"), {"run": source.run, "on": runs.PLACE, "where": source.where})


def _fetch(kept: Kept, host: str, scratch: Path) -> list[str]:
    (scratch / "logs").mkdir()
    pieces = kept.pieces(host)
    found: dict[str, str] = {}
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for piece, files in zip(pieces, pool.map(kept.read, pieces), strict=True):
            life = piece.split("/")[1]
            for name, data in files.items():
                # Lines go on where another life of the host has ended; what is written once is as the last one has it.
                again = name.endswith(".json") and found.get(name) != life
                with (scratch / name).open("wb" if again else "ab") as file:
                    file.write(data)
                found[name] = life
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever gives up does not wait for the others
    return list(found)


def _put(came: Path, folder: Path, name: str) -> None:
    target = folder / name
    if name == "report.json":
        report = runs.read_object(came)
        if report is None or runs.outcome_known(folder):
            return
        report.pop("folder", None)  # of its captain
        replace(str(came), report)
    elif name == "plan.json" and target.exists():
        return
    elif target.exists():
        whole = came.with_suffix(".whole")
        with came.open("rb") as there, target.open("rb") as here, whole.open("wb") as file:
            file.writelines(merged(there, here))
        came = whole
    target.parent.mkdir(exist_ok=True)
    came.replace(target)


def merged(there: Iterable[bytes], here: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of one file, of which each side may lack some: in their order, and those that both have once.

    >>> line = b"2026-11-15T04:30:%02d.000Z g1 | %d\\n"
    >>> first, second, third = (line % (number, number) for number in (1, 2, 3))
    >>> list(merged([first, third], [first, second])) == [first, second, third]
    True
    """
    sides = _moments(there), _moments(here)
    alone = Lately(), Lately()  # what was met on one side only, and may yet come from the other, where clocks differ
    heads = [next(side, None) for side in sides]
    while any(heads):
        first, second = heads
        if first is not None and second is not None and first[0] == second[0]:
            yield from first[1]
            if len(second[1]) > len(first[1]):
                yield from (Counter(second[1]) - Counter(first[1])).elements()
            heads = [next(side, None) for side in sides]
            continue
        which = 0 if second is None or (first is not None and first[0] < second[0]) else 1
        for line in (heads[which] or (None, ()))[1]:
            if not alone[1 - which].had(line):
                alone[which].add(line)
                yield line
        heads[which] = next(sides[which], None)


class Lately:
    """Lines that were met not long ago."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self._count: Counter[bytes] = Counter()

    def add(self, line: bytes) -> None:
        self._order.append(line)
        self._count[line] += 1
        if len(self._order) > LATELY:
            self.had(self._order.popleft())

    def had(self, line: bytes) -> bool:
        """Each is told of once."""
        if line not in self._count:
            return False
        self._count[line] -= 1
        if not self._count[line]:
            del self._count[line]
        return True


def _moments(lines: Iterable[bytes]) -> Iterator[tuple[Moment, list[bytes]]]:
    """Lines that follow each other and are of the same time; those of a task by generations first."""
    last: Moment = 0, b""

    def moment(line: bytes) -> Moment:
        nonlocal last
        if found := _LINE.match(line):
            last = int(found[2]), found[1]
        elif found := _EVENT.match(line):
            last = 0, found[1]
        return last  # what has no time is of that before it

    for at, group in groupby(lines, moment):
        yield at, [line if line.endswith(b"\n") else line + b"\n" for line in group]
