"""Event files of TensorBoard in a folder: of what was written twice only the later is left, and the place has a copy.

A program that goes on from step N writes the steps after N once more, and one that begins anew writes all of them. What
generations before have written is dropped then: of each tag, whatever is not before the first step that a later
generation has written; and at once whatever is after N, of tags that count the steps of training. So what nobody writes
again stays, also where a program has restored what Paceline does not know of, and where steps are epochs or examples.
Files whose writers live are never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.runtime import tfrecord
from paceline.storage.files import write_all
from paceline.storage.manifest import fit
from paceline.storage.store import Store, Wanted

FOLDER = "tensorboard"  # of a run, at the place
MOST_FILES = 20_000
GROWN = 1.05  # a store cannot append: a file is sent again once it has grown by that factor, and at the end
_COPIED = 1 << 20
_NEVER = 1 << 63
_MARK = "tfevents"  # in the names of what TensorBoard reads

Found = dict[str, tuple[int, int]]  # path below the folder -> inode and size
# Generation -> the step that it goes on from, and the furthest that training is known to have come before.
After = Mapping[int, tuple[int, int]]


def find(folder: str) -> Found:
    """Regular files below it that hold something. Links are not followed: they may lead anywhere, and in circles."""
    found: Found = {}
    folders = [""]
    while folders and len(found) < MOST_FILES:
        below = folders.pop()
        try:
            with os.scandir(f"{folder}/{below}") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{below}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        about = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(about.st_mode) and about.st_size:
                            found[f"{below}{entry.name}"] = about.st_ino, about.st_size
        except OSError:
            continue  # a folder that a task has just removed
    return found


def event_files(folder: str) -> Found:
    return {path: about for path, about in find(folder).items() if _MARK in os.path.basename(path)}


@dataclass
class _Known:
    """What was read of a file, up to a place in it."""

    inode: int
    at: int = 0
    low: dict[str, int] = field(default_factory=dict)  # tag -> its lowest step
    high: dict[str, int] = field(default_factory=dict)


class Curves:
    def __init__(self, folder: str, scratch: str) -> None:
        """`scratch`: begins the paths of files that are made in passing, on the same disk; nobody else uses it."""
        self._folder, self._scratch = folder, scratch
        self._known: dict[str, _Known] = {}
        self._sent: Found = {}

    # ---- one line

    def trim(self, old: Mapping[str, int], after: After) -> list[str]:
        """The paths of files that have become shorter. `old`: those whose writers are gone, with their generation;
        what else is there is of a later one. `after`: of generations that go on from a snapshot."""
        with alone(self._folder):
            places: dict[str, dict[int, list[str]]] = {}
            found = event_files(self._folder)
            for path in found:
                generation = old.get(path, _NEVER)
                places.setdefault(os.path.dirname(path), {}).setdefault(generation, []).append(path)
            return [
                path
                for generations in places.values()
                if min(generations) < _NEVER
                for path in self._trim_place(generations, found, after)
            ]

    def _trim_place(self, generations: Mapping[int, list[str]], found: Found, after: After) -> Iterator[str]:
        """The files of one folder: to TensorBoard they are one run."""
        floors: dict[str, int] = {}  # tag -> the first step that a later generation has written
        for generation in sorted(generations, reverse=True):
            written = [(path, self._read(path, found[path])) for path in generations[generation]]
            if generation < _NEVER:
                first = _first_dropped([known for _, known in written], floors, generation, after)
                for path, known in written:
                    if any(step >= first[tag] for tag, step in known.high.items()):
                        self._rewrite(path, first)
                        yield path
            for _, known in written:
                for tag, step in known.low.items():
                    floors[tag] = min(step, floors.get(tag, step))

    def _read(self, path: str, found: tuple[int, int]) -> _Known:
        inode, size = found
        known = self._known.get(path)
        if known is None or known.inode != inode or size < known.at:
            known = self._known[path] = _Known(inode)
        if size == known.at:
            return known
        try:
            with open(f"{self._folder}/{path}", "rb") as file:
                file.seek(known.at)
                for _, record in tfrecord.records(file):
                    known.at = file.tell()
                    step, tags = tfrecord.summary_of(record) or (0, ())
                    for tag in tags:
                        known.low[tag] = min(step, known.low.get(tag, step))
                        known.high[tag] = max(step, known.high.get(tag, step))
        except (OSError, tfrecord.Torn):
            pass  # what follows is not whole, or not yet
        return known

    def _rewrite(self, path: str, first: Mapping[str, int]) -> None:
        """Without what is not before `first` of its tag."""
        own, beside = f"{self._folder}/{path}", f"{self._scratch}.trimmed"
        kept: list[tuple[int, int]] = []  # ranges of bytes
        with open(own, "rb") as file:
            with contextlib.suppress(tfrecord.Torn):
                for begin, record in tfrecord.records(file):
                    step, tags = tfrecord.summary_of(record) or (-1, ())
                    if any(step >= first.get(tag, _NEVER) for tag in tags):
                        continue
                    if kept and kept[-1][1] == begin:
                        begin = kept.pop()[0]
                    kept.append((begin, file.tell()))
            with open(beside, "wb") as made:
                for begin, end in kept:
                    _copy(file.fileno(), made.fileno(), begin, end)
        os.chmod(beside, stat.S_IMODE(os.stat(own).st_mode))
        os.rename(beside, own)

    # ---- the copy at the place

    def keep(self, store: Store, below: str, wanted: Wanted, last: bool) -> None:
        """Sends what is new. `last`: all of it, however little."""
        for path, (inode, size) in find(self._folder).items():
            before = self._sent.get(path)
            if before == (inode, size) or not fit(path):
                continue
            if not last and before is not None and before[0] == inode and before[1] < size < GROWN * before[1]:
                continue
            scratch = f"{self._scratch}.sent"  # a file that grows while it is sent would not be what it began as
            try:
                with open(f"{self._folder}/{path}", "rb") as file, open(scratch, "wb") as copy:
                    _copy(file.fileno(), copy.fileno(), 0, size)
            except FileNotFoundError:
                continue
            store.send_all([(scratch, f"{below}/{path}")], wanted, {})
            os.unlink(scratch)
            self._sent[path] = inode, size

    def bring(self, store: Store, below: str, wanted: Wanted) -> list[str]:
        """What this folder lacks: of another life of its host. The paths that have come."""
        came, scratch = [], f"{self._scratch}.brought"
        for name in store.names(f"{below}/"):
            path = name[len(below) + 1 :]
            own = f"{self._folder}/{path}"
            if not fit(path) or os.path.lexists(own):
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)
            try:
                store.fetch(name, scratch, wanted)
            except KeyError:
                continue
            os.makedirs(os.path.dirname(own), exist_ok=True)
            os.rename(scratch, own)
            about = os.stat(own)
            self._sent[path] = about.st_ino, about.st_size
            came.append(path)
        return came


def _first_dropped(written: list[_Known], floors: Mapping[str, int], generation: int, after: After) -> dict[str, int]:
    """By tag: from which step on its values are dropped, of what one generation has written."""
    high: dict[str, int] = {}
    for known in written:
        for tag, step in known.high.items():
            high[tag] = max(step, high.get(tag, step))
    return {
        tag: min(
            floors.get(tag, _NEVER),
            *(step + 1 for later, (step, reached) in after.items() if later > generation and _counts(last, reached)),
            _NEVER,
        )
        for tag, last in high.items()
    }


def _counts(last: int, reached: int) -> bool:
    """Whether a tag counts the steps of training: one that counts examples or tokens has come much further. A program
    may say how far it is less often than it writes."""
    return last <= reached + max(10, reached // 10)


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end:
        data = os.pread(source, min(_COPIED, end - begin), begin)
        if not data:
            return
        write_all(target, data)
        begin += len(data)


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Hosts on one machine share a folder: one at a time."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
