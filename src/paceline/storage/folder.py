"""A folder as a place for snapshots: of this machine, of a volume, or shared over the network."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Callable

from paceline.storage.store import PIECE, StoreError, Unwanted, Wanted
from paceline.storage.together import together

AT_ONCE = 4  # files: while one is synced, others are read
BATCH = 256  # small files that are written before they are synced,
SYNCS = 16  # so many at once
_MADE = 0o600
_BUFFER = 1024 * 1024  # bytes: what was read is still in the processor's cache when it is written and digested
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Folder:
    """A file gets its name when all of it is on the disk. What a crash leaves has a name with `.partial` at its end."""

    def __init__(self, root: str) -> None:
        self._root = root

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            self._make_folders(os.path.dirname(path))
            partial = self._partial(path)
            fd = os.open(partial, _NEW, _MADE)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.link(partial, path)  # unlike a rename, this fails where the name is taken
            except FileExistsError:
                return False
            finally:
                os.unlink(partial)
            _sync(os.path.dirname(path))
            return True
        except OSError as error:
            raise self._failed("write", name, error) from None

    def read(self, name: str, most: int) -> bytes | None:
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("read", name, error) from None
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
            _sync(os.path.dirname(path))
            self._tidy(os.path.dirname(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed("delete", name, error) from None

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted) -> list[tuple[int, str]]:
        """Several large ones at once. Small ones are written by one thread, as Python's lock would have several wait
        for each other. Folders are synced last, and once."""
        small = {each for each in files if os.path.getsize(each[0]) <= _BUFFER}
        large = [each for each in files if each not in small]
        found = dict(zip(large, together(self._send, large, lambda _: AT_ONCE, wanted)))
        left = [each for each in files if each in small]
        for begin in range(0, len(left), BATCH):
            batch = left[begin : begin + BATCH]
            found.update(zip(batch, self._send_batch(batch, wanted)))
        for folder, name in {os.path.dirname(self._path(name)): name for _, name in files}.items():
            with self._failing("write", name):
                _sync(folder)
        return [found[each] for each in files]

    def _send(self, each: tuple[str, str], wanted: Wanted) -> tuple[int, str]:
        path, name = each
        with self._failing("write", name):
            partial = self._begun(name)
            found = copy(path, partial, wanted, sync=True)
            os.rename(partial, self._path(name))
            return found

    def _send_batch(self, files: Sequence[tuple[str, str]], wanted: Wanted) -> list[tuple[int, str]]:
        """All are written, then all are synced, then all get their names: each sync has less to do the less has changed
        since the one before."""
        found: list[tuple[int, str]] = []
        written: dict[str, tuple[int, str]] = {}  # name -> its descriptor, and its path until it has its own

        def sync(name: str, _: Wanted) -> None:
            with self._failing("write", name):
                os.fsync(written[name][0])

        try:
            for path, name in files:
                with self._failing("write", name):
                    partial = self._begun(name)
                    written[name] = os.open(partial, _NEW, _MADE), partial
                    found.append(_copied(path, written[name][0], wanted))
            together(sync, list(written), lambda _: SYNCS, wanted)
            for _, name in files:
                with self._failing("write", name):
                    os.rename(written[name][1], self._path(name))
                    os.close(written.pop(name)[0])
        except BaseException:
            for writing, partial in written.values():
                os.close(writing)
                os.unlink(partial)
            raise
        return found

    def _begun(self, name: str) -> str:
        there = self._path(name)
        self._make_folders(os.path.dirname(there))
        return self._partial(there)

    def at_once(self, size: int) -> int:
        return 1 if size <= _BUFFER else AT_ONCE

    def take(self, pieces: Iterable[bytes | bytearray], name: str) -> tuple[int, str]:
        """What somebody else sends; where it breaks off, nothing is kept."""
        there = self._path(name)
        digest, size = hashlib.sha256(), 0
        try:
            self._make_folders(os.path.dirname(there))
            partial = self._partial(there)
            fd = os.open(partial, _NEW, _MADE)
        except OSError as error:
            raise self._failed("write", name, error) from None
        try:
            for data in pieces:
                try:
                    write_all(fd, data)
                except OSError as error:
                    raise self._failed("write", name, error) from None
                digest.update(data)
                size += len(data)
            os.fsync(fd)
            os.rename(partial, there)
        except BaseException:
            os.unlink(partial)
            raise
        finally:
            os.close(fd)
        _sync(os.path.dirname(there))
        return size, digest.hexdigest()

    def give(self, name: str) -> Iterator[bytes] | None:
        """For somebody else; None: there is no such name."""
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("read", name, error) from None
        return _pieces(fd)

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
            _sync(os.path.dirname(each))

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
        passing = error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
        return StoreError(f"cannot {verb} {self._path(name)}: {why}", passing)


def digest(source: str, wanted: Wanted) -> tuple[int, str]:
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_all(reading, source, wanted)
    finally:
        os.close(reading)


def _read_all(reading: int, source: str, wanted: Wanted, writing: int | None = None) -> tuple[int, str]:
    made, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(max(1, min(_BUFFER, os.fstat(reading).st_size))))
    while True:
        length = os.readv(reading, [buffer])
        if not wanted(length):
            raise Unwanted(source)
        if not length:
            return size, made.hexdigest()
        data = buffer[:length]
        if writing is not None:
            write_all(writing, data)
        made.update(data)
        size += length


def copy(source: str, target: str, wanted: Wanted, sync: bool) -> tuple[int, str]:
    """Digested on the way: one pass."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writing = os.open(target, _NEW, _MADE)
        try:
            found = _read_all(reading, source, wanted, writing)
            if sync:
                os.fsync(writing)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return found


def _copied(source: str, writing: int, wanted: Wanted) -> tuple[int, str]:
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_all(reading, source, wanted, writing)
    finally:
        os.close(reading)


def _pieces(fd: int) -> Iterator[bytes]:
    try:
        while data := os.read(fd, PIECE):
            yield data
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(folder: str) -> None:
    """Its names are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, and need not
            raise
    finally:
        os.close(fd)
