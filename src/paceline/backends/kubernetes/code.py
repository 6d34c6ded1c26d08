"""The person's code on its way to a cluster: which files of a folder are sent, and the archive that carries them.

What is left out, and how to bring it back, is in ignore.py. Symbolic links stay links as long as they stay inside the
folder. Empty folders are sent; sockets, pipes and devices are not, and a note says so.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.agent.unpack import MOST_BYTES, MOST_ENTRIES, leads_outside
from paceline.backends.kubernetes.config_maps import cut
from paceline.backends.kubernetes.ignore import Fate, Pattern, Rules, is_secret, read
from paceline.job.errors import visible
from paceline.view.runs import runs_folder
from paceline.view.words import size as in_units

LIMIT = 8 << 20  # bytes of the archive: what a dozen ConfigMaps hold
SHOWN = 10  # files or names in a message
MADE = 946_684_800  # the time all files get: 2000, since zip files know none before 1980
OWN, GIT = ".pacelineignore", ".gitignore"

_SYSTEM = (
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/media", "/opt", "/proc", "/root",
    "/run", "/sbin", "/sys", "/tmp", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/sbin", "/usr/share", "/var",
    "/var/lib", "/var/log", "/var/tmp", "/Applications", "/Library", "/System", "/Users", "/Volumes", "/private",
    "/private/etc", "/private/tmp", "/private/var",
)  # fmt: skip
_SYSTEM_WITHIN = ("/boot", "/etc", "/proc", "/sys")
_KEYS_WITHIN = (".git", ".ssh", ".aws", ".kube", ".gnupg", ".azure", ".docker", ".config/gcloud")
_KINDS = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_PIECE = 1 << 20


class CodeError(Exception):
    """This folder cannot be sent as it is; the text says what, where, and what to do."""


@dataclass(frozen=True)
class File:
    path: str  # below the folder
    size: int  # 0 for a link
    executable: bool = False
    link: str | None = None  # where it leads, if it is a symbolic link
    state: tuple[int, ...] = field(default=(), repr=False, compare=False)  # what shows that it was changed


@dataclass(frozen=True)
class Code:
    folder: Path
    files: tuple[File, ...]
    folders: tuple[str, ...]
    notes: tuple[str, ...]  # what a person should know was left out

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def describe(self) -> str:
        """`12 files, 34 KiB`"""
        return f"{len(self.files):,} file{'s' * (len(self.files) != 1)}, {in_units(self.size)}"

    def archive(self) -> bytes:
        """A gzipped tar; the same files give the same bytes. They are read once, by the first call."""
        return self._packed

    def chunks(self, size: int) -> list[bytes]:
        return cut(self.archive(), size)

    @cached_property
    def _packed(self) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # gzip, with neither name nor time
        packed: list[bytes] = []
        length = 0
        for piece in self._tar():
            packed.append(packer.compress(piece))
            length += len(packed[-1])
            if length > LIMIT:
                break
        packed.append(packer.flush())
        if length + len(packed[-1]) > LIMIT:
            raise self.too_big(f"more than {in_units(LIMIT)} when packed")
        return b"".join(packed)

    def _tar(self) -> Iterator[bytes]:
        entries: list[tuple[str, File | None]] = [(path, None) for path in self.folders]
        entries += [(file.path, file) for file in self.files]
        for path, file in sorted(entries, key=lambda entry: entry[0]):
            info = tarfile.TarInfo(path)
            info.mtime = MADE
            if file is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif file.link is not None:
                info.type, info.mode, info.linkname = tarfile.SYMTYPE, 0o777, file.link
            else:
                info.size, info.mode = file.size, 0o755 if file.executable else 0o644
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            if file is not None and file.link is None:
                yield from self._content(file)
                yield b"\0" * (-file.size % tarfile.BLOCKSIZE)
        yield b"\0" * (2 * tarfile.BLOCKSIZE)

    def _content(self, file: File) -> Iterator[bytes]:
        changed = CodeError(
            f"{_shown(self.folder)}: {_shown(file.path)} changed while it was read: run this again, or list the file"
            f" in {OWN} if something keeps writing to it"
        )
        try:
            # Not blocking: it may have become a pipe.
            fd = os.open(self.folder / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as source:
                left = file.size
                while left:
                    data = source.read(min(left, _PIECE))
                    if not data:
                        raise changed
                    left -= len(data)
                    yield data
                if _state(os.fstat(fd)) != file.state:
                    raise changed
        except OSError as error:
            raise _unreadable(self.folder, file.path, error) from None

    def too_big(self, why: str) -> CodeError:
        biggest = sorted(self.files, key=lambda file: (-file.size, file.path))[:SHOWN]
        own = _shown(self.folder / OWN)
        lines = [
            f"the code in {_shown(self.folder)} is too big to be sent along: {self.describe()}, {why}.",
            "The biggest files:",
            *(f"  {in_units(file.size):>9}  {_shown(file.path)}" for file in biggest),
            f"Either list what the run does not need in {own}, which is written like a {GIT},",
            "or put the code into the image and write `code: image` in the job file.",
        ]
        return CodeError("\n".join(lines))


def collect(folder: Path) -> Code:
    """What would be sent of this folder. Files are not read yet, only listed."""
    root = _allowed(folder)
    files: list[File] = []
    folders: list[str] = []
    notes: list[str] = []
    secrets: list[str] = []
    ignored = False
    for path, found, fate, secret in _walk(root):
        if fate is not Fate.SENT:
            ignored = True
            secrets += [path] if secret else []
            continue
        _check_name(root, path)
        if stat.S_ISDIR(found.st_mode):
            folders.append(path)
        elif stat.S_ISREG(found.st_mode):
            files.append(File(path, found.st_size, bool(found.st_mode & 0o100), None, _state(found)))
        elif stat.S_ISLNK(found.st_mode):
            files.append(File(path, 0, link=_target(root, path)))
        else:
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
            notes.append(f"{_shown(path)} is not sent: it is {kind}")
        if len(files) + len(folders) > MOST_ENTRIES:
            break
    if ignored and not files:
        notes.append(f"nothing is sent: {GIT}, {OWN} or Paceline's own rules leave out every file of {_shown(root)}")
    if secrets:
        notes.append(_about(sorted(secrets)))
    code = Code(root, tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(folders)), tuple(sorted(notes)))
    if len(files) + len(folders) > MOST_ENTRIES:
        raise code.too_big(f"and more were not counted: {MOST_ENTRIES:,} files and folders are the most")
    if code.size > MOST_BYTES:
        raise code.too_big(f"and {in_units(MOST_BYTES)} is the most, before it is packed")
    _check_links(code)
    return code


# ---- the folder itself


def _allowed(folder: Path) -> Path:
    """The folder as it really is, unless nobody can mean to send all of it."""
    try:
        root = folder.resolve(strict=True)
    except FileNotFoundError:
        raise CodeError(f"{_shown(folder)}: there is no such folder: `code` names the one with the program") from None
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its links lead in a circle"
        raise CodeError(f"{_shown(folder)}: cannot be read: {why}") from None
    if not root.is_dir():
        raise CodeError(f"{_shown(root)}: is not a folder: `code` names the one with the program")
    remedy = "put the program into a folder of its own and name that as `code`"
    homes = _homes()
    if root in homes:
        raise CodeError(f"{_shown(root)}: is a home folder, which is not sent as a whole: {remedy}")
    system = str(root) in _SYSTEM or root == Path(tempfile.gettempdir()).resolve()
    if system or any(root.is_relative_to(place) for place in _SYSTEM_WITHIN):
        raise CodeError(f"{_shown(root)}: is a folder of the system, which is not sent: {remedy}")
    if any(home.is_relative_to(root) for home in homes):
        raise CodeError(f"{_shown(root)}: holds a home folder, which is not sent as a whole: {remedy}")
    if any(f"/{place}/" in f"{root}/" for place in _KEYS_WITHIN):
        raise CodeError(f"{_shown(root)}: is where keys or credentials are kept, and is not sent: {remedy}")
    return root


def _homes() -> set[Path]:
    homes = {os.environ.get("HOME", "")}
    try:
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        pass  # a numeric user
    return {Path(home).resolve() for home in homes if home.startswith("/")}


def _above(root: Path) -> tuple[Rules, str]:
    """The ignore files of the repository that this folder lies in, and the way down from its top.

    A repository that is a home folder is for dotfiles, and often ignores everything else.
    """
    top = root
    while not _exists(top / ".git"):
        if top == top.parent:
            return Rules(), ""
        top = top.parent
    if any(home.is_relative_to(top) for home in _homes()):
        return Rules(), ""
    rules = Rules()
    way = ""
    for name in root.relative_to(top).parts:
        lines = (_lines(top, way, file, {file: None} if _exists(top / way / file) else {}) for file in (GIT, OWN))
        rules = rules.within(_as_git(way), *lines)
        way += f"{name}/"
    return rules, way


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


# ---- what is in it


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result, Fate, bool]]:
    """Every path with what becomes of it, and whether it is left out as a secret that nobody else ignores."""
    above, prefix = _above(root)
    ahead = [("", above, Fate.SENT)]
    while ahead:
        path, rules, state = ahead.pop()
        listed = _list(root, path)
        base = _as_git(f"{prefix}{path}")
        rules = rules.within(base, _lines(root, path, GIT, listed), _lines(root, path, OWN, listed))
        for name, found in listed.items():
            is_folder = stat.S_ISDIR(found.st_mode)
            known = f"{base}{_as_git(name)}"
            fate = rules.fate(known, is_folder, state, is_folder and _is_no_code(root / path / name))
            hidden = fate is Fate.HIDDEN and is_secret(known, is_folder) and not rules.ignored_by_git(known, is_folder)
            if is_folder and (fate is Fate.SENT or (fate is not Fate.CLOSED and rules.reach(known))):
                ahead.append((f"{path}{name}/", rules, fate))
            yield f"{path}{name}", found, fate, hidden


def _list(root: Path, path: str) -> dict[str, os.stat_result]:
    found = {}
    try:
        with os.scandir(root / path) as entries:
            for entry in entries:
                try:
                    found[entry.name] = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # gone meanwhile
    except OSError as error:
        raise _unreadable(root, path, error) from None
    return dict(sorted(found.items()))


def _lines(root: Path, path: str, name: str, listed: Container[str]) -> tuple[Pattern, ...]:
    place = root / path / name
    try:
        return read(place.read_bytes()) if name in listed and place.is_file() else ()
    except OSError as error:
        raise _unreadable(root, f"{path}{name}", error) from None


def _is_no_code(path: Path) -> bool:
    """A virtual environment, or one of conda's, by whatever name; and where this machine keeps its runs."""
    return _exists(path / "pyvenv.cfg") or _exists(path / "conda-meta") or path == _kept()


