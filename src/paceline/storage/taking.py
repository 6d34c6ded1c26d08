"""Takes what is in a folder that a program keeps its own checkpoints in, between two of its writes and never in one.

A file is copied once: what has not changed since is linked from the copy before, which is nobody else's.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Mapping

from paceline.storage import watched
from paceline.storage.snapshots import Unfit, always
from paceline.storage.store import Wanted
from paceline.storage.watched import ABOUT, Contents, Later, Signature, contents, duplicate

REST = 0.9  # seconds without a change, or as many as the writing took: a checkpoint is often more than one file
LONGEST_REST = 10.0
RESTLESS = 3.0  # seconds of change after which a short pause has to do, where what changes is written quickly
QUICKLY = 64 * 1024 * 1024  # bytes
PAUSE = 0.05
PAUSES = 10


class Taking:
    def __init__(self, folder: str, own: str, tasks: str) -> None:
        """`own`: a folder for the copies, which is made anew. `tasks`: one with a file for each task that runs here and
        may write to it, by name, with the number of its process; whoever ends well has none any more."""
        self._folder, self._own, self._tasks = folder, own, tasks
        self._copies: dict[str, tuple[Signature, str]] = {}  # path -> of which file, and where it is
        self._numbers = itertools.count()
        self._taken = Contents()
        self._seen = Contents()
        self._since = 0.0  # it has not changed
        self._first: float | None = None  # when it was first seen to differ from what was taken
        self._doubtful: dict[str, Signature] = {}
        shutil.rmtree(own, ignore_errors=True)

    def begin(self, restored: bool, doubtful: Mapping[str, Signature]) -> None:
        """Tasks are about to start. `restored`: with what is there now. `doubtful`: files that a task wrote which died,
        perhaps while it did."""
        self._doubtful = dict(doubtful)
        self._taken = contents(self._folder) if restored else Contents()
        self._first = None

    def take(self, to: str, metrics: Mapping[str, float], leader: str = "", wanted: Wanted = always) -> bool:
        """Into the new folder `to`; false where there is nothing new. `leader`: the task whose files they are; empty:
        it has ended well."""
        found = contents(self._folder)
        if found.unfit:
            raise Unfit(found.unfit[0])
        if found == self._taken or not found.files:
            self._first = None
            return False
        for path, known in self._doubtful.items():
            if found.files.get(path) == known:
                raise Unfit(
                    f"{path!r} was written by a task that died, perhaps while it did, and has not changed since"
                )
        found = self._at_rest(found, ended=not leader)
        # From here on nobody writes but who opens a file now, and that would show.
        if (written := watched.writer(found)) is not None:
            raise Later(f"{written[0]} is open for writing by {written[1]}")
        self._first = None
        for path, known in found.files.items():
            self._copy(path, known, wanted)
        if contents(self._folder) != found:
            raise Later("it changed while it was copied")
        self._all_live(leader)
        try:
            self._put_together(found, to, metrics)
        except BaseException:
            shutil.rmtree(to, ignore_errors=True)
            raise
        self._forget(found)
        self._taken = found
        return True

    def _at_rest(self, found: Contents, ended: bool) -> Contents:
        """What is there, once nothing has changed for a while."""
        now = time.monotonic()
        if found != self._seen:
            self._seen, self._since = found, now
        if self._first is None:
            self._first = now
        took = self._since - self._first
        if now - self._since >= min(max(REST, took), LONGEST_REST):
            return found
        if not ended and (took < RESTLESS or self._news(found) > QUICKLY):
            raise Later("it has changed just now")
        for _ in range(PAUSES):
            time.sleep(PAUSE)
            before, found = found, contents(self._folder)
            if found == before:
                return found
        raise Later("it changes all the time")

    def _all_live(self, leader: str) -> None:
        """So they did when nobody was seen to write: none of them had died while it wrote."""
        for task in {*watched.names(self._tasks), *filter(None, [leader])}:
            try:
                with open(f"{self._tasks}/{task}") as file:
                    if watched.lives(file.read()):
                        continue
            except FileNotFoundError:
                if task != leader:
                    continue  # it has just ended well
            raise Later(f"{task} has died")

    def _news(self, found: Contents) -> int:
        """Bytes."""
        return sum(known[2] for path, known in found.files.items() if self._taken.files.get(path) != known)

    def _copy(self, path: str, known: Signature, wanted: Wanted) -> None:
        if path in self._copies and self._copies[path][0] == known:
            return
        os.makedirs(self._own, exist_ok=True)
        copy = f"{self._own}/{next(self._numbers)}"
        try:
            duplicate(f"{self._folder}/{path}", copy, wanted)
        except FileNotFoundError:
            raise Later("it changed while it was copied") from None
        except BaseException:
            _unlink(copy)
            raise
        self._drop(path)
        self._copies[path] = known, copy

    def _put_together(self, found: Contents, to: str, metrics: Mapping[str, float]) -> None:
        os.makedirs(to)
        for path in (*found.files, *found.logs):
            os.makedirs(os.path.dirname(f"{to}/{path}"), exist_ok=True)
        for path in found.files:
            try:
                os.link(self._copies[path][1], f"{to}/{path}")
            except OSError:
                duplicate(self._copies[path][1], f"{to}/{path}", always)
        for path in found.logs:
            try:
                duplicate(f"{self._folder}/{path}", f"{to}/{path}", always)
            except FileNotFoundError:
                continue
        times = {path: known[3] for path, known in found.files.items()}
        with open(f"{to}/{ABOUT}", "w") as file:
            json.dump({"metrics": dict(metrics), "watched": {"times": times, "links": found.links}}, file)

    def _forget(self, found: Contents) -> None:
        for path in [path for path in self._copies if path not in found.files]:
            self._drop(path)

    def _drop(self, path: str) -> None:
        if path in self._copies:
            _unlink(self._copies.pop(path)[1])


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
