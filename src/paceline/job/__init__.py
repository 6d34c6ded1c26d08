"""The job file: what a person wrote, read and checked. Cheap to import; pydantic and YAML wait for the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.errors import JobError, Problem

if TYPE_CHECKING:
    from paceline.job.models import Group, Job

__all__ = ["Group", "Job", "JobError", "Loaded", "Problem", "from_command", "load", "load_text", "schema"]


@dataclass(frozen=True)
class Loaded:
    """A job that is right: the job, its text as run (with the overrides), and what a person may want to know."""

    job: Job
    text: str
    notes: list[str]


def load(path: Path, overrides: Sequence[str] = (), *, cluster: bool = False) -> Loaded:
    """The job in a file, with `--set` overrides. Raises JobError with everything that is wrong.

    For a cluster, programs are not looked for on this machine, and fields for clusters are not noted as unused.
    """
    from paceline.job import loading

    return loading.load(path, overrides, cluster)


def load_text(text: str, source: str, folder: Path, overrides: Sequence[str] = (), *, cluster: bool = False) -> Loaded:
    """The same for a text; `source` names it in messages, `folder` is where its paths start."""
    from paceline.job import loading

    return loading.load_text(text, source, folder, overrides, cluster)


def from_command(
    framework: str,
    workers: int,
    strategy: str | None = None,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
    gpus: int | None = None,
    name: str | None = None,
    *,
    command: Sequence[str],
    folder: Path,
) -> str:
    """The text of the job for a command given without a file; it is for load_text to check."""
    from paceline.job import writing

    return writing.from_command(
        framework, workers, strategy, ps, chief, evaluator, gpus, name, command=command, folder=folder
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of job files, for editors."""
    from paceline.job import published

    return published.schema()


def __getattr__(name: str) -> Any:
    if name in ("Job", "Group"):
        from paceline.job import models

        return getattr(models, name)
    raise AttributeError(name)
