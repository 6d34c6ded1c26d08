"""What the captain decides in elastic jobs: which hosts take part in a generation, and when that changes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from paceline import job
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.joining_hosts import FETCH_LIMIT, MOST_GONE
from paceline.agent.captain.restart_units import RUNNING
from paceline.agent.goodput import Goodput
from paceline.agent.transfers.requests import DAMAGED, STORE, Failure
from paceline.frameworks.environment import task_variables
from paceline.job import planning
from paceline.plan import Elastic, ElasticHosts, Plan, from_data, to_data
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.view.files.plan_files import plan_of
from paceline.view.state import run_state
from paceline.view.state.events import Event
from paceline.view.text.wording import describe
from support import recorded
from support.committing import AWAY, a_plan
from support.polling import PollingTasks
from support.worlds import LEASE, Machine, World, make_plan, up

WAIT, EVERY = 30.0, 120.0
NAMES, HOSTS = [f"worker-{index}" for index in range(3)], [f"worker-host-{index}" for index in range(3)]


def names(world: World) -> list[str]:
    return sorted(name for name, _ in world.running())


def settle(world: World, seconds: float) -> None:
    """Time passes, and all messages arrive."""
    for _ in range(int(seconds)):
        world.pass_time(1)
        world.deliver_all()


def train_and_poll(world: World, polling: PollingTasks, seconds: int) -> None:
    """Tasks ask in each second whether to save, at step 50."""
    for _ in range(seconds):
        for name in polling.names():
            polling.call(name, 50)
        for name in polling.names():
            polling.answer(name)
        settle(world, 1)


def lose(world: World, *hosts: str) -> None:
    """The connection of these hosts is lost until their leases have run out."""
    for host in hosts:
        world.disconnect(host)
    settle(world, LEASE + 1)


def texts(world: World, kind: str = "note") -> list[str]:
    return [str(fields["text"]) for each, _, fields in world.events if each == kind]


def test_a_run_starts_with_fewer_hosts_once_it_has_waited() -> None:
    world = World(make_plan(3, hang_after=None, least=2))
    world.join("worker-host-0")
    world.join("worker-host-2")
    settle(world, WAIT - 1)
    assert names(world) == []
    settle(world, 2)
    assert names(world) == ["worker-0", "worker-2"]
    assert world.last("generation-formed")["absent"] == ["worker-1"]


def test_a_run_does_not_wait_once_all_hosts_are_there() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    assert names(world) == ["worker-0", "worker-1", "worker-2"]
    assert "absent" not in world.last("generation-formed")


def test_below_min_the_run_waits_and_says_for_whom() -> None:
    world = World(make_plan(3, hang_after=None, least=2))
    world.join("worker-host-0")
    settle(world, WAIT + 60)
    assert names(world) == []
    assert world.last("waiting")["missing"] == ["worker-host-1", "worker-host-2"]
    world.join("worker-host-2")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-2"]


def test_the_others_continue_when_the_lease_of_a_lost_host_is_over() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    world.save("worker-1", 10)
    world.disconnect("worker-host-0")
    settle(world, LEASE - 2)
    assert world.captain.generation == 1, "the lost host may still train"
    settle(world, 3)
    assert names(world) == ["worker-1", "worker-2"]
    formed = world.last("generation-formed")
    assert formed["restore"] == "step-10-g1" and formed["absent"] == ["worker-0"]
    assert world.last("restart")["cause"] == "host-lost"


def test_several_losses_within_a_lease_are_one_change() -> None:
    world = up(make_plan(5, hang_after=None, least=2))
    world.disconnect("worker-host-0")
    settle(world, LEASE - 3)
    world.disconnect("worker-host-3")
    settle(world, 2 * LEASE)
    assert names(world) == ["worker-1", "worker-2", "worker-4"]
    assert world.captain.generation == 2


def test_a_host_that_is_back_when_the_group_starts_takes_part() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    world.host_is_replaced("worker-host-1", dead=True)
    world.join("worker-host-1")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"] and world.captain.generation == 2


def test_the_group_does_not_wait_for_a_host_that_shuts_down() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    world.tell(ev.HostLeaving("worker-host-1", "SIGTERM"))
    world.deliver_all()
    world.exit("worker-1", "preempted")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-2"]


def leave_and_return(world: World, host: str) -> None:
    """The host shuts down, and its replacement joins before the others have ended their tasks."""
    world.tell(ev.HostLeaving(host, "SIGTERM"))
    world.exit(host.replace("-host", ""), "preempted")
    world.tell(ev.MemberLeft(host))
    world.host_is_replaced(host, dead=True)
    world.join(host)


def test_the_group_does_not_wait_for_the_replacement_of_a_host_that_shut_down() -> None:
    """It would have to import the framework and fetch the snapshot first."""
    world = up(make_plan(3, hang_after=None, least=2))
    world.save("worker-0", 10)
    world.deliver_all()
    leave_and_return(world, "worker-host-1")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-2"] and world.captain.generation == 2
    settle(world, EVERY + 10)
    world.save("worker-0", 70)
    settle(world, 5)
    assert names(world) == ["worker-0", "worker-1", "worker-2"] and world.captain.generation == 3


def test_the_replacement_of_a_host_that_shut_down_takes_part_if_it_could_not_join_later() -> None:
    """Hosts join after a snapshot, and this program has not saved any."""
    world = up(make_plan(3, hang_after=None, least=2))
    leave_and_return(world, "worker-host-1")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"] and world.captain.generation == 2


def test_a_host_that_was_replaced_before_the_run_started_takes_part() -> None:
    world = World(make_plan(3, hang_after=None, least=2))
    world.join("worker-host-0")
    world.join("worker-host-1")
    world.tell(ev.HostLeaving("worker-host-1", "SIGTERM"))
    world.tell(ev.MemberLeft("worker-host-1"))
    world.host_is_replaced("worker-host-1", dead=True)
    world.join("worker-host-1")
    world.join("worker-host-2")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"]


def test_below_min_the_replacement_of_a_host_that_shut_down_is_waited_for() -> None:
    world = up(make_plan(3, hang_after=None, least=3))
    leave_and_return(world, "worker-host-1")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"] and world.captain.generation == 2


@pytest.mark.parametrize("is_reachable", [True, False])
def test_others_get_the_part_of_a_host_that_shuts_down_while_the_store_is_away(is_reachable: bool) -> None:
    """As long as it is connected, and they can reach it."""
    world = up(a_plan(3, least=2), serves="10.0.0.1:7000")
    world.place.fails = AWAY
    world.peers_fail = None if is_reachable else Failure(STORE, "no route to host", True)
    world.tell(ev.HostLeaving("worker-host-2", "SIGTERM"))
    for number in range(3):
        world.save(f"worker-{number}", 20, parts=3)
    settle(world, 3)
    world.exit("worker-2", "preempted")
    world.deliver_all()
    world.host_is_replaced("worker-host-2", dead=True)
    settle(world, LEASE)
    assert names(world) == ["worker-0", "worker-1"]
    assert world.last("generation-formed")["restore"] == ("step-20-g1" if is_reachable else None)


@pytest.mark.parametrize(
    ("plan", "peers_fail", "is_released"),
    [
        (a_plan(3, least=2), None, True),
        (a_plan(3, least=2), Failure(STORE, "no route to host", True), False),
        (a_plan(3, least=3), None, False),
        (a_plan(3), None, False),
    ],
    ids=["others have it", "others cannot fetch it", "too few others", "not elastic"],
)
def test_a_host_that_shuts_down_does_not_wait_for_the_commit_if_others_have_its_snapshot(
    plan: Plan, peers_fail: Failure | None, is_released: bool
) -> None:
    world = up(plan, serves="10.0.0.1:7000")
    world.place.fails, world.peers_fail = AWAY, peers_fail
    polling = PollingTasks(world)

    train = functools.partial(train_and_poll, world, polling)
    train(2)
    world.tell(ev.HostLeaving("worker-host-2", "SIGTERM"))
    train(8)
    assert polling.saves and world.released == []
    for name in polling.names():
        world.save(name, 50, parts=3)
    settle(world, 3)
    assert world.released == (["worker-host-2"] if is_released else [])
    world.place.fails = world.peers_fail = None  # before the group would be asked for another snapshot
    settle(world, 3)
    can_continue = plan.elastic is not None and plan.elastic.hosts[0].min < 3
    assert world.released == (["worker-host-2"] if can_continue else []), "a failed fetch is repeated"
    settle(world, 120)
    assert world.released == ["worker-host-2"]


@pytest.mark.parametrize(
    ("stop_s", "is_intact"),
    [(0, True), (LEASE + 2, True), (0, False)],
    ids=["at once", "after its lease", "a program has changed what was fetched"],
)
def test_others_continue_from_what_they_have_fetched_of_a_host_that_has_left(
    stop_s: float, is_intact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves once its own part is in the store, while the others still send theirs."""
    send, uploads = World._store, list[tuple[Machine, ins.StorePart]]()

    def begin_upload(world: World, machine: Machine, message: ins.StorePart) -> None:
        if machine.host == "worker-host-2":
            send(world, machine, message)
        else:
            uploads.append((machine, message))

    monkeypatch.setattr(World, "_store", begin_upload)
    world = up(a_plan(3, least=2), serves="10.0.0.1:7000")
    world.tell(ev.HostLeaving("worker-host-2", "SIGTERM"))
    for name in NAMES:
        world.save(name, 20, parts=3)
    settle(world, 3)
    assert [machine.prefetched for machine in world.machines.values()] == [SnapshotId(20, 1)] * 2 + [None]
    if not is_intact:
        world.machines["worker-host-0"].prefetched = None
    world.exit("worker-2", "preempted")
    world.tell(ev.MemberLeft("worker-host-2"))
    world.disconnect("worker-host-2")
    world.pass_time(stop_s)  # until the other tasks have ended
    settle(world, 1)
    assert names(world) == (["worker-0", "worker-1"] if is_intact else [])
    assert world.told_committed == []
    for machine, message in uploads:
        send(world, machine, message)
    settle(world, 1)
    assert [str(each) for each in world.told_committed] == ["step-20-g1"]
    assert names(world) == ["worker-0", "worker-1"]
    assert world.last("generation-formed")["restore"] == "step-20-g1"
    failed = ["worker-host-0 cannot get the snapshot from other hosts: a host that has a part is gone"]
    assert texts(world, "warning") == ([] if is_intact else failed)


