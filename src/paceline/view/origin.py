"""What a new run starts from, and whether its places answer: found out before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paceline.plan import CLAIM, Plan
from paceline.view import places, runs


def resolved(plan: Plan, cluster: bool = False) -> Plan:
    """With the place of a run's snapshots instead of its id."""
    origin = plan.snapshots.origin
    if not origin or "/" in origin:
        return plan
    run = runs.find(origin, remaining=True)
    place = places.place_of(run)
    get = f"`paceline snapshots get {run.name} --to FOLDER` copies one"
    if places.in_pod(run):
        raise places.OutOfReach(f"snapshots.from: those of {run.name} are in its captain's pod; {get}")
    if cluster and place.startswith("/"):
        raise places.OutOfReach(f"snapshots.from: those of {run.name} are at {place} on this machine, unseen by pods")
    if not cluster and place.startswith(CLAIM):
        raise places.OutOfReach(f"snapshots.from: those of {run.name} are at {place} on its cluster; {get}")
    where = f"{place.rstrip('/')}/{run.name}"
    return replace(plan, snapshots=replace(plan.snapshots, origin=where))


def of_run(folder: Path) -> str:
    """What a run that this machine knows was started from; empty: from nothing."""
    planned = (runs.read_object(folder / "plan.json") or {}).get("snapshots")
    origin = planned.get("origin") if isinstance(planned, dict) else None
    return origin if isinstance(origin, str) else ""


def check(plan: Plan) -> None:
    """Of a run on this machine, which has what its agents will have to reach them with. StoreError: what is wrong."""
    from paceline.storage.origin import PATIENCE, candidates, find
    from paceline.storage.places import open_store
    from paceline.storage.snapshots import Snapshots
    from paceline.storage.store import StoreError

    with _settings(plan):
        if plan.snapshots.in_bucket:
            open_store(plan.snapshots.to, PATIENCE).names("generations/")
        if not plan.snapshots.origin:
            return
        origin = find(plan.snapshots.origin)
        if origin.place:
            source = Snapshots(open_store(origin.place, PATIENCE), origin.run)
            if not any(source.has(id) for id in candidates(origin, source)):
                raise StoreError(f"there is no snapshot {origin.id} to start from at {origin.place}/{origin.run}")


def taken(plan: Plan, run: str) -> str:
    """Why there can be no other run of that id where its snapshots would go; empty: there can."""
    to = plan.snapshots.to
    if not to or plan.snapshots.claimed[0]:
        return ""
    from paceline.storage import snapshots
    from paceline.storage.origin import PATIENCE
    from paceline.storage.places import open_store

    with _settings(plan):
        found = snapshots.Snapshots(open_store(to, PATIENCE), run).taken()
    return snapshots.taken(to, run) if found else ""


@contextmanager
def _settings(plan: Plan) -> Iterator[None]:
    """What the job says of its buckets, as agents have it."""
    before = dict(os.environ)
    os.environ.update(next(role.env for role in plan.roles if role.decides))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
