"""Parts of snapshots that a host has, shared with the tasks that resume from them: large files are linked, not copied.

A program must not change the files that it resumes from: they are also those that are committed, and that the next
restart uses. Before a part is sent or shared, the size and the time of the last change of its files are recorded.
`verify` detects files that have been changed since.

A host may have parts in several folders: in memory and on disk. Files are not linked from one to the other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping, Sequence

from paceline.storage.json_values import read_json
from paceline.storage.local_files import copy, remove_tree
from paceline.storage.snapshots.manifest import Damaged, SnapshotId
from paceline.storage.snapshots.repository import always, files_of
from paceline.storage.stores.folder import NO_HARD_LINKS, FolderStore
from paceline.storage.stores.protocol import ContinueCheck

SMALL = 64 * 1024  # bytes; smaller files are copied, so that programs can change them
_NO_LINK = (*NO_HARD_LINKS, errno.EXDEV)
_Signatures = Mapping[str, list[int]]  # path -> size and time of the last change


def find(folders: Sequence[str], task: str, snapshot: SnapshotId) -> str:
    """The part in the first of these folders that has it; in the last one if none has."""
    parts = [f"{folder}/{task}/{snapshot}" for folder in folders]
    return next(filter(os.path.isdir, parts), parts[-1])


class PartsStore(FolderStore):
    """Parts in several folders, for other hosts."""

    def __init__(self, folders: Sequence[str]) -> None:
        super().__init__(folders[-1])
        self._folders = folders

    def _path(self, name: str) -> str:
        paths = [f"{folder}/{name}" for folder in self._folders]
        return next(filter(os.path.exists, paths), paths[-1])


def assemble(parts: Sequence[str], folder: str, in_memory: str = "") -> int:
    """Build a folder with the files of all parts; if two parts have the same path, the first one wins. The folder
    appears when it is complete. Return the size of its files. `parts`: their folders. `in_memory`: build it there, and
    make the folder a link to it, unless memory is full."""
    if in_memory:
        try:
            size = assemble(parts, in_memory)
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            os.symlink(in_memory, folder)
            return size
        except OSError as error:
            remove_tree(in_memory, ignore_errors=True)
            if error.errno != errno.ENOSPC:
                raise
    parent, name = os.path.split(folder)
    partial = f"{parent}/.{name}.{os.urandom(4).hex()}.partial"
    size = 0
    try:
        os.makedirs(partial)
        for part in parts:
            size += _share_part(part, partial)
        os.rename(partial, folder)
    except BaseException:
        remove_tree(partial, ignore_errors=True)
        raise
    return size


def move_to_disk(link: str, should_continue: ContinueCheck = always) -> None:
    """Copy the folder in memory to which the link leads, make it lead to the copy, and delete the folder in memory."""
    in_memory, unique = os.readlink(link), os.urandom(4).hex()
    parent, name = os.path.split(link)
    copied, new_link = f"{parent}/.{name}.{unique}", f"{parent}/.{name}.{unique}.link"
    try:
        os.mkdir(copied)
        for path in sorted(files_of(in_memory)):
            os.makedirs(os.path.dirname(f"{copied}/{path}"), exist_ok=True)
            copy(f"{in_memory}/{path}", f"{copied}/{path}", should_continue, sync=False)
        if os.readlink(link) == in_memory:  # otherwise it was removed
            os.symlink(copied, new_link)
            os.replace(new_link, link)
    except BaseException:
        remove_tree(copied, ignore_errors=True)
        raise
    remove_tree(in_memory, ignore_errors=True)


def _share_part(part: str, folder: str) -> int:
    if not os.path.isdir(part):
        raise Damaged(f"{part} is missing")
    size = 0
    for path, (file_size, _) in sign(part).items():
        source, target = f"{part}/{path}", f"{folder}/{path}"
        if os.path.exists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        size += file_size
        if file_size <= SMALL or not _link(source, target):
            copy(source, target, always, sync=False)
    return size


def _link(source: str, target: str) -> bool:
    """Whether the file could be linked."""
    try:
        os.link(source, target)
        return True
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise


def sign(part: str) -> _Signatures:
    """Record the size and time of change of all files, once; if that was done before, verify them."""
    recorded = _read_signatures(part)
    if recorded is None:
        recorded = {path: _signature(part, path) for path in sorted(files_of(part))}
        _write_signatures(part, recorded)
    else:
        verify(part)
    return recorded


def is_signed(part: str) -> bool:
    """Whether `sign` has recorded its files. Damaged: the record cannot be read."""
    return _read_signatures(part) is not None


def verify(part: str) -> None:
    """Damaged: a file has been changed since it was recorded."""
    for path, signature in (_read_signatures(part) or {}).items():
        if _signature(part, path) != signature:
            raise Damaged(
                f"{part}/{path} was changed after it was saved: a program must not change files in PACELINE_RESTORE"
            )


def _signature(part: str, path: str) -> list[int]:
    try:
        status = os.stat(f"{part}/{path}")
    except FileNotFoundError:
        raise Damaged(f"{part}/{path} is missing") from None
    return [status.st_size, status.st_mtime_ns]


def forget(part: str) -> None:
    """The part is deleted."""
    with contextlib.suppress(OSError):
        os.unlink(_signature_file(part))


def _signature_file(part: str) -> str:
    folder, name = os.path.split(part)
    return f"{folder}/.{name}.shared"


def _read_signatures(part: str) -> _Signatures | None:
    """None: nothing is recorded."""
    try:
        return dict(read_json(_signature_file(part)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise Damaged(f"{_signature_file(part)} is damaged") from None


def _write_signatures(part: str, signatures: _Signatures) -> None:
    partial = f"{_signature_file(part)}.{os.urandom(4).hex()}"
    with open(partial, "w") as file:
        json.dump(signatures, file)
    os.replace(partial, _signature_file(part))
