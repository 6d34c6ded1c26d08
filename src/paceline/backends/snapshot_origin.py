"""The snapshot that a new run starts from, and its store: checked before anything is started."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import Argument, Call
from paceline.plan import CLAIM, Plan
from paceline.storage.stores.locations import SETTINGS, is_bucket
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import run_folders, run_lookup
from paceline.view.snapshots import snapshot_locations, store_settings


def resolved(plan: Plan, cluster: bool = False) -> Plan:
    """The plan with `snapshots.from` as a location, if it was the id of a run."""
    origin = plan.snapshots.origin
    if not origin or "/" in origin:
        return plan
    run = run_lookup.find(origin, remaining=True)
    store = snapshot_locations.location_of(run)
    copy_one = ("`", Call("copy_snapshot", run.name, (Argument("to"),)), "` copies one")
    if snapshot_locations.in_pod(run):
        raise snapshot_locations.OutOfReach(
            f"the snapshots of {run.name} are in its captain's pod", where="snapshots.from", remedy=copy_one
        )
    if cluster and store.startswith("/"):
        raise snapshot_locations.OutOfReach(
            f"the snapshots of {run.name} are in {store} on this machine, where pods cannot read them",
            where="snapshots.from",
        )
    if not cluster and store.startswith(CLAIM):
        raise snapshot_locations.OutOfReach(
            f"the snapshots of {run.name} are at {store} on its cluster", where="snapshots.from", remedy=copy_one
        )
    if is_bucket(store) and not run_folders.is_own(run.folder):
        store_settings.check_bucket(run.name, store)
    location = f"{store.rstrip('/')}/{run.name}"
    return replace(plan, snapshots=replace(plan.snapshots, origin=location))


def check(plan: Plan) -> None:
    """Check that the snapshot exists and the store responds; for local runs, whose agents use the same credentials.
    Raises StoreError."""
    from paceline.storage.snapshots.origin import PATIENCE, candidates, find
    from paceline.storage.snapshots.repository import SnapshotRepository
    from paceline.storage.stores.locations import open_store

    settings = _settings(plan)
    if plan.snapshots.in_bucket:
        open_store(plan.snapshots.to, PATIENCE, settings).names("generations/")
    if not plan.snapshots.origin:
        return
    origin = find(plan.snapshots.origin)
    if origin.location:
        source = SnapshotRepository(open_store(origin.location, PATIENCE, settings), origin.run)
        if not any(source.has(id) for id in candidates(origin, source)):
            raise StoreError(f"snapshots.from: {origin.location}/{origin.run} has no snapshot {origin.id}")


def taken(plan: Plan, run: str) -> StoreError | None:
    """The error if the run's id is already in use at the location for its snapshots."""
    to = plan.snapshots.to
    if not to or plan.snapshots.claimed[0]:
        return None
    from paceline.storage.snapshots import repository
    from paceline.storage.snapshots.origin import PATIENCE
    from paceline.storage.stores.locations import open_store

    is_taken = repository.SnapshotRepository(open_store(to, PATIENCE, _settings(plan)), run).taken()
    return repository.run_exists(to, run) if is_taken else None


def _settings(plan: Plan) -> dict[str, str]:
    """The settings for object stores in the job's environment, as agents receive them."""
    environment = next(role.env for role in plan.roles if role.decides)
    return {name: value for name, value in environment.items() if name.startswith(SETTINGS)}
