"""What the captain decides when a user changes the number of hosts of a run."""

from __future__ import annotations

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.transfers.requests import STORE, Failure
from paceline.plan import Plan, from_data, to_data
from support.polling import PollingTasks
from support.worlds import LEASE, World, make_plan, up

EVERY, WAIT = 120.0, 30.0


def plan(most: int = 4, first: int = 2, least: int = 1, evaluator: int = 0) -> Plan:
    return make_plan(most, hang_after=None, least=least, first=first, evaluator=evaluator)


def running(world: World) -> list[str]:
    return sorted(name for name, _ in world.running())


def settle(world: World, seconds: float) -> None:
    """Time passes, and all messages arrive."""
    for _ in range(int(seconds)):
        world.pass_time(1)
        world.deliver_all()


def texts(world: World) -> list[str]:
    return [str(fields["text"]) for kind, _, fields in world.events if kind == "note"]


def has_left(world: World, host: str) -> bool:
    return world.machines[host].finished


def begin(most: int = 4, first: int = 2, least: int = 1, evaluator: int = 0) -> World:
    """Only the hosts that the run starts with have started."""
    world = World(plan(most, first, least, evaluator))
    for host in world.plan.first_hosts:
        world.join(host.name)
    world.deliver_all()
    return world


def scale_up(world: World, hosts: int) -> None:
    """The new hosts come, and are warm."""
    world.scale(hosts)
    for number in range(hosts):
        world.join(f"worker-host-{number}")
        world.tell(ev.SpareReady(f"worker-host-{number}", 3.0))
    world.deliver_all()


def test_a_run_starts_with_its_replicas_and_does_not_wait_for_more() -> None:
    world = begin()
    assert running(world) == ["worker-0", "worker-1"]
    assert "absent" not in world.last("generation-formed")


def test_more_hosts_join_after_a_snapshot_without_elastic_every() -> None:
    world = begin()
    scale_up(world, 3)
    assert world.last("scaled") == {
        "role": "worker", "count": 3, "was": 2, "tasks": ["worker-0", "worker-1", "worker-2"],
    }  # fmt: skip
    assert running(world) == ["worker-0", "worker-1"], "there is no snapshot yet"
    world.save("worker-0", 10)
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1", "worker-2"]
    assert world.last("generation-formed")["restore"] == "step-10-g1"
    assert "restart" not in world.kinds()


def test_the_group_is_interrupted_once_for_several_new_hosts() -> None:
    world = begin()
    world.scale(4)
    world.join("worker-host-2")
    world.tell(ev.SpareReady("worker-host-2", 3.0))
    world.save("worker-0", 10)
    world.deliver_all()
    assert world.captain.generation == 1, "worker-host-3 may be ready soon"
    settle(world, 5)
    world.join("worker-host-3")
    world.tell(ev.SpareReady("worker-host-3", 3.0))
    world.save("worker-0", 20)
    world.deliver_all()
    assert len(running(world)) == 4 and world.captain.generation == 2


def test_a_new_host_does_not_wait_for_long_for_another() -> None:
    world = begin()
    world.scale(4)
    world.join("worker-host-2")
    world.tell(ev.SpareReady("worker-host-2", 3.0))
    settle(world, WAIT + 2)
    world.save("worker-0", 10)
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1", "worker-2"]
    assert world.last("generation-formed")["absent"] == ["worker-3"]
    assert world.captain.scaling.joining_hosts() == ["worker-host-3"]


def test_the_hosts_with_the_highest_indexes_leave_once_a_snapshot_is_committed() -> None:
    world = begin(first=3)
    world.save("worker-0", 10)
    world.deliver_all()
    world.scale(2)
    world.deliver_all()
    assert world.captain.scaling.leaving_hosts() == ["worker-host-2"]
    assert len(running(world)) == 3, "what was saved before the request does not count"
    world.place.fails = Failure(STORE, "away", True)
    world.save("worker-0", 20)
    settle(world, 5)
    assert len(running(world)) == 3, "it is not committed"
    world.place.fails = None
    settle(world, 60)
    assert running(world) == ["worker-0", "worker-1"]
    formed = world.last("generation-formed")
    assert formed["restore"] == "step-20-g1" and "absent" not in formed
    assert has_left(world, "worker-host-2") and world.captain.scaling.leaving_hosts() == []
    assert "worker-host-2 leaves: the group continues with 2 hosts" in texts(world)


