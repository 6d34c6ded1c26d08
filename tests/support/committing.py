"""A captain's world with a store: plans, what was asked of the store, what counts as committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.plan import Plan, Snapshots
from paceline.storage.manifest import Id
from support.worlds import World, make_plan

AWAY = {"kind": "store", "text": "the bucket does not answer", "passing": True}


def a_plan(workers: int = 2, commit: float = 60.0, snapshots: Snapshots | None = None, **more: Any) -> Plan:
    made = make_plan(workers, **more)
    kept = snapshots or Snapshots("s3://bucket/runs", keep=10)
    return replace(made, snapshots=kept, limits=replace(made.limits, commit=commit))


def counted(world: World) -> list[Id]:
    return world.place.snapshots.known().counted()


def committed(world: World, *steps: int) -> World:
    for step in steps:
        world.save("worker-0", step)
        world.deliver_all()
    return world


def warnings(world: World) -> list[str]:
    return [fields["text"] for kind, _, fields in world.events if kind == "warning"]


def asked(world: World, do: str) -> list[dict[str, Any]]:
    return [request for request in world.place.asked if request["do"] == do]
