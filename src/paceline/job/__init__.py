"""Reads and checks job files. Cheap to import: pydantic and YAML are imported on the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.errors import JobError, Problem

if TYPE_CHECKING:
    from paceline.job.schema_models import HostPool, Job

__all__ = ["HostPool", "Job", "JobError", "LoadedJob", "Problem", "load", "load_text", "schema"]


@dataclass(frozen=True)
class LoadedJob:
    """A valid job, its text with the overrides applied, and notes for the user."""

    job: Job
    text: str
    notes: list[str]


def load(path: Path, overrides: Sequence[str] = (), *, cluster: bool = False) -> LoadedJob:
    """Load a job file and apply `--set` overrides. Raises JobError with all problems.

    With `cluster`, programs need not exist on this machine, and no note reports fields for clusters as unused.
    """
    from paceline.job import loading

    return loading.load(path, overrides, cluster)


def load_text(
    text: str, source: str, folder: Path, overrides: Sequence[str] = (), *, cluster: bool = False
) -> LoadedJob:
    """Like `load`, for a string. Messages call it `source`; relative paths start at `folder`."""
    from paceline.job import loading

    return loading.load_text(text, source, folder, overrides, cluster)


def schema() -> dict[str, Any]:
    """The JSON Schema of job files, for editors."""
    from paceline.job import json_schema

    return json_schema.schema()


def __getattr__(name: str) -> Any:
    if name in ("Job", "HostPool"):
        from paceline.job import schema_models

        return getattr(schema_models, name)
    raise AttributeError(name)
