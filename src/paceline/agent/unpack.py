"""Puts the code that a run was sent into its folder: nothing lands outside of it, and no file is there by half."""

from __future__ import annotations

import os
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, NamedTuple, Union, cast

MOST_ENTRIES = 50_000
MOST_BYTES = 200 << 20  # of all files together
MOST_PACKED = 64 << 20
PARTIAL = ".paceline-partial"  # the file that is being written, in the target itself

_MOST_UNPACKED = MOST_BYTES + 4096 * MOST_ENTRIES  # with what tar says of each entry
_MOST_LINKS = 40  # that the kernel follows for one path
_PIECE = 1 << 20

Part = Union[bytes, str, "os.PathLike[str]"]


class UnpackError(Exception):
    """The code cannot be put in place; nothing is written where the archive itself is at fault."""


class _Entry(NamedTuple):
    name: str
    kind: bytes
    executable: bool
    link: str


def unpack(parts: Iterable[Part], target: str) -> None:
    """`parts`: the archive in pieces, in order, as bytes or as files. What is in `target` already is replaced."""
    packed = list(_read(parts))
    entries = _survey(packed)
    base = os.fsencode(target)
    try:
        os.makedirs(base, exist_ok=True)
        try:
            _write(packed, entries, base)
        finally:
            _remove(os.path.join(base, PARTIAL.encode()))
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename else target
        raise UnpackError(
            f"cannot put the code into {target}: {where}: {error.strerror} (as user {os.geteuid()})"
        ) from None


def leads_outside(name: str, links: Mapping[str, str]) -> bool:
    """Whether the link `name` leads out of the folder, through others of `links` (name -> target) too.

    >>> leads_outside("a/up", {"a/up": "../b"}), leads_outside("up", {"up": "../b"})
    (False, True)
    >>> leads_outside("out", {"here": ".", "out": "here/.."})
    True
    """
    at: list[str] = []
    ahead = name.split("/")[::-1]
    followed = 0
    while ahead:
        piece = ahead.pop()
        if piece == "..":
            if not at:
                return True
            at.pop()
        elif piece not in ("", "."):
            at.append(piece)
            link = links.get("/".join(at))
            if link is not None:
                followed += 1
                if link.startswith("/"):
                    return True
                if followed > _MOST_LINKS:
                    return False  # in a circle: it leads nowhere
                at.pop()
                ahead += link.split("/")[::-1]
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
                raise UnpackError(f"cannot read a part of the code, {os.fspath(part)}: {error.strerror}") from None
        total += len(data)
        if total > MOST_PACKED:
            raise UnpackError(f"the code is over {MOST_PACKED >> 20} MiB packed")
        yield data


class _Inflated:
    """The tar inside, for reading once from front to end; its checksum is verified at the end."""

    def __init__(self, packed: Iterable[bytes]) -> None:
        self._packed = iter(packed)
        self._inflate = zlib.decompressobj(31)
        self._total = 0

    def read(self, size: int) -> bytes:
        found = b""
        while len(found) < size and not self._inflate.eof:
            data = self._inflate.unconsumed_tail or next(self._packed, b"")
            try:
                found += self._inflate.decompress(data, size - len(found))
            except zlib.error:
                raise UnpackError("the code was damaged on its way: it does not unpack") from None
            if not data and not self._inflate.eof and len(found) < size:
                raise UnpackError("the code was damaged on its way: its end is missing")
        self._total += len(found)
        if self._total > _MOST_UNPACKED:
            raise UnpackError(f"the code unpacks to more than {MOST_BYTES >> 20} MiB")
        return found

    def finish(self) -> None:
        while self.read(_PIECE):
            pass
        if self._inflate.unused_data or any(self._packed):
            raise UnpackError("the code was damaged on its way: something follows its end")


