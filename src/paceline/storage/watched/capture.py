"""Captures a folder in which a program keeps its own checkpoints, between two writes and never during one.

A file is copied once: if it has not changed, it is hard-linked from the previous copy, which nothing else uses.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping

from paceline.storage.local_files import remove_tree
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.repository import Unfit, always
from paceline.storage.stores.protocol import ContinueCheck
from paceline.storage.watched import folder_contents
from paceline.storage.watched.folder_contents import ABOUT, Contents, Later, Signature, contents, duplicate
from paceline.storage.watched.selection import select

REST = 0.9  # seconds without a change, or as long as the writing took: a checkpoint is often more than one file
LONGEST_REST = 10.0
RESTLESS = 3.0  # seconds of changes after which a short pause suffices, if the changes are small
QUICK_BYTES = 64 * 1024 * 1024  # bytes of changes that are written quickly
PAUSE = 0.05
PAUSES = 10


class FolderCapture:
    def __init__(self, path: str, own: str, tasks: str) -> None:
        """`path`: a folder, a file, or a folder with a pattern of names of files. `own`: a folder for the copies, which
        is recreated. `tasks`: a folder with a file for each task on this host that may write to the watched folder,
        containing its pid; a task that has succeeded has none."""
        self._path, self._own, self._tasks = path, own, tasks
        self._selection = select(path)
        self._copies: dict[str, tuple[Signature, str]] = {}  # path -> signature of the original, and path of the copy
        self._numbers = itertools.count()
        self._captured = Contents()
        self._seen = Contents()
        self._unchanged_since = 0.0
        self._first_change: float | None = None  # since the last capture
        self._doubtful: dict[str, Signature] = {}
        remove_tree(own, ignore_errors=True)

    def begin(self, restored: bool, doubtful: Mapping[str, Signature]) -> None:
        """Call before tasks start. `restored`: the folder contains a restored snapshot. `doubtful`: files of a task
        that may have died while writing them."""
        self._doubtful = dict(doubtful)
        self._selection = select(self._path)
        self._captured = self._scan() if restored else Contents()
        self._first_change = None

    def take(
        self, to: str, metrics: Mapping[str, float], leader: str = "", should_continue: ContinueCheck = always
    ) -> bool:
        """Capture into the new folder `to`; False if nothing is new. `leader`: the task that writes the files; empty:
        it has succeeded."""
        self._selection = select(self._path)  # it may have become a file, or a folder
        scan = self._scan()
        if scan.unfit:
            raise Unfit(scan.unfit[0])
        if scan == self._captured or not scan.files:
            self._first_change = None
            return False
        for path, signature in self._doubtful.items():
            if scan.files.get(path) == signature:
                raise Unfit(f"{path!r} may be incomplete: the task that wrote it died, and it has not changed since")
        scan = self._at_rest(scan, ended=not leader)
        # From here on, only a process that opens a file now can write, and the second scan would detect that.
        if (open_file := folder_contents.writer(scan)) is not None:
            raise Later(f"{open_file[0]} is open for writing by {open_file[1]}")
        self._first_change = None
        for path, signature in scan.files.items():
            self._copy(path, signature, should_continue)
        if self._scan() != scan:
            raise Later("it changed while it was copied")
        self._check_tasks_live(leader)
        try:
            self._assemble(scan, to, metrics)
        except BaseException:
            remove_tree(to, ignore_errors=True)
            raise
        self._drop_deleted(scan)
        self._captured = scan
        return True

    def _scan(self) -> Contents:
        return contents(self._selection.folder, self._selection.pattern)

    def _at_rest(self, scan: Contents, ended: bool) -> Contents:
        """The contents, once nothing has changed for a while."""
        now = time.monotonic()
        if scan != self._seen:
            self._seen, self._unchanged_since = scan, now
        if self._first_change is None:
            self._first_change = now
        took = self._unchanged_since - self._first_change
        if now - self._unchanged_since >= min(max(REST, took), LONGEST_REST):
            return scan
        if not ended and (took < RESTLESS or self._changed_bytes(scan) > QUICK_BYTES):
            raise Later("it has just changed")
        for _ in range(PAUSES):
            time.sleep(PAUSE)
            before, scan = scan, self._scan()
            if scan == before:
                return scan
        raise Later("it keeps changing")

    def _check_tasks_live(self, leader: str) -> None:
        """If all tasks live now, none of them had died while writing when no open file was found."""
        for task in {*folder_contents.names(self._tasks), *filter(None, [leader])}:
            try:
                with open(open_regular(f"{self._tasks}/{task}")) as file:
                    if folder_contents.lives(file.read()):
                        continue
            except FileNotFoundError:
                if task != leader:
                    continue  # it has just succeeded
            raise Later(f"{task} has died")

    def _changed_bytes(self, scan: Contents) -> int:
        files = self._captured.files
        return sum(signature[2] for path, signature in scan.files.items() if files.get(path) != signature)

    def _copy(self, path: str, signature: Signature, should_continue: ContinueCheck) -> None:
        if path in self._copies and self._copies[path][0] == signature:
            return
        os.makedirs(self._own, exist_ok=True)
        copy = f"{self._own}/{next(self._numbers)}"
        try:
            duplicate(f"{self._selection.folder}/{path}", copy, should_continue)
        except FileNotFoundError:
            raise Later("it changed while it was copied") from None
        except BaseException:
            _unlink(copy)
            raise
        self._drop(path)
        self._copies[path] = signature, copy

    def _assemble(self, scan: Contents, to: str, metrics: Mapping[str, float]) -> None:
        os.makedirs(to)
        for path in (*scan.files, *scan.logs):
            os.makedirs(os.path.dirname(f"{to}/{path}"), exist_ok=True)
        for path in scan.files:
            try:
                os.link(self._copies[path][1], f"{to}/{path}")
            except OSError:
                duplicate(self._copies[path][1], f"{to}/{path}", always)
        for path in scan.logs:
            try:
                duplicate(f"{self._selection.folder}/{path}", f"{to}/{path}", always)
            except FileNotFoundError:
                continue
        times = {path: signature[3] for path, signature in scan.files.items()}
        with open(f"{to}/{ABOUT}", "w") as file:
            kind = {"files": True} if self._selection.pattern else {}
            json.dump({"metrics": dict(metrics), "watched": {"times": times, "links": scan.links, **kind}}, file)

    def _drop_deleted(self, scan: Contents) -> None:
        for path in [path for path in self._copies if path not in scan.files]:
            self._drop(path)

    def _drop(self, path: str) -> None:
        if path in self._copies:
            _unlink(self._copies.pop(path)[1])


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
