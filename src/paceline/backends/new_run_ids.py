"""Ids of runs, the same for local runs and runs on a cluster."""

from __future__ import annotations

import re
import secrets
from typing import Any

from paceline.agent.run_files import stamp
from paceline.errors import USAGE, PacelineError
from paceline.plan import NAME, Plan

_LETTERS = "0123456789bcdfghjkmnpqrstvwxz"  # no vowels, so they spell no words
_SUFFIX_LENGTH = 6  # long enough that 10,000 runs of one job in one bucket almost never collide
LONGEST_RUN = 45  # followed by the longest role, group and index, it is still a valid DNS label


class BadRunId(PacelineError):
    """The requested run id is invalid."""

    exit_code = USAGE


def new_run(job: str, requested: str | None = None) -> str:
    """The requested id, if it is valid; by default the job's name with a random suffix."""
    suffix = (secrets.choice(_LETTERS) for _ in range(min(_SUFFIX_LENGTH, LONGEST_RUN - len(job) - 1)))
    run = requested or f"{job}-{''.join(suffix)}"
    if len(run) > LONGEST_RUN or not re.fullmatch(NAME, run):
        raise BadRunId(
            f"{run!r} cannot be a run's id",
            remedy=f"use a lower-case letter, then lower-case letters, digits and -, at most {LONGEST_RUN} characters",
        )
    return run


def run_identity(run: str, plan: Plan) -> dict[str, Any]:
    """The fields of run.json that every run has, wherever it runs."""
    return {
        "run": run,
        "job": plan.name,
        "framework": plan.framework,
        "strategy": plan.strategy,
        "started": stamp(),
    }
