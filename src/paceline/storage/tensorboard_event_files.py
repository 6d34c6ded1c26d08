"""TensorBoard event files in a folder: drops values that a later generation has rewritten, and copies files to a store.

A program that resumes from step N writes the steps after N again; a program that starts from scratch writes all steps
again. Values of earlier generations are then dropped: for each tag, those at or after the first step that a later
generation has written; and immediately those after N, if the tag counts training steps. So values that are not written
again are kept, even if a program restores state that Paceline does not know about, and if steps are epochs or examples.
Files that a live process writes are never changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.storage import tfrecord
from paceline.storage.local_files import write_all
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.manifest import is_safe_path
from paceline.storage.stores.protocol import ContinueCheck, Store

FOLDER = "tensorboard"  # folder of a run's event files in its store
MOST_FILES = 20_000
MOST_ENTRIES = 100_000  # files and folders that are looked at, as agents wait for it
GROWN = 1.05  # a store cannot append: a file is sent again once it has grown by this factor, and at the end
_COPY_BYTES = 1 << 20
_NEVER = 1 << 63
_NAME = "tfevents"  # part of the name of every event file

FileStamps = dict[str, tuple[int, int]]  # path below the folder -> inode and size
# Generation -> the step it resumes from, and the highest step that training is known to have reached before.
After = Mapping[int, tuple[int, int]]


def find(folder: str) -> FileStamps:
    """Regular files below the folder that are not empty. Symbolic links are not followed: they may form cycles."""
    stamps: FileStamps = {}
    folders = [""]
    seen = 0
    while folders and len(stamps) < MOST_FILES and seen < MOST_ENTRIES:
        below = folders.pop()
        try:
            with os.scandir(f"{folder}/{below}") as entries:
                for entry in itertools.islice(entries, MOST_ENTRIES - seen):
                    seen += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{below}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and status.st_size:
                            stamps[f"{below}{entry.name}"] = status.st_ino, status.st_size
        except OSError:
            continue  # a folder that a task has just removed
    return stamps


def event_files(folder: str) -> FileStamps:
    return {path: stamp for path, stamp in find(folder).items() if is_event_file(path)}


def is_event_file(path: str) -> bool:
    return _NAME in os.path.basename(path)


def mark_cut(folder: str) -> None:
    """Record that a file below the folder was shortened, so that readers read it again."""
    with contextlib.suppress(OSError), open(_mark(folder), "wb") as file:
        os.utime(file.fileno())


def last_cut(folder: str) -> int:
    """A number that changes whenever a file was shortened."""
    try:
        return os.stat(_mark(folder)).st_mtime_ns
    except OSError:
        return 0


def _mark(folder: str) -> str:
    return os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.cut")


@dataclass
class _Scan:
    """The steps in the part of a file that has been read so far."""

    inode: int
    offset: int = 0
    low: dict[str, int] = field(default_factory=dict)  # tag -> lowest step
    high: dict[str, int] = field(default_factory=dict)  # tag -> highest step


class EventFiles:
    def __init__(self, folder: str, scratch: str, shown: str = "") -> None:
        """`scratch`: prefix of the paths of temporary files, on the same disk and used by nothing else.
        `shown`: the folder that TensorBoard reads, if it is a different one."""
        self._folder, self._scratch, self._shown = folder, scratch, shown or folder
        self._scans: dict[str, _Scan] = {}
        self._sent: FileStamps = {}

    # ---- trimming

    def trim(self, old: Mapping[str, int], after: After) -> list[str]:
        """Return the paths of files that were shortened. `old`: files whose writers have ended, with their generation;
        all other files belong to a later generation. `after`: generations that resume from a snapshot."""
        with alone(self._folder):
            folders: dict[str, dict[int, list[str]]] = {}
            stamps = event_files(self._folder)
            for path in stamps:
                generation = old.get(path, _NEVER)
                folders.setdefault(os.path.dirname(path), {}).setdefault(generation, []).append(path)
            return [
                path
                for generations in folders.values()
                if min(generations) < _NEVER
                for path in self._trim_folder(generations, stamps, after)
            ]

    def _trim_folder(self, generations: Mapping[int, list[str]], stamps: FileStamps, after: After) -> Iterator[str]:
        """The files of one folder: TensorBoard shows them as one run."""
        floors: dict[str, int] = {}  # tag -> the first step that a later generation has written
        for generation in sorted(generations, reverse=True):
            scans = [(path, self._read(path, stamps[path])) for path in generations[generation]]
            if generation < _NEVER:
                first = _first_dropped([scan for _, scan in scans], floors, generation, after)
                for path, scan in scans:
                    if any(step >= first[tag] for tag, step in scan.high.items()):
                        self._rewrite(path, first)
                        yield path
            for _, scan in scans:
                for tag, step in scan.low.items():
                    floors[tag] = min(step, floors.get(tag, step))

    def _read(self, path: str, stamp: tuple[int, int]) -> _Scan:
        inode, size = stamp
        scan = self._scans.get(path)
        if scan is None or scan.inode != inode or size < scan.offset:
            scan = self._scans[path] = _Scan(inode)
        if size == scan.offset:
            return scan
        try:
            with open(open_regular(f"{self._folder}/{path}", follow=True), "rb") as file:
                file.seek(scan.offset)
                for _, record in tfrecord.records(file):
                    scan.offset = file.tell()
                    step, tags = tfrecord.summary_of(record) or (0, ())
                    for tag in tags:
                        scan.low[tag] = min(step, scan.low.get(tag, step))
                        scan.high[tag] = max(step, scan.high.get(tag, step))
        except (OSError, tfrecord.Torn):
            pass  # the next record is incomplete, or not written yet
        return scan

    def _rewrite(self, path: str, first: Mapping[str, int]) -> None:
        """Drop the values at or after the step `first` of their tag."""
        target, trimmed = f"{self._folder}/{path}", f"{self._scratch}.trimmed"
        ranges: list[tuple[int, int]] = []  # ranges of bytes to keep
        with open(open_regular(target, follow=True), "rb") as file:
            with contextlib.suppress(tfrecord.Torn):
                for begin, record in tfrecord.records(file):
                    step, tags = tfrecord.summary_of(record) or (-1, ())
                    if any(step >= first.get(tag, _NEVER) for tag in tags):
                        continue
                    if ranges and ranges[-1][1] == begin:
                        begin = ranges.pop()[0]
                    ranges.append((begin, file.tell()))
            with open(trimmed, "wb") as copy:
                for begin, end in ranges:
                    _copy(file.fileno(), copy.fileno(), begin, end)
        os.chmod(trimmed, stat.S_IMODE(os.stat(target).st_mode))
        mark_cut(self._shown)  # before the rename: if this process is killed in between, the mark already exists
        os.rename(trimmed, target)

    # ---- the copy in the store

    def keep(self, store: Store, below: str, should_continue: ContinueCheck, last: bool) -> None:
        """Send new files, and files that have grown enough. `last`: send every change."""
        for path, (inode, size) in find(self._folder).items():
            sent = self._sent.get(path)
            if sent == (inode, size) or not is_safe_path(path):
                continue
            if not last and sent is not None and sent[0] == inode and sent[1] < size < GROWN * sent[1]:
                continue
            scratch = f"{self._scratch}.sent"  # the file may grow while it is sent
            try:
                source = open_regular(f"{self._folder}/{path}", follow=True)
            except OSError:
                continue  # it was removed, or replaced by something else
            with open(source, "rb") as file, open(scratch, "wb") as copy:
                _copy(file.fileno(), copy.fileno(), 0, size)
            store.send_all([(scratch, f"{below}/{path}")], should_continue, {})
            os.unlink(scratch)
            self._sent[path] = inode, size

    def bring(self, store: Store, below: str, should_continue: ContinueCheck) -> list[str]:
        """Fetch files that this folder lacks, written before its host was replaced. Return their paths."""
        fetched, scratch = [], f"{self._scratch}.brought"
        for name in store.names(f"{below}/"):
            path = name[len(below) + 1 :]
            target = f"{self._folder}/{path}"
            if not is_safe_path(path) or os.path.lexists(target):
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)
            try:
                store.fetch(name, scratch, should_continue)
            except KeyError:
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(scratch, target)
            status = os.stat(target)
            self._sent[path] = status.st_ino, status.st_size
            fetched.append(path)
        return fetched


def _first_dropped(scans: list[_Scan], floors: Mapping[str, int], generation: int, after: After) -> dict[str, int]:
    """For each tag of one generation: the first step whose values are dropped."""
    high: dict[str, int] = {}
    for scan in scans:
        for tag, step in scan.high.items():
            high[tag] = max(step, high.get(tag, step))
    return {
        tag: min(
            floors.get(tag, _NEVER),
            *(
                step + 1
                for later, (step, reached) in after.items()
                if later > generation and _counts_training_steps(last, reached)
            ),
            _NEVER,
        )
        for tag, last in high.items()
    }


def _counts_training_steps(last: int, reached: int) -> bool:
    """A tag that counts examples or tokens has reached a much higher number. Some tolerance is needed: a program may
    report its step less often than it writes values."""
    return last <= reached + max(10, reached // 10)


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end:
        data = os.pread(source, min(_COPY_BYTES, end - begin), begin)
        if not data:
            return
        write_all(target, data)
        begin += len(data)


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Lock the folder: hosts on one machine share it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
