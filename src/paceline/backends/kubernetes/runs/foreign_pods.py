"""Tells the pods of a run from others with the same labels, which anybody who may create pods could have created."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.backends.kubernetes.api.owners import controller
from paceline.view.files.run_folders import info


def is_of_job(pod: Any, uid: str) -> bool:
    """Whether the Job with this uid has created the pod. Runs of early versions do not know the uids of their Jobs."""
    return not uid or controller(pod) == uid


def own_captains(pods: Iterable[Any], folder: Path) -> list[Any]:
    """Of pods with the labels of a captain, those that the captain's Job of this run has created."""
    uid = str(info(folder).get("uid") or "")
    return [pod for pod in pods if is_of_job(pod, uid)]