def test_hosts_that_leave_count_as_no_failure_and_are_not_awaited() -> None:
    world = begin(first=3)
    world.scale(2)
    world.save("worker-0", 10)
    world.deliver_all()
    assert has_left(world, "worker-host-2")
    world.disconnect("worker-host-2")
    settle(world, 3 * LEASE)
    assert not {"restart", "member-lost", "waiting"} & set(world.kinds())
    assert world.captain.generation == 2 and world.captain.failures.restarts == []
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1"], "the next failure does not bring it back"


def test_the_group_is_asked_for_a_snapshot() -> None:
    world = begin(first=3)
    polling = PollingTasks(world)
    for name in polling.names():
        polling.call(name, 1)
    world.beat_all()
    world.scale(2)
    assert any(isinstance(each, ins.AgreeOnStep) for each in world.machines["worker-host-2"].inbox)


def test_a_host_that_has_a_part_that_is_not_committed_stays() -> None:
    """The next generation starts from a newer snapshot than the one that was committed for the change."""
    world = up(make_plan(3, hang_after=None, least=1), serves="10.0.0.1:7000")
    world.scale(2)
    world.save("worker-2", 10)
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1"] and has_left(world, "worker-host-2")

    world = up(make_plan(3, hang_after=None, least=1), serves="10.0.0.1:7000")
    world.scale(2)
    world.save("worker-2", 10)
    while world.captain.generation == 1 and "note" not in world.kinds():
        world.answer_one() if world.place.asked else world.deliver("worker-host-2")
    world.save("worker-2", 20)  # while the tasks are being ended
    world.place.fails = None
    for host in ("worker-host-0", "worker-host-1", "worker-host-2"):
        world.deliver(host)
    assert not has_left(world, "worker-host-2")
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1"] and has_left(world, "worker-host-2")
    assert world.place.snapshots.has(world.told_committed[-1])


def test_a_host_that_leaves_keeps_no_snapshots() -> None:
    world = up(make_plan(3, hang_after=None, least=1))
    world.scale(2)
    world.save("worker-2", 10)
    world.deliver_all()
    assert has_left(world, "worker-host-2") and world.machines["worker-host-2"].held == {}
    assert world.last("generation-formed")["restore"] == "step-10-g1"


def test_a_host_that_is_not_wanted_leaves_as_soon_as_it_joins() -> None:
    world = begin()
    world.join("worker-host-3")
    world.deliver_all()
    assert has_left(world, "worker-host-3") and len(running(world)) == 2


def test_a_host_that_left_comes_back_when_it_is_wanted_again() -> None:
    world = begin(first=3)
    world.scale(2)
    world.save("worker-0", 10)
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1"]
    scale_up(world, 3)
    world.save("worker-0", 20)
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1", "worker-2"]


def test_a_host_that_has_been_dismissed_is_not_used_until_it_is_replaced() -> None:
    world = begin(first=3)
    world.scale(2)
    world.save("worker-0", 10)
    for _ in range(30):
        world.answer()
        for host in ("worker-host-0", "worker-host-1"):
            world.deliver(host)
        if not world.captain.ledger.running_on("worker-host-2"):
            break
        while world.machines["worker-host-2"].inbox and isinstance(
            world.machines["worker-host-2"].inbox[0], ins.EndTasks
        ):
            instruction = world.machines["worker-host-2"].inbox.popleft()
            world._end(world.machines["worker-host-2"], instruction)
    settle_without(world, "worker-host-2")
    assert any(isinstance(each, ins.DismissMember) for each in world.machines["worker-host-2"].inbox)
    world.scale(3)
    world.exit("worker-0", "signal")
    settle_without(world, "worker-host-2")
    assert running(world) == ["worker-0", "worker-1"], "its member is about to exit"


