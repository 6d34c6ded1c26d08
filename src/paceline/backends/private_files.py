"""Small files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path


def write(folder: Path, files: dict[str, str]) -> None:
    """File name -> content; the folder, too, is readable by its owner only."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, text in files.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
