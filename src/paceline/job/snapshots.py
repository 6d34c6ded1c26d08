"""What a job file says of snapshots: where they go, and which are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from paceline.job import values
from paceline.job.errors import BadValueError, did_you_mean
from paceline.job.fields import Memory, Strict, Text, choice, text_schema, whole
from paceline.plan import KEEP

BUCKETS = ("s3", "gs", "az")
PLACES = "a folder, or a bucket: s3://bucket/path, gs://bucket/path, az://container/path"
_ALSO_BUCKETS = {"gcs": "gs", "s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az"}
_ALSO_MODES = {"lowest": "min", "minimum": "min", "highest": "max", "maximum": "max"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def place(value: Any) -> str:
    text = values.text(value)
    found = _URL.fullmatch(text)
    if found is None:
        return text
    scheme, rest = found[1].lower(), found[2]
    if scheme not in BUCKETS:
        also = _ALSO_BUCKETS.get(scheme)
        near = f'did you mean "{also}://"?' if also else did_you_mean(scheme, BUCKETS)
        raise BadValueError(f'"{found[1]}://" is no place for snapshots', near, PLACES)
    steps = rest.rstrip("/").split("/")
    if not steps[0]:
        raise BadValueError("names no bucket", f"write {scheme}://bucket/path", PLACES)
    if any(step in ("", ".", "..") for step in steps) or not rest.isprintable() or "?" in rest or "#" in rest:
        raise BadValueError("has a path that no bucket has", "write names with one / between them", PLACES)
    return f"{scheme}://{'/'.join(steps)}"


Place = Annotated[str, PlainValidator(place), WithJsonSchema(text_schema(r"\S"))]


class Best(Strict):
    """Which snapshot is kept besides the newest ones."""

    metric: Text = Field(description="A metric that is in the snapshot.", examples=["loss"])
    mode: Annotated[str, *choice(("min", "max"), _ALSO_MODES)] = Field(
        default="min", description="Whether the lowest or the highest is the best."
    )


class Snapshots(Strict):
    """The place for snapshots, and how many stay there."""

    to: Place | None = Field(
        default=None,
        description=f"Where they are committed: {PLACES}. A folder is relative to the folder of the job file. "
        "Unset: the run's own folder.",
        examples=["s3://training/digits", "/mnt/snapshots"],
    )
    keep: Annotated[int, *whole(1)] = Field(default=KEEP, description="How many of the newest are kept.")
    best: Best | None = Field(
        default=None,
        description="Also keep the best one by a metric.",
        examples=[{"metric": "loss", "mode": "min"}],
    )
    rate: Memory | None = Field(
        default=None, description="Bytes a second that each host may send. Unset: as many as it can.", examples=["50Mi"]
    )


def placed(given: Snapshots, folder: Path) -> Snapshots:
    """With the absolute path of a folder."""
    if given.to is None or _URL.fullmatch(given.to):
        return given
    path = os.path.abspath(folder / os.path.expanduser(given.to))  # noqa: PTH100, PTH111 (these never raise)
    return given.model_copy(update={"to": path})
