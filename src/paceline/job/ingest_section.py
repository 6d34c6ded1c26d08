"""The `ingest` section of a job file: data that is created once, before training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from paceline.job import snapshots_section
from paceline.job.errors import BadValueError, Finding, describe, visible
from paceline.job.fields import Argument, Command, Duration, Strict, text_schema
from paceline.job.kubernetes_section import Kubernetes, Volume
from paceline.plan import BUCKETS, CLAIM, INGEST_S
from paceline.storage.ingested.fingerprint import MissingInput, match

if TYPE_CHECKING:
    from paceline.job.schema_models import Job

Steps = tuple[str | int, ...]


def _inputs(value: Any) -> Any:
    if not isinstance(value, list):
        raise BadValueError(f"must be a list of files, got {describe(value)}", "write [ingest.py, raw/*.txt]")
    return value


Location = Annotated[
    str, PlainValidator(lambda value: snapshots_section.location(value, "data")), WithJsonSchema(text_schema(r"\S"))
]
Inputs = Annotated[list[Argument], BeforeValidator(_inputs)]


class Ingest(Strict):
    """Data that is created once, before the first generation. Later runs reuse it until its inputs change."""

    command: Command = Field(
        description="The command that creates the data. It runs in the `code` folder, writes to the empty folder "
        "`PACELINE_INGEST_DIR`, and exits with 0 when the data is complete.",
        examples=[["python", "ingest.py"]],
    )
    to: Location = Field(
        description="The location in which the data gets its own subfolder: a folder (relative to the folder of the "
        "job file), a bucket (s3://bucket/path, gs://bucket/path, az://container/path), or on a cluster a volume claim "
        "(claim://name/path) or a path below one of `kubernetes.volumes`. Tasks find the data with `PACELINE_DATA`.",
        examples=["s3://training/digits", "data"],
    )
    inputs: Inputs | None = Field(
        default=None,
        description="What the data is created from: files, folders and patterns in the `code` folder, addresses in "
        "buckets, and variables (`$NAME`). If one of them or the command changes, the data is rebuilt next to the old "
        "data. Default: the files in `code` and the addresses in buckets that the command names.",
        examples=[["ingest.py", "raw/*.txt", "$LANGUAGES"]],
    )
    limit: Duration = Field(
        default=INGEST_S,
        description="Time until the data is complete, including retries and waiting for another run that creates it.",
        examples=["6h"],
    )


def check(job: Job, broken: Sequence[Steps], cluster: bool) -> Iterator[Finding]:
    ingest = job.ingest
    if cluster and ingest is not None and not ingest.to.startswith((*BUCKETS, CLAIM)):
        yield from _check_folder(ingest.to, job.kubernetes)


def _check_folder(to: str, kubernetes: Kubernetes | None) -> Iterator[Finding]:
    """On a cluster, the folder must be on a volume that all pods mount."""
    volumes = [] if kubernetes is None else kubernetes.volumes
    volume = next((volume for volume in volumes if _contains(volume, to)), None)
    field: Steps = ("ingest", "to")
    if volume is None:
        hint = "use a bucket, a volume claim (claim://name/path), or a path below one of kubernetes.volumes"
        yield Finding(field, "is a folder, but pods do not share a file system", hint)
    elif volume.claim is None:
        yield Finding(
            field,
            f"is below {volume.mount}, which is not a volume claim and is lost with its pod",
            "use a volume claim",
        )
    elif volume.read_only:
        yield Finding(
            field, f"is below {volume.mount}, which is mounted read-only", "remove read_only from that volume"
        )


def _contains(volume: Volume, path: str) -> bool:
    return volume.mount is not None and os.path.normpath(path).startswith(f"{volume.mount}/")


def check_inputs(ingest: Ingest, code: Path, broken: Sequence[Steps], cluster: bool) -> Iterator[Finding]:
    """Check that the input files exist."""
    for index, pattern in enumerate(ingest.inputs or ()):
        if ("ingest", "inputs", index) in broken or (cluster and pattern.startswith("/")):
            continue
        try:
            match(pattern, str(code))
        except MissingInput:
            yield Finding(
                ("ingest", "inputs", index), f'no file matches "{visible(pattern)}" in {visible(str(code), 300)}'
            )


def with_absolute_paths(ingest: Ingest | None, folder: Path) -> Ingest | None:
    return None if ingest is None else ingest.model_copy(update={"to": snapshots_section.absolute(ingest.to, folder)})
