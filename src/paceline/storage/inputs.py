"""What data is made from, as a fingerprint: it is another when the command, or what it reads, has changed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from paceline.storage.files import digest
from paceline.storage.snapshots import always

VERSION = 1
LENGTH = 16  # characters of a fingerprint
_BUCKETS = ("s3://", "gs://", "az://")
_OF_PYTHON = "__pycache__"  # what running the program leaves

Listing = Callable[[str], Iterable[Sequence[Any]]]  # of an address in a bucket: names, each with size and tag


class Missing(Exception):
    """An input that is not there; the text says which, and where it was looked for."""


def fingerprint(
    command: Sequence[str],
    inputs: Sequence[str] | None,
    folder: str,
    environment: Mapping[str, str],
    listing: Listing,
    without: str = "",
) -> str:
    """`folder`: of the code. `without`: a folder, or an address, that is no input, since the data goes there."""
    found: list[Any] = []
    for each in named(command, folder, without) if inputs is None else inputs:
        if each.startswith("$"):
            found.append(["variable", each[1:], environment.get(each[1:])])
        elif each.startswith(_BUCKETS):
            there = sorted(list(map(str, item)) for item in listing(each))
            if not there and inputs is not None:
                raise Missing(f"ingest.inputs: there is nothing at {each}")
            found.append(["bucket", each, there])
        else:
            for path in match(each, folder):
                whole = os.path.join(folder, path)
                if not without or not f"{os.path.realpath(whole)}/".startswith(f"{os.path.realpath(without)}/"):
                    found.append(["file", path, *digest(whole, always)])
    words = {"version": VERSION, "command": list(command), "inputs": sorted(found, key=json.dumps)}
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:LENGTH]


def named(command: Sequence[str], folder: str, without: str = "") -> list[str]:
    """The files and folders of the code that a command names, also as a module of Python, and what is in buckets."""
    found = []
    for before, word in zip(("", *command), command):
        if word.startswith(_BUCKETS):
            if not without or not f"{word}/".startswith(f"{without}/"):
                found.append(word)
            continue
        below = word.replace(".", "/") if before == "-m" else word
        for path in (below, f"{below}.py") if before == "-m" else (below,):
            steps = os.path.normpath(path).split("/")
            if not path.startswith("/") and steps[0] not in ("", ".", "..") and os.path.exists(f"{folder}/{path}"):
                found.append(path)
    return found


def match(pattern: str, folder: str) -> list[str]:
    """The files in `folder` that it names, with all below a folder, sorted; none for what is no file."""
    if pattern.startswith(("$", *_BUCKETS)):
        return []
    where = os.path.join(glob.escape(folder), pattern)
    found: set[str] = set()
    for path in glob.glob(where, recursive=True):
        found.update(_below(path) if os.path.isdir(path) else [path])
    if not found and not os.path.isdir(os.path.join(folder, pattern)):
        raise Missing(f"ingest.inputs: nothing is called {pattern} in {folder}")
    return sorted(os.path.relpath(path, folder) if not pattern.startswith("/") else path for path in found)


def _below(folder: str) -> list[str]:
    found = []
    for above, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != _OF_PYTHON]
        found += [f"{above}/{name}" for name in files]
    return found
