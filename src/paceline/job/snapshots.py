"""What a job file says of snapshots: where they go, and which are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from paceline.job import cluster_values, values
from paceline.job.cluster import ObjectName
from paceline.job.errors import BadValueError, Finding, did_you_mean
from paceline.job.fields import Memory, Strict, Text, choice, text_schema, whole
from paceline.plan import CLAIM, KEEP

SCHEMES = ("s3", "gs", "az", "claim")
PLACES = (
    "a folder, a bucket (s3://bucket/path, gs://bucket/path, az://container/path), "
    "or on a cluster a volume claim (claim://name/path)"
)
ACCESS = ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")
_ALSO_CALLED = {"gcs": "gs", "s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "pvc": "claim"}
_ALSO_MODES = {"lowest": "min", "minimum": "min", "highest": "max", "maximum": "max"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def place(value: Any) -> str:
    text = values.text(value)
    found = _URL.fullmatch(text)
    if found is None:
        return text
    scheme, rest = found[1].lower(), found[2]
    if scheme not in SCHEMES:
        also = _ALSO_CALLED.get(scheme)
        near = f'did you mean "{also}://"?' if also else did_you_mean(scheme, SCHEMES)
        raise BadValueError(f'"{found[1]}://" is no place for snapshots', near, PLACES)
    steps = rest.rstrip("/").split("/")
    if not steps[0]:
        what = "claim" if scheme == "claim" else "bucket"
        raise BadValueError(f"names no {what}", f"write {scheme}://{'name' if what == 'claim' else what}/path", PLACES)
    if any(step in ("", ".", "..") for step in steps) or not rest.isprintable() or "?" in rest or "#" in rest:
        raise BadValueError("has a path that cannot be one", "write names with one / between them", PLACES)
    if scheme == "claim":
        cluster_values.object_name(steps[0])
    return f"{scheme}://{'/'.join(steps)}"


Place = Annotated[str, PlainValidator(place), WithJsonSchema(text_schema(r"\S"))]


class Best(Strict):
    """Which snapshot is kept besides the newest ones."""

    metric: Text = Field(description="A metric that is in the snapshot.", examples=["loss"])
    mode: Annotated[str, *choice(("min", "max"), _ALSO_MODES)] = Field(
        default="min", description="Whether the lowest or the highest is the best."
    )


class Claim(Strict):
    """A volume claim to be made, where the one that `to` names is not there. It outlives the run."""

    size: Memory = Field(description="How much it holds.", examples=["100Gi"])
    storage_class: ObjectName | None = Field(default=None, description="Of the cluster. Unset: the cluster's default.")
    access: Annotated[str, *choice(ACCESS, {"rwo": ACCESS[0], "rwx": ACCESS[1], "rwop": ACCESS[2]})] = Field(
        default=ACCESS[0], description="How many may mount it: Paceline mounts it in one pod."
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
    claim: Claim | None = Field(
        default=None,
        description="Make the claim of `to: claim://name`, unless it is there.",
        examples=[{"size": "100Gi"}],
    )
    rate: Memory | None = Field(
        default=None, description="Bytes a second that each host may send. Unset: as many as it can.", examples=["50Mi"]
    )


def check(given: Snapshots, broken: Sequence[tuple[str | int, ...]], cluster: bool) -> Iterator[Finding]:
    to = given.to or ""
    if ("snapshots", "to") in broken:
        return
    if given.claim is not None and not to.startswith(CLAIM):
        hint = f"write to: claim://{'snapshots' if not to else 'name'}, or remove claim"
        yield Finding(("snapshots", "claim"), "has no effect: snapshots.to names no claim", hint, at_key=True)
    if cluster and to and not _URL.fullmatch(to):
        message = "is a folder, and pods have none in common"
        yield Finding(("snapshots", "to"), message, "name a bucket, or a volume claim: claim://name/path")


def placed(given: Snapshots, folder: Path) -> Snapshots:
    """With the absolute path of a folder."""
    if given.to is None or _URL.fullmatch(given.to):
        return given
    path = os.path.abspath(folder / os.path.expanduser(given.to))  # noqa: PTH100, PTH111 (these never raise)
    return given.model_copy(update={"to": path})
