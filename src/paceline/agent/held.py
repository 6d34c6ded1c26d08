"""Files that TensorBoard's pod takes from members: appended where they end, each host's apart, shown as one folder."""

from __future__ import annotations

import os
from collections.abc import Set
from typing import Any

from paceline.storage.curves import After, Curves, find

MOST_BYTES = 4 * 1024 * 1024 * 1024  # of all files: the node's disk is everybody's
MOST_FILES = 20_000
PATH_LIMIT = 1024
DEPTH_LIMIT = 32


class Refusal(Exception):
    """A file, or a part of one, that is not taken; the text says why."""


class Held:
    def __init__(self, folder: str, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
        self._hosts = f"{folder}/hosts"
        self.shown = f"{folder}/shown"
        self._most_bytes, self._most_files = most_bytes, most_files
        self._linked: set[str] = set()
        os.makedirs(self._hosts, exist_ok=True)
        os.makedirs(self.shown, exist_ok=True)
        there = [os.path.join(place, name) for place, _, names in os.walk(self._hosts) for name in names]
        self._files, self._bytes = len(there), sum(os.stat(path).st_size for path in there)

    def size(self, host: str, path: str) -> int:
        """How much of the file is here: where its next part begins. The path is fit."""
        try:
            return os.stat(f"{self._hosts}/{host}/{path}", follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def append(self, host: str, path: str, at: int, data: bytes, anew: bool = False) -> int:
        """The size of the file now. A part that does not begin where the file ends is not taken: say it again from
        there. `anew`: the file was replaced at its host, and what is here of it is forgotten.
        """
        if not fit(path):
            raise Refusal(f"its path is not one of at most {PATH_LIMIT} characters below the folder")
        own = f"{self._hosts}/{host}/{path}"
        try:
            if own not in self._linked:
                self._begin(host, path, own)
            fd = os.open(own, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return self._write(fd, at, data, anew)
            finally:
                os.close(fd)
        except OSError as error:
            raise Refusal(error.strerror or str(error)) from None

    def trim(self, host: str, has: Set[str], after: After) -> None:
        """Of the files of a host all but those that it has now: an instance before it has written them."""
        folder = f"{self._hosts}/{host}"
        lost = [path for path in find(folder) if path not in has] if os.path.isdir(folder) else []
        if not lost:
            return
        before = {path: os.stat(f"{folder}/{path}").st_size for path in lost}
        shown = {path: self._shown(host, path) for path in lost}
        try:
            trimmed = Curves(folder, f"{self._hosts}/.{host}").trim(dict.fromkeys(lost, 0), after)
            for path in trimmed:
                own = f"{folder}/{path}"
                self._bytes += os.stat(own).st_size - before[path]
                beside = f"{self._hosts}/.{host}.shown"
                os.link(own, beside)
                os.replace(beside, shown[path])
        except OSError:
            pass  # a full disk: training goes on, and it is tried again

    def _shown(self, host: str, path: str) -> str:
        own = f"{self._hosts}/{host}/{path}"
        names = [f"{self.shown}/{name}" for name in (path, f"{path}.{host}")]
        return next((name for name in names if os.path.exists(name) and os.path.samefile(own, name)), names[-1])

    def _write(self, fd: int, at: int, data: bytes, anew: bool) -> int:
        size = os.fstat(fd).st_size
        if anew and at == 0 and size:
            os.ftruncate(fd, 0)
            self._bytes -= size
            size = 0
        if at != size:
            return size
        if self._bytes + len(data) > self._most_bytes:
            raise Refusal(f"more than {self._most_bytes >> 20} MiB are not kept")
        written = os.pwrite(fd, data, at)
        self._bytes += written
        return size + written

    def _begin(self, host: str, path: str, own: str) -> None:
        if not os.path.lexists(own):
            if self._files >= self._most_files:
                raise Refusal(f"more than {self._most_files} files are not kept")
            os.makedirs(os.path.dirname(own), exist_ok=True)
            os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._files += 1
        # Two hosts may have a file of the same name: whoever is later shows it under its own.
        for name in (path, f"{path}.{host}"):
            shown = f"{self.shown}/{name}"
            os.makedirs(os.path.dirname(shown), exist_ok=True)
            try:
                os.link(own, shown)
                break
            except FileExistsError:
                if os.path.samefile(own, shown):
                    break
        self._linked.add(own)


def fit(path: Any) -> bool:
    """Whether it stays below the folder that it is put into, and is one that a file can have.

    >>> fit("train/events.out.tfevents.1"), fit("../other"), fit("/etc/passwd")
    (True, False, False)
    """
    if not isinstance(path, str) or len(path) > PATH_LIMIT:
        return False
    steps = path.split("/")
    try:
        os.fsencode(path)
    except UnicodeError:
        return False
    return len(steps) <= DEPTH_LIMIT and all(step not in ("", ".", "..") and "\0" not in step for step in steps)
