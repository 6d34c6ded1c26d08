"""Fetches parts of a snapshot from the hosts that have them, in ranges of their files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

from paceline.storage.snapshots.manifest import FILE_BYTES, MOST_BYTES, Damaged, Gone, SnapshotId, is_safe_path
from paceline.storage.stores.parallel import together
from paceline.storage.stores.protocol import ContinueCheck

if TYPE_CHECKING:
    from paceline.storage.stores.peer_client import PeerStore

RANGE = 64 * 1024 * 1024  # bytes of a file that are fetched at a time,
MOST_RANGES = 64  # unless it is so large that there would be more ranges
LARGEST_FILE = 1 << 50  # bytes; of smaller ones, the disk of this host may be too small
# Errors of files that no host has written, with names or sizes that a file system does not allow.
_NOT_VALID = (errno.EFBIG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
Dial = Callable[[str], "PeerStore"]


@dataclass(frozen=True)
class Range:
    address: str
    name: str  # at the host
    target: str  # the file here
    start: int
    size: int


class PartsFetch:
    """Fetches parts of one snapshot to `<folder>/<task>`. After an interruption it can be continued: ranges that are
    complete are not fetched again."""

    def __init__(self, addresses: Mapping[str, str], snapshot: SnapshotId, folder: str, dial: Dial) -> None:
        """`addresses`: of the hosts, by task."""
        self.addresses, self.snapshot, self.folder = dict(addresses), snapshot, folder
        self._dial = dial
        self._left: list[Range] | None = None  # None: the hosts were not asked yet

    @property
    def can_continue(self) -> bool:
        return self._left is not None

    def run(self, at_once: int, should_continue: ContinueCheck, need: Callable[[int], None]) -> int:
        """Returns the number of bytes. `at_once`: ranges, each over a connection of its own. `need`: called with the
        number of bytes before any of them is fetched; may raise an error."""
        with _connections(self._dial) as connection:
            if self._left is None:
                self._left = self._list(connection, need)
            done: set[Range] = set()

            def fetch(part: Range, check: ContinueCheck) -> int:
                fd = os.open(part.target, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    with _valid(part.address, part.name):
                        size = connection(part.address).fetch_range(part.name, part.start, part.size, fd, check)
                except KeyError:
                    raise Gone(f"{part.address} does not have {part.name}") from None
                finally:
                    os.close(fd)
                if size != part.size:
                    raise Gone(f"{part.name} at {part.address} has become shorter")
                done.add(part)
                return size

            try:
                return sum(together(fetch, self._left, lambda _: at_once, should_continue))
            finally:
                self._left = [part for part in self._left if part not in done]

    def _list(self, connection: Dial, need: Callable[[int], None]) -> list[Range]:
        files: list[tuple[str, str, str, int]] = []  # address, name there, path here, size
        listed = 0  # bytes in a manifest
        for task, address in self.addresses.items():
            prefix = f"{task}/{self.snapshot}/"
            sizes = connection(address).sizes(prefix)
            if not sizes:
                raise Gone(f"{address} does not have {task} of {self.snapshot}")
            for name, size in sizes.items():
                path = name[len(prefix) :]
                if not name.startswith(prefix) or not is_safe_path(path):
                    raise Damaged(f"{address} lists the path {path!r}, which is not valid")
                if size > LARGEST_FILE:
                    raise Damaged(f"{address} lists the file {path!r}, which is not valid: {os.strerror(errno.EFBIG)}")
                files.append((address, name, f"{self.folder}/{task}/{path}", size))
                listed += len(path) + FILE_BYTES
            if listed > MOST_BYTES:
                raise Damaged(f"{address} lists {len(sizes)} files: more than a manifest can list")
        need(sum(size for *_, size in files))
        ranges: list[Range] = []
        for address, name, target, size in files:
            with _valid(address, name):
                ranges += _ranges(address, name, _new_file(target), size)
        return ranges


def _ranges(address: str, name: str, target: str, size: int) -> list[Range]:
    step = max(RANGE, -(-size // MOST_RANGES))
    return [Range(address, name, target, start, min(step, size - start)) for start in range(0, size, step)]


@contextmanager
def _valid(address: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_VALID:
            raise  # of this host, such as a full disk
        raise Damaged(f"{address} lists the file {path!r}, which is not valid: {error.strerror}") from None


def _new_file(path: str) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return path


@contextmanager
def _connections(dial: Dial) -> Iterator[Dial]:
    """A connection for each thread and address, closed at the end."""
    open_connections: dict[tuple[int, str], PeerStore] = {}

    def connection(address: str) -> PeerStore:
        key = threading.get_ident(), address
        if key not in open_connections:
            open_connections[key] = dial(address)
        return open_connections[key]

    try:
        yield connection
    finally:
        for each in open_connections.values():
            each.close()
