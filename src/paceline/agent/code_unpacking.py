"""Unpacks the code of a run into its work folder: nothing is written outside it, and files are replaced atomically."""

from __future__ import annotations

import os
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, NamedTuple, Union, cast

MOST_ENTRIES = 50_000
MOST_BYTES = 200 << 20  # total size of all files
MOST_PACKED = 64 << 20
PARTIAL = ".paceline-partial"  # the file being written, in the target folder

_MOST_UNPACKED = MOST_BYTES + 4096 * MOST_ENTRIES  # including the tar headers
_MOST_LINKS = 40  # the kernel's limit for one path
_PIECE = 1 << 20

Part = Union[bytes, str, "os.PathLike[str]"]


class UnpackError(Exception):
    """The code cannot be unpacked. If the archive itself is invalid, nothing has been written."""


class _Entry(NamedTuple):
    name: str
    kind: bytes
    executable: bool
    link: str


def unpack(parts: Iterable[Part], target: str) -> None:
    """`parts`: the pieces of the archive in order, as bytes or as paths. Files that exist in `target` are replaced."""
    packed = list(_read(parts))
    entries = _checked_entries(packed)
    base = os.fsencode(target)
    try:
        os.makedirs(base, exist_ok=True)
        try:
            _write(packed, entries, base)
        finally:
            _remove(os.path.join(base, PARTIAL.encode()))
    except OSError as error:
        path = os.fsdecode(error.filename) if error.filename else target
        raise UnpackError(
            f"cannot unpack the code into {target}: {path}: {error.strerror} (as user {os.geteuid()})"
        ) from None


def leads_outside(name: str, links: Mapping[str, str]) -> bool:
    """Whether the symbolic link `name` points outside the folder, directly or through other `links` (name -> target).

    >>> leads_outside("a/up", {"a/up": "../b"}), leads_outside("up", {"up": "../b"})
    (False, True)
    >>> leads_outside("out", {"here": ".", "out": "here/.."})
    True
    """
    resolved: list[str] = []
    remaining = name.split("/")[::-1]
    followed = 0
    while remaining:
        component = remaining.pop()
        if component == "..":
            if not resolved:
                return True
            resolved.pop()
        elif component not in ("", "."):
            resolved.append(component)
            link = links.get("/".join(resolved))
            if link is not None:
                followed += 1
                if link.startswith("/"):
                    return True
                if followed > _MOST_LINKS:
                    return False  # a cycle: it has no target
                resolved.pop()
                remaining += link.split("/")[::-1]
    return False


# ---- the archive


def _read(parts: Iterable[Part]) -> Iterator[bytes]:
    total = 0
    for part in parts:
        if isinstance(part, bytes):
            data = part
        else:
            try:
                with open(part, "rb") as file:
                    data = file.read(MOST_PACKED + 1)
            except OSError as error:
                raise UnpackError(f"{os.fspath(part)}: cannot read part of the code: {error.strerror}") from None
        total += len(data)
        if total > MOST_PACKED:
            raise UnpackError(f"the code archive is larger than {MOST_PACKED >> 20} MiB")
        yield data


class _Inflated:
    """The decompressed tar as a stream that can be read once; its checksum is verified at the end."""

    def __init__(self, packed: Iterable[bytes]) -> None:
        self._packed = iter(packed)
        self._inflate = zlib.decompressobj(31)
        self._total = 0

    def read(self, size: int) -> bytes:
        output = b""
        while len(output) < size and not self._inflate.eof:
            data = self._inflate.unconsumed_tail or next(self._packed, b"")
            try:
                output += self._inflate.decompress(data, size - len(output))
            except zlib.error:
                raise UnpackError("the code archive is damaged: it cannot be decompressed") from None
            if not data and not self._inflate.eof and len(output) < size:
                raise UnpackError("the code archive is damaged: it is truncated")
        self._total += len(output)
        if self._total > _MOST_UNPACKED:
            raise UnpackError(f"the code unpacks to more than {MOST_BYTES >> 20} MiB")
        return output

    def finish(self) -> None:
        while self.read(_PIECE):
            pass
        if self._inflate.unused_data or any(self._packed):
            raise UnpackError("the code archive is damaged: there is data after its end")