def test_a_host_joins_after_a_snapshot_and_not_before_elastic_every_has_passed() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    lose(world, "worker-host-1")
    started = world.now
    world.join("worker-host-1")
    world.tell(ev.SpareReady("worker-host-1", 3.0))
    world.save("worker-0", 10)
    settle(world, 60)
    world.save("worker-0", 20)
    world.deliver_all()
    assert world.captain.generation == 2, "too soon"
    settle(world, EVERY - (world.now - started))
    assert world.captain.generation == 2, "there is no snapshot since"
    world.save("worker-0", 30)
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"]
    assert world.last("generation-formed")["restore"] == "step-30-g2"
    assert "worker-host-1 joins: the group continues with 3 hosts" in texts(world)
    assert [restart.cause for restart in world.captain.failures.restarts] == ["host-lost"], "joining is no failure"


def test_the_group_agrees_on_a_step_to_let_a_host_join() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    polling = PollingTasks(world)
    lose(world, "worker-host-2")
    world.join("worker-host-2")

    train = functools.partial(train_and_poll, world, polling)
    train(int(EVERY) + 20)
    assert polling.saves, "all tasks were asked to save at the same step"
    world.save("worker-0", 50)
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"]


def test_a_host_joins_once_it_has_a_spare_or_has_had_time_for_one() -> None:
    for has_spare in (True, False):
        world = up(make_plan(3, hang_after=None, least=2, every=1.0))
        world.tell(ev.SpareReady("worker-host-1", 3.0))  # of the agent that dies
        world.agent_dies("worker-host-1")
        settle(world, LEASE + 1)
        world.join("worker-host-1")
        world.save("worker-0", 10)
        settle(world, WAIT - 10)
        assert world.captain.generation == 2
        if has_spare:
            world.tell(ev.SpareReady("worker-host-1", 3.0))
            settle(world, 1)
        else:
            settle(world, 11)
        world.save("worker-0", 20)
        settle(world, 1)
        assert world.captain.generation == 3 and len(names(world)) == 3


