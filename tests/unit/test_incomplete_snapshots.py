"""Snapshots that not all tasks save their part of: hosts keep few of them, and a task that is behind completes some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain.snapshots.incomplete_snapshots import MOST
from paceline.plan import HOST
from support.agreeing import AgreeingTasks
from support.committing import a_plan, warnings
from support.worlds import LEASE, World, up

HOSTS = ("worker-host-0", "worker-host-1")
COMPLETE = 4  # the newest complete snapshot, the newest committed one, the one that is being sent, and the next one


def a_world(workers: int = 2, **settings: Any) -> World:
    return up(a_plan(workers, hang_after=None, **settings))


def save(world: World, task: str, steps: Iterable[int], parts: int = 2) -> None:
    """Never are there more snapshots than stated, on any host or in the captain."""
    for step in steps:
        world.save(task, step, parts)
        for _ in range(2):
            world.answer()
            for host in world.machines:
                world.deliver(host)
        held = [len([name for name, _ in machine.held if name == task]) for machine in world.machines.values()]
        assert max(held) <= MOST + COMPLETE and world.captain.commits.held_count <= MOST + COMPLETE


def held(world: World, host: str = HOSTS[0]) -> list[int]:
    return sorted(snapshot.step for _, snapshot in world.machines[host].held)


def committed(world: World) -> list[int]:
    return [snapshot.step for snapshot in world.told_committed]


def test_of_the_snapshots_that_one_task_never_saves_the_oldest_and_the_newest_are_kept() -> None:
    world = a_world()
    save(world, "worker-0", range(1, 101))
    assert held(world) == [1, 2, 99, 100]
    assert warnings(world) == [
        "the snapshot of step 3 is incomplete and was deleted: it needs 2 parts, but only worker-0 saved one. At "
        "most 4 incomplete snapshots are kept. Each task must save its part of a snapshot, and all tasks must save the "
        "same steps"
    ]
    assert world.captain.commits.skipped == 0, "only complete snapshots count as skipped"


def test_a_few_incomplete_snapshots_are_kept_without_a_warning() -> None:
    world = a_world()
    save(world, "worker-0", range(1, MOST + 1))
    save(world, "worker-1", range(1, MOST + 1))
    assert committed(world) == [1, 2, 3, 4] and warnings(world) == []


@pytest.mark.parametrize("behind", [1, 3, 5, 10, 30])
def test_a_task_that_is_behind_the_others_completes_some_snapshots(behind: int) -> None:
    world = a_world(3)
    for step in range(1, 101):
        save(world, "worker-0", [step], 3)
        save(world, "worker-1", [step], 3)
        if step > behind:
            save(world, "worker-2", [step - behind], 3)
    steps = committed(world)
    assert len(steps) >= 100 // behind - 1 and steps[-1] > 100 - 2 * behind
    assert (warnings(world) == []) == (behind <= MOST)


@pytest.mark.parametrize("every", [2, 3, 7])
def test_a_task_that_is_slower_than_the_others_completes_snapshots_less_and_less_often(every: int) -> None:
    world = a_world()
    for time in range(1, 301):
        save(world, "worker-0", [time])
        if time % every == 0:
            save(world, "worker-1", [time // every])
    steps = committed(world)
    assert len(steps) >= 4 and steps[-1] > 300 / every**2


def test_a_task_that_saves_more_rarely_than_the_others_completes_all_that_it_saves() -> None:
    world = a_world()
    for step in range(1, 101):
        save(world, "worker-0", [step])
        if step % 10 == 1 and step > 1:  # a little later
            save(world, "worker-1", [step - 1])
    assert committed(world) == list(range(10, 100, 10))


def test_snapshots_that_no_task_can_complete_any_more_are_deleted_first() -> None:
    world = a_world()
    for step in range(1, 100, 2):
        save(world, "worker-0", [step])
        save(world, "worker-1", [step + 1])
    assert held(world) == [97, 99] and held(world, HOSTS[1]) == [98, 100]
    assert len(warnings(world)) == 1 and committed(world) == []
    for task in ("worker-0", "worker-1"):
        save(world, task, [200])
    assert committed(world) == [200] and held(world) == held(world, HOSTS[1]) == [200]


def test_a_task_that_has_started_again_may_save_the_same_steps_again() -> None:
    world = a_world(scope=HOST)
    save(world, "worker-0", [1, 2])
    save(world, "worker-1", [1, 2])
    save(world, "worker-1", [10])
    save(world, "worker-0", [5])
    world.exit("worker-1", "signal")
    world.deliver_all()
    save(world, "worker-0", [6, 7, 8, 9])
    assert held(world) == [2, 5, 6, 8, 9], "worker-1 has not saved a later step since it started"
    save(world, "worker-1", [6])
    assert committed(world) == [1, 2, 6]


def test_a_new_generation_keeps_no_incomplete_snapshots() -> None:
    world = a_world()
    for generation in range(1, 4):
        save(world, "worker-0", range(1, 101))
        assert len(held(world)) == MOST and world.captain.generation == generation
        world.exit("worker-1", "signal")
        world.deliver_all()
        world.pass_time(60)
        world.deliver_all()
        assert held(world) == [] and world.captain.commits.held_count == 0
    assert len(warnings(world)) == 1


def test_a_host_that_has_saved_while_it_was_not_connected_keeps_as_few() -> None:
    world = a_world()
    world.disconnect(HOSTS[0])
    for step in range(1, 21):
        world.save("worker-0", step, 2)
    world.join(HOSTS[0])
    world.deliver_all()
    assert held(world) == [1, 2, 19, 20]
    save(world, "worker-0", [21])
    world.disconnect(HOSTS[0])  # before it is told to delete step 21
    world.join(HOSTS[0])
    world.deliver_all()
    assert held(world) == [1, 2, 20, 21]


def with_later_incomplete_snapshots() -> World:
    """A captain that returns cannot tell which snapshots are complete before all hosts have joined: the committed one,
    one that is being sent, the newest complete one, or later ones."""
    world = a_world()
    for step in (10, 20, 30):
        for task in ("worker-0", "worker-1"):
            world.save(task, step, 2)
        if step == 20:  # it is being sent, which takes long
            for machine in world.machines.values():
                machine.inbox.clear()
        world.deliver_all()
    save(world, "worker-0", [40, 50, 60, 70])
    assert held(world) == [10, 20, 30, 40, 50, 60, 70] and committed(world) == [10]
    return world


@pytest.mark.parametrize("with_notes", [True, False])
@pytest.mark.parametrize("first", HOSTS)
def test_a_returning_captain_deletes_nothing_before_all_hosts_have_joined(with_notes: bool, first: str) -> None:
    world = with_later_incomplete_snapshots()
    world.restart_captain(with_notes)
    world.join(first)
    world.deliver_all()
    world.join_all()
    world.deliver_all()
    assert committed(world) == [10, 30] and held(world) == [30, 40, 50, 60, 70]


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_host_that_joins_a_returning_captain_late_still_completes_a_snapshot(with_notes: bool) -> None:
    """Its tasks have ended, and training has to resume from what it has saved before."""
    world = with_later_incomplete_snapshots()
    world.restart_captain(with_notes)
    world.join(HOSTS[0])
    world.pass_time(LEASE + 5)
    world.deliver_all()
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE)
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-30-g1"


def test_the_parts_of_a_snapshot_that_all_tasks_have_agreed_to_take_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task takes it much later than the other, which goes on, and there are older incomplete snapshots."""
    world = a_world()
    tasks = AgreeingTasks(world, monkeypatch)
    save(world, "worker-0", [1, 2])
    world.tell(ev.SaveRequested(HOSTS[0], "worker-0"))
    tasks.train(3, 40)
    ((step,), _) = tasks.saves.values()
    save(world, "worker-0", [step, *range(41, 60)])
    assert held(world) == [1, 2, step, 59]
    save(world, "worker-1", [step])
    assert committed(world) == [step]
    tasks.close()


def test_only_some_of_many_tasks_are_named() -> None:
    world = a_world(12)
    for task in range(11):
        save(world, f"worker-{task}", range(1, MOST + 1), 12)
    save(world, "worker-0", [MOST + 1], 12)
    (text,) = warnings(world)
    named = "worker-0, worker-1, worker-10, worker-2, worker-3, worker-4, worker-5, worker-6 and 3 others saved one."
    assert f"it needs 12 parts, but only {named}" in text
