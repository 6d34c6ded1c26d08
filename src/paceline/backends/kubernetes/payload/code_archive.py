"""Collects the user's code for a cluster: which files of a folder are sent, and the archive with them.

Which files are excluded, and how to include them, is in ignore_rules.py. Symbolic links inside the folder stay links;
links that point outside it are errors. Empty folders are sent; sockets, pipes and devices are not, with a note.
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
from functools import cached_property, partial
from pathlib import Path

from paceline.agent.code_unpacking import MOST_BYTES, MOST_ENTRIES, leads_outside
from paceline.backends.kubernetes.objects.config_maps import cut
from paceline.backends.kubernetes.payload.ignore_rules import Fate, Pattern, Rules, is_secret, read
from paceline.errors import USAGE, PacelineError
from paceline.job.errors import visible
from paceline.view.files.run_folders import runs_folder
from paceline.view.text.wording import size as in_units

LIMIT = 8 << 20  # bytes of the archive: a dozen ConfigMaps
SHOWN = 10  # files or names in a message
MODIFIED = 946_684_800  # the modification time of all files: 2000, since zip files have none before 1980
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
_READ_SIZE = 1 << 20


_SET_CODE = "set `code` to the folder with the program"


class CodeError(PacelineError):
    """The folder cannot be sent."""

    exit_code = USAGE


@dataclass(frozen=True)
class File:
    path: str  # relative to the folder
    size: int  # 0 for a link
    executable: bool = False
    link: str | None = None  # the target, if it is a symbolic link
    state: tuple[int, ...] = field(default=(), repr=False, compare=False)  # differs if the file was changed


@dataclass(frozen=True)
class Code:
    folder: Path
    files: tuple[File, ...]
    folders: tuple[str, ...]
    notes: tuple[str, ...]  # for the user: what was excluded

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def describe(self) -> str:
        """`12 files, 34 KiB`"""
        return f"{len(self.files):,} file{'s' * (len(self.files) != 1)}, {in_units(self.size)}"

    def archive(self) -> bytes:
        """A gzipped tar; the same files give the same bytes. The first call reads the files."""
        return self._packed

    def chunks(self, size: int) -> list[bytes]:
        return cut(self.archive(), size)

    @cached_property
    def _packed(self) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # gzip, without name and time
        packed: list[bytes] = []
        length = 0
        for piece in self._tar():
            packed.append(packer.compress(piece))
            length += len(packed[-1])
            if length > LIMIT:
                break
        packed.append(packer.flush())
        if length + len(packed[-1]) > LIMIT:
            raise self.too_big(f"more than {in_units(LIMIT)} when compressed")
        return b"".join(packed)

    def _tar(self) -> Iterator[bytes]:
        entries: list[tuple[str, File | None]] = [(path, None) for path in self.folders]
        entries += [(file.path, file) for file in self.files]
        for path, file in sorted(entries, key=lambda entry: entry[0]):
            info = tarfile.TarInfo(path)
            info.mtime = MODIFIED
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
            f"{_shown(file.path)} changed while it was read",
            where=_shown(self.folder),
            remedy=f"run this again, or list the file in {OWN} if it changes all the time",
        )
        try:
            # Non-blocking: it may have become a pipe.
            fd = os.open(self.folder / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as source:
                remaining = file.size
                while remaining:
                    data = source.read(min(remaining, _READ_SIZE))
                    if not data:
                        raise changed
                    remaining -= len(data)
                    yield data
                if _state(os.fstat(fd)) != file.state:
                    raise changed
        except OSError as error:
            raise _unreadable(self.folder, file.path, error) from None

    def too_big(self, limit: str) -> CodeError:
        largest = sorted(self.files, key=lambda file: (-file.size, file.path))[:SHOWN]
        own = _shown(self.folder / OWN)
        lines = [
            f"the code in {_shown(self.folder)} is too large to send: {self.describe()}, {limit}.",
            "The largest files:",
            *(f"  {in_units(file.size):>9}  {_shown(file.path)}" for file in largest),
            f"Either list the files that the run does not need in {own} (same syntax as {GIT}),",
            "or put the code into the image and set `code: image` in the job file.",
        ]
        return CodeError("\n".join(lines))


def collect(folder: Path) -> Code:
    """The files of this folder to send. They are listed, not read yet."""
    root = _allowed(folder)
    files: list[File] = []
    folders: list[str] = []
    notes: list[str] = []
    secrets: list[str] = []
    any_ignored = False
    for path, status, fate, is_hidden_secret in _walk(root):
        if fate is not Fate.SENT:
            any_ignored = True
            secrets += [path] if is_hidden_secret else []
            continue
        _check_name(root, path)
        if stat.S_ISDIR(status.st_mode):
            folders.append(path)
        elif stat.S_ISREG(status.st_mode):
            files.append(File(path, status.st_size, bool(status.st_mode & 0o100), None, _state(status)))
        elif stat.S_ISLNK(status.st_mode):
            files.append(File(path, 0, link=_target(root, path)))
        else:
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
            notes.append(f"{_shown(path)} is not sent: it is {kind}")
        if len(files) + len(folders) > MOST_ENTRIES:
            break
    if any_ignored and not files:
        notes.append(f"nothing is sent: {GIT}, {OWN} or Paceline's built-in rules exclude every file in {_shown(root)}")
    if secrets:
        notes.append(_secrets_note(sorted(secrets)))
    code = Code(root, tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(folders)), tuple(sorted(notes)))
    if len(files) + len(folders) > MOST_ENTRIES:
        raise code.too_big(f"and more that were not counted; the limit is {MOST_ENTRIES:,} files and folders")
    if code.size > MOST_BYTES:
        raise code.too_big(f"more than {in_units(MOST_BYTES)} before compression")
    _check_links(code)
    return code


# ---- the folder itself


def _allowed(folder: Path) -> Path:
    """The resolved folder. CodeError: it should not be sent as a whole."""
    try:
        root = folder.resolve(strict=True)
    except FileNotFoundError:
        raise CodeError("there is no such folder", where=_shown(folder), remedy=_SET_CODE) from None
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its links form a loop"
        raise CodeError(f"cannot be read: {why}", where=_shown(folder)) from None
    if not root.is_dir():
        raise CodeError("not a folder", where=_shown(root), remedy=_SET_CODE)
    refuse = partial(CodeError, where=_shown(root), remedy="move the program to its own folder and set `code` to that")
    homes = _homes()
    if root in homes:
        raise refuse("this is a home folder, which is not sent as a whole")
    is_system = str(root) in _SYSTEM or root == Path(tempfile.gettempdir()).resolve()
    if is_system or any(root.is_relative_to(folder) for folder in _SYSTEM_WITHIN):
        raise refuse("this is a system folder, which is not sent")
    if any(home.is_relative_to(root) for home in homes):
        raise refuse("this folder contains a home folder, which is not sent as a whole")
    if any(f"/{name}/" in f"{root}/" for name in _KEYS_WITHIN):
        raise refuse("this is a folder for keys or credentials, which is not sent")
    return root


def _homes() -> set[Path]:
    homes = {os.environ.get("HOME", "")}
    try:
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        pass  # a numeric user
    return {Path(home).resolve() for home in homes if home.startswith("/")}


def _above(root: Path) -> tuple[Rules, str]:
    """The ignore files of the repository that contains this folder, and the folder's path in the repository.

    A repository in a home folder is skipped: it is for dotfiles, and often ignores everything else.
    """
    top = root
    while not _exists(top / ".git"):
        if top == top.parent:
            return Rules(), ""
        top = top.parent
    if any(home.is_relative_to(top) for home in _homes()):
        return Rules(), ""
    rules = Rules()
    path = ""
    for name in root.relative_to(top).parts:
        patterns = (
            _patterns(top, path, file, {file: None} if _exists(top / path / file) else {}) for file in (GIT, OWN)
        )
        rules = rules.within(_as_git(path), *patterns)
        path += f"{name}/"
    return rules, path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


# ---- its content


def _walk(root: Path) -> Iterator[tuple[str, os.stat_result, Fate, bool]]:
    """Each path, whether it is sent (its `Fate`), and whether it is a secret that only the built-in rules exclude."""
    above, prefix = _above(root)
    pending = [("", above, Fate.SENT)]
    while pending:
        path, rules, folder_fate = pending.pop()
        listed = _list(root, path)
        base = _as_git(f"{prefix}{path}")
        rules = rules.within(base, _patterns(root, path, GIT, listed), _patterns(root, path, OWN, listed))
        for name, status in listed.items():
            is_folder = stat.S_ISDIR(status.st_mode)
            full = f"{base}{_as_git(name)}"
            fate = rules.fate(full, is_folder, folder_fate, is_folder and _is_not_code(root / path / name))
            hidden = fate is Fate.HIDDEN and is_secret(full, is_folder) and not rules.ignored_by_git(full, is_folder)
            if is_folder and (fate is Fate.SENT or (fate is not Fate.CLOSED and rules.may_reinclude(full))):
                pending.append((f"{path}{name}/", rules, fate))
            yield f"{path}{name}", status, fate, hidden


def _list(root: Path, path: str) -> dict[str, os.stat_result]:
    listed = {}
    try:
        with os.scandir(root / path) as entries:
            for entry in entries:
                try:
                    listed[entry.name] = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # deleted in the meantime
    except OSError as error:
        raise _unreadable(root, path, error) from None
    return dict(sorted(listed.items()))


def _patterns(root: Path, path: str, name: str, listed: Container[str]) -> tuple[Pattern, ...]:
    file = root / path / name
    try:
        return read(file.read_bytes()) if name in listed and file.is_file() else ()
    except OSError as error:
        raise _unreadable(root, f"{path}{name}", error) from None


def _is_not_code(path: Path) -> bool:
    """Whether it is a virtual or conda environment, of any name, or the folder of this machine's runs."""
    return _exists(path / "pyvenv.cfg") or _exists(path / "conda-meta") or path == _runs_folder()


