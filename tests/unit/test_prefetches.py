"""Snapshots that hosts fetch from others before a restart needs them: which, when, and when not."""

from __future__ import annotations

import pytest

from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots.prefetches import REMEASURE
from paceline.agent.options import SHARED_FOLDER
from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import SnapshotId
from support.worlds import World, make_plan, up

ADDRESS = "10.0.0.1:7000"
FIRST, SECOND, THIRD = "worker-host-0", "worker-host-1", "worker-host-2"


def fetching(world: World) -> list[tuple[str, int, list[str]]]:
    """Hosts that were told to fetch, but have not received it yet: host, step, and the tasks whose parts they lack."""
    inboxes = [each for machine in world.machines.values() for each in machine.inbox]
    fetches = [each for each in inboxes if isinstance(each, ins.PrefetchSnapshot) and each.sources]
    return [(each.host, each.snapshot.step, sorted(each.sources)) for each in fetches]


def fetch(world: World, host: str, seconds: float) -> None:
    """The host fetches what it was told to, which takes this long."""
    world.deliver(host)
    assert world.machines[host].prefetching is not None
    world.pass_time(seconds)
    world.finish_prefetch(host)


def test_hosts_that_lack_the_newest_snapshot_fetch_it_one_after_the_other() -> None:
    world = up(make_plan(3), ADDRESS)
    world.save("worker-0", 10)
    assert fetching(world) == [(SECOND, 10, ["worker-0"])]
    fetch(world, SECOND, 2.0)
    assert fetching(world) == [(THIRD, 10, ["worker-0"])]
    fetch(world, THIRD, 2.0)
    assert fetching(world) == []
    assert [machine.prefetched for machine in world.machines.values()] == [None, SnapshotId(10, 1), SnapshotId(10, 1)]


def test_a_host_fetches_only_the_parts_of_other_hosts() -> None:
    world = up(make_plan(2), ADDRESS)
    world.save("worker-0", 10, parts=2)
    assert fetching(world) == [], "the snapshot is not complete"
    world.save("worker-1", 10, parts=2)
    assert fetching(world) == [(FIRST, 10, ["worker-1"])]
    fetch(world, FIRST, 1.0)
    assert fetching(world) == [(SECOND, 10, ["worker-0"])]


@pytest.mark.parametrize("serves", [SHARED_FOLDER, ""])
def test_nothing_is_fetched_if_hosts_share_a_folder_or_cannot_reach_each_other(serves: str) -> None:
    world = up(make_plan(2), serves)
    world.save("worker-0", 10)
    assert fetching(world) == []


def test_nothing_is_fetched_if_only_the_host_that_saves_resumes() -> None:
    """Workers of a parameter-server job have no state."""
    world = up(make_plan(2, ps=1, chief=True), ADDRESS)
    world.save("chief-0", 10)
    assert fetching(world) == []


def test_the_snapshots_of_an_evaluator_and_of_idle_hosts_are_not_fetched() -> None:
    world = up(make_plan(1, evaluator=1), ADDRESS)
    world.save("worker-0", 10)
    assert fetching(world) == []


def test_a_snapshot_is_not_fetched_if_the_next_one_would_come_too_soon_after_it() -> None:
    world = up(make_plan(2), ADDRESS)
    world.save("worker-0", 10)
    fetch(world, SECOND, 6.0)
    world.pass_time(5.0)
    world.save("worker-0", 20)  # 11 s after the last one: less than four times the time of a fetch
    world.deliver_all()
    assert fetching(world) == [] and world.machines[SECOND].prefetched == SnapshotId(10, 1)
    assert "fetching takes 6.0 s in total, and a snapshot is saved every 11.0 s" in world.last("note")["text"]
    world.pass_time(24.0)
    world.save("worker-0", 30)
    assert fetching(world) == [(SECOND, 30, ["worker-0"])]


def test_a_fetch_ends_when_a_newer_snapshot_is_complete() -> None:
    world = up(make_plan(2, hang_after=None), ADDRESS)
    world.save("worker-0", 10)
    world.deliver(SECOND)
    world.pass_time(20.0)
    world.save("worker-0", 20)
    world.deliver(SECOND)
    assert world.machines[SECOND].prefetching is None, "it takes at least 20 s, which is the time between two snapshots"
    world.pass_time(80.0)
    world.save("worker-0", 30)
    assert fetching(world) == [(SECOND, 30, ["worker-0"])]
    world.deliver(SECOND)
    world.pass_time(1.0)
    world.exit("worker-1")
    world.deliver_all()
    assert world.captain.generation == 2 and world.machines[SECOND].restored == SnapshotId(30, 1)


def test_the_time_of_all_hosts_counts() -> None:
    world = up(make_plan(3), ADDRESS)
    world.save("worker-0", 10)
    for host in (SECOND, THIRD):
        fetch(world, host, 6.0)
    world.pass_time(28.0)
    world.save("worker-0", 20)  # 40 s after the last one
    assert fetching(world) == []


def test_the_time_of_a_fetch_is_measured_again_after_a_while() -> None:
    world = up(make_plan(2, hang_after=None), ADDRESS)
    world.save("worker-0", 10)
    fetch(world, SECOND, 10.0)
    for step in range(1, int(REMEASURE) + 1):
        world.pass_time(10.0)
        world.save("worker-0", 10 + step)
        world.deliver_all()
        assert world.machines[SECOND].prefetched == SnapshotId(10, 1)
    world.pass_time(1.0)
    world.save("worker-0", 100)
    assert fetching(world) == [(SECOND, 100, ["worker-0"])]


def test_a_snapshot_that_could_not_be_fetched_is_not_tried_again_but_the_next_one_is() -> None:
    world = up(make_plan(2), ADDRESS)
    world.peers_fail = req.Failure(req.HERE, "too little room", True)
    world.save("worker-0", 10)
    fetch(world, SECOND, 1.0)
    world.pass_time(30.0)
    assert fetching(world) == []
    world.pass_time(10.0)
    world.save("worker-0", 20)
    assert fetching(world) == [(SECOND, 20, ["worker-0"])]


def test_a_host_that_joins_again_fetches_again() -> None:
    """It may have been replaced, or may not have received the instruction."""
    world = up(make_plan(2), ADDRESS)
    world.save("worker-0", 10)
    world.disconnect(SECOND)
    world.join(SECOND)
    assert fetching(world) == [(SECOND, 10, ["worker-0"])]


def test_a_lost_host_does_not_keep_others_from_fetching() -> None:
    world = up(make_plan(3), ADDRESS)
    world.save("worker-0", 10)
    world.disconnect(SECOND)
    assert fetching(world) == [(THIRD, 10, ["worker-0"])]


def test_nothing_is_fetched_in_advance_while_a_generation_starts_or_again_after_it() -> None:
    world = up(make_plan(2), ADDRESS)
    world.save("worker-0", 10)
    fetch(world, SECOND, 1.0)
    world.exit("worker-1")
    world.deliver_all()
    assert world.captain.generation == 2 and world.machines[SECOND].restored == SnapshotId(10, 1)
    assert fetching(world) == [] and world.machines[SECOND].prefetching is None
    world.pass_time(10.0)
    world.save("worker-0", 20)
    assert fetching(world) == [(SECOND, 20, ["worker-0"])]