def _walk(packed: Iterable[bytes]) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """Every entry, with the archive to read its content from before the next is asked for."""
    stream = _Inflated(packed)
    try:
        with tarfile.open(
            fileobj=cast("IO[bytes]", stream), mode="r|", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            for info in tar:
                yield info, tar
    except UnpackError:
        raise
    except Exception as error:  # what tarfile makes of nonsense differs from version to version
        raise UnpackError(f"the code was damaged on its way: {error}") from None
    stream.finish()


def _survey(packed: Iterable[bytes]) -> dict[str, _Entry]:
    """All entries by name, where each is harmless and they fit together."""
    entries: dict[str, _Entry] = {}
    size = 0
    for info, _ in _walk(packed):
        entry = _entry(info)
        size += info.size if entry.kind == tarfile.REGTYPE else 0
        if entry.name in entries:
            raise UnpackError(f"{entry.name!r} is there twice")
        entries[entry.name] = entry
        if len(entries) > MOST_ENTRIES:
            raise UnpackError(f"the code has more than {MOST_ENTRIES} files")
        if size > MOST_BYTES:
            raise UnpackError(f"the code unpacks to more than {MOST_BYTES >> 20} MiB")
    links = {entry.name: entry.link for entry in entries.values() if entry.kind == tarfile.SYMTYPE}
    for name in entries:
        above = name.rpartition("/")[0]
        while above:
            if above in entries and entries[above].kind != tarfile.DIRTYPE:
                raise UnpackError(f"{name!r} lies below {above!r}, which is no folder")
            above = above.rpartition("/")[0]
    for name, link in links.items():
        if leads_outside(name, links):
            raise UnpackError(f"the link {name!r} leads out of the folder, to {link!r}")
    return entries


def _entry(info: tarfile.TarInfo) -> _Entry:
    name = info.name
    if any(piece in ("", ".", "..") for piece in name.split("/")) or "\0" in name or name == PARTIAL:
        raise UnpackError(f"{name!r} is no name for something inside a folder")
    kind = tarfile.REGTYPE if info.type == tarfile.AREGTYPE else info.type
    if info.issparse() or kind not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
        raise UnpackError(f"{name!r} is neither a file nor a folder nor a symbolic link")
    if info.mode & ~0o777:
        raise UnpackError(f"{name!r} asks for more than ordinary permissions ({info.mode:o})")
    link = info.linkname if kind == tarfile.SYMTYPE else ""
    if kind == tarfile.SYMTYPE and (not link or "\0" in link):
        raise UnpackError(f"{name!r} is a link to nothing")
    try:
        f"{name}{link}".encode()
    except UnicodeEncodeError:
        raise UnpackError(f"{name!r} is not UTF-8") from None
    return _Entry(name, kind, bool(info.mode & 0o100), link)


# ---- the folder


def _write(packed: Iterable[bytes], entries: Mapping[str, _Entry], target: bytes) -> None:
    """Links last, so that nothing is ever written through one."""
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


def _make_folder(target: bytes, path: bytes, known: set[bytes]) -> None:
    """With those above it. What a program put in its place meanwhile gives way: a link would lead elsewhere."""
    place = target
    for piece in filter(None, path.split(b"/")):
        place = os.path.join(place, piece)
        if place in known:
            continue
        known.add(place)
        try:
            if stat.S_ISDIR(os.lstat(place).st_mode):
                continue
            os.unlink(place)
        except FileNotFoundError:
            pass
        os.mkdir(place)
        os.chmod(place, 0o755)  # whatever the umask


def _write_partial(partial: bytes, tar: tarfile.TarFile, info: tarfile.TarInfo, executable: bool) -> None:
    _remove(partial)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        content = tar.extractfile(info)
        left = info.size
        while left:
            data = content.read(min(left, _PIECE)) if content is not None else b""
            if not data:
                raise UnpackError(f"the code was damaged on its way: {info.name!r} is cut off")
            file.write(data)
            left -= len(data)
        os.fchmod(fd, 0o755 if executable else 0o644)


def _remove(path: bytes) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
