"""The `snapshots` section of a job file: where snapshots are stored, and which are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, create_model

from paceline.job import kubernetes_values, values
from paceline.job.errors import BadValueError, Finding
from paceline.job.fields import Duration, Memory, Strict, Switch, Text, choice, text_schema, whole
from paceline.job.kubernetes_section import ObjectName
from paceline.job.similar_names import did_you_mean
from paceline.plan import CLAIM, KEEP, NAME
from paceline.plan import SCHEMES as BUCKET_SCHEMES
from paceline.storage.watched.selection import is_pattern

SCHEMES = (*BUCKET_SCHEMES, "claim")
LOCATIONS = (
    "a folder, a bucket (s3://bucket/path, gs://bucket/path, az://container/path), "
    "or on a cluster a volume claim (claim://name/path)"
)
ORIGINS = "a run's id, s3://bucket/path/RUN, /folder/RUN, or any folder"
WATCHED = "a folder, a file, or a pattern of names of files"
ACCESS = ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")
_SCHEME_ALIASES = {"gcs": "gs", "s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "pvc": "claim"}
_MODE_ALIASES = {"lowest": "min", "minimum": "min", "highest": "max", "maximum": "max"}
_RUN = re.compile(NAME)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MISSING_SLASHES = re.compile(r"([A-Za-z0-9]+):/?([^/].*)", re.DOTALL)


def location(value: Any, contents: str = "snapshots") -> str:
    text = values.text(value)
    url = _url(text)
    if url is None:
        return text
    scheme, path = url[1].lower(), url[2]
    if scheme not in SCHEMES:
        meant = _SCHEME_ALIASES.get(scheme)
        hint = f'did you mean "{meant}://"?' if meant else did_you_mean(scheme, SCHEMES)
        raise BadValueError(f'"{url[1]}://" is not a supported location for {contents}', hint, LOCATIONS)
    steps = path.rstrip("/").split("/")
    if not steps[0]:
        kind = "claim" if scheme == "claim" else "bucket"
        raise BadValueError(
            f"does not name a {kind}", f"write {scheme}://{'name' if kind == 'claim' else kind}/path", LOCATIONS
        )
    if any(step in ("", ".", "..") for step in steps) or not path.isprintable() or "?" in path or "#" in path:
        raise BadValueError("has an invalid path", "separate names by a single /, without ., .., ? and #", LOCATIONS)
    if scheme == "claim":
        kubernetes_values.object_name(steps[0])
    return f"{scheme}://{'/'.join(steps)}"


def _url(text: str) -> re.Match[str] | None:
    """None if it is a folder, not a bucket or claim."""
    mistake = _MISSING_SLASHES.fullmatch(text)
    if mistake is not None and mistake[1].lower() in (*SCHEMES, *_SCHEME_ALIASES):
        hint = f"write {mistake[1]}://{mistake[2]}, or ./{text} for a folder of that name"
        raise BadValueError(f'needs two slashes after "{mistake[1]}:"', hint, LOCATIONS)
    return _URL.fullmatch(text)


def origin(value: Any) -> str:
    """What a run starts from: a run's id, the location of a run in a bucket or claim, or a folder."""
    text = values.text(value)
    if _url(text):
        text = location(text)
        if "/" not in text.partition("://")[2]:
            raise BadValueError("does not name a run", f"write {text}/RUN", ORIGINS)
    elif "/" not in text and text not in (".", "..", "~") and not _RUN.fullmatch(text):
        raise BadValueError("is not a run id", f"write ./{text} for a folder", ORIGINS)
    return text


def watched_path(value: Any) -> str:
    """A folder, a file, or a pattern of names of files in a folder."""
    text = values.text(value)
    path = os.path.normpath(text)
    if path in (".", "/") or path.startswith(("..", "~")) or not path.isprintable() or "://" in text:
        raise BadValueError(
            "is not a valid place of checkpoints",
            "use a folder below the working folder (ckpt/), a file (snapshot.pt) or a pattern of names (*.pt)",
            WATCHED,
        )
    folder, name = os.path.split(path)
    if is_pattern(folder) or "**" in name:
        raise BadValueError("has a pattern in the name of a folder", "use a pattern only for names of files", WATCHED)
    if is_pattern(name) and not re.search(r"\w", re.sub(r"\[[^]]*\]", "", name)):
        raise BadValueError(
            "matches all files, and a restart replaces the files that match",
            "use a part of the names of checkpoints, such as *.pt",
            WATCHED,
        )
    return path


Location = Annotated[str, PlainValidator(location), WithJsonSchema(text_schema(r"\S"))]
Origin = Annotated[str, PlainValidator(origin), WithJsonSchema(text_schema(r"\S"))]
Watched = Annotated[str, PlainValidator(watched_path), WithJsonSchema(text_schema(r"\S"))]


class Best(Strict):
    """Which snapshot is kept in addition to the newest ones."""

    metric: Text = Field(description="A metric of the snapshot, or one that an evaluator reports.", examples=["loss"])
    mode: Annotated[str, *choice(("min", "max"), _MODE_ALIASES)] = Field(
        default="min", description="Whether the lowest or the highest value is the best."
    )


