"""`restart.scope`: what restarts when a task dies, while the others continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import plan
from paceline.agent import pod
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.restart_units import WAITING
from paceline.agent.transfers.requests import STORE, Failure
from paceline.plan import GROUP, HOST, TASK
from paceline.storage.snapshots.manifest import SnapshotId
from support.worlds import LEASE, World, make_plan, up


def attempts(world: World) -> dict[str, int]:
    return {name: process.attempt for name, process in sorted(world.running())}


def restores(world: World) -> list[tuple[list[str], str | None]]:
    """The tasks of each start, and what they resume from."""
    return [(fields["tasks"], fields["restore"]) for kind, _, fields in world.events if kind == "generation-formed"]


def test_a_dead_worker_restarts_alone() -> None:
    world = up(make_plan(3, scope=TASK, evaluator=1))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert attempts(world) == {"evaluator-0": 1, "worker-0": 1, "worker-1": 2, "worker-2": 1}
    assert world.last("restart")["scope"] == ["worker-1"]


def test_the_tasks_of_a_host_restart_together_and_those_of_others_continue() -> None:
    world = up(make_plan(4, scope=HOST, per_host=2))
    world.exit("worker-3", "signal")
    world.deliver_all()
    assert attempts(world) == {"worker-0": 1, "worker-1": 1, "worker-2": 2, "worker-3": 2}
    assert world.last("restart")["scope"] == ["worker-2", "worker-3"]


def test_one_task_of_a_host_restarts_and_the_other_continues() -> None:
    world = up(make_plan(4, scope=TASK, per_host=2))
    world.exit("worker-3", "signal")
    world.deliver_all()
    assert attempts(world) == {"worker-0": 1, "worker-1": 1, "worker-2": 1, "worker-3": 2}


def test_the_group_restarts_by_default() -> None:
    world = up(make_plan(3, scope=GROUP))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert attempts(world) == {"worker-0": 2, "worker-1": 2, "worker-2": 2}


def test_no_generation_begins_when_a_task_restarts_alone() -> None:
    """The others could not commit what they save in an earlier one."""
    world = up(make_plan(2, scope=TASK))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert {process.generation for _, process in world.running()} == {1}
    world.save("worker-0", 10)
    world.deliver_all()
    assert world.told_committed == [SnapshotId(10, 1)]


def test_a_task_keeps_its_address_because_others_use_it() -> None:
    world = up(make_plan(3, scope=TASK))
    before = world.known_addresses["worker-0"]
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert attempts(world)["worker-1"] == 2
    assert world.known_addresses["worker-1"] == before


def test_the_tasks_of_a_host_that_was_replaced_keep_their_addresses() -> None:
    world = up(make_plan(4, scope=HOST, per_host=2))
    before = world.known_addresses["worker-0"]
    world.host_is_replaced("worker-host-0", dead=True)
    world.join("worker-host-0")
    world.deliver_all()
    assert attempts(world) == {"worker-0": 2, "worker-1": 2, "worker-2": 1, "worker-3": 1}
    assert world.known_addresses["worker-0"] == before


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_task_that_restarts_alone_resumes_from_the_newest_snapshot(is_committed: bool) -> None:
    world = up(make_plan(3, scope=TASK))
    world.save("worker-0", 10)
    if not is_committed:
        world.place.fails = Failure(STORE, "away", True)
    world.deliver_all()
    world.save("worker-0", 20)
    world.deliver_all()
    world.exit("worker-2", "signal")
    world.deliver_all()
    assert restores(world)[1:] == [(["worker-2"], "step-20-g1")]


def test_each_task_resumes_from_the_snapshot_that_is_the_newest_when_it_restarts() -> None:
    world = up(make_plan(3, scope=TASK))
    for step, task in ((10, "worker-1"), (20, "worker-2"), (30, "worker-0")):
        world.save("worker-0", step)
        world.deliver_all()
        world.exit(task, "signal")
        world.deliver_all()
    assert restores(world)[1:] == [
        (["worker-1"], "step-10-g1"), (["worker-2"], "step-20-g1"), (["worker-0"], "step-30-g1")
    ]  # fmt: skip
    assert attempts(world) == {"worker-0": 2, "worker-1": 2, "worker-2": 2}


@pytest.mark.parametrize("commits", [True, False])
def test_others_keep_what_a_host_is_getting_however_often_they_save_meanwhile(commits: bool) -> None:
    world = up(make_plan(2, scope=TASK, hang_after=None, start=1e6), serves="10.0.0.1:7000")
    world.save("worker-0", 1)
    world.deliver_all()
    world.place.fails = None if commits else Failure(STORE, "away", True)
    world.save("worker-0", 2)
    world.deliver_all()
    world.exit("worker-1", "signal")
    for step in range(3, 9):
        world.save("worker-0", step)
        world.pass_time(60)
        world.deliver("worker-host-0")
    world.deliver("worker-host-1")
    assert restores(world)[-1] == (["worker-1"], "step-2-g1")
    world.deliver_all()
    assert 2 not in {snapshot.step for _, snapshot in world.machines["worker-host-0"].held}


def test_two_tasks_of_a_host_that_die_together_start_together() -> None:
    world = up(make_plan(4, scope=TASK, per_host=2))
    world.save("worker-0", 10)
    world.deliver_all()
    world.exit("worker-2", "signal")
    world.exit("worker-3", "signal")
    world.deliver_all()
    assert restores(world)[-1] == (["worker-2", "worker-3"], "step-10-g1")


def test_what_a_host_has_saved_of_a_step_is_not_combined_with_what_it_saves_after_a_restart() -> None:
    world = up(make_plan(4, scope=HOST, per_host=2))
    world.save("worker-2", 10, parts=2)  # worker-3 dies before it has saved its part
    world.exit("worker-3", "signal")
    world.deliver_all()
    assert attempts(world)["worker-2"] == 2
    world.save("worker-3", 10, parts=2)
    world.deliver_all()
    assert world.told_committed == []
    world.save("worker-2", 10, parts=2)
    world.deliver_all()
    assert world.told_committed == [SnapshotId(10, 1)]


def test_the_run_succeeds_when_all_workers_have() -> None:
    world = up(make_plan(3, scope=TASK))
    for task in ("worker-0", "worker-2"):
        world.exit(task, "")
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.over is None
    assert attempts(world) == {"worker-1": 2}, "those that have succeeded do not start again"
    world.exit("worker-1", "")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"


def test_the_tasks_of_a_host_restart_together_even_if_one_has_succeeded() -> None:
    """As in a group: they may train together."""
    world = up(make_plan(4, scope=HOST, per_host=2))
    world.exit("worker-2", "")
    world.exit("worker-3", "signal")
    world.deliver_all()
    assert attempts(world) == {"worker-0": 1, "worker-1": 1, "worker-2": 2, "worker-3": 2}


def test_only_the_tasks_of_a_lost_host_start_again_once_it_is_back() -> None:
    world = up(make_plan(3, scope=TASK))
    world.host_is_replaced("worker-host-1", dead=True)
    for step in range(1, 40):
        world.step(step)
        world.pass_time(1)
    assert attempts(world) == {"worker-0": 1, "worker-2": 1}
    assert world.last("waiting")["missing"] == ["worker-host-1"]
    world.save("worker-0", 39)
    world.deliver_all()
    world.join("worker-host-1")
    world.deliver_all()
    assert attempts(world) == {"worker-0": 1, "worker-1": 2, "worker-2": 1}
    assert restores(world)[-1] == (["worker-1"], "step-39-g1")


def test_the_limit_for_a_lost_host_counts_from_its_own_loss() -> None:
    """Another task may be waiting for longer, because it has failed again and again."""
    world = up(make_plan(2, scope=TASK, start=50.0, limit=100))
    for _ in range(7):
        world.exit("worker-0", "signal")
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert world.last("restart")["delay_s"] == 60
    world.pass_time(40)
    world.agent_dies("worker-host-1")
    world.pass_time(35)  # of which 10 s are the lease
    assert "ending" not in world.kinds()
    world.deliver_all()
    assert attempts(world) == {"worker-0": 9}
    world.pass_time(40)
    assert "worker-1 did not start within 50 s" in world.last("ending")["reason"]


def test_a_task_that_never_gets_further_ends_the_run_whatever_others_achieve() -> None:
    world = up(make_plan(2, scope=TASK, limit=3))
    for step in range(1, 40):
        world.step(step, ["worker-0"])
        world.save("worker-0", step)
        world.exit("worker-1", "signal")
        world.deliver_all()
        world.pass_time(10)
        world.deliver_all()
    assert world.over is not None and "worker-1" in world.over.reason and "restart.limit is 3" in world.over.reason


def test_each_task_has_its_own_budget_and_its_own_steps_reset_it() -> None:
    world = up(make_plan(2, scope=TASK, limit=2))
    for step in range(1, 10):
        world.exit("worker-1", "signal")
        world.deliver_all()
        world.pass_time(2)
        world.deliver_all()
        world.step(step, ["worker-1"])
    assert world.over is None
    assert attempts(world) == {"worker-0": 1, "worker-1": 10}


def test_a_task_that_reports_no_steps_and_has_run_for_a_while_has_made_progress_if_the_run_has() -> None:
    world = up(make_plan(2, scope=TASK, limit=2, hang_after=None))
    for step in range(1, 6):
        world.exit("worker-1", "signal")
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
        world.step(step, ["worker-0"])
    assert world.over is None
    assert attempts(world) == {"worker-0": 1, "worker-1": 6}


def test_a_budget_outlasts_the_captain() -> None:
    world = up(make_plan(2, scope=TASK, limit=1))
    world.step(5)
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.restart_captain()
    world.join_all()
    world.deliver_all()
    world.step(5)  # it has been there before
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.pass_time(5)
    assert world.over is not None and world.over.status == "failed"


def test_hangs_are_judged_for_each_task() -> None:
    world = up(make_plan(2, scope=TASK, hang_after=60.0))
    world.step(1)
    for step in range(2, 80):
        world.step(step, ["worker-0"])
        world.pass_time(1)
        world.deliver_all()
        world.output()
    assert world.last("hang")["tasks"] == ["worker-1"]
    assert attempts(world)["worker-0"] == 1
    assert attempts(world)["worker-1"] >= 2


def test_hangs_are_judged_for_the_tasks_of_a_host_together() -> None:
    world = up(make_plan(4, scope=HOST, per_host=2, hang_after=60.0))
    world.step(1)
    for step in range(2, 80):
        world.step(step, ["worker-0", "worker-3"])
        world.pass_time(1)
        world.deliver_all()
    assert "hang" not in world.kinds(), "one task of each host reports steps"


def test_recovery_is_timed_by_the_steps_of_the_tasks_that_restarted() -> None:
    world = up(make_plan(2, scope=TASK))
    world.step(1)
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.pass_time(3)
    world.step(2, ["worker-0"])
    assert "recovered" not in world.kinds()
    world.step(3, ["worker-1"])
    assert world.last("recovered") == {"task": "worker-1", "first_step_after_s": 3.0}


def test_a_captain_that_returns_in_time_adopts_all_and_restarts_only_what_has_died() -> None:
    world = up(make_plan(3, scope=TASK))
    world.restart_captain()
    world.exit("worker-2", "signal")
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 1)
    world.deliver_all()
    assert attempts(world) == {"worker-0": 1, "worker-1": 1, "worker-2": 2}
    assert world.captain.generation == 1


def test_a_captain_without_notes_starts_all_again_if_one_dies_because_it_knows_no_addresses() -> None:
    world = up(make_plan(3, scope=TASK))
    world.exit("worker-0", "")
    world.deliver_all()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    assert attempts(world) == {"worker-1": 1, "worker-2": 1}
    world.exit("worker-2", "signal")
    for _ in range(3):
        world.deliver_all()
        world.pass_time(LEASE)
    assert {name: process.generation for name, process in world.running()} == {"worker-1": 2, "worker-2": 2}
    assert world.known_addresses["worker-1"] == world.known_addresses["worker-2"]


def test_a_snapshot_is_requested_from_the_tasks_that_restart_together() -> None:
    """Others may be at another step, or may not be there."""
    world = up(make_plan(4, scope=HOST, per_host=2))
    asked: list[str] = []

    def note(instruction: ins.AgreeOnStep) -> None:
        asked.extend(instruction.tasks)

    world.on_agreement = note
    world.asking = lambda machine: tuple(machine.processes)
    world.beat_all()
    world.tell(ev.SaveRequested("worker-host-0", "worker-0"))
    assert asked == ["worker-0", "worker-1"]


def test_a_metric_that_is_not_finite_is_reported_for_each_task() -> None:
    world = up(make_plan(2, scope=TASK))
    for task in ("worker-0", "worker-1", "worker-1"):
        world.report(task, 3)
    assert [fields["task"] for kind, _, fields in world.events if kind == "not-finite"] == ["worker-0", "worker-1"]


def test_workers_that_never_met_are_not_warned_about() -> None:
    """Units need not meet at the address of rank 0."""
    world = up(make_plan(2, scope=TASK))
    world.exit("worker-0", "", listened=False)
    world.exit("worker-1", "")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"
    assert "warning" not in world.kinds()


def test_a_unit_waits_with_its_host_while_the_store_is_away() -> None:
    world = up(make_plan(2, scope=TASK), serves="")
    world.save("worker-0", 10)
    world.deliver_all()
    assert world.told_committed == [SnapshotId(10, 1)]
    world.place.fails = Failure(STORE, "away", True)
    world.exit("worker-1", "signal")
    world.deliver_all()
    unit = next(unit for unit in world.captain.units if unit.name == "worker-1")
    assert unit.phase == WAITING and attempts(world) == {"worker-0": 1}
    world.place.fails = None
    world.pass_time(5)
    world.deliver_all()
    assert restores(world)[-1] == (["worker-1"], "step-10-g1")


def test_a_snapshot_is_requested_from_others_if_the_first_tasks_have_finished() -> None:
    world = up(make_plan(3, scope=TASK))
    asked: list[str] = []

    def note(instruction: ins.AgreeOnStep) -> None:
        asked.extend(instruction.tasks)

    world.asking = lambda machine: tuple(machine.processes)
    world.beat_all()
    world.exit("worker-0", "")
    world.deliver_all()
    world.on_agreement = note
    world.tell(ev.SaveRequested("worker-host-2", "worker-2"))
    assert asked == ["worker-1"]


@pytest.mark.parametrize(
    ("scope", "address"), [(GROUP, "10.0.0.7"), (HOST, "digits-worker-1.digits"), (TASK, "digits-worker-1.digits")]
)
def test_on_a_cluster_an_address_that_is_kept_outlives_the_pod(tmp_path: Path, scope: str, address: str) -> None:
    (tmp_path / "plan.json").write_text(plan.to_json(make_plan(2, scope=scope)))
    folders = dict.fromkeys(("plan", "folder", "work"), str(tmp_path))
    unused = dict.fromkeys(("tls", "captain", "last_words", "code", "tensorboard", "snapshots", "obstore"), "")
    of_job = {"run": "digits", "job": "digits-worker", "role": "worker", "first": 0, "lease": 30.0}
    settings = {**unused, **of_job, **folders}
    options = pod.prepare(settings, 1, "10.0.0.7")
    assert options.host == "worker-host-1"
    assert options.address == address and options.peers.startswith(f"{address}:")
