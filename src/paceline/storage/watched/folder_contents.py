"""A folder in which a program keeps its own checkpoints: its contents, and the processes that write to it."""

from __future__ import annotations

import fnmatch
import os
import stat
from dataclasses import dataclass, field

from paceline.storage.local_files import remove_tree
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.manifest import is_safe_path
from paceline.storage.stores.protocol import PIECE, ContinueCheck, TransferCanceled

ABOUT = "paceline.json"  # metadata in a snapshot
MOST_FILES = 100_000
_EXITING = 4  # PF_EXITING, in the flags of a process
_LOG = ".tfevents."  # event files grow all the time, and each record has its own checksum

Signature = tuple[int, ...]


class Later(Exception):
    """The folder cannot be captured now; the text says why."""

    is_transient = True


@dataclass(frozen=True)
class Contents:
    """Equal for two scans of a folder if nothing was written between them."""

    files: dict[str, Signature] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # symbolic links to targets in the folder
    logs: list[str] = field(default_factory=list, compare=False)
    unfit: list[str] = field(default_factory=list, compare=False)  # why the folder cannot become a snapshot


def contents(folder: str, pattern: str = "") -> Contents:
    """Scan a folder, which need not exist. `pattern`: only files in the folder itself whose names match it. Later: the
    folder is changing right now."""
    scan = Contents()
    folders = [""]
    while folders:
        parent = folders.pop()
        try:
            with os.scandir(f"{folder}/{parent}") as entries:
                for entry in entries:
                    path = f"{parent}{entry.name}"
                    if path == ABOUT or (pattern and not _is_matching_file(entry, pattern)):
                        continue
                    if _add(scan, path, entry):
                        folders.append(f"{path}/")
        except FileNotFoundError:
            if parent:
                raise Later("it has just changed") from None
        except NotADirectoryError:
            scan.unfit.append("it is not a folder")
        if len(scan.files) + len(scan.links) + len(scan.logs) > MOST_FILES:
            scan.unfit.append(f"it contains more than {MOST_FILES} files")
            break
    return scan


def _is_matching_file(entry: os.DirEntry[str], pattern: str) -> bool:
    return fnmatch.fnmatchcase(entry.name, pattern) and not entry.is_dir(follow_symlinks=False)


def _add(scan: Contents, path: str, entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder."""
    status = entry.stat(follow_symlinks=False)
    if not is_safe_path(path):
        scan.unfit.append(f"{path!r} is not a valid path for a file in a snapshot")
    elif stat.S_ISDIR(status.st_mode):
        return True
    elif stat.S_ISLNK(status.st_mode):
        target = os.readlink(entry.path)
        if leads_inside(path, target):
            scan.links[path] = target
        else:
            scan.unfit.append(f"{path!r} is a symbolic link to {target!r}, outside the folder")
    elif not stat.S_ISREG(status.st_mode):
        scan.unfit.append(f"{path!r} is not a regular file: a snapshot can contain only files and folders")
    elif _LOG in entry.name:
        scan.logs.append(path)
    else:
        scan.files[path] = signature(status)
    return False


def signature(status: os.stat_result) -> Signature:
    """Changes whenever the file is written."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def leads_inside(path: str, target: str) -> bool:
    """
    >>> leads_inside("run/latest", "../old/step-3"), leads_inside("run/latest", "../../x"), leads_inside("x", "/x")
    (True, False, False)
    """
    resolved = os.path.normpath(os.path.join(os.path.dirname(path), target))
    is_plain = os.path.normpath(target) == target.rstrip("/") and target.isprintable()
    return is_plain and not os.path.isabs(target) and resolved.split("/")[0] != ".." and is_safe_path(path)


def writer(scan: Contents) -> tuple[str, str] | None:
    """A file that a process on this machine has open for writing, and that process."""
    paths = {signature[:2]: path for path, signature in scan.files.items()}
    inodes = {str(signature[1]): path for path, signature in scan.files.items()}
    for pid in filter(str.isdigit, names("/proc")):
        path = _opened(pid, paths) or _mapped(pid, inodes)
        if path is not None:
            return path, f"{_name(pid)} ({pid})"
    return None


def _opened(pid: str, paths: dict[Signature, str]) -> str | None:
    for number in names(f"/proc/{pid}/fd"):
        try:
            status = os.stat(f"/proc/{pid}/fd/{number}")
            path = paths.get((status.st_dev, status.st_ino))
            if path is not None and _may_write(f"/proc/{pid}/fdinfo/{number}"):
                return path
        except OSError:
            continue  # it has been closed, or belongs to another user
    return None


def _may_write(info: str) -> bool:
    with open(info) as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    return flags & os.O_ACCMODE != os.O_RDONLY


def _mapped(pid: str, inodes: dict[str, str]) -> str | None:
    """A memory-mapped file, which can be written after it was closed."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                _, permissions, _, _, inode = line.split(maxsplit=5)[:5]
                if permissions[1::2] == "ws" and inode in inodes:
                    return inodes[inode]
    except OSError:
        pass  # it has ended, or belongs to another user
    return None


def lives(pid: str) -> bool:
    """Whether the process still has its files open: it closes them shortly before it ends."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # a process may have any name
            fields = file.read().rpartition(")")[2].split()
        return fields[0] not in "ZX" and not int(fields[6]) & _EXITING
    except FileNotFoundError:
        return False


def _name(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "a process"


def names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def duplicate(source: str, target: str, should_continue: ContinueCheck) -> None:
    """Copy a file; the copy shares its data blocks if the file system supports that."""
    source_fd = open_regular(source, follow=True)
    with open(source_fd, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        size, copied = os.fstat(reading.fileno()).st_size, 0
        try:
            while copied < size:
                if not should_continue(0):
                    raise TransferCanceled(source)
                count = os.copy_file_range(reading.fileno(), writing.fileno(), min(size - copied, 8 * PIECE))
                if not count:
                    break
                copied += count
        except (OSError, AttributeError):
            pass  # not supported here; a full disk fails again below
        reading.seek(copied)
        writing.seek(copied)
        while data := reading.read(PIECE):
            if not should_continue(0):
                raise TransferCanceled(source)
            view = memoryview(data)
            while view:
                view = view[writing.write(view) :]


def remove(folder: str) -> None:
    """Remove a folder, a file or a link."""
    if os.path.isdir(folder) and not os.path.islink(folder):
        remove_tree(folder, ignore_errors=True)
    elif os.path.lexists(folder):
        os.unlink(folder)
