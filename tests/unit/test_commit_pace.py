"""How often snapshots are sent to the store, and when they are sent at once."""

from __future__ import annotations

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.transfers import requests as req
from paceline.plan import Snapshots
from paceline.storage.snapshots.manifest import SnapshotId
from support import worlds
from support.committing import AWAY, a_plan, asked, committed, counted, warnings
from support.worlds import World


def up(every: float | None) -> World:
    return worlds.up(a_plan(snapshots=Snapshots("s3://bucket/runs", keep=10, commit_every=every)))


def save(world: World, *steps: int, seconds: float = 0.0) -> None:
    """`seconds`: how long sending takes."""
    for step in steps:
        world.save("worker-0", step)
        world.now += seconds
        world.deliver_all()


def steps(world: World) -> list[int]:
    return [id.step for id in counted(world)][::-1]


def notes(world: World) -> list[str]:
    texts = [fields["text"] for kind, _, fields in world.events if kind == "note"]
    return [text for text in texts if "not every saved snapshot" in text]


def test_commit_every_limits_how_often_snapshots_are_sent() -> None:
    world = up(30.0)
    save(world, 10, 20, 30)
    assert steps(world) == [10] and world.captain.commits.skipped == 1
    world.pass_time(29)
    world.deliver_all()
    assert steps(world) == [10]
    world.pass_time(2)
    world.deliver_all()
    assert steps(world) == [10, 30]


def test_by_default_quick_commits_are_not_delayed() -> None:
    world = up(None)
    save(world, 10, 20, 30, seconds=0.9)
    assert steps(world) == [10, 20, 30] and notes(world) == []


def test_by_default_commits_take_up_a_quarter_of_the_time() -> None:
    world = up(None)
    save(world, 10, seconds=10.0)
    save(world, 20)
    world.pass_time(29)
    world.deliver_all()
    assert steps(world) == [10]
    world.pass_time(2)
    world.deliver_all()
    assert steps(world) == [10, 20]


def test_what_is_skipped_is_said_once() -> None:
    world = up(30.0)
    save(world, 10, 20, 30, 40)
    assert notes(world) == [
        "not every saved snapshot is committed: the newest is sent at most every 30 s (snapshots.commit_every)"
    ]


def test_the_last_snapshot_is_committed_at_once_when_training_ends() -> None:
    world = up(3600.0)
    save(world, 10, 20)
    for task in ("worker-0", "worker-1"):
        world.exit(task, "")
    world.deliver_all()
    assert steps(world) == [10, 20] and world.last("run-ended")["status"] == "succeeded"


def test_stop_commits_the_newest_snapshot_at_once() -> None:
    world = up(3600.0)
    save(world, 10, 20)
    world.tell(ev.StopRequested("a user stopped it"))
    world.deliver_all()
    assert steps(world) == [10, 20]


def test_a_host_that_shuts_down_has_the_newest_snapshot_committed_at_once() -> None:
    world = up(3600.0)
    save(world, 10, 20)
    world.tell(ev.HostLeaving("worker-host-1", "SIGTERM"))
    world.deliver_all()
    assert steps(world) == [10, 20]


@pytest.mark.parametrize("every", [None, 50.0])
def test_a_restart_resumes_from_the_newest_snapshot_whether_it_is_committed_or_not(every: float | None) -> None:
    world = up(every)
    save(world, 10, seconds=10.0)
    save(world, 20)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-20-g1"
    committed(world, 30)
    world.pass_time(51)
    world.deliver_all()
    assert counted(world)[0] == SnapshotId(30, 2)


@pytest.mark.parametrize("every", [None, 3600.0])
def test_a_store_that_fails_is_tried_less_and_less_often_and_reported_once(every: float | None) -> None:
    world = up(every)
    attempts = 0
    for step in range(1, 51):
        world.save("worker-0", step)
        world.deliver("worker-host-0")
        while world.place.asked:
            request, _ = world.place.asked.popleft()
            attempts += isinstance(request, req.CommitSnapshot)
            world.tell(ev.StoreAnswered(request, AWAY))
        world.now += 1.0
        world.beat_all()
    assert attempts == 5  # after 2, 4, 8, 16 and 32 s
    assert warnings(world) == ["the snapshot of step 1 is not committed yet: the bucket does not answer"]
    assert notes(world) == [], "the store is the reason"


def test_an_older_snapshot_is_not_sent_before_the_one_that_the_group_takes_for_a_host_that_shuts_down() -> None:
    world = up(3600.0)
    save(world, 10, 20)
    hosts = [f"worker-host-{number}" for number in range(2)]
    for number, host in enumerate(hosts):
        world.tell(ev.Heartbeat(host, 1, {}, asking=(f"worker-{number}",)))
    world.tell(ev.HostLeaving(hosts[1], "SIGTERM"))
    [where] = [each for each in world.machines[hosts[0]].inbox if isinstance(each, ins.AgreeOnStep)]
    for say in ("here", "yes", "saves"):
        for number, host in enumerate(hosts):
            world.tell(ev.AgreementReply(host, f"worker-{number}", say, where.words["which"], 3, 26))
    world.tell(ev.Tick())
    assert not [each for each in world.machines[hosts[0]].inbox if isinstance(each, ins.StorePart)]
    world.save("worker-0", 26)
    world.deliver_all()
    assert steps(world) == [10, 26]


def test_a_host_that_vanished_while_it_shut_down_does_not_hurry_commits() -> None:
    world = up(3600.0)
    save(world, 10)
    world.tell(ev.HostLeaving("worker-host-1", "SIGTERM"))
    world.captain.members["worker-host-1"].connected = False
    save(world, 20, 30)
    assert steps(world) == [10]


def test_a_captain_that_returns_does_not_hurry_commits() -> None:
    world = up(30.0)
    save(world, 10, 20)
    world.restart_captain()
    world.join_all()
    world.deliver_all()
    assert steps(world) == [10]
    world.pass_time(31)
    world.deliver_all()
    assert steps(world) == [10, 20]


def test_a_snapshot_that_a_listing_shows_as_committed_is_no_longer_being_sent() -> None:
    """The answer to its commit was lost, and the store is listed while the commit is requested again."""
    world = up(None)
    save(world, 10)
    world.save("worker-0", 20)
    world.deliver("worker-host-0")
    commit, _ = world.place.asked.popleft()
    assert isinstance(commit, req.CommitSnapshot) and world.place.answer(commit) == req.Done()
    world.tell(ev.StoreAnswered(commit, AWAY))
    world.now += 3
    world.tell(ev.Tick())
    world.deliver("worker-host-0")
    assert asked(world, req.CommitSnapshot), "it is requested again"
    listing = world.captain.commits.contents.list_request()
    world.tell(ev.StoreAnswered(listing, world.place.answer(listing)))
    world.deliver_all()
    save(world, 30)
    assert steps(world) == [10, 20, 30]
