"""A folder as a place for snapshots: of this machine, of a volume, or shared over the network."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Callable

from paceline.storage.files import MADE, NEW, copy, digest, pieces, sync, sync_all_of, write_all
from paceline.storage.store import PIECE, Sent, StoreError, Wanted
from paceline.storage.together import together

SMALL = 1024 * 1024  # bytes of a file that is synced when all are written: it is quick to write, and slow to sync
AT_ONCE = 4  # files that are not small: while one is synced, others are read
SYNCS = 16  # small files that are synced at once
MANY = 64  # small files from which on the whole file system is synced instead,
FLUSH = 1024 * 1024  # where each has no more than this of what is written: that takes as long as a flush

# What was used before may become usable again: a disk has room, a share is back, somebody mounts it for writing again.
PASSING = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOTCONN, errno.EROFS,
    errno.EACCES, errno.EPERM,
)  # fmt: skip
LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
NO_LINKS = (
    "its file system has no hard links, without which a file cannot get its name only once and only when it is whole; "
    "use a folder on another, or a bucket"
)


class Folder:
    """A file gets its name when all of it is on the disk. What a crash leaves has a name with `.partial` at its end."""

    def __init__(self, root: str) -> None:
        self._root = root

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            self._make_folders(os.path.dirname(path))
            partial = self._partial(path)
            fd = os.open(partial, NEW, MADE)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.link(partial, path)  # unlike a rename, this fails where the name is taken
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in LINKLESS:
                    raise StoreError(f"{self._root} cannot be used: {NO_LINKS}") from None
                raise
            finally:
                os.unlink(partial)
            sync(os.path.dirname(path))
            return True
        except OSError as error:
            raise self._failed("write", name, error) from None

    def read(self, name: str, most: int) -> bytes | None:
        fd = self._open(name)
        if fd is None:
            return None
        try:
            found = bytearray()
            while len(found) <= most:
                data = os.read(fd, PIECE)
                if not data:
                    return bytes(found)
                found += data
            raise StoreError(f"{self._path(name)} has more than the {most} bytes that such a file may have")
        except OSError as error:
            raise self._failed("read", name, error) from None
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        try:
            os.stat(self._path(name))
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failed("read", name, error) from None

    def is_link(self, name: str) -> bool:
        return os.path.islink(self._path(name))

    def folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self._path(prefix)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("list", prefix, error) from None

    def names(self, prefix: str) -> list[str]:
        found: list[str] = []
        folders = [prefix]
        try:
            while folders:
                folder = folders.pop()
                try:
                    with os.scandir(self._path(folder)) as entries:
                        for entry in entries:
                            if entry.is_dir(follow_symlinks=False):
                                folders.append(f"{folder}{entry.name}/")
                            elif not entry.name.endswith(".partial"):
                                found.append(f"{folder}{entry.name}")
                except FileNotFoundError:
                    continue
        except OSError as error:
            raise self._failed("list", prefix, error) from None
        return sorted(found)

    def delete(self, name: str) -> None:
        self._remove(name, os.unlink)

    def clear(self, prefix: str) -> None:
        self._remove(prefix.rstrip("/"), shutil.rmtree)

    def _remove(self, name: str, remove: Callable[[str], None]) -> None:
        path = self._path(name)
        try:
            remove(path)
            sync(os.path.dirname(path))
            self._tidy(os.path.dirname(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed("delete", name, error) from None

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted, sent: Sent) -> None:
        """First all data is on the disk, then the names of all; each folder is synced once."""
        sizes = {name: os.path.getsize(path) for path, name in files}
        partials: dict[str, str] = {}  # name -> what holds its data until then

        def write(each: tuple[str, str], still: Wanted) -> tuple[int, str]:
            path, name = each
            with self._failing("write", name):
                there = self._path(name)
                self._make_folders(os.path.dirname(there))
                partials[name] = self._partial(there)
                return copy(path, partials[name], still, sync=sizes[name] > SMALL)

        try:
            found = together(write, files, lambda each: self.at_once(sizes[each[1]]), wanted)
            small = {name: partials[name] for name, size in sizes.items() if size <= SMALL}
            self._sync(small, sum(sizes.values()), wanted)
            for name in sizes:
                with self._failing("write", name):
                    os.rename(partials[name], self._path(name))
                    del partials[name]
            for folder, name in {os.path.dirname(self._path(name)): name for name in sizes}.items():
                with self._failing("write", name):
                    sync(folder)
        except BaseException:
            for partial in partials.values():
                with suppress(OSError):
                    os.unlink(partial)
            raise
        sent.update(zip(sizes, found))

    def _sync(self, small: Mapping[str, str], size: int, wanted: Wanted) -> None:
        """A flush of the disk for each file takes most of the time where there are many; one call for the file system
        writes what others have not written yet, too: the least of it is this snapshot, as its tasks have left it."""

        def one(name: str, _: Wanted) -> None:
            with self._failing("write", name):
                sync(small[name])

        if len(small) >= MANY and len(small) * FLUSH > size:
            with self._failing("write", next(iter(small))):
                if sync_all_of(self._root):
                    return
        together(one, small, lambda _: SYNCS, wanted)

    def at_once(self, size: int) -> int:
        """Small ones one after the other: several threads would wait for Python's lock."""
        return 1 if size <= SMALL else AT_ONCE

    def take(self, pieces: Iterable[bytes | bytearray], name: str) -> tuple[int, str]:
        """What somebody else sends; where it breaks off, nothing is kept."""
        there = self._path(name)
        digest, size = hashlib.sha256(), 0
        try:
            self._make_folders(os.path.dirname(there))
            partial = self._partial(there)
            fd = os.open(partial, NEW, MADE)
        except OSError as error:
            raise self._failed("write", name, error) from None
        try:
            for data in pieces:
                with self._failing("write", name):
                    write_all(fd, data)
                digest.update(data)
                size += len(data)
            with self._failing("write", name):
                os.fsync(fd)
                os.rename(partial, there)
                sync(os.path.dirname(there))
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        finally:
            os.close(fd)
        return size, digest.hexdigest()

    def give(self, name: str) -> Iterator[bytes] | None:
        """For somebody else; None: there is no such name."""
        fd = self._open(name)
        return None if fd is None else pieces(fd)

    def _open(self, name: str) -> int | None:
        try:
            return os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("read", name, error) from None

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        try:
            return copy(self._path(name), path, wanted, sync=False)
        except FileNotFoundError as error:
            if error.filename == self._path(name):
                raise KeyError(name) from None
            raise
        except OSError as error:
            if error.filename == path:
                raise
            raise self._failed("read", name, error) from None

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        try:
            return digest(self._path(name), wanted)
        except FileNotFoundError:
            raise KeyError(name) from None
        except OSError as error:
            raise self._failed("read", name, error) from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _partial(self, path: str) -> str:
        """A name of our own beside it: another process may be writing the same."""
        folder, name = os.path.split(path)
        return f"{folder}/.{name[:100]}.{os.urandom(6).hex()}.partial"

    def _make_folders(self, folder: str) -> None:
        """Those above are on the disk before what is in them."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            try:
                os.mkdir(each, 0o700)
            except FileExistsError:
                pass  # somebody else has made it
            sync(os.path.dirname(each))

    def _tidy(self, folder: str) -> None:
        """Folders that are empty now, up to the root."""
        while folder != self._root and folder.startswith(self._root):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    @contextmanager
    def _failing(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(verb, name, error) from None

    def _failed(self, verb: str, name: str, error: OSError) -> StoreError:
        why = error.strerror or str(error)
        return StoreError(f"cannot {verb} {self._path(name)}: {why}", error.errno in PASSING)
