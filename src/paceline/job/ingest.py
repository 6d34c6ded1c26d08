"""What a job file says of data that is made once, before training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from paceline.job import snapshots
from paceline.job.cluster import Kubernetes, Volume
from paceline.job.errors import BadValueError, Finding, described, visible
from paceline.job.fields import Argument, Command, Duration, Strict, text_schema
from paceline.plan import BUCKETS, CLAIM, INGEST_S
from paceline.storage.inputs import Missing, match

if TYPE_CHECKING:
    from paceline.job.models import Job

Steps = tuple[str | int, ...]


def _inputs(value: Any) -> Any:
    if not isinstance(value, list):
        raise BadValueError(f"must be a list of files, got {described(value)}", "write [ingest.py, raw/*.txt]")
    return value


Place = Annotated[str, PlainValidator(lambda value: snapshots.place(value, "data")), WithJsonSchema(text_schema(r"\S"))]
Inputs = Annotated[list[Argument], BeforeValidator(_inputs)]


class Ingest(Strict):
    """Data that is made before the first generation, once: later runs find it, until its inputs change."""

    command: Command = Field(
        description="What makes the data: it runs in the `code` folder, writes to the empty folder "
        "`PACELINE_INGEST_DIR`, and exits with 0 when the data is complete.",
        examples=[["python", "ingest.py"]],
    )
    to: Place = Field(
        description="Where the data is put, in a folder of its own below: a folder (relative to the folder of the job "
        "file), a bucket (s3://bucket/path, gs://bucket/path, az://container/path), or on a cluster a volume claim "
        "(claim://name/path) or a path below one of `kubernetes.volumes`. Tasks find it by `PACELINE_DATA`.",
        examples=["s3://training/digits", "data"],
    )
    inputs: Inputs | None = Field(
        default=None,
        description="What the data is made from: files, folders and patterns in the `code` folder, addresses in "
        "buckets, and variables (`$NAME`). When one of them, or the command, changes, the data is made anew, beside "
        "the old. Unset: what the command names of `code` and in buckets.",
        examples=[["ingest.py", "raw/*.txt", "$LANGUAGES"]],
    )
    limit: Duration = Field(
        default=INGEST_S,
        description="Time until the data is there, with all tries, and with waiting for another run that makes it.",
        examples=["6h"],
    )


def check(job: Job, broken: Sequence[Steps], cluster: bool) -> Iterator[Finding]:
    given = job.ingest
    if cluster and given is not None and not given.to.startswith((*BUCKETS, CLAIM)):
        yield from _folder(given.to, job.kubernetes)


def _folder(to: str, kubernetes: Kubernetes | None) -> Iterator[Finding]:
    """On a cluster, it has to be on a volume that all pods have."""
    volumes = [] if kubernetes is None else kubernetes.volumes
    volume = next((volume for volume in volumes if _holds(volume, to)), None)
    where: Steps = ("ingest", "to")
    if volume is None:
        hint = "name a bucket, a volume claim (claim://name/path), or a path below one of kubernetes.volumes"
        yield Finding(where, "is a folder, and pods have none in common", hint)
    elif volume.claim is None:
        yield Finding(where, f"is below {volume.mount}, which is no claim and goes with its pod", "name a claim there")
    elif volume.read_only:
        yield Finding(where, f"is below {volume.mount}, which is mounted read-only", "remove read_only of that volume")


def _holds(volume: Volume, path: str) -> bool:
    return volume.mount is not None and os.path.normpath(path).startswith(f"{volume.mount}/")


def check_inputs(given: Ingest, code: Path, broken: Sequence[Steps], cluster: bool) -> Iterator[Finding]:
    """That files which are named are there."""
    for number, each in enumerate(given.inputs or ()):
        if ("ingest", "inputs", number) in broken or (cluster and each.startswith("/")):
            continue
        try:
            match(each, str(code))
        except Missing:
            yield Finding(
                ("ingest", "inputs", number), f'nothing is called "{visible(each)}" in {visible(str(code), 300)}'
            )


def placed(given: Ingest | None, folder: Path) -> Ingest | None:
    """With the absolute path of a folder."""
    return None if given is None else given.model_copy(update={"to": snapshots.absolute(given.to, folder)})