def test_a_host_that_joins_learns_what_to_import() -> None:
    world = World(make_plan(3, hang_after=None, least=2))
    world.join("worker-host-0")
    world.join("worker-host-1")
    settle(world, WAIT + 1)
    world.tell(ev.SpareReady("worker-host-0", 3.0, '"torch"\n'))
    world.join("worker-host-2")
    inboxes = {host: list(machine.inbox) for host, machine in world.machines.items()}
    assert inboxes["worker-host-2"] == [ins.PrepareSpare("worker-host-2", '"torch"\n')]
    assert inboxes["worker-host-1"] == [], "its task has imported it"


def test_nobody_is_interrupted_for_a_host_that_cannot_get_the_snapshot() -> None:
    world = up(make_plan(3, hang_after=None, least=2), serves="10.0.0.1:7000")
    lose(world, "worker-host-1")
    world.join("worker-host-1")
    settle(world, EVERY)
    world.peers_fail = world.place.fails = _failure()
    world.save("worker-0", 10)
    world.deliver_all()
    settle(world, 5)
    assert names(world) == ["worker-0", "worker-2"] and world.captain.generation == 2
    world.peers_fail = world.place.fails = None
    world.save("worker-0", 20)
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"]


def test_a_host_for_which_every_snapshot_is_replaced_too_soon_gets_one_when_the_group_has_stopped() -> None:
    world = up(make_plan(3, hang_after=None, least=2), serves="10.0.0.1:7000")
    lose(world, "worker-host-1")
    world.join("worker-host-1")
    settle(world, EVERY)
    world.peers_fail = world.place.fails = _failure(DAMAGED)
    for step in range(10, 10 * (MOST_GONE + 1), 10):
        world.save("worker-0", step)
        world.deliver_all()
        assert names(world) == ["worker-0", "worker-2"] and world.captain.generation == 2
    world.save("worker-0", 100)
    world.deliver("worker-host-1")
    world.peers_fail = world.place.fails = None
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1", "worker-2"]
    assert len([text for text in texts(world) if "cannot join" in text]) == MOST_GONE


