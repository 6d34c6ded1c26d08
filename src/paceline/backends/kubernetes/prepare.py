"""From a job file to what can be rendered: its plan, checked for a cluster, and its code in parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import plan as plans
from paceline.backends.kubernetes.code import collect
from paceline.backends.kubernetes.config_maps import CHUNK, cut
from paceline.plan import CODE_IN_IMAGE, Plan
from paceline.view import origin

if TYPE_CHECKING:
    from paceline.job import Loaded


class CannotSubmit(Exception):
    """The job cannot run on a cluster as it is; the text says why and what to do."""


class Taken(CannotSubmit):
    """There is a run of this id already."""


@dataclass(frozen=True)
class Prepared:
    plan: Plan
    text: str
    notes: tuple[str, ...]
    code: tuple[bytes, ...]
    library: tuple[bytes, ...] = ()


def prepare(loaded: Loaded) -> Prepared:
    """Of a job that was loaded for a cluster."""
    plan = origin.resolved(plans.make(loaded.job), cluster=True)
    if not plan.kubernetes.get("image"):
        raise CannotSubmit(
            "kubernetes.image is not set: say which container image the tasks run in, for example "
            "--set kubernetes.image=tensorflow/tensorflow:2.21.0"
        )
    books = library_parts() if plan.needs_bucket else ()
    if plan.code == CODE_IN_IMAGE:
        return Prepared(plan, loaded.text, tuple(loaded.notes), (), books)
    code = collect(Path(plan.code))
    notes = (*loaded.notes, *code.notes, f"sending {plan.code}: {code.describe()}")
    return Prepared(plan, loaded.text, notes, tuple(code.chunks(CHUNK)), books)


def library_parts() -> tuple[bytes, ...]:
    from paceline.backends.kubernetes.library import library

    return tuple(cut(library(), CHUNK))


def certificates() -> dict[str, str]:
    from paceline.backends.certificates import generate

    return generate()
