"""The folder of an exported model: where it is written to, and `paceline.json` beside it, which says what it takes.

{"format": "saved_model", "run": "digits-3f9a", "step": 120, "signatures": {"serving_default": {
    "inputs": {"image": {"dtype": "float32", "shape": [-1, 64]}}, "outputs": {...}}}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ABOUT = "paceline.json"
DEFAULT = "serving_default"  # the signature that whoever names none is given
FILES = {"saved_model": "saved_model.pb", "pt2": "model.pt2", "stablehlo": "model.stablehlo"}
BATCH = -1  # the size of a dimension that is free


class CannotExport(ValueError):
    """The model cannot be exported as it was given; the text says what is missing."""


def target(to: Any = None) -> Path:
    """The empty folder to write to: that of `paceline export`, else the one that the program names."""
    given = os.environ.get("PACELINE_EXPORT_DIR") or to
    if not given:
        raise CannotExport("nothing says where to: run this by `paceline export RUN --to DIR`, or give to=DIR")
    folder = Path(given)
    if folder.is_dir() and any(folder.iterdir()):
        raise CannotExport(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tensor(dtype: str, shape: Sequence[Any]) -> dict[str, Any]:
    """
    >>> tensor("float32", [None, 64])
    {'dtype': 'float32', 'shape': [-1, 64]}
    """
    return {"dtype": dtype, "shape": [size if isinstance(size, int) else BATCH for size in shape]}


def describe(folder: Path, format: str, signatures: Mapping[str, Any]) -> None:
    """Last, when the model is written."""
    about = {"format": format, "run": os.environ.get("PACELINE_RUN"), "step": _step(), "signatures": signatures}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def complete(folder: Path, run: str, step: int) -> dict[str, Any]:
    """What `paceline.json` says of the one model that a program has left there, once it tells whose it is."""
    found = formats(folder)
    if len(found) != 1:
        there = ", ".join(sorted(each.name for each in folder.iterdir())[:5]) or "nothing"
        wanted = f"a SavedModel ({FILES['saved_model']}), {FILES['pt2']} or {FILES['stablehlo']}"
        raise CannotExport(
            f"the job's export has left no model in PACELINE_EXPORT_DIR: {wanted} is looked for, {there} found"
        )
    try:
        told = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        told = None
    signatures = told.get("signatures", {}) if isinstance(told, dict) else {}
    about = {"format": found[0], "run": run, "step": step, "signatures": signatures}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return about


def formats(folder: Path) -> list[str]:
    """Of the models that are in it."""
    return [format for format, name in FILES.items() if (folder / name).is_file()]


def _step() -> int | None:
    """Of the snapshot that was restored."""
    found = re.match(r"step-(\d+)", Path(os.environ.get("PACELINE_RESTORE", "")).name)
    return int(found[1]) if found else None