def test_hosts_that_are_ready_do_not_wait_without_end_for_one_that_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    world = up(make_plan(4, hang_after=None, least=2), serves="10.0.0.1:7000")
    handle = world._handle

    def handle_unless_stuck(machine: Machine, message: ins.MemberInstruction) -> None:
        if not (machine.host == "worker-host-1" and isinstance(message, ins.PrepareHost)):
            handle(machine, message)

    lose(world, "worker-host-1", "worker-host-2")
    monkeypatch.setattr(world, "_handle", handle_unless_stuck)
    world.join("worker-host-1")
    world.join("worker-host-2")
    settle(world, EVERY)
    world.save("worker-0", 10)
    for _ in range(round(FETCH_LIMIT / 10) - 1):
        world.output()
        settle(world, 10)
    assert names(world) == ["worker-0", "worker-3"]
    settle(world, 20)
    assert names(world) == ["worker-0", "worker-2", "worker-3"]


def _failure(kind: str = STORE) -> Failure:
    return Failure(kind, "away", True)


def test_a_host_that_is_lost_again_and_again_has_to_stay_longer() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    step, waits = 0, []
    for _ in range(4):
        lose(world, "worker-host-1")
        world.join("worker-host-1")
        joined = world.now
        while "worker-1" not in names(world):
            step += 1
            world.save("worker-0", step)
            settle(world, 1)
            assert world.now - joined < 5000
        waits.append(world.now - joined)
    assert waits[0] <= EVERY + 2
    assert [round(wait / EVERY) for wait in waits[1:]] == [1, 2, 4], waits


