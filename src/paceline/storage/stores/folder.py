"""A store in a folder: on this machine, on a volume, or on a network share."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Callable

from paceline.storage.local_files import MODE, NEW, copy, digest, pieces, sync, sync_all_of, write_all
from paceline.storage.regular_files import open_regular
from paceline.storage.stores.parallel import together
from paceline.storage.stores.protocol import PIECE, ContinueCheck, Sent, StoreError

SMALL = 1024 * 1024  # bytes; smaller files are synced when all are written: quick to write, slow to sync
AT_ONCE = 4  # larger files in parallel: while one is synced, others are read
SYNCS = 16  # small files that are synced in parallel
MANY = 64  # from this number of small files on, the whole file system is synced instead,
FLUSH = 1024 * 1024  # if there are at most this many bytes to write per small file: about as slow as one flush

# Errors that may be temporary: a full disk, a share that is unreachable, a volume that is mounted read-only.
TRANSIENT = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOTCONN, errno.EROFS,
    errno.EACCES, errno.EPERM,
)  # fmt: skip
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FolderStore:
    """A file appears under its name when all of it is on disk. A crash leaves files whose names end in `.partial`."""

    def __init__(self, root: str) -> None:
        self._root = root

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            self._make_folders(os.path.dirname(path))
            partial = self._partial(path)
            fd = os.open(partial, NEW, MODE)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.link(partial, path)  # unlike a rename, this fails if the name exists
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in NO_HARD_LINKS:
                    raise StoreError(
                        "its file system does not support hard links, which are needed to create a file atomically",
                        where=self._root,
                        remedy="use a folder on another file system, or a bucket",
                    ) from None
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
            content = bytearray()
            while len(content) <= most:
                data = os.read(fd, PIECE)
                if not data:
                    return bytes(content)
                content += data
            raise StoreError(f"{self._path(name)} is larger than the limit of {most} bytes for such files")
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
        names: list[str] = []
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
                                names.append(f"{folder}{entry.name}")
                except FileNotFoundError:
                    continue
        except OSError as error:
            raise self._failed("list", prefix, error) from None
        return sorted(names)

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

    def send_all(self, files: Sequence[tuple[str, str]], should_continue: ContinueCheck, sent: Sent) -> None:
        """Write and sync all data first, then rename all files; each folder is synced once."""
        sizes = {name: os.path.getsize(path) for path, name in files}
        partials: dict[str, str] = {}  # name -> temporary path

        def write(file: tuple[str, str], check: ContinueCheck) -> tuple[int, str]:
            path, name = file
            with self._failing("write", name):
                target = self._path(name)
                self._make_folders(os.path.dirname(target))
                partials[name] = self._partial(target)
                return copy(path, partials[name], check, sync=sizes[name] > SMALL)

        try:
            digests = together(write, files, lambda file: self.at_once(sizes[file[1]]), should_continue)
            small = {name: partials[name] for name, size in sizes.items() if size <= SMALL}
            self._sync(small, sum(sizes.values()), should_continue)
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
        sent.update(zip(sizes, digests))

    def _sync(self, small: Mapping[str, str], size: int, should_continue: ContinueCheck) -> None:
        """With many files, most of the time goes into one disk flush per file. One call for the whole file system is
        faster, though it also writes what other processes have not written yet."""

        def sync_file(name: str, _: ContinueCheck) -> None:
            with self._failing("write", name):
                sync(small[name])

        if len(small) >= MANY and len(small) * FLUSH > size:
            with self._failing("write", next(iter(small))):
                if sync_all_of(self._root):
                    return
        together(sync_file, small, lambda _: SYNCS, should_continue)

    def at_once(self, size: int) -> int:
        """Small files are fetched one after the other: several threads would wait for Python's GIL."""
        return 1 if size <= SMALL else AT_ONCE

    def take(self, pieces: Iterable[bytes | bytearray], name: str) -> tuple[int, str]:
        """Store a file that a client sends; if it is interrupted, nothing is kept."""
        target = self._path(name)
        digest, size = hashlib.sha256(), 0
        try:
            self._make_folders(os.path.dirname(target))
            partial = self._partial(target)
            fd = os.open(partial, NEW, MODE)
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
                os.rename(partial, target)
                sync(os.path.dirname(target))
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        finally:
            os.close(fd)
        return size, digest.hexdigest()

    def sizes(self, prefix: str) -> dict[str, int]:
        """The files whose names begin with `prefix`, and how large they are."""
        sizes = {}
        for name in self.names(prefix):
            try:
                sizes[name] = os.stat(self._path(name)).st_size
            except FileNotFoundError:
                continue  # it was deleted in the meantime
            except OSError as error:
                raise self._failed("list", prefix, error) from None
        return sizes

    @contextmanager
    def give(self, name: str, start: int = 0, size: int | None = None) -> Iterator[Iterator[bytes] | None]:
        """Read a file for a client, or `size` bytes of it; None: the name does not exist."""
        fd = self._open(name)
        try:
            yield None if fd is None else pieces(fd, start, size)
        finally:
            if fd is not None:
                os.close(fd)

    def _open(self, name: str) -> int | None:
        try:
            return open_regular(self._path(name), follow=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed("read", name, error) from None

    def fetch(self, name: str, path: str, should_continue: ContinueCheck) -> tuple[int, str]:
        try:
            return copy(self._path(name), path, should_continue, sync=False)
        except FileNotFoundError as error:
            if error.filename == self._path(name):
                raise KeyError(name) from None
            raise
        except OSError as error:
            if error.filename == path:
                raise
            raise self._failed("read", name, error) from None

    def digest(self, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        try:
            return digest(self._path(name), should_continue)
        except FileNotFoundError:
            raise KeyError(name) from None
        except OSError as error:
            raise self._failed("read", name, error) from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _partial(self, path: str) -> str:
        """A unique name in the same folder: another process may be writing the same file."""
        folder, name = os.path.split(path)
        return f"{folder}/.{name[:100]}.{os.urandom(6).hex()}.partial"

    def _make_folders(self, folder: str) -> None:
        """Create and sync parents before their children."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass  # another process has created it
            sync(os.path.dirname(path))

    def _tidy(self, folder: str) -> None:
        """Remove folders that are now empty, up to the root."""
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
        reason = error.strerror or str(error)
        return StoreError(f"cannot {verb} {self._path(name)}: {reason}", error.errno in TRANSIENT, reason=reason)