class Claim(Strict):
    """The volume claim to create if the claim that `to` names does not exist. It is not deleted with the run."""

    size: Memory = Field(description="The size of the volume.", examples=["100Gi"])
    storage_class: ObjectName | None = Field(
        default=None, description="The StorageClass. Default: the cluster's default."
    )
    access: Annotated[str, *choice(ACCESS, {"rwo": ACCESS[0], "rwx": ACCESS[1], "rwop": ACCESS[2]})] = Field(
        default=ACCESS[0], description="The access mode. Paceline mounts the claim in one pod."
    )


class _Snapshots(Strict):
    """Where snapshots are stored, how many are kept, and what the run starts from."""

    to: Location | None = Field(
        default=None,
        description=f"The location to which snapshots are committed: {LOCATIONS}. A folder is relative to the folder "
        "of the job file. Default: the run's folder.",
        examples=["s3://training/digits", "/mnt/snapshots"],
    )
    keep: Annotated[int, *whole(1)] = Field(default=KEEP, description="How many of the newest snapshots are kept.")
    best: Best | None = Field(
        default=None,
        description="Also keep the best snapshot by a metric.",
        examples=[{"metric": "loss", "mode": "min"}],
    )
    claim: Claim | None = Field(
        default=None,
        description="Create the claim of `to: claim://name` if it does not exist.",
        examples=[{"size": "100Gi"}],
    )
    rate: Memory | None = Field(
        default=None,
        description="Upload limit of each host, in bytes per second; the limit of what it fetches from other hosts in "
        "advance, too. Default: no limit.",
        examples=["50Mi"],
    )
    commit_every: Duration | None = Field(
        default=None,
        description="The least time between the starts of two commits while the group trains. What is saved in between "
        "stays on its hosts, where a restart finds it; the newest is committed next. When the run ends or a host shuts "
        "down, the newest is committed at once. Default: no pause, or after a commit that took a second or more, three "
        "times as long.",
        examples=["5m"],
    )
    memory: Memory | None = Field(
        default=None,
        description="Memory of each host that saves snapshots, in addition to its `memory`: the helpers save there, or "
        "to disk if it is full. Use at least twice the size of what the tasks of a host save. Used on clusters only. "
        "Default: snapshots are saved on disk; see [saving to memory](snapshots.md#saving-to-memory).",
        examples=["8Gi"],
    )
    watch: Watched | None = Field(
        default=None,
        description="Where the program keeps its own checkpoints, relative to its working folder: a folder, a file, or "
        "a pattern of names of files in a folder. What is there becomes a snapshot whenever it changes, and is "
        "restored before tasks restart. `$PACELINE_RUN` in it is replaced by the run's id.",
        examples=["ckpt/", "snapshot.pt", "*.pt", "ckpt/$PACELINE_RUN"],
    )
    trust: Switch = Field(
        default=False,
        description="Let paceline.torch save and load objects that need pickle. Loading them can run any code: use "
        "this only for snapshots from sources you trust, including `from`.",
    )

    @property
    def origin(self) -> str:
        return getattr(self, "from") or ""


if TYPE_CHECKING:
    Snapshots = _Snapshots
else:  # `from` is a keyword
    _FROM = Field(
        default=None,
        description="Start from a snapshot of another run: the run's id, or the location of its snapshots "
        "(s3://bucket/path/RUN, /folder/RUN), by default the newest one, or the one given by a final /step-<n>-g<m>. "
        "Or start from any folder of files.",
        examples=["digits-3f9a", "s3://training/digits/digits-3f9a"],
    )
    Snapshots = create_model(
        "Snapshots", __base__=_Snapshots, __doc__=_Snapshots.__doc__, **{"from": (Origin | None, _FROM)}
    )


def check(section: Snapshots, broken: Sequence[tuple[str | int, ...]], cluster: bool) -> Iterator[Finding]:
    if section.memory is not None and section.watch is not None:
        message = "has no effect with snapshots.watch: what the program keeps there is copied to disk"
        yield Finding(("snapshots", "memory"), message, "remove one of them")
    to = section.to or ""
    if ("snapshots", "to") in broken:
        return
    if section.claim is not None and not to.startswith(CLAIM):
        hint = f"write to: claim://{'snapshots' if not to else 'name'}, or remove claim"
        yield Finding(("snapshots", "claim"), "has no effect: snapshots.to is not a volume claim", hint, at_key=True)
    if cluster and to and not _URL.fullmatch(to):
        message = "is a folder, but pods do not share a file system"
        yield Finding(("snapshots", "to"), message, "use a bucket or a volume claim (claim://name/path)")
    yield from _check_origin(section, cluster)


def _check_origin(section: Snapshots, cluster: bool) -> Iterator[Finding]:
    origin = section.origin
    if cluster and "/" in origin and not _URL.fullmatch(origin):
        yield Finding(
            ("snapshots", "from"), "is a folder on this machine, which pods cannot read", "copy it to a bucket"
        )
    if not cluster and origin.startswith(CLAIM):
        yield Finding(("snapshots", "from"), "is a volume claim, which only a cluster has", "use --on kubernetes")


def with_absolute_paths(section: Snapshots, folder: Path) -> Snapshots:
    update = {"to": absolute(section.to, folder) if section.to else None}
    if "/" in section.origin or section.origin.startswith((".", "~")):
        update["from"] = absolute(section.origin, folder)
    return section.model_copy(update=update)


def absolute(address: str, folder: Path) -> str:
    if _URL.fullmatch(address):
        return address
    return os.path.abspath(folder / os.path.expanduser(address))  # noqa: PTH100, PTH111 (these never raise)