def test_the_run_succeeds_once_all_tasks_that_take_part_have_succeeded() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    lose(world, "worker-host-1")
    world.exit("worker-0", "")
    world.deliver_all()
    assert world.over is None
    world.exit("worker-2", "")
    world.deliver_all()
    settle(world, 1)
    assert world.over is not None and world.over.status == "succeeded"


def test_a_task_that_succeeded_before_the_others_were_lost_does_not_end_the_run() -> None:
    world = up(make_plan(2, hang_after=None, least=1))
    world.place.fails = _failure()
    world.save("worker-1", 10)
    world.exit("worker-0", "")
    world.disconnect("worker-host-1")
    settle(world, LEASE + 1)
    assert world.over is None
    world.place.fails = None
    settle(world, 20)
    assert names(world) == ["worker-0"], "it goes on alone"


def test_a_lost_chief_is_waited_for() -> None:
    world = up(make_plan(3, hang_after=None, chief=True, least=1))
    lose(world, "worker-host-0", "worker-host-2")
    assert names(world) == ["chief-0", "worker-1"]
    lose(world, "chief-host-0")
    assert names(world) == []
    world.join("chief-host-0")
    world.deliver_all()
    assert names(world) == ["chief-0", "worker-1"]


def test_a_captain_that_returns_amid_a_smaller_generation_adopts_it() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    lose(world, "worker-host-1")
    world.restart_captain()
    for host in ("worker-host-0", "worker-host-2"):
        world.join(host)
    settle(world, 1)
    assert world.last("captain-returned")["adopted"] is True, "without waiting for a host that does not take part"
    assert world.captain.generation == 2 and names(world) == ["worker-0", "worker-2"]
    assert world.captain.units[0].phase == RUNNING


def test_a_captain_that_has_lost_its_notes_starts_the_smaller_group_again() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    lose(world, "worker-host-1")
    world.restart_captain(with_notes=False)
    for host in ("worker-host-0", "worker-host-2"):
        world.join(host)
    settle(world, LEASE + 2)
    assert {process.generation for _, process in world.running()} == {3}
    assert names(world) == ["worker-0", "worker-2"]


def test_a_captain_does_not_adopt_a_task_of_an_earlier_generation() -> None:
    """As of a host that was stopped for a while, and has not ended its tasks yet."""
    world = up(make_plan(3, hang_after=None, least=2))
    stopped = world.machines["worker-host-1"].processes["worker-1"]
    lose(world, "worker-host-1")
    world.machines["worker-host-1"].processes["worker-1"] = stopped
    for with_notes in (True, False):
        world.restart_captain(with_notes=with_notes)
        world.machines["worker-host-1"].processes["worker-1"] = stopped
        world.join("worker-host-1")
        world.join("worker-host-0")
        world.join("worker-host-2")
        settle(world, LEASE + 2)
        assert len({process.generation for _, process in world.running()}) == 1
        assert stopped not in [process for _, process in world.running()]


def test_what_only_a_lost_host_has_does_not_block_later_commits() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    world.place.read_only = _failure()
    world.save("worker-1", 10)
    world.tell(ev.HostLeaving("worker-host-1", "SIGTERM"))
    world.exit("worker-1", "preempted")
    world.deliver_all()
    assert world.last("generation-formed")["restore"] == "step-10-g1", "from the host that leaves"
    world.place.read_only = None
    lose(world, "worker-host-1")
    world.save("worker-0", 20)
    settle(world, 30)
    assert [str(each) for each in world.told_committed] == ["step-20-g2"]


def test_a_manifest_names_the_number_of_tasks_that_saved_it() -> None:
    world = up(make_plan(3, hang_after=None, least=2))
    lose(world, "worker-host-1")
    world.save("worker-0", 10)
    settle(world, 5)
    [snapshot] = world.place.snapshots.inventory().committed
    assert world.place.snapshots.manifest(snapshot).world == 2


