"""Imports the events and logs that a run has uploaded into a local folder, laid out like that of a local run."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.agent.limited_log import LimitedLog
from paceline.agent.run_files import replace
from paceline.plan import CAPTAIN, Plan
from paceline.storage import log_parts
from paceline.storage.snapshots.manifest import Damaged, Gone
from paceline.storage.stored_run_files import StoredRunFiles, life_of
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import run_folders
from paceline.view.files.plan_files import read_plan
from paceline.view.files.run_files import DamagedRun, NewerRun
from paceline.view.snapshots.snapshot_locations import InvalidLocation, Source

PARALLEL_READS = 8
TRIES = 3
RECENT_LINES = 100_000
RECENT_BYTES = 64 * 1024 * 1024
GROUP_LINES = 10_000  # lines with the same time that are compared at once
LONGEST_LINE = 8 * 1024 * 1024  # bytes
MOST_FILES = 20_000  # of one host
MOST_OPEN = 64  # logs
CHUNK = 16 * 1024  # bytes that are read at a time
_LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) g(\d{1,9}) ")
_EVENT = re.compile(rb'\{"at": "([^"]+)"')

Moment = tuple[int, bytes, int]


class TooLarge(Damaged):
    """Another user's run has written more than is copied."""


def import_hosts(
    archive: StoredRunFiles, folder: Path, hosts: Iterable[str], log_limit: int | None = None, until: float = math.inf
) -> None:
    """Import what these hosts have written; of hosts other than the captain's, only the output of their own tasks.
    Lines that the folder already contains are kept once. `log_limit`: the number of bytes to keep of the output of each
    task; None: all of it. `until`: a time of time.monotonic(), at which StoreError is raised.

    TooLarge: only a part was imported."""
    limit = run_folders.copy_limit(folder)
    left = math.inf if limit is None else limit
    too_large = False
    plan: Plan | None = None
    for host in hosts:
        plan = None if host == CAPTAIN else plan or _readable_plan(folder)  # the captain may send another plan
        is_accepted = _accepted_names(plan, host)
        with TemporaryDirectory(prefix=".kept-", dir=folder) as parent:
            scratch, sizes, is_cut = _fetch_listed(archive, host, Path(parent), is_accepted, left, log_limit, until)
            too_large = too_large or is_cut
            left -= sum(sizes.values())
            for name in sizes:
                too_large = not _merge_into(Path(scratch, name), folder, name, limit, log_limit) or too_large
    if too_large:
        raise TooLarge(
            "only part of another user's run was copied to this machine "
            f"(limits: {run_folders.COPY_LIMIT >> 30} GiB or half of the free space, and "
            f"{run_folders.JSON_LIMIT >> 20} MiB per JSON file): the rest is not shown; "
            "select tasks with `logs --task NAME`"
        )


def import_run(source: Source, folder: Path) -> None:
    """Import events, plan and report of a run, which this machine may not know, into an empty folder."""
    import_hosts(source.archive, folder, [CAPTAIN])
    if not (folder / "events.jsonl").exists():
        raise InvalidLocation(
            "contains only snapshots: only runs on a cluster upload their events and logs", where=source.address
        )
    replace(str(folder / "run.json"), {"run": source.run, "on": run_folders.LOCATION, "where": source.address})


def _readable_plan(folder: Path) -> Plan | None:
    try:
        return read_plan(folder)
    except (DamagedRun, NewerRun):
        return None


def _accepted_names(plan: Plan | None, host: str) -> Callable[[str], bool]:
    """Which files of a host are imported. What a run's events say comes only from the captain's pod: members, which run
    the programs of users, may store files, too. The plan, which the captain also sends, says which tasks a host has; if
    it cannot be read, nothing of members is imported."""
    if host == CAPTAIN:
        return lambda name: True
    if plan is None:
        return lambda name: False
    tasks = [*plan.tasks, *([] if plan.ingest_task is None else [plan.ingest_task])]
    return {f"logs/{task.name}.log" for task in tasks if task.host == host}.__contains__


def _fetch_listed(
    archive: StoredRunFiles, host: str, parent: Path, is_accepted: Callable[[str], bool], limit: float,
    log_limit: int | None, until: float,
) -> tuple[Path, dict[str, int], bool]:  # fmt: skip
    """The folder of the files, and what `_fetch` returns. The captain may replace pieces while they are read."""
    number = 0
    while True:
        scratch = parent / str(number)
        scratch.mkdir()
        try:
            return scratch, *_fetch(archive, host, scratch, is_accepted, limit, log_limit, until)
        except Gone:
            number += 1
            if host != CAPTAIN or number == TRIES:
                raise


