"""What hosts keep of snapshots, so that the place for them may be lost: on a cluster, without a store, with a pod."""

from __future__ import annotations

from paceline.storage.manifest import Id
from support.worlds import LEASE, World, make_plan, up


def committed(world: World) -> list[Id]:
    return world.place.snapshots.known().counted()


def saved_twice() -> World:
    world = up(make_plan(2), copies=True)
    for step in (10, 20):
        for task in ("worker-0", "worker-1"):
            world.save(task, step, parts=2)
        world.deliver_all()
    return world


def test_hosts_keep_the_newest() -> None:
    world = saved_twice()
    assert committed(world) == [Id(20, 1), Id(10, 1)]
    assert [set(machine.held) for machine in world.machines.values()] == [
        {("worker-0", Id(20, 1))},
        {("worker-1", Id(20, 1))},
    ]


def test_a_place_that_is_lost_with_its_captain_gets_them_again_while_training_goes_on() -> None:
    world = saved_twice()
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    assert committed(world) == [Id(20, 1)]
    assert {process.generation for _, process in world.running()} == {1}
    assert "step 20 is brought back" in world.last("note")["text"]
    for task in ("worker-0", "worker-1"):
        world.save(task, 30, parts=2)
    world.deliver_all()
    assert committed(world) == [Id(30, 1), Id(20, 1)]


def test_also_in_a_later_generation_than_the_copies_are_from() -> None:
    world = saved_twice()
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.captain.generation == 2
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    assert committed(world) == [Id(20, 1)]
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-20-g1"


def test_when_tasks_and_captain_are_lost_at_once_they_begin_from_the_copies() -> None:
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


def test_a_host_that_is_lost_takes_its_copy_with_it_and_the_place_has_it() -> None:
    world = saved_twice()
    world.host_is_replaced("worker-host-1", dead=True)
    world.join_all()
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-20-g1"


def test_with_the_place_and_one_of_the_copies_lost_training_begins_anew() -> None:
    """Two of two are gone: nothing whole is left anywhere."""
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


def test_a_place_that_is_lost_before_anything_was_saved_costs_no_work() -> None:
    world = up(make_plan(2), copies=True)
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
    assert committed(world) == [Id(10, 1)]
