"""Generations that start from snapshots that are not committed yet: a process that died does not wait for the store."""

from __future__ import annotations

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import Manifest, SnapshotId
from support.committing import AWAY, a_plan, asked, committed, counted, warnings
from support.worlds import World, up

HOSTS = ("worker-host-0", "worker-host-1")


def restored(world: World) -> list[str | None]:
    return [fields["restore"] for kind, _, fields in world.events if kind == "generation-formed"]


def unreachable(world: World) -> World:
    world.place.fails = AWAY
    return world


def fail(world: World, task: str = "worker-1") -> None:
    """The task dies, and the next generation starts."""
    generation = world.captain.generation
    world.exit(task, "signal")
    for _ in range(4):
        world.deliver_all()
        world.pass_time(4)  # the back-off after several failures
    assert world.captain.generation > generation


def recover(world: World) -> None:
    """The store answers again."""
    world.place.fails = None
    for _ in range(8):
        world.output()
        world.pass_time(10)
        world.deliver_all()


def test_a_restart_does_not_wait_for_the_commit() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    assert len(world.running()) == 2 and restored(world) == [None, "step-20-g1"]
    assert world.told_committed == [SnapshotId(10, 1)], "the store has not answered yet"
    world.deliver_all()
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)], "the next generation commits its parent"


def test_a_restart_does_not_wait_for_a_store_that_does_not_answer() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    fail(world)
    assert len(world.running()) == 2 and restored(world) == [None, "step-10-g1"], "from the copy on the host"


