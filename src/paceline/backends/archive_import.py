"""Imports the events and logs that a run has uploaded into a local folder, laid out like that of a local run."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.agent.run_files import replace
from paceline.plan import CAPTAIN
from paceline.storage.run_archive import RunArchive
from paceline.view import run_folders
from paceline.view.snapshot_locations import InvalidLocation, Source

PARALLEL_READS = 8
RECENT_LINES = 100_000
_LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) g(\d{1,9}) ")
_EVENT = re.compile(rb'\{"at": "([^"]+)"')

Moment = tuple[int, bytes]


def import_hosts(archive: RunArchive, folder: Path, hosts: Iterable[str]) -> None:
    """Import what these hosts have written. Lines that the folder already contains are kept once."""
    for host in hosts:
        with TemporaryDirectory(prefix=".kept-", dir=folder) as scratch:
            for name in _fetch(archive, host, Path(scratch)):
                _merge_into(Path(scratch, name), folder, name)


def import_run(source: Source, folder: Path) -> None:
    """Import events, plan and report of a run, which this machine may not know, into an empty folder."""
    import_hosts(source.archive, folder, [CAPTAIN])
    if not (folder / "events.jsonl").exists():
        raise InvalidLocation(
            "contains only snapshots: only runs on a cluster upload their events and logs", where=source.address
        )
    replace(str(folder / "run.json"), {"run": source.run, "on": run_folders.LOCATION, "where": source.address})


def _fetch(archive: RunArchive, host: str, scratch: Path) -> list[str]:
    """The names of the files that were fetched into `scratch`."""
    (scratch / "logs").mkdir()
    pieces = archive.pieces(host)
    instance_of: dict[str, str] = {}  # by file: the instance of the host that wrote it last
    pool = ThreadPoolExecutor(PARALLEL_READS)
    try:
        for piece, files in zip(pieces, pool.map(archive.read, pieces), strict=True):
            instance = piece.split("/")[1]
            for name, data in files.items():
                # Lines of a later instance of the host are appended; a JSON file of a later instance replaces it.
                is_replaced = name.endswith(".json") and instance_of.get(name) != instance
                with (scratch / name).open("wb" if is_replaced else "ab") as file:
                    file.write(data)
                instance_of[name] = instance
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, do not wait for the other reads
    return list(instance_of)


def _merge_into(fetched: Path, folder: Path, name: str) -> None:
    target = folder / name
    if name == "report.json":
        report = run_folders.read_object(fetched)
        if report is None or run_folders.outcome_known(folder):
            return
        report.pop("folder", None)  # a path on the captain's host
        replace(str(fetched), report)
    elif name == "plan.json" and target.exists():
        return
    elif target.exists():
        combined = fetched.with_suffix(".whole")
        with fetched.open("rb") as remote, target.open("rb") as local, combined.open("wb") as file:
            file.writelines(merged(remote, local))
        fetched = combined
    target.parent.mkdir(exist_ok=True)
    fetched.replace(target)


def merged(remote: Iterable[bytes], local: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of two incomplete copies of one file, in order; lines that both have appear once.

    >>> line = b"2026-11-15T04:30:%02d.000Z g1 | %d\\n"
    >>> first, second, third = (line % (number, number) for number in (1, 2, 3))
    >>> list(merged([first, third], [first, second])) == [first, second, third]
    True
    """
    sides = _moments(remote), _moments(local)
    unmatched = RecentLines(), RecentLines()  # lines of one side that the other may still have later: clocks differ
    heads = [next(side, None) for side in sides]
    while any(heads):
        first, second = heads
        if first is not None and second is not None and first[0] == second[0]:
            yield from first[1]
            if len(second[1]) > len(first[1]):
                yield from (Counter(second[1]) - Counter(first[1])).elements()
            heads = [next(side, None) for side in sides]
            continue
        earlier = 0 if second is None or (first is not None and first[0] < second[0]) else 1
        for line in (heads[earlier] or (None, ()))[1]:
            if not unmatched[1 - earlier].remove(line):
                unmatched[earlier].add(line)
                yield line
        heads[earlier] = next(sides[earlier], None)


class RecentLines:
    """A bounded multiset of lines; the oldest are dropped first."""

    def __init__(self) -> None:
        self._order: deque[bytes] = deque()
        self._count: Counter[bytes] = Counter()

    def add(self, line: bytes) -> None:
        self._order.append(line)
        self._count[line] += 1
        if len(self._order) > RECENT_LINES:
            self.remove(self._order.popleft())

    def remove(self, line: bytes) -> bool:
        """Remove one occurrence. False: there is none."""
        if line not in self._count:
            return False
        self._count[line] -= 1
        if not self._count[line]:
            del self._count[line]
        return True


def _moments(lines: Iterable[bytes]) -> Iterator[tuple[Moment, list[bytes]]]:
    """Consecutive lines with the same time; the lines of a task are ordered by generation first."""
    last: Moment = 0, b""

    def moment(line: bytes) -> Moment:
        nonlocal last
        if match := _LINE.match(line):
            last = int(match[2]), match[1]
        elif match := _EVENT.match(line):
            last = 0, match[1]
        return last  # a line without a time belongs to the line before it

    for at, group in groupby(lines, moment):
        yield at, [line if line.endswith(b"\n") else line + b"\n" for line in group]
