"""Files that the TensorBoard pod receives from members: stored per host, and linked into one folder to show."""

from __future__ import annotations

import os
from collections.abc import Set
from typing import Any

from paceline.storage.tensorboard_event_files import After, EventFiles, find, is_event_file, mark_cut

MOST_BYTES = 4 * 1024 * 1024 * 1024  # total size of all files: the node's disk is shared
MOST_FILES = 20_000
PATH_LIMIT = 1024
DEPTH_LIMIT = 32


class Refusal(Exception):
    """A file, or a part of one, was rejected; the text says why."""


class ReceivedFiles:
    def __init__(self, folder: str, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
        self._hosts = f"{folder}/hosts"
        self.shown = f"{folder}/shown"
        self._most_bytes, self._most_files = most_bytes, most_files
        self._linked: set[str] = set()
        os.makedirs(self._hosts, exist_ok=True)
        os.makedirs(self.shown, exist_ok=True)
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(self._hosts) for name in names]
        self._files, self._bytes = len(paths), sum(os.stat(path).st_size for path in paths)

    def size(self, host: str, path: str) -> int:
        """The received bytes of the file, which is where its next part begins. The path must be valid."""
        try:
            return os.stat(f"{self._hosts}/{host}/{path}", follow_symlinks=False).st_size
        except OSError:
            return 0  # it does not exist, or cannot: its name may be too long

    def append(self, host: str, path: str, at: int, data: bytes, anew: bool = False) -> int:
        """Returns the new size of the file. A part that does not begin where the file ends is ignored: send it again
        from there. `anew`: the file was replaced on its host: discard the bytes received so far.
        """
        if not is_valid_path(path):
            raise Refusal(f"the path must be relative, without '..', and at most {PATH_LIMIT} characters long")
        own = f"{self._hosts}/{host}/{path}"
        try:
            if own not in self._linked:
                self._begin(host, path, own)
            fd = os.open(own, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return self._write(fd, path, at, data, anew)
            finally:
                os.close(fd)
        except OSError as error:
            raise Refusal(error.strerror or str(error)) from None

    def trim(self, host: str, has: Set[str], after: After) -> None:
        """Trims files that the host no longer has: an earlier instance of the host wrote them."""
        folder = f"{self._hosts}/{host}"
        orphans = [path for path in find(folder) if path not in has] if os.path.isdir(folder) else []
        if not orphans:
            return
        try:
            sizes = {path: os.stat(f"{folder}/{path}").st_size for path in orphans}
            links = {path: self._link_of(host, path) for path in orphans}
            trimmed = EventFiles(folder, f"{self._hosts}/.{host}", self.shown).trim(dict.fromkeys(orphans, 0), after)
            for path in trimmed:
                own = f"{folder}/{path}"
                self._bytes += os.stat(own).st_size - sizes[path]
                link = f"{self._hosts}/.{host}.shown"
                os.link(own, link)
                os.replace(link, links[path])
        except OSError:
            pass  # a full disk: retried later

    def _link_of(self, host: str, path: str) -> str:
        own = f"{self._hosts}/{host}/{path}"
        names = [f"{self.shown}/{name}" for name in (path, f"{path}.{host}")]
        return next((name for name in names if os.path.exists(name) and os.path.samefile(own, name)), names[-1])

    def _write(self, fd: int, path: str, at: int, data: bytes, anew: bool) -> int:
        size = os.fstat(fd).st_size
        if anew and at == 0 and size:
            os.ftruncate(fd, 0)
            if is_event_file(path):
                mark_cut(self.shown)
            self._bytes -= size
            size = 0
        if at != size:
            return size
        if self._bytes + len(data) > self._most_bytes:
            raise Refusal(f"the limit of {self._most_bytes >> 20} MiB for all files is reached")
        count = os.pwrite(fd, data, at)
        self._bytes += count
        return size + count

    def _begin(self, host: str, path: str, own: str) -> None:
        if not os.path.lexists(own):
            if self._files >= self._most_files:
                raise Refusal(f"the limit of {self._most_files} files is reached")
            os.makedirs(os.path.dirname(own), exist_ok=True)
            os.close(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._files += 1
        # Two hosts may have a file of the same name: the name of the second then ends with its host.
        for name in (path, f"{path}.{host}"):
            link = f"{self.shown}/{name}"
            os.makedirs(os.path.dirname(link), exist_ok=True)
            try:
                os.link(own, link)
                break
            except FileExistsError:
                if os.path.samefile(own, link):
                    break
        self._linked.add(own)


def is_valid_path(path: Any) -> bool:
    """Whether a file can have this path, and it stays inside the folder it is relative to.

    >>> is_valid_path("train/events.out.tfevents.1"), is_valid_path("../other"), is_valid_path("/etc/passwd")
    (True, False, False)
    """
    if not isinstance(path, str) or len(path) > PATH_LIMIT:
        return False
    names = path.split("/")
    try:
        os.fsencode(path)
    except UnicodeError:
        return False
    return len(names) <= DEPTH_LIMIT and all(name not in ("", ".", "..") and "\0" not in name for name in names)
