"""The `track` section of a job file: where the metrics of a run are sent, and which fields of the job go with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.agent.redaction import Redactor, looks_secret
from paceline.job.fields import Strict, Text
from paceline.job.notify_section import Address

if TYPE_CHECKING:
    from paceline.job.schema_models import Job

MOST_PARAMETERS = 500
# Not about training, or not the same for the same job.
_LEFT_OUT = {"name", "code", "notify", "track", "kubernetes", "credentials", "tensorboard", "try", "export", "serve"}


class Track(Strict):
    """An [MLflow server](notifications.md#mlflow) that gets the metrics of the run."""

    mlflow: Address = Field(
        description="The address of the server: https:// or http://. Credentials come from the variables that MLflow "
        "uses: `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`.",
        examples=["https://mlflow.example.com"],
    )
    experiment: Text | None = Field(
        default=None,
        description="The MLflow experiment of the run; it is created if it does not exist. Default: the job's `name`.",
        examples=["translate"],
    )


def parameters(job: Job) -> dict[str, str]:
    """The fields that the user has set, with `--set` or in the file, by their paths; without secrets."""
    fields = job.model_dump(exclude_unset=True, exclude=_LEFT_OUT)
    redact = Redactor(job.env, *(pools[0].env for pools in job.roles.values()))
    entries = list(_entries("", fields))[:MOST_PARAMETERS]
    return {path: redact(text) for path, text in entries if not looks_secret(path.rpartition(".")[2], text)}


def _entries(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """
    >>> dict(_entries("", {"command": ["python", "a b.py"], "roles": {"worker": [{"replicas": 2}]}, "cpu": None}))
    {'command': "python 'a b.py'", 'roles.worker.replicas': '2'}
    """
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _entries(f"{path}.{name}" if path else str(name), each)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for number, each in enumerate(value):
            yield from _entries(path if len(value) == 1 else f"{path}.{number}", each)
    elif isinstance(value, list):
        yield path, shlex.join(map(str, value))
    elif value is not None:
        yield path, value if isinstance(value, str) else json.dumps(value)