def _kept() -> Path | None:
    """Where this machine keeps its runs."""
    try:
        return runs_folder().resolve()
    except RuntimeError:
        return None  # a user without a home folder


def _state(found: os.stat_result) -> tuple[int, ...]:
    return stat.S_IFMT(found.st_mode), found.st_ino, found.st_size, found.st_mtime_ns


def _target(root: Path, path: str) -> str:
    try:
        target = os.readlink(root / path)  # noqa: PTH115 - as it is written: a Path would change it
    except OSError as error:
        raise _unreadable(root, path, error) from None
    _check_name(root, path, target)
    return target


def _check_name(root: Path, path: str, target: str = "") -> None:
    try:
        f"{path}{target}".encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        what = f"the link {name} leads to a name that" if target else f"the name {name}"
        raise CodeError(f"{_shown(root)}: {what} is not UTF-8: rename it, or leave it out in {OWN}") from None


def _check_links(code: Code) -> None:
    links = {file.path: file.link for file in code.files if file.link is not None}
    for path, target in links.items():
        if leads_outside(path, links):
            raise CodeError(
                f"{_shown(code.folder)}: the link {_shown(path)} leads out of the folder, to {_shown(target)}:"
                f" replace it by a copy or by a relative link that stays inside, or list it in {OWN}"
            )


# ---- words


def _unreadable(root: Path, path: str, error: OSError) -> CodeError:
    where = f"{_shown(root)}: {_shown(path or '.')}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
        return CodeError(f"{where} vanished or became something else while it was read: run this again")
    return CodeError(f"{where} cannot be read: {error.strerror}: make it readable, or list it in {OWN}")


def _about(secrets: list[str]) -> str:
    named = ", ".join(map(_shown, secrets[:SHOWN]))
    more = f" and {len(secrets) - SHOWN} more" if len(secrets) > SHOWN else ""
    return f"not sent, since they may hold secrets: {named}{more} (a line !/{_shown(secrets[0])} in {OWN} sends it)"


def _shown(text: object) -> str:
    return visible(str(text), 300)


def _as_git(path: str) -> str:
    """git compares bytes: here each is a character."""
    return path if path.isascii() else os.fsencode(path).decode("latin-1")
