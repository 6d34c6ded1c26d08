"""Small files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path


def write(folder: Path, files: dict[str, str]) -> None:
    """Into a folder that only its owner can read."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in files.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
