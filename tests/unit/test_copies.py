"""Copies of snapshots on hosts, in case their store is lost: on a cluster without a bucket, it is lost with a pod."""

from __future__ import annotations

from paceline.storage.snapshots.manifest import SnapshotId
from support.worlds import LEASE, World, make_plan, up


def committed(world: World) -> list[SnapshotId]:
    return world.place.snapshots.inventory().current()


def saved_twice() -> World:
    world = up(make_plan(2), serves="")
    for step in (10, 20):
        for task in ("worker-0", "worker-1"):
            world.save(task, step, parts=2)
        world.deliver_all()
    return world


def test_hosts_keep_the_newest_snapshot() -> None:
    world = saved_twice()
    assert committed(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]
    assert [set(machine.held) for machine in world.machines.values()] == [
        {("worker-0", SnapshotId(20, 1))},
        {("worker-1", SnapshotId(20, 1))},
    ]


def test_a_store_lost_with_its_captain_is_restored_from_copies_while_training_continues() -> None:
    world = saved_twice()
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    assert committed(world) == [SnapshotId(20, 1)]
    assert {process.generation for _, process in world.running()} == {1}
    assert "storing step 20 again, from copies" in world.last("note")["text"]
    for task in ("worker-0", "worker-1"):
        world.save(task, 30, parts=2)
    world.deliver_all()
    assert committed(world) == [SnapshotId(30, 1), SnapshotId(20, 1)]


def test_copies_of_an_earlier_generation_are_restored_too() -> None:
    world = saved_twice()
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.captain.generation == 2
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    assert committed(world) == [SnapshotId(20, 1)]
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-20-g1"


def test_tasks_start_from_the_copies_if_tasks_and_captain_are_lost_at_once() -> None:
    world = saved_twice()
    for host in list(world.machines):
        world.agent_dies(host)
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-20-g1"
    assert len(world.running()) == 2


def test_the_store_still_has_the_snapshot_if_a_host_is_lost_with_its_copy() -> None:
    world = saved_twice()
    world.host_is_replaced("worker-host-1", dead=True)
    world.join_all()
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-20-g1"


def test_training_starts_from_scratch_if_the_store_and_one_copy_are_lost() -> None:
    """The store and the only copy of a part are lost: no complete snapshot remains."""
    world = saved_twice()
    world.place_is_lost()
    world.restart_captain(with_notes=True)
    world.host_is_replaced("worker-host-1", dead=True)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert world.last("generation-formed")["restore"] is None
    assert len(world.running()) == 2


def test_losing_the_store_before_anything_was_saved_costs_no_work() -> None:
    world = up(make_plan(2), serves="")
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert {process.generation for _, process in world.running()} == {1}
    for task in ("worker-0", "worker-1"):
        world.save(task, 10, parts=2)
    world.deliver_all()
    assert committed(world) == [SnapshotId(10, 1)]