def test_ranks_are_counted_anew_among_the_tasks_that_take_part() -> None:
    plan = make_plan(6, per_host=2, least=2, evaluator=1)
    roster = {f"worker-{index}": f"h:{index}" for index in (0, 1, 4, 5)} | {"evaluator-0": "h:9"}
    dealt = plan.of_generation(roster)
    assert [(task.name, task.rank) for task in dealt.tasks] == [
        ("worker-0", 0), ("worker-1", 1), ("worker-4", 2), ("worker-5", 3), ("evaluator-0", -1),
    ]  # fmt: skip
    variables = task_variables(dealt, dealt.task("worker-4"), roster, "run", 2, 1)
    assert (variables["PACELINE_RANK"], variables["PACELINE_WORLD_SIZE"]) == ("2", "4")
    assert (variables["PACELINE_TASK"], variables["POD_NAME"], variables["PACELINE_INDEX"]) == (
        "worker-4", "worker-2", "2",
    )  # fmt: skip
    config = json.loads(variables["TF_CONFIG"])
    assert config == {
        "cluster": {"worker": ["h:0", "h:1", "h:4", "h:5"]}, "task": {"type": "worker", "index": 2}
    }  # fmt: skip


def test_the_roster_has_only_the_tasks_that_take_part() -> None:
    world = up(make_plan(3, hang_after=None, least=2, evaluator=1))
    lose(world, "worker-host-0")
    assert sorted(world.captain.ledger.roster()) == ["evaluator-0", "worker-1", "worker-2"]


def test_the_plan_says_which_hosts_are_needed() -> None:
    fields = "name: a\nframework: torch\ncommand: [python, train.py]\ncode: image\n"
    roles = "roles: {worker: [{replicas: 1, gpus: 8}, {replicas: 4, min: 2}]}\nelastic: {every: 5m}\n"
    plan = planning.make_plan(job.load_text(fields + roles, "job.yaml", Path("/")).job)
    assert plan.elastic == Elastic(30.0, 300.0, (ElasticHosts("worker", 1, 2),))
    assert from_data(to_data(plan)) == plan and plan_of(to_data(plan)) == plan
    fixed = planning.make_plan(job.load_text(fields, "job.yaml", Path("/")).job)
    assert fixed.elastic is None and "elastic" not in to_data(fixed)


def _event(line: dict[str, Any]) -> Event:
    return Event(line["at"], line["event"], line["generation"], line)


def test_views_show_which_tasks_are_absent() -> None:
    formed = {"tasks": ["worker-1", "worker-2"], "restore": "step-10-g1", "absent": ["worker-0"]}
    lines = [
        recorded.event(0, "run-started", 0, run="r", job="j", framework="torch", strategy="", tasks=NAMES, hosts=HOSTS),
        recorded.event(1, "generation-formed", 1, tasks=NAMES, restore=None),
        recorded.event(2, "generation-formed", 2, **formed),
    ]
    state = run_state.fold(_event(line) for line in lines)
    assert [task.state for task in state.tasks.values()] == ["absent", "starting", "starting"]
    assert describe(_event(lines[-1])) == (
        "starting worker-1 and worker-2, without worker-0 from step 10 (generation 2)"
    )


def test_training_has_ended_once_the_tasks_that_take_part_have_succeeded() -> None:
    started = {"run": "r", "job": "j", "framework": "torch", "strategy": "", "tasks": NAMES, "hosts": HOSTS}
    goodput = Goodput().add_all(
        [
            recorded.event(0, "run-started", 0, **started),
            *(recorded.event(0, "member-joined", 0, host=host) for host in HOSTS),
            recorded.event(1, "generation-formed", 1, tasks=NAMES[1:], restore=None, absent=NAMES[:1]),
            *(recorded.event(1, "step", 1, task=task, step=1, metrics={}) for task in NAMES[1:]),
            *(recorded.event(5, "task-exited", 1, task=task, code=0, expected=False) for task in NAMES[1:]),
            recorded.event(9, "note", 1, text="later"),
        ]
    )  # fmt: skip
    assert goodput.seconds()["training"] == 4.0 and goodput.seconds()["ending"] == 4.0
