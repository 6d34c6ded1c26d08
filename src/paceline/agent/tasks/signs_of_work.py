"""Finds a checkpoint that a program has changed in its working folder: a sign of progress if it reports nothing."""

from __future__ import annotations

import os
import time

MOST_ENTRIES = 5000
MOST_LEVELS = 4
MOST_SECONDS = 0.5
_SUFFIXES = (
    ".pt", ".pth", ".ckpt", ".h5", ".hdf5", ".keras", ".safetensors", ".npz", ".pkl", ".pickle", ".msgpack", ".index",
)  # fmt: skip
_NAMES = ("checkpoint", "ckpt", "snapshot")  # in the name of a file, or of a folder that it is in
_IGNORED = ("__pycache__", "node_modules", "site-packages")


def changed_checkpoint(folder: str, since: float, excluded: str = "") -> str:
    """The path in `folder` of the newest file that looks like a checkpoint and was changed after `since` (seconds since
    1970); empty: there is none. The search is limited, so that it is short in any folder. `excluded`: a folder that is
    not searched."""
    newest, path_of_newest = since, ""
    deadline, remaining = time.monotonic() + MOST_SECONDS, MOST_ENTRIES
    level = [""]
    for _ in range(MOST_LEVELS):
        subfolders: list[str] = []
        for parent in level:
            for entry in _entries(f"{folder}/{parent}"):
                remaining -= 1
                if not remaining or time.monotonic() > deadline:
                    return path_of_newest
                path = f"{parent}{entry.name}"
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if _may_contain_checkpoints(entry, excluded):
                            subfolders.append(f"{path}/")
                        continue
                    changed = entry.stat(follow_symlinks=False).st_mtime
                except OSError:
                    continue  # it has just been deleted
                if changed > newest and _looks_like_checkpoint(path):
                    newest, path_of_newest = changed, path
        level = subfolders
    return path_of_newest


def _looks_like_checkpoint(path: str) -> bool:
    lower = path.lower()
    return lower.endswith(_SUFFIXES) or any(name in lower for name in _NAMES)


def _may_contain_checkpoints(folder: os.DirEntry[str], excluded: str) -> bool:
    if folder.name.startswith(".") or folder.name in _IGNORED or os.path.exists(f"{folder.path}/pyvenv.cfg"):
        return False
    return not excluded or os.path.realpath(folder.path) != os.path.realpath(excluded)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