def _runs_folder() -> Path | None:
    try:
        return runs_folder().resolve()
    except RuntimeError:
        return None  # a user without a home folder


def _state(status: os.stat_result) -> tuple[int, ...]:
    return stat.S_IFMT(status.st_mode), status.st_ino, status.st_size, status.st_mtime_ns


def _target(root: Path, path: str) -> str:
    try:
        target = os.readlink(root / path)  # noqa: PTH115 - unchanged: a Path would normalize it
    except OSError as error:
        raise _unreadable(root, path, error) from None
    _check_name(root, path, target)
    return target


def _check_name(root: Path, path: str, target: str = "") -> None:
    try:
        f"{path}{target}".encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        subject = f"the target of the link {name}" if target else f"the name {name}"
        raise CodeError(
            f"{subject} is not UTF-8", where=_shown(root), remedy=f"rename it, or list it in {OWN}"
        ) from None


def _check_links(code: Code) -> None:
    links = {file.path: file.link for file in code.files if file.link is not None}
    for path, target in links.items():
        if leads_outside(path, links):
            raise CodeError(
                f"the link {_shown(path)} points outside the folder, to {_shown(target)}",
                where=_shown(code.folder),
                remedy=f"replace it with a copy or a relative link inside the folder, or list it in {OWN}",
            )


# ---- messages


def _unreadable(root: Path, path: str, error: OSError) -> CodeError:
    folder, name = _shown(root), _shown(path or ".")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
        return CodeError(f"{name} was deleted or replaced while it was read", where=folder, remedy="run this again")
    return CodeError(
        f"{name} cannot be read: {error.strerror}", where=folder, remedy=f"make it readable, or list it in {OWN}"
    )


def _secrets_note(secrets: list[str]) -> str:
    names = ", ".join(map(_shown, secrets[:SHOWN]))
    more = f" and {len(secrets) - SHOWN} more" if len(secrets) > SHOWN else ""
    return f"not sent, may contain secrets: {names}{more} (to send one, add !/{_shown(secrets[0])} to {OWN})"


def _shown(text: object) -> str:
    return visible(str(text), 300)


def _as_git(path: str) -> str:
    """git compares bytes: here each byte is one character."""
    return path if path.isascii() else os.fsencode(path).decode("latin-1")
