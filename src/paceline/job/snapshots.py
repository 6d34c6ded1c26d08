"""What a job file says of snapshots: where they go, and which are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, create_model

from paceline.job import cluster_values, values
from paceline.job.cluster import ObjectName
from paceline.job.errors import BadValueError, Finding, did_you_mean
from paceline.job.fields import Memory, Strict, Switch, Text, choice, text_schema, whole
from paceline.plan import CLAIM, KEEP

SCHEMES = ("s3", "gs", "az", "claim")
PLACES = (
    "a folder, a bucket (s3://bucket/path, gs://bucket/path, az://container/path), "
    "or on a cluster a volume claim (claim://name/path)"
)
ORIGINS = "a run's id, s3://bucket/path/RUN, /folder/RUN, or any folder"
ACCESS = ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")
_ALSO_CALLED = {"gcs": "gs", "s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "pvc": "claim"}
_ALSO_MODES = {"lowest": "min", "minimum": "min", "highest": "max", "maximum": "max"}
_RUN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SLIP = re.compile(r"([A-Za-z0-9]+):/?([^/].*)", re.DOTALL)


def place(value: Any, what: str = "snapshots") -> str:
    text = values.text(value)
    found = _url(text)
    if found is None:
        return text
    scheme, rest = found[1].lower(), found[2]
    if scheme not in SCHEMES:
        also = _ALSO_CALLED.get(scheme)
        near = f'did you mean "{also}://"?' if also else did_you_mean(scheme, SCHEMES)
        raise BadValueError(f'"{found[1]}://" is no place for {what}', near, PLACES)
    steps = rest.rstrip("/").split("/")
    if not steps[0]:
        kind = "claim" if scheme == "claim" else "bucket"
        raise BadValueError(f"names no {kind}", f"write {scheme}://{'name' if kind == 'claim' else kind}/path", PLACES)
    if any(step in ("", ".", "..") for step in steps) or not rest.isprintable() or "?" in rest or "#" in rest:
        raise BadValueError("has a path that cannot be one", "write names with one / between them", PLACES)
    if scheme == "claim":
        cluster_values.object_name(steps[0])
    return f"{scheme}://{'/'.join(steps)}"


def _url(text: str) -> re.Match[str] | None:
    """None: it is no bucket and no claim."""
    slip = _SLIP.fullmatch(text)
    if slip is not None and slip[1].lower() in (*SCHEMES, *_ALSO_CALLED):
        hint = f"write {slip[1]}://{slip[2]}, or ./{text} for a folder of that name"
        raise BadValueError(f'has to have two slashes after "{slip[1]}:"', hint, PLACES)
    return _URL.fullmatch(text)


def origin(value: Any) -> str:
    """Where a run starts from: a run's id, a bucket or claim with a run in it, or a folder."""
    text = values.text(value)
    if _url(text):
        text = place(text)
        if "/" not in text.partition("://")[2]:
            raise BadValueError("names no run", f"write {text}/RUN", ORIGINS)
    elif "/" not in text and text not in (".", "..", "~") and not _RUN.fullmatch(text):
        raise BadValueError("is no id of a run", f"write ./{text} for a folder", ORIGINS)
    return text


def watched(value: Any) -> str:
    text = values.text(value)
    path = os.path.normpath(text)
    if path in (".", "/") or path.startswith(("..", "~")) or not path.isprintable() or "://" in text:
        raise BadValueError("cannot be a folder of checkpoints", "name one below the working folder: ckpt/", "a folder")
    return path


Place = Annotated[str, PlainValidator(place), WithJsonSchema(text_schema(r"\S"))]
Origin = Annotated[str, PlainValidator(origin), WithJsonSchema(text_schema(r"\S"))]
Watched = Annotated[str, PlainValidator(watched), WithJsonSchema(text_schema(r"\S"))]


class Best(Strict):
    """Which snapshot is kept besides the newest ones."""

    metric: Text = Field(description="A metric of the snapshot, or one that an evaluator reports.", examples=["loss"])
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


class _Snapshots(Strict):
    """The place for snapshots, how many stay there, and what the run starts from."""

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
    watch: Watched | None = Field(
        default=None,
        description="A folder that the program keeps its own checkpoints in, relative to its working folder: what is "
        "there is committed whenever it has changed, and put back before tasks start again. `$PACELINE_RUN` in it "
        "is the run's id.",
        examples=["ckpt/", "ckpt/$PACELINE_RUN"],
    )
    trust: Switch = Field(
        default=False,
        description="Let paceline.torch write and load what only pickle can hold, which runs code when it is loaded: "
        "only for what people you trust have made, in `from` too.",
    )

    @property
    def origin(self) -> str:
        return getattr(self, "from") or ""


if TYPE_CHECKING:
    Snapshots = _Snapshots
else:  # `from` is a keyword
    _FROM = Field(
        default=None,
        description="Start from a snapshot of another run: its id, or where its snapshots are "
        "(s3://bucket/path/RUN, /folder/RUN), the newest unless /step-<n>-g<m> follows; or any folder of files.",
        examples=["digits-3f9a", "s3://training/digits/digits-3f9a"],
    )
    Snapshots = create_model(
        "Snapshots", __base__=_Snapshots, __doc__=_Snapshots.__doc__, **{"from": (Origin | None, _FROM)}
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
    yield from _check_origin(given, cluster)


def _check_origin(given: Snapshots, cluster: bool) -> Iterator[Finding]:
    where = given.origin
    if cluster and "/" in where and not _URL.fullmatch(where):
        yield Finding(
            ("snapshots", "from"), "is a folder of this machine, which pods do not see", "copy it to a bucket"
        )
    if not cluster and where.startswith(CLAIM):
        yield Finding(("snapshots", "from"), "is a volume claim, and this machine has none", "run it --on kubernetes")


def placed(given: Snapshots, folder: Path) -> Snapshots:
    """With absolute paths of folders."""
    update = {"to": absolute(given.to, folder) if given.to else None}
    if "/" in given.origin or given.origin.startswith((".", "~")):
        update["from"] = absolute(given.origin, folder)
    return given.model_copy(update=update)


def absolute(where: str, folder: Path) -> str:
    if _URL.fullmatch(where):
        return where
    return os.path.abspath(folder / os.path.expanduser(where))  # noqa: PTH100, PTH111 (these never raise)