def _fetch(
    archive: StoredRunFiles, host: str, scratch: Path, is_accepted: Callable[[str], bool], limit: float,
    log_limit: int | None, until: float,
) -> tuple[dict[str, int], bool]:  # fmt: skip
    """The files that were fetched into `scratch`, with the number of bytes kept; and whether there are more."""
    (scratch / "logs").mkdir()
    pieces = archive.pieces(host)
    instance_of: dict[str, str] = {}  # by file: the instance of the host that wrote it last
    sizes: dict[str, int] = {}
    logs: dict[str, LimitedLog] = {}
    total = 0
    pool = ThreadPoolExecutor(PARALLEL_READS)
    try:
        for piece, files in _read_all(archive, pieces, pool, until):
            instance = life_of(piece)
            for name, data in files.items():
                if not is_accepted(name):
                    continue
                before = sizes.get(name, 0)
                kept_limit = log_limit if log_limit is not None and name.endswith(".log") else math.inf
                added = max(0, min(len(data), kept_limit - before))
                if total + added > limit or (name not in sizes and len(sizes) >= MOST_FILES):
                    return sizes, True
                # Lines of a later instance of the host are appended; a JSON file of a later instance replaces it.
                is_replaced = name.endswith(".json") and instance_of.get(name) != instance
                instance_of[name] = instance
                if log_limit is not None and name.endswith(".log"):
                    if name not in logs:
                        if len(logs) >= MOST_OPEN:
                            _close(logs)
                        logs[name] = LimitedLog(str(scratch / name), _fail, log_limit)
                    logs[name].write(data)
                    sizes[name] = _size(scratch / name)  # a long line is kept even if it exceeds the limit
                else:
                    with (scratch / name).open("wb" if is_replaced else "ab") as file:
                        file.write(data)
                    sizes[name] = before + len(data)
                total += sizes[name] - before
    finally:
        _close(logs)
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, do not wait for the other reads
    return sizes, False


def _close(logs: dict[str, LimitedLog]) -> None:
    """They are opened again if something is written."""
    for log in logs.values():
        log.close()
    logs.clear()


def _read_all(
    archive: StoredRunFiles, pieces: list[str], pool: ThreadPoolExecutor, until: float
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A few at a time: a piece may be large."""
    for first in range(0, len(pieces), PARALLEL_READS):
        batch = pieces[first : first + PARALLEL_READS]
        remaining = max(0.0, until - time.monotonic()) if until < math.inf else None
        try:
            yield from zip(batch, pool.map(archive.read, batch, timeout=remaining), strict=True)
        except TimeoutError:
            raise StoreError("the store did not respond within the time limit", is_transient=True) from None


def _fail(problem: str) -> None:
    raise OSError(problem)


def _merge_into(fetched: Path, folder: Path, name: str, limit: int | None, log_limit: int | None) -> bool:
    """False: the file would be larger than the limit, and was left as it is."""
    target = folder / name
    if limit is not None and name.endswith(".json") and fetched.stat().st_size > run_folders.JSON_LIMIT:
        return False
    if name == "report.json":
        report = run_folders.read_object(fetched)
        if report is None or run_folders.outcome_known(folder):
            return True
        report.pop("folder", None)  # a path on the captain's host
        replace(str(fetched), report)
    elif name == "plan.json" and target.exists():
        return True
    elif target.exists() or log_parts.parts(str(target)):
        combined = fetched.with_suffix(".whole")
        if log_limit is not None and name.endswith(".log"):
            _merge_logs(fetched, target, combined, log_limit)
        else:
            with combined.open("wb") as file:
                file.writelines(merged(_lines(fetched), _lines(target)))
        if limit is not None and _size(combined) > max(limit, _size(target)):
            return False
        fetched = combined
    target.parent.mkdir(exist_ok=True)
    _move(fetched, target)
    return True


def _size(path: Path) -> int:
    first, end = log_parts.bounds(str(path))
    return end - first


def _merge_logs(remote: Path, local: Path, combined: Path, limit: int) -> None:
    first = max(log_parts.bounds(str(path))[0] for path in (remote, local))
    if first:  # what comes before it was deleted: an empty part begins there
        Path(log_parts.parts_folder(str(combined))).mkdir()
        Path(log_parts.part_path(str(combined), first)).touch()
    log = LimitedLog(str(combined), _fail, limit)
    for line in merged(_lines(remote), _lines(local)):
        log.write(line)
    log.close()


def _move(source: Path, target: Path) -> None:
    """Replace a file and its earlier parts."""
    source_parts, target_parts = (Path(log_parts.parts_folder(str(path))) for path in (source, target))
    if target_parts.exists():
        shutil.rmtree(target_parts)
    if source_parts.exists():
        source_parts.rename(target_parts)
    if source.exists():
        source.replace(target)
    else:
        target.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[bytes]:
    """With their line ends. No line uses memory without limit: a longer one is cut into several."""
    reader = log_parts.LogReader(str(path))
    try:
        rest = b""
        while data := reader.read(CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"
            if len(rest) >= LONGEST_LINE:
                yield rest
                rest = b""
        if rest:
            yield rest
    finally:
        reader.close()


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
        self._bytes = 0
        self._count: Counter[bytes] = Counter()

    def add(self, line: bytes) -> None:
        self._order.append(line)
        self._bytes += len(line)
        self._count[line] += 1
        while len(self._order) > RECENT_LINES or self._bytes > RECENT_BYTES:
            oldest = self._order.popleft()
            self._bytes -= len(oldest)
            self.remove(oldest)

    def remove(self, line: bytes) -> bool:
        """Remove one occurrence. False: there is none."""
        if line not in self._count:
            return False
        self._count[line] -= 1
        if not self._count[line]:
            del self._count[line]
        return True


def _moments(lines: Iterable[bytes]) -> Iterator[tuple[Moment, list[bytes]]]:
    """Consecutive lines with the same time, a limited number; the lines of a task are ordered by generation first."""
    last, count, size = (0, b""), 0, 0

    def moment(line: bytes) -> Moment:
        nonlocal last, count, size
        before = last
        if match := _LINE.match(line):
            last = int(match[2]), match[1]
        elif match := _EVENT.match(line):
            last = 0, match[1]
        # A line without a time belongs to the line before it.
        count, size = (count + 1, size + len(line)) if last == before else (0, 0)
        return *last, count // GROUP_LINES + size // LONGEST_LINE

    for at, group in groupby(lines, moment):
        yield at, [line if line.endswith(b"\n") else line + b"\n" for line in group]