def test_the_parent_is_committed_after_the_record_of_its_child() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    fail(world)
    recover(world)
    assert world.place.snapshots.inventory().records[2].parent == SnapshotId(20, 1)
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)] == world.captain.commits.contents.chain
    assert counted(committed(world, 30)) == [SnapshotId(30, 2), SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_newer_snapshot_replaces_a_parent_that_is_not_committed_yet() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    fail(world)
    world.save("worker-0", 30)
    recover(world)
    assert counted(world) == [SnapshotId(30, 2), SnapshotId(10, 1)]


def test_a_parent_that_is_lost_with_its_host_leads_back_to_the_newest_committed_snapshot() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    fail(world)
    world.save("worker-1", 30, parts=2)  # the other part is never saved
    world.host_is_replaced(HOSTS[0], dead=True)
    world.join_all()
    recover(world)
    assert restored(world)[-1] == "step-10-g1"
    parts = world.place.snapshots.manifest(SnapshotId(10, 1)).parts
    world.place.snapshots.create(Manifest("run", SnapshotId(20, 1), 2, parts))  # by a porter that was frozen
    assert counted(world) == [SnapshotId(10, 1)], "nothing of the orphaned line counts"
    newest = SnapshotId(40, world.captain.generation)
    assert counted(committed(world, 40)) == [newest, SnapshotId(10, 1)]


def test_two_parents_in_a_row_that_are_not_committed() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    fail(world)
    world.save("worker-0", 30)
    fail(world)
    assert restored(world) == [None, "step-20-g1", "step-30-g2"]
    recover(world)
    records = world.place.snapshots.inventory().records
    assert [records[number].parent for number in (1, 2, 3)] == [None, SnapshotId(20, 1), SnapshotId(30, 2)]
    assert counted(world) == [SnapshotId(30, 2), SnapshotId(10, 1)]


def test_a_store_that_is_unreachable_for_three_generations() -> None:
    world = unreachable(committed(up(a_plan(limit=9)), 10))
    for step in (20, 30, 40):
        world.save("worker-0", step)
        fail(world)
    (warning,) = [text for text in warnings(world) if text.startswith("cannot write")]
    assert "training continues" in warning
    recover(world)
    assert sorted(world.place.snapshots.inventory().records) == [1, 2, 3, 4]
    assert counted(world) == [SnapshotId(40, 3), SnapshotId(10, 1)]
    assert counted(committed(world, 50))[0] == SnapshotId(50, 4)


def test_members_know_the_records_that_a_lost_captain_owed() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    fail(world)
    world.save("worker-0", 30)
    fail(world)
    world.restart_captain(with_notes=False)
    world.place.fails = None
    world.join_all()
    recover(world)
    assert restored(world) == [None, "step-20-g1", "step-30-g2"], "training continues"
    assert sorted(world.place.snapshots.inventory().records) == [1, 2, 3]
    assert counted(world) == [SnapshotId(30, 2), SnapshotId(10, 1)]


def test_a_captain_whose_record_was_written_without_an_answer_writes_the_same_again() -> None:
    for with_notes in (True, False):
        world = committed(up(a_plan()), 10)
        world.save("worker-0", 20)
        world.exit("worker-1", "signal")
        for host in (*HOSTS, *HOSTS):
            world.deliver(host)
        assert asked(world, req.BeginGeneration)
        world.restart_captain(with_notes, answers_are_lost=True)
        world.join_all()
        recover(world)
        assert world.left is None and restored(world) == [None, "step-20-g1"]
        assert counted(committed(world, 30)) == [SnapshotId(30, 2), SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_captain_without_notes_does_not_commit_below_a_generation_that_its_predecessor_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = committed(up(a_plan(), serves=""), 10)
    world.save("worker-0", 20)
    host, held = world.machines[HOSTS[0]], dict(world.machines[HOSTS[0]].held)
    host.inbox.clear()  # the request to send it is lost
    monkeypatch.setattr(world, "_start", lambda *_: None)  # as are the requests to start the tasks,
    world.exit("worker-1", "signal")
    for _ in range(8):
        world.pass_time(1)
        for name in HOSTS:
            world.deliver(name)
    host.held = held  # and to delete it
    monkeypatch.undo()
    assert restored(world) == [None, "step-10-g1"] and not world.running(), "generation 2 is about to start"
    world.restart_captain(with_notes=False, answers_are_lost=True)
    world.join_all()
    recover(world)
    assert world.left is None and world.captain.generation == 3
    assert SnapshotId(20, 1) not in world.told_committed
    newest = committed(world, 30).told_committed[-1]
    assert counted(world) == [newest, SnapshotId(10, 1)] and newest == SnapshotId(30, 3)


def test_a_parent_that_a_frozen_porter_commits_late_counts() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    ((commit, ticket),) = list(world.place.asked)
    world.place.asked.clear()
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    assert len(world.running()) == 2 and restored(world) == [None, "step-20-g1"]
    world.deliver_all()
    world.tell(ev.StoreAnswered(commit, world.place.answer(commit), ticket))
    world.deliver_all()
    assert world.captain.generation == 2 and world.left is None
    world.now += 3
    assert counted(committed(world, 30)) == [SnapshotId(30, 2), SnapshotId(20, 1), SnapshotId(10, 1)]


def test_parts_on_two_hosts_are_exchanged() -> None:
    world = unreachable(committed(up(a_plan(), serves="10.0.0.1:7000"), 10))
    world.save("worker-0", 20, parts=2)
    world.save("worker-1", 20, parts=2)
    fail(world)
    assert restored(world) == [None, "step-20-g1"]


def test_a_snapshot_whose_part_is_lost_with_a_host_is_not_restored() -> None:
    world = unreachable(committed(up(a_plan()), 10))
    world.save("worker-0", 20, parts=2)
    world.save("worker-1", 20, parts=2)
    world.host_is_replaced(HOSTS[1], dead=True)
    world.join_all()
    world.deliver_all()
    recover(world)
    assert restored(world) == [None, "step-10-g1"]


def test_hosts_that_cannot_reach_each_other_wait_for_the_commit() -> None:
    world = committed(up(a_plan(), serves=""), 10)
    world.save("worker-0", 20)
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    assert not world.running()
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"] and SnapshotId(20, 1) in world.told_committed


def test_hosts_hold_only_what_is_needed_while_the_store_is_slow() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    world.deliver(HOSTS[0])  # being committed; the store does not answer yet
    for step in range(20, 100, 10):
        world.save("worker-0", step)
        world.deliver(HOSTS[0])
    held = sorted(snapshot.step for _, snapshot in world.machines[HOSTS[0]].held)
    assert held == [10, 90] and world.captain.commits.skipped == 7


@pytest.mark.parametrize("is_reachable", [True, False])
def test_the_snapshots_of_a_host_do_not_become_more_while_generations_come_and_go(is_reachable: bool) -> None:
    """Whatever is not sent yet and whatever records are owed: a host has the newest committed snapshot, the one that is
    being sent, and the newest complete one; and a part of the one that the group is saving."""
    world = committed(up(a_plan()), 10)
    if not is_reachable:
        unreachable(world)
    for step in range(20, 400, 10):
        world.save("worker-0", step, parts=2)
        most_held = len({snapshot for _, snapshot in world.machines[HOSTS[0]].held})
        world.save("worker-1", step, parts=2)
        for host in HOSTS:
            world.deliver(host)  # the store does not answer meanwhile
        for host in HOSTS:
            held = {snapshot for _, snapshot in world.machines[host].held}
            assert len(held) <= 3 and most_held <= 4
        if step % 50 == 0:
            fail(world)
    assert len(restored(world)) == 8 and world.captain.commits.skipped > 10
