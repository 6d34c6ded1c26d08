"""The folder of an exported model, and its `paceline.json`, which describes the inputs and outputs.

{"format": "saved_model", "run": "digits-3f9a", "step": 120, "signatures": {"serving_default": {
    "inputs": {"image": {"dtype": "float32", "shape": [-1, 64]}}, "outputs": {...}}}}
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.storage.json_values import read_json

ABOUT = "paceline.json"
DEFAULT = "serving_default"  # the signature of requests that name none
FILES = {"saved_model": "saved_model.pb", "pt2": "model.pt2", "stablehlo": "model.stablehlo"}
BATCH = -1  # a dimension of any size


class CannotExport(ValueError):
    """The model cannot be exported; the text says why."""


def target(to: Any = None) -> Path:
    """The empty folder to write to: that of `paceline export`, or else `to`."""
    path = os.environ.get("PACELINE_EXPORT_DIR") or to
    if not path:
        raise CannotExport("no folder to export to: run `paceline export RUN --to DIR`, or pass to=DIR")
    folder = Path(path)
    if folder.is_dir() and any(folder.iterdir()):
        raise CannotExport(f"{folder} is not empty: export to a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tensor(dtype: str, shape: Sequence[Any]) -> dict[str, Any]:
    """
    >>> tensor("float32", [None, 64])
    {'dtype': 'float32', 'shape': [-1, 64]}
    """
    return {"dtype": dtype, "shape": [size if isinstance(size, int) else BATCH for size in shape]}


def describe(folder: Path, format: str, signatures: Mapping[str, Any]) -> None:
    """Writes `paceline.json`, after the model is written."""
    about = {"format": format, "run": os.environ.get("PACELINE_RUN"), "step": _step(), "signatures": signatures}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def complete(folder: Path, run: str, step: int) -> dict[str, Any]:
    """Adds run and step to the `paceline.json` of the one model that a program wrote there, and returns it."""
    models = formats(folder)
    if len(models) != 1:
        files = ", ".join(sorted(each.name for each in folder.iterdir())[:5]) or "nothing"
        expected = f"a SavedModel ({FILES['saved_model']}), {FILES['pt2']} or {FILES['stablehlo']}"
        text = "the job's export did not write exactly one model to PACELINE_EXPORT_DIR"
        raise CannotExport(f"{text}: expected {expected}, found {files}")
    try:
        existing = read_json(str(folder / ABOUT))
    except (OSError, ValueError):
        existing = None
    signatures = existing.get("signatures", {}) if isinstance(existing, dict) else {}
    about = {"format": models[0], "run": run, "step": step, "signatures": signatures}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return about


def formats(folder: Path) -> list[str]:
    """The formats of the models in the folder."""
    return [format for format, name in FILES.items() if (folder / name).is_file()]


def _step() -> int | None:
    """The step of the restored snapshot."""
    match = re.match(r"step-(\d+)", Path(os.environ.get("PACELINE_RESTORE", "")).name)
    return int(match[1]) if match else None


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for a copy of a model that only this user can change, deleted at the end."""
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-model-") as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"there is no space for a private copy of the model in {tempfile.gettempdir()}"
        raise OSError(error.errno, f"{text}; set TMPDIR to another folder") from error