def settle_without(world: World, host: str) -> None:
    for _ in range(20):
        world.answer()
        for each in world.machines:
            if each != host:
                world.deliver(each)


def test_hosts_do_not_leave_if_fewer_than_min_would_be_left() -> None:
    world = begin(most=3, first=3, least=2)
    world.disconnect("worker-host-0")
    settle(world, LEASE + 1)
    assert running(world) == ["worker-1", "worker-2"]
    world.scale(2)
    world.save("worker-1", 10)
    settle(world, 10)
    assert running(world) == ["worker-1", "worker-2"], "worker-host-0 is lost"
    world.join("worker-host-0")
    world.tell(ev.SpareReady("worker-host-0", 3.0))
    world.deliver_all()
    world.save("worker-1", 20)
    settle(world, 5)
    assert running(world) == ["worker-0", "worker-1"] and has_left(world, "worker-host-2")


def test_a_failure_before_the_snapshot_makes_the_group_smaller_at_once() -> None:
    world = begin(first=3)
    world.save("worker-0", 10)
    world.deliver_all()
    world.scale(2)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1"] and has_left(world, "worker-host-2")


def test_before_the_first_generation_the_run_waits_for_the_requested_hosts() -> None:
    world = World(plan(first=3))
    world.join("worker-host-0")
    world.scale(2)
    world.join("worker-host-1")
    world.deliver_all()
    assert running(world) == ["worker-0", "worker-1"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_the_next_captain_knows_the_requested_number(has_begun: bool) -> None:
    world = begin() if has_begun else World(plan())
    before = world.captain.milestone()
    world.scale(3)
    assert world.captain.milestone() != before, "it is saved at once"
    world.restart_captain()
    assert world.captain.ledger.sizes == {"worker": 3}
    assert world.captain.ledger.unwanted_hosts == ["worker-host-3"]


def test_a_captain_that_returns_goes_on_with_a_change() -> None:
    world = begin(first=3)
    world.scale(2)
    world.restart_captain()
    world.join_all()
    settle(world, LEASE + 2)
    assert len(running(world)) == 3
    world.save("worker-0", 10)
    settle(world, 5)
    assert running(world) == ["worker-0", "worker-1"] and has_left(world, "worker-host-2")


def test_a_captain_without_notes_goes_on_with_the_hosts_of_the_plan() -> None:
    world = begin()
    scale_up(world, 3)
    world.save("worker-0", 10)
    world.deliver_all()
    assert len(running(world)) == 3
    world.restart_captain(with_notes=False)
    world.join_all()
    settle(world, 2 * LEASE)
    assert running(world) == ["worker-0", "worker-1"] and has_left(world, "worker-host-2")


@pytest.mark.parametrize(
    "role, hosts, problem",
    [
        ("worker", 5, "worker can have 1 to 4 hosts"),
        ("worker", 0, "worker can have 1 to 4 hosts"),
        ("evaluator", 1, "the number of hosts of evaluator cannot change"),
        ("wroker", 2, "the number of hosts of wroker cannot change"),
        ("worker", 4, ""),
    ],
)
def test_what_cannot_be_requested(role: str, hosts: int, problem: str) -> None:
    world = begin(evaluator=1)
    assert world.captain.scaling.problem_with(role, hosts) == problem
    world.tell(ev.ScaleRequested(role, hosts))
    assert ("scaled" in world.kinds()) == (not problem)


def test_a_run_that_ends_or_is_not_elastic_cannot_be_scaled() -> None:
    world = begin()
    world.tell(ev.StopRequested("stop"))
    assert world.captain.scaling.problem_with("worker", 3) == "the run is ending"
    fixed = up(make_plan(2, hang_after=None))
    assert fixed.captain.scaling.problem_with("worker", 1) == "the number of hosts of worker cannot change"


def test_plans_keep_the_number_of_hosts_to_start_with() -> None:
    assert from_data(to_data(plan())) == plan()
    assert to_data(plan())["elastic"]["hosts"] == [{"role": "worker", "group": 0, "min": 1, "replicas": 2}]
    assert "replicas" not in to_data(make_plan(3, least=2))["elastic"]["hosts"][0]
