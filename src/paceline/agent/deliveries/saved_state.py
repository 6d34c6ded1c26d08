"""What was delivered, in the folder of a run: a restarted captain and its process continue from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.agent.run_files import replace
from paceline.storage.json_values import read_json

FOLDER = "deliveries"


def mlflow_run_file(folder: str) -> str:
    """`folder`: of the run."""
    return f"{folder}/{FOLDER}/mlflow.json"


def saved_mlflow_run(folder: str) -> str:
    """The id of the MLflow run; empty: it is not known."""
    try:
        return str(read_json(mlflow_run_file(folder))["run"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def save_position(path: str, position: Mapping[str, Any]) -> bool:
    """Whether it was saved. What cannot be saved, as on a full disk, is read again by the next process."""
    try:
        replace(path, dict(position))
    except OSError:
        return False
    return True


def saved_offset(position: Mapping[str, Any]) -> int:
    """ValueError, TypeError, KeyError, OverflowError: no file has such an offset."""
    offset = int(position["offset"])
    if not 0 <= offset < 1 << 62:
        raise ValueError(f"offset {offset}")
    return offset
