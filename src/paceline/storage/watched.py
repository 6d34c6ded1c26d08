"""A folder that a program keeps its own checkpoints in: what is there, and who is writing to it."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass, field

from paceline.storage.manifest import fit
from paceline.storage.store import PIECE, Unwanted, Wanted

ABOUT = "paceline.json"  # in a snapshot: what is said of it, beside its files
MOST_FILES = 100_000
_EXITING = 4  # PF_EXITING, in the flags of a process
_LOG = ".tfevents."  # what TensorBoard reads: grows all the time, and every record of it has its own checksum

Signature = tuple[int, ...]


class Later(Exception):
    """It cannot be taken now; the text says why."""

    passing = True


@dataclass(frozen=True)
class Contents:
    """Two of a folder are the same where nothing was written between them."""

    files: dict[str, Signature] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # that lead to somewhere in the folder
    logs: list[str] = field(default_factory=list, compare=False)
    unfit: list[str] = field(default_factory=list, compare=False)  # why it cannot be a snapshot


def contents(folder: str) -> Contents:
    """Of a folder that need not be there. Later: it changes at this moment."""
    found = Contents()
    below = [""]
    while below:
        above = below.pop()
        try:
            with os.scandir(f"{folder}/{above}") as entries:
                for entry in entries:
                    path = f"{above}{entry.name}"
                    if path != ABOUT and _add(found, path, entry):
                        below.append(f"{path}/")
        except FileNotFoundError:
            if above:
                raise Later("it has changed just now") from None
        except NotADirectoryError:
            found.unfit.append("it is no folder")
        if len(found.files) + len(found.links) + len(found.logs) > MOST_FILES:
            found.unfit.append(f"it holds more than {MOST_FILES} files")
            break
    return found


def _add(found: Contents, path: str, entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder."""
    seen = entry.stat(follow_symlinks=False)
    if not fit(path):
        found.unfit.append(f"{path!r} cannot be the path of a file in a snapshot")
    elif stat.S_ISDIR(seen.st_mode):
        return True
    elif stat.S_ISLNK(seen.st_mode):
        target = os.readlink(entry.path)
        if leads_inside(path, target):
            found.links[path] = target
        else:
            found.unfit.append(f"{path!r} is a link that leads out of it, to {target!r}")
    elif not stat.S_ISREG(seen.st_mode):
        found.unfit.append(f"{path!r} is no file: a snapshot holds files and folders")
    elif _LOG in entry.name:
        found.logs.append(path)
    else:
        found.files[path] = signature(seen)
    return False


def signature(seen: os.stat_result) -> Signature:
    """Another one once a byte of the file was written."""
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def leads_inside(path: str, target: str) -> bool:
    """
    >>> leads_inside("run/latest", "../old/step-3"), leads_inside("run/latest", "../../x"), leads_inside("x", "/x")
    (True, False, False)
    """
    ends = os.path.normpath(os.path.join(os.path.dirname(path), target))
    plain = os.path.normpath(target) == target.rstrip("/") and target.isprintable()
    return plain and not os.path.isabs(target) and ends.split("/")[0] != ".." and fit(path)


def writer(found: Contents) -> tuple[str, str] | None:
    """A file that some process of this machine may be writing to, and that process."""
    paths = {known[:2]: path for path, known in found.files.items()}
    inodes = {str(known[1]): path for path, known in found.files.items()}
    for pid in filter(str.isdigit, names("/proc")):
        path = _opened(pid, paths) or _mapped(pid, inodes)
        if path is not None:
            return path, f"{_name(pid)} ({pid})"
    return None


def _opened(pid: str, paths: dict[Signature, str]) -> str | None:
    for number in names(f"/proc/{pid}/fd"):
        try:
            seen = os.stat(f"/proc/{pid}/fd/{number}")
            path = paths.get((seen.st_dev, seen.st_ino))
            if path is not None and _may_write(f"/proc/{pid}/fdinfo/{number}"):
                return path
        except OSError:
            continue  # it is closed by now, or none of ours
    return None


def _may_write(info: str) -> bool:
    with open(info) as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    return flags & os.O_ACCMODE != os.O_RDONLY


def _mapped(pid: str, inodes: dict[str, str]) -> str | None:
    """A file in memory: it can be written to there after it was closed."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                _, allowed, _, _, inode = line.split(maxsplit=5)[:5]
                if allowed[1::2] == "ws" and inode in inodes:
                    return inodes[inode]
    except OSError:
        pass  # it is gone, or none of ours
    return None


def lives(pid: str) -> bool:
    """Whether it still has open what it had; a process loses that a little before it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0] not in "ZX" and not int(fields[6]) & _EXITING
    except FileNotFoundError:
        return False


def _name(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "a process"


def names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def duplicate(source: str, target: str, wanted: Wanted) -> None:
    """The bytes of a file, as a new one; shared with it where the file system can."""
    with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        size, done = os.fstat(reading.fileno()).st_size, 0
        try:
            while done < size:
                if not wanted(0):
                    raise Unwanted(source)
                came = os.copy_file_range(reading.fileno(), writing.fileno(), min(size - done, 8 * PIECE))
                if not came:
                    break
                done += came
        except (OSError, AttributeError):
            pass  # not between these two, or not on this machine; a full disk will say so once more
        reading.seek(done)
        writing.seek(done)
        while data := reading.read(PIECE):
            if not wanted(0):
                raise Unwanted(source)
            view = memoryview(data)
            while view:
                view = view[writing.write(view) :]


def remove(folder: str) -> None:
    """Whatever has that name."""
    if os.path.isdir(folder) and not os.path.islink(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif os.path.lexists(folder):
        os.unlink(folder)
