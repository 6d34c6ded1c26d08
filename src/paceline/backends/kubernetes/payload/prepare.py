"""Prepares a job for a cluster: its plan, checked, and its code split into parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backends import snapshot_origin
from paceline.backends.kubernetes.objects.config_maps import CHUNK, cut
from paceline.backends.kubernetes.payload.code_archive import collect
from paceline.errors import USAGE, PacelineError
from paceline.job.planning import make_plan
from paceline.plan import CODE_IN_IMAGE, Plan

if TYPE_CHECKING:
    from paceline.job import LoadedJob


class CannotSubmit(PacelineError):
    """The job cannot run on a cluster."""

    exit_code = USAGE


class Taken(CannotSubmit):
    """A run with this id already exists."""


@dataclass(frozen=True)
class Prepared:
    plan: Plan
    text: str
    notes: tuple[str, ...]
    code: tuple[bytes, ...]
    library: tuple[bytes, ...] = ()


def prepare(loaded: LoadedJob) -> Prepared:
    """`loaded`: a job that was loaded with `cluster=True`."""
    plan = snapshot_origin.resolved(make_plan(loaded.job), cluster=True)
    if not plan.kubernetes.get("image"):
        raise CannotSubmit(
            "kubernetes.image is not set",
            remedy="set the container image for the tasks, for example "
            "--set kubernetes.image=tensorflow/tensorflow:2.21.0",
        )
    library = library_parts() if plan.needs_bucket else ()
    if plan.code == CODE_IN_IMAGE:
        return Prepared(plan, loaded.text, tuple(loaded.notes), (), library)
    code = collect(Path(plan.code))
    notes = (*loaded.notes, *code.notes, f"sending {plan.code}: {code.describe()}")
    return Prepared(plan, loaded.text, notes, tuple(code.chunks(CHUNK)), library)


def library_parts() -> tuple[bytes, ...]:
    from paceline.backends.kubernetes.payload.obstore_archive import library

    return tuple(cut(library(), CHUNK))


def certificates() -> dict[str, str]:
    from paceline.backends.certificates import generate

    return generate()
