"""Creates code folders for tests, and lists the files of one that would be sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.backends.kubernetes.payload.code_archive import collect


def make(folder: Path, *paths: str) -> Path:
    """Creates empty files; a path that ends in / becomes a folder."""
    for path in paths:
        target = folder / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    return folder


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        make(folder, path)
        (folder / path).write_text(text)
    return folder


def sent(folder: Path) -> set[str]:
    return {file.path for file in collect(folder).files}
