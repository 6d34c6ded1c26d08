"""What was delivered, in the folder of a run: a restarted captain and its process continue from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.agent.run_files import replace

FOLDER = "deliveries"


def mlflow_run_file(folder: str) -> str:
    """`folder`: of the run."""
    return f"{folder}/{FOLDER}/mlflow.json"


def saved_mlflow_run(folder: str) -> str:
    """The id of the MLflow run; empty: it is not known."""
    try:
        with open(mlflow_run_file(folder)) as file:
            return str(json.load(file)["run"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def save_position(path: str, position: Mapping[str, Any]) -> bool:
    """Whether it was saved. What cannot be saved, as on a full disk, is read again by the next process."""
    try:
        replace(path, dict(position))
    except OSError:
        return False
    return True