def _walk(packed: Iterable[bytes]) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """Each entry, with the archive; read the content of an entry before requesting the next one."""
    stream = _Inflated(packed)
    try:
        with tarfile.open(
            fileobj=cast("IO[bytes]", stream), mode="r|", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            for info in tar:
                yield info, tar
    except UnpackError:
        raise
    except Exception as error:  # tarfile raises different exceptions for invalid input in each Python version
        raise UnpackError(f"the code archive is damaged: {error}") from None
    stream.finish()


def _checked_entries(packed: Iterable[bytes]) -> dict[str, _Entry]:
    """All entries by name. UnpackError: one of them is unsafe, or two of them conflict."""
    entries: dict[str, _Entry] = {}
    size = 0
    for info, _ in _walk(packed):
        entry = _entry(info)
        size += info.size if entry.kind == tarfile.REGTYPE else 0
        if entry.name in entries:
            raise UnpackError(f"{entry.name!r} occurs twice in the code archive")
        entries[entry.name] = entry
        if len(entries) > MOST_ENTRIES:
            raise UnpackError(f"the code has more than {MOST_ENTRIES} files")
        if size > MOST_BYTES:
            raise UnpackError(f"the code unpacks to more than {MOST_BYTES >> 20} MiB")
    links = {entry.name: entry.link for entry in entries.values() if entry.kind == tarfile.SYMTYPE}
    for name in entries:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in entries and entries[parent].kind != tarfile.DIRTYPE:
                raise UnpackError(f"{name!r} is inside {parent!r}, which is not a folder")
            parent = parent.rpartition("/")[0]
    for name, link in links.items():
        if leads_outside(name, links):
            raise UnpackError(f"the symbolic link {name!r} points outside the folder, to {link!r}")
    return entries


def _entry(info: tarfile.TarInfo) -> _Entry:
    name = info.name
    if any(piece in ("", ".", "..") for piece in name.split("/")) or "\0" in name or name == PARTIAL:
        raise UnpackError(f"{name!r} is not a valid path inside the folder")
    kind = tarfile.REGTYPE if info.type == tarfile.AREGTYPE else info.type
    if info.issparse() or kind not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
        raise UnpackError(f"{name!r} is not a file, a folder or a symbolic link")
    if info.mode & ~0o777:
        raise UnpackError(f"{name!r} has special permission bits ({info.mode:o})")
    link = info.linkname if kind == tarfile.SYMTYPE else ""
    if kind == tarfile.SYMTYPE and (not link or "\0" in link):
        raise UnpackError(f"{name!r} is a symbolic link without a valid target")
    try:
        f"{name}{link}".encode()
    except UnicodeEncodeError:
        raise UnpackError(f"{name!r} is not UTF-8") from None
    return _Entry(name, kind, bool(info.mode & 0o100), link)


# ---- the folder


def _write(packed: Iterable[bytes], entries: Mapping[str, _Entry], target: bytes) -> None:
    """Creates symbolic links last, so that nothing is ever written through one."""
    partial = os.path.join(target, PARTIAL.encode())
    folders: set[bytes] = set()
    for info, tar in _walk(packed):
        entry = entries[info.name]
        path = entry.name.encode()
        if entry.kind == tarfile.DIRTYPE:
            _make_folder(target, path, folders)
        elif entry.kind == tarfile.REGTYPE:
            _make_folder(target, os.path.dirname(path), folders)
            _write_partial(partial, tar, info, entry.executable)
            os.replace(partial, os.path.join(target, path))
    for entry in entries.values():
        if entry.kind == tarfile.SYMTYPE:
            path = entry.name.encode()
            _make_folder(target, os.path.dirname(path), folders)
            _remove(partial)
            os.symlink(entry.link.encode(), partial)
            os.replace(partial, os.path.join(target, path))


def _make_folder(target: bytes, path: bytes, created: set[bytes]) -> None:
    """Creates the folder and its parents. Replaces anything else at these paths: a link would point elsewhere."""
    folder = target
    for component in filter(None, path.split(b"/")):
        folder = os.path.join(folder, component)
        if folder in created:
            continue
        created.add(folder)
        try:
            if stat.S_ISDIR(os.lstat(folder).st_mode):
                continue
            os.unlink(folder)
        except FileNotFoundError:
            pass
        os.mkdir(folder)
        os.chmod(folder, 0o755)  # regardless of the umask


def _write_partial(partial: bytes, tar: tarfile.TarFile, info: tarfile.TarInfo, executable: bool) -> None:
    _remove(partial)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        content = tar.extractfile(info)
        remaining = info.size
        while remaining:
            data = content.read(min(remaining, _PIECE)) if content is not None else b""
            if not data:
                raise UnpackError(f"the code archive is damaged: {info.name!r} is truncated")
            file.write(data)
            remaining -= len(data)
        os.fchmod(fd, 0o755 if executable else 0o644)


def _remove(path: bytes) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
