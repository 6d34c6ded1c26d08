"""A captain's world with a store: its plan, the requests to the store, the committed snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from paceline.agent.transfers.requests import STORE, Failure
from paceline.plan import Plan, Snapshots
from paceline.storage.snapshots.manifest import SnapshotId
from support.worlds import World, make_plan

R = TypeVar("R")
AWAY = Failure(STORE, "the bucket does not answer", True)


def a_plan(workers: int = 2, commit: float = 60.0, snapshots: Snapshots | None = None, **more: Any) -> Plan:
    plan = make_plan(workers, **more)
    settings = snapshots or Snapshots("s3://bucket/runs", keep=10)
    return replace(plan, snapshots=settings, limits=replace(plan.limits, commit=commit))


def counted(world: World) -> list[SnapshotId]:
    return world.place.snapshots.inventory().current()


def committed(world: World, *steps: int) -> World:
    for step in steps:
        world.save("worker-0", step)
        world.deliver_all()
    return world


def warnings(world: World) -> list[str]:
    return [fields["text"] for kind, _, fields in world.events if kind == "warning"]


def asked(world: World, kind: type[R]) -> list[R]:
    return [request for request, _ in world.place.asked if isinstance(request, kind)]
