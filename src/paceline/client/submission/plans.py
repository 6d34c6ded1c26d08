"""Completes a job's plan before it runs: finds its starting snapshot and checks its stores."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import Argument, UsageError
from paceline.plan import Plan


def with_rebuilt_data(plan: Plan) -> Plan:
    """The plan with its data rebuilt even if it exists."""
    if plan.ingest is None:
        raise UsageError("the job has no `ingest`", where=Argument("rebuild_data", True))
    return replace(plan, ingest=replace(plan.ingest, again=True))


def with_origin(plan: Plan, check: bool) -> Plan:
    """The plan with the address of the snapshot that it starts from. `check`: also check that its stores respond."""
    if not plan.snapshots.origin and not plan.snapshots.in_bucket:
        return plan
    from paceline.backends import snapshot_origin

    plan = snapshot_origin.resolved(plan)
    if check:
        snapshot_origin.check(plan)
    return plan
