"""What the captain decides, one situation at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from paceline.agent import generation_numbers
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import File, SnapshotId
from support.worlds import LEASE, World, make_plan, up

Kind = TypeVar("Kind")


def generations(world: World) -> set[int]:
    return {process.generation for _, process in world.running()}


def names(world: World) -> list[str]:
    return sorted(name for name, _ in world.running())


def test_the_first_generation_waits_for_all_hosts() -> None:
    world = World(make_plan(2))
    world.join("worker-host-0")
    world.deliver_all()
    assert names(world) == []
    world.join("worker-host-1")
    world.deliver_all()
    assert names(world) == ["worker-0", "worker-1"]
    assert generations(world) == {1}


def test_a_dead_worker_restarts_the_group() -> None:
    world = up(make_plan(2, evaluator=True))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert {n: p.generation for n, p in world.running()} == {"worker-0": 2, "worker-1": 2, "evaluator-0": 1}
    assert world.last("restart")["cause"] == "signal"
    assert world.last("restart")["scope"] == ["worker-0", "worker-1"]


def test_a_dead_evaluator_restarts_alone() -> None:
    world = up(make_plan(2, evaluator=True))
    world.exit("evaluator-0", "signal")
    world.deliver_all()
    assert {n: p.attempt for n, p in world.running()} == {"worker-0": 1, "worker-1": 1, "evaluator-0": 2}
    assert generations(world) == {1}


def test_a_broken_evaluator_is_given_up_and_training_continues() -> None:
    world = up(make_plan(2, evaluator=True))
    for _ in range(2):
        world.exit("evaluator-0", "program-error", "x.py:1")
        world.deliver_all()
        world.pass_time(5)
        world.deliver_all()
    assert names(world) == ["worker-0", "worker-1"]
    assert "gave up on evaluator-0" in world.last("warning")["text"]
    for task in ("worker-0", "worker-1"):
        world.exit(task, "")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"


def test_parameter_server_worker_restarts_alone_and_all_with_ps_or_chief() -> None:
    world = up(make_plan(2, ps=1, chief=True))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert {n: p.attempt for n, p in world.running()} == {"worker-0": 1, "worker-1": 2, "chief-0": 1, "ps-0": 1}
    assert world.captain.generation == 1
    world.exit("ps-0", "signal")
    world.deliver_all()
    assert {n: p.attempt for n, p in world.running()} == {"worker-0": 2, "worker-1": 3, "chief-0": 2, "ps-0": 2}
    assert world.captain.generation == 2
    assert [(record.cause, record.task) for record in world.captain.failures.restarts] == [
        ("signal", "worker-1"),
        ("signal", "ps-0"),
    ]


def test_the_chief_decides_success_and_servers_end() -> None:
    world = up(make_plan(2, ps=1, chief=True))
    world.exit("chief-0", "")
    world.deliver_all()
    assert names(world) == []
    assert world.over is not None and world.over.status == "succeeded"


def test_without_a_chief_all_workers_decide() -> None:
    world = up(make_plan(2, ps=1))
    world.exit("worker-0", "")
    world.deliver_all()
    assert world.over is None
    world.exit("worker-1", "")
    world.deliver_all()
    assert names(world) == []
    assert world.over is not None and world.over.status == "succeeded"


def test_workers_continue_when_parameter_servers_need_a_new_generation() -> None:
    world = up(make_plan(2, ps=1, hang_after=None))
    world.captain.commits.missed_newer = True  # the snapshot from which it has started is outdated
    world.step(10, ["worker-0"])
    for _ in range(10):
        world.pass_time(1)
        world.deliver_all()
    assert world.captain.generation == 2
    assert {name: process.attempt for name, process in world.running()} == {"ps-0": 2, "worker-0": 1, "worker-1": 1}


def warnings(world: World) -> list[str]:
    return [fields["text"] for kind, _, fields in world.events if kind == "warning"]


@pytest.mark.parametrize(
    ("framework", "hint"), [("torch", "MASTER_PORT"), ("jax", "initialize"), ("tensorflow", "TF_CONFIG")]
)
def test_workers_that_never_met_are_warned_about_at_the_end(framework: str, hint: str) -> None:
    world = up(replace(make_plan(2), framework=framework))
    world.exit("worker-0", "", listened=False)
    world.deliver_all()
    assert warnings(world) == []
    world.exit("worker-1", "")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"
    [text] = warnings(world)
    assert text.startswith(
        "2 workers succeeded and probably never communicated with each other: no process used h:worker-0"
    )
    assert hint in text


@pytest.mark.parametrize("listened", [True, None])
def test_workers_that_met_or_may_have_met_are_not_warned_about(listened: bool | None) -> None:
    world = up(make_plan(2))
    world.exit("worker-0", "", listened=listened)
    world.exit("worker-1", "")
    world.deliver_all()
    assert world.over is not None and warnings(world) == []


def test_only_the_last_attempt_says_whether_workers_met() -> None:
    world = up(make_plan(2))
    world.exit("worker-0", "", listened=False)
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.exit("worker-0", "", listened=True)
    world.exit("worker-1", "")
    world.deliver_all()
    assert world.over is not None and warnings(world) == []


def test_a_returned_captain_still_knows_that_workers_never_met() -> None:
    world = up(make_plan(2))
    world.exit("worker-0", "", listened=False)
    world.restart_captain()
    world.join_all()
    world.deliver_all()
    world.exit("worker-1", "")
    world.deliver_all()
    assert world.over is not None and len(warnings(world)) == 1


def test_the_evaluator_may_finish_after_training() -> None:
    world = up(make_plan(1, evaluator=True))
    world.exit("worker-0", "")
    world.deliver_all()
    assert names(world) == ["evaluator-0"] and world.over is None
    world.exit("evaluator-0", "")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_does_not_finish_is_ended_after_the_grace() -> None:
    world = up(make_plan(1, evaluator=True))
    world.exit("worker-0", "")
    world.pass_time(world.plan.limits.grace + 1)
    world.deliver_all()
    assert names(world) == []
    assert world.over is not None and world.over.status == "succeeded"


def test_the_same_program_error_twice_ends_the_run() -> None:
    world = up(make_plan(2))
    world.exit("worker-0", "program-error", "train.py:10")
    world.deliver_all()
    assert len(world.running()) == 2
    world.exit("worker-1", "program-error", "train.py:10")
    world.deliver_all()
    assert world.over is not None
    assert (world.over.status, world.over.cause) == ("failed", "program-error")
    assert "twice" in world.over.reason


def test_the_same_program_error_after_progress_is_tried_again() -> None:
    world = up(make_plan(2))
    for step in (10, 20, 30):
        world.step(step)
        world.exit("worker-0", "program-error", "train.py:10")
        world.deliver_all()
        assert len(world.running()) == 2
    assert [record.cause for record in world.captain.failures.restarts] == ["program-error"] * 3


@pytest.mark.parametrize(
    ("signs", "text"),
    [
        ({"checkpoint": "ckpt/model.pt"}, "ckpt/model.pt had changed"),
        ({"ran": 61.0, "to_first_output": 6.0}, "the program had run for 61 s"),
    ],
)
def test_the_same_error_of_a_program_that_reports_nothing_is_tried_again_after_work(
    signs: dict[str, Any], text: str
) -> None:
    world = up(make_plan(2, limit=3, hang_after=None))
    for _ in range(3):
        world.exit("worker-0", "program-error", "train.py:10", **signs)
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
    assert world.over is None and len(world.running()) == 2
    restarts = [fields for kind, _, fields in world.events if kind == "restart"]
    assert [fields.get("signs_of_work") for fields in restarts] == [None, text, text]
    assert [fields["count"] for fields in restarts] == [1, 2, 3], "the budget counts on"
    world.exit("worker-0", "program-error", "train.py:10", **signs)
    world.deliver_all()
    assert world.over is not None and "restart.limit is 3" in world.over.reason


@pytest.mark.parametrize(
    "signs", [{"ran": 59.0, "to_first_output": 1.0}, {"ran": 300.0, "to_first_output": 40.0}, {"ran": 0.1}]
)
def test_a_short_run_and_a_slow_start_are_no_progress(signs: dict[str, float]) -> None:
    world = up(make_plan(1))
    for _ in range(2):
        world.exit("worker-0", "program-error", "train.py:10", **signs)
        world.deliver_all()
    assert world.over is not None
    assert "no new step, snapshot or checkpoint file, and it ran only briefly" in world.over.reason


def test_once_steps_are_reported_only_they_and_snapshots_are_progress() -> None:
    world = up(make_plan(1))
    world.step(5)
    for _ in range(2):
        world.exit("worker-0", "program-error", "train.py:10", ran=1e4, checkpoint="model.pt")
        world.deliver_all()
    assert world.over is not None and "no new step or snapshot" in world.over.reason


def test_two_exits_with_different_last_lines_are_different_errors() -> None:
    world = up(make_plan(1, hang_after=None))
    for place in ("exit code 1: epoch 15", "exit code 1: epoch 30"):
        world.exit("worker-0", "program-error", place)
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
    assert world.over is None
    world.exit("worker-0", "program-error", "exit code 1: epoch 30")
    world.deliver_all()
    assert world.over is not None and "the same exit code and last line of output twice" in world.over.reason


def formed(world: World) -> list[dict[str, Any]]:
    return [fields for kind, _, fields in world.events if kind == "generation-formed"]


def test_a_group_without_a_snapshot_starts_again_from_the_beginning() -> None:
    world = up(make_plan(2, evaluator=1))
    world.exit("worker-0", "signal")
    world.deliver_all()
    world.exit("evaluator-0", "signal")
    world.deliver_all()
    assert [(fields["tasks"], fields.get("from_scratch")) for fields in formed(world)] == [
        (["worker-0", "worker-1", "evaluator-0"], None), (["worker-0", "worker-1"], True), (["evaluator-0"], None),
    ]  # fmt: skip


@pytest.mark.parametrize("reports_steps", [False, True])
def test_a_snapshot_of_a_program_that_reports_no_steps_has_a_number(reports_steps: bool) -> None:
    world = up(make_plan(1, watch="ckpt"))
    if reports_steps:
        world.step(1)
    world.save("worker-0", 1)
    world.deliver_all()
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert formed(world)[-1]["restore"] == "step-1-g1"
    kinds = ("saved", "committed", "generation-formed")
    counted = [fields.get("counted", False) for kind, _, fields in world.events if kind in kinds][1:]
    assert counted == [not reports_steps] * 3


def test_losing_a_peer_twice_is_not_a_repeated_program_error() -> None:
    """For example, a chief whose worker has not found the new ps yet: no other task has failed."""
    world = up(make_plan(2, limit=2, hang_after=None))
    for _ in range(2):
        world.exit("worker-0", "program-error", "tf.py:1", survivor=True)
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
    assert world.over is None and len(world.running()) == 2
    world.exit("worker-0", "program-error", "tf.py:1", survivor=True)
    world.deliver_all()
    assert world.over is not None and "restart.limit is 2" in world.over.reason


def test_repeated_steps_are_not_progress() -> None:
    world = up(make_plan(2, limit=2, hang_after=None))
    for _ in range(3):
        world.step(5)
        world.exit("worker-0", "signal")
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
    assert world.over is not None and world.over.cause == "signal"
    assert "restart.limit is 2" in world.over.reason


def test_restarts_without_progress_wait_longer_each_time() -> None:
    world = up(make_plan(2, limit=5, hang_after=None))
    for _ in range(4):
        world.exit("worker-0", "signal")
        world.deliver_all()
        world.pass_time(70)
        world.deliver_all()
    delays = [fields["delay_s"] for kind, _, fields in world.events if kind == "restart"]
    assert delays[0] == 0 and delays == sorted(delays) and delays[-1] > delays[1]


@pytest.mark.parametrize("order", [["survivor", "culprit"], ["culprit", "survivor"]])
def test_the_cause_is_never_the_error_of_a_survivor(order: list[str]) -> None:
    world = up(make_plan(2))
    for kind in order:
        if kind == "survivor":
            world.exit("worker-0", "program-error", "tf.py:1", survivor=True)
        else:
            world.exit("worker-1", "signal")
    world.deliver_all()
    assert (world.last("restart")["cause"], world.last("restart")["task"]) == ("signal", "worker-1")


def test_a_lost_host_is_the_cause_even_if_survivors_report_first() -> None:
    world = up(make_plan(2))
    world.disconnect("worker-host-1")
    world.exit("worker-0", "program-error", "tf.py:1", survivor=True)
    world.deliver_all()
    assert world.captain.generation == 1, "the lost host may still run: its lease has not ended"
    world.pass_time(LEASE + 2)
    world.host_is_replaced("worker-host-1", dead=True)
    world.join_all()
    world.deliver_all()
    assert world.last("restart")["cause"] == "host-lost"
    assert generations(world) == {2}


def test_a_short_disconnection_does_not_affect_training() -> None:
    world = up(make_plan(2))
    world.disconnect("worker-host-1")
    world.pass_time(3)
    world.join("worker-host-1")
    world.deliver_all()
    world.pass_time(3)
    assert generations(world) == {1} and "restart" not in world.kinds()


def test_a_host_that_leaves_at_the_end_is_not_lost_even_if_its_last_message_is() -> None:
    world = up(make_plan(2))
    for task in ("worker-0", "worker-1"):
        world.exit(task, cause="")
    assert isinstance(world.machines["worker-host-1"].inbox[-1], ins.DismissMember)
    world.disconnect("worker-host-1")
    world.deliver_all()
    assert "member-lost" not in world.kinds() and world.last("run-ended")["status"] == "succeeded"


def test_a_restarted_agent_has_lost_its_tasks() -> None:
    world = up(make_plan(2))
    world.agent_dies("worker-host-0")
    world.join("worker-host-0")
    world.deliver_all()
    assert generations(world) == {2} and len(world.running()) == 2
    assert world.last("restart")["cause"] == "host-lost"


def test_the_captain_waits_until_the_lease_of_a_replaced_host_has_ended() -> None:
    world = up(make_plan(2))
    world.host_is_replaced("worker-host-1", dead=False)
    world.join("worker-host-1")
    world.deliver_all()
    assert generations(world) == {1}, "the old instance may still train"
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert generations(world) == {2} and len(world.running()) == 2


def test_the_captain_does_not_wait_if_a_host_is_replaced_in_the_same_pod() -> None:
    world = World(make_plan(2))
    world.machines["worker-host-1"].place = "pod-1"
    world.join_all()
    world.deliver_all()
    world.host_is_replaced("worker-host-1", dead=False, same_place=True)
    world.join("worker-host-1")
    world.deliver_all()
    assert generations(world) == {2} and len(world.running()) == 2


def test_a_captain_that_returns_within_the_lease_adopts_the_generation() -> None:
    world = up(make_plan(2, evaluator=True))
    world.step(7)
    world.restart_captain()
    world.pass_time(2)
    world.join_all()
    world.deliver_all()
    world.pass_time(2)
    assert world.last("captain-returned") == {"adopted": True}
    assert generations(world) == {1} and len(world.running()) == 3
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert world.captain.generation == 2


def test_a_captain_without_notes_learns_from_its_members() -> None:
    world = up(make_plan(2))
    world.exit("worker-0", "signal")
    world.deliver_all()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    world.pass_time(2)
    assert generations(world) == {2} and world.captain.generation == 2
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert generations(world) == {3}


@pytest.mark.parametrize("number", [10_000_000, 99_999_999])
def test_a_generation_that_cannot_be_true_is_ignored(number: int) -> None:
    world = up(make_plan(2))
    world.disconnect("worker-host-1")
    machine = world.machines["worker-host-1"]
    machine.generation, machine.records = number, (ev.GenerationRecord(number, None, "x"),)
    saved = ev.PartSaved("worker-host-1", "worker-1", SnapshotId(5, number), 1)
    machine.held["worker-1", saved.snapshot] = saved
    for _ in range(2):
        world.join("worker-host-1")
        world.disconnect("worker-host-1")
    world.join("worker-host-1")
    world.tell(saved)
    assert world.captain.commits._copies == {}
    assert [text.split(",")[0] for text in warnings(world)] == [f"worker-host-1 reports generation {number}"]
    world.exit("worker-0", "program-error")
    world.deliver_all()
    world.pass_time(5)
    world.deliver_all()
    assert (generations(world), world.captain.commits.records.newest) == ({2}, 2)


def test_a_captain_without_notes_continues_after_any_generation_that_only_members_know() -> None:
    """The store cannot be reached."""
    world = up(make_plan(2))
    for machine in world.machines.values():
        machine.generation = 9_000_000
        for process in machine.processes.values():
            process.generation = 9_000_000
    world.place.fails = req.Failure(req.STORE, "down", True)
    world.restart_captain(with_notes=False)
    world.join_all()
    assert world.captain.generation == 9_000_000
    assert warnings(world) == []


def test_the_captain_begins_no_generation_that_members_reject() -> None:
    world = up(make_plan(2))
    world.captain.ledger.generation = generation_numbers.MOST
    world.exit("worker-0", "program-error")
    world.deliver_all()
    world.pass_time(5)
    assert world.captain._shutdown.outcome[:2] == ("failed", "no generation can follow 99999999")


def test_a_captain_that_returns_after_the_lease_forms_the_next_generation() -> None:
    world = up(make_plan(2))
    world.restart_captain()
    world.pass_time(LEASE + 2)
    assert world.running() == []
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert generations(world) == {2} and len(world.running()) == 2


def test_a_start_timeout_names_the_missing_members() -> None:
    world = World(make_plan(3, start=30))
    world.join("worker-host-0")
    world.pass_time(31)
    world.deliver_all()
    assert world.over is not None and world.over.cause == "start-timeout"
    assert "worker-1, worker-2" in world.over.reason
    waits = [fields for kind, _, fields in world.events if kind == "waiting"]
    assert waits and waits[0]["missing"] == ["worker-host-1", "worker-host-2"]


def test_the_wait_for_the_first_host_is_not_limited() -> None:
    world = World(make_plan(3, start=30))
    world.pass_time(500)
    assert world.over is None


def test_a_group_without_a_step_for_hang_after_hangs() -> None:
    world = up(make_plan(2, hang_after=20))
    world.step(1)
    for _ in range(19):
        world.pass_time(1)
        world.output()
    assert "hang" not in world.kinds()
    world.pass_time(3)
    world.deliver_all()
    assert world.last("hang")["progress"] == "step"
    assert world.last("restart")["cause"] == "hang"
    assert generations(world) == {2}


def test_output_counts_as_progress_until_steps_are_reported() -> None:
    world = up(make_plan(2, hang_after=20))
    for _ in range(50):
        world.output()
        world.pass_time(1)
    assert "hang" not in world.kinds()
    world.pass_time(25)
    assert world.last("hang")["progress"] == "output"


def test_an_unset_hang_after_grows_with_the_longest_gap() -> None:
    world = up(make_plan(2, hang_after=None))
    world.step(1)
    world.pass_time(300)
    world.step(2)
    world.pass_time(1200)
    assert "hang" not in world.kinds()
    world.pass_time(400)
    assert "hang" in world.kinds()


def test_ps_and_evaluator_are_not_checked_for_hangs() -> None:
    world = up(make_plan(1, ps=1, chief=True, evaluator=True, hang_after=20))
    for step in range(1, 60):
        world.step(step, ["chief-0"])
        world.pass_time(1)
    assert "hang" not in world.kinds()


def test_a_chief_that_hangs_restarts_its_workers_too() -> None:
    world = up(make_plan(2, ps=1, chief=True, hang_after=20))
    world.step(1, ["chief-0"])
    world.pass_time(25)
    world.deliver_all()
    assert {n: p.attempt for n, p in world.running()} == {"chief-0": 2, "worker-0": 2, "worker-1": 2, "ps-0": 2}


def test_a_worker_that_reports_steps_is_checked_for_hangs_on_its_own() -> None:
    world = up(make_plan(2, ps=1, hang_after=20))
    world.step(1)
    for step in range(2, 30):
        world.step(step, ["worker-0"])
        world.pass_time(1)
    world.deliver_all()
    assert world.last("restart")["task"] == "worker-1"
    assert {n: p.attempt for n, p in world.running()} == {"worker-0": 1, "worker-1": 2, "ps-0": 1}


def test_the_runtime_limit_has_its_own_reason() -> None:
    world = up(make_plan(2, runtime=100, hang_after=None))
    world.pass_time(101)
    world.deliver_all()
    assert world.over is not None and world.over.cause == "runtime-limit"
    assert "limits.runtime" in world.over.reason and world.running() == []


@pytest.mark.parametrize("clock", [{"wall": 1e9}, {"wall": 1.0}, {"ahead": -900.0}])
def test_the_runtime_limit_continues_with_the_next_captain_whatever_its_clock_says(clock: dict[str, float]) -> None:
    world = up(make_plan(2, runtime=100, hang_after=None))
    world.pass_time(60)
    world.restart_captain(**clock)
    world.join_all()
    world.pass_time(39)
    world.deliver_all()
    assert world.over is None and len(world.running()) == 2
    world.pass_time(2)
    world.deliver_all()
    assert world.over is not None and world.over.cause == "runtime-limit"


def test_stop_ends_everything() -> None:
    world = up(make_plan(2, evaluator=True))
    world.tell(ev.StopRequested("a person said so"))
    world.deliver_all()
    assert world.running() == [] and world.over is not None
    assert (world.over.status, world.over.reason) == ("stopped", "a person said so")


@pytest.mark.parametrize(("interrupt", "how"), [(False, "term"), (True, "int")])
def test_a_stop_by_ctrl_c_interrupts_tasks_with_the_same_grace(interrupt: bool, how: str) -> None:
    world = up(make_plan(2))
    world.tell(ev.StopRequested("interrupted", interrupt))
    ends = [each for m in world.machines.values() for each in m.inbox if isinstance(each, ins.EndTasks)]
    assert [(end.how, end.grace) for end in ends] == [(how, world.plan.limits.grace)] * 2
    world.deliver_all()
    assert world.over is not None and (world.over.status, world.over.reason) == ("stopped", "interrupted")


def test_recovery_is_timed_from_failure_to_the_next_step() -> None:
    world = up(make_plan(2))
    world.step(10)
    world.exit("worker-0", "signal")
    world.deliver_all()
    world.now += 1.5
    world.step(11)
    assert world.last("recovered")["first_step_after_s"] == pytest.approx(1.5)
    assert world.captain.failures.restarts[0].first_step_after_s == pytest.approx(1.5)


def test_a_stop_while_the_captain_returns_still_grants_the_grace() -> None:
    world = up(make_plan(2))
    world.restart_captain()
    world.tell(ev.StopRequested("a person said so"))
    assert world.over is None, "no member has reported its tasks yet"
    world.join_all()
    ends = [end for machine in world.machines.values() for end in machine.inbox if isinstance(end, ins.EndTasks)]
    assert [(end.how, end.grace) for end in ends] == [("term", world.plan.limits.grace)] * 2
    world.deliver_all()
    assert world.over is not None and world.over.status == "stopped"


def test_a_death_after_adoption_is_noticed() -> None:
    world = up(make_plan(2))
    world.restart_captain()
    world.join("worker-host-0")
    world.agent_dies("worker-host-0")
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert generations(world) == {2} and len(world.running()) == 2


def test_a_captain_that_dies_during_a_back_off_counts_no_restart_twice() -> None:
    world = up(make_plan(2, hang_after=None))
    for _ in range(2):
        world.exit("worker-0", "signal")
        world.deliver_all()
    assert len(world.captain.failures.restarts) == 2, "the second restart waits"
    world.restart_captain()
    world.join_all()
    world.pass_time(LEASE + 5)
    world.deliver_all()
    assert [record.cause for record in world.captain.failures.restarts] == ["signal", "signal"]
    assert len(world.running()) == 2


def test_a_failure_that_no_generation_has_followed_is_no_restart() -> None:
    """The run is stopped while the second restart waits."""
    world = up(make_plan(2, hang_after=None))
    for _ in range(2):
        world.exit("worker-0", "signal")
        world.deliver_all()
    assert len(world.captain.failures.restarts) == 2 and len(world.captain.failures.followed_restarts()) == 1
    world.restart_captain()
    world.join_all()
    world.deliver_all()
    assert len(world.captain.failures.followed_restarts()) == 1, "the next captain knows it, too"
    world.pass_time(LEASE + 5)
    world.deliver_all()
    assert len(world.running()) == 2 and len(world.captain.failures.followed_restarts()) == 2


def test_a_failure_while_the_captain_was_away_is_the_cause() -> None:
    world = up(make_plan(2))
    world.restart_captain()
    world.exit("worker-1", "program-error", "train.py:3")
    world.join_all()
    world.deliver_all()
    assert (world.last("restart")["cause"], world.last("restart")["task"]) == ("program-error", "worker-1")


def test_a_member_that_reconnects_while_the_run_ends_keeps_its_grace() -> None:
    world = up(make_plan(2))
    world.tell(ev.StopRequested("stop"))
    world.disconnect("worker-host-1")
    world.now += 1
    world.join("worker-host-1")
    (end,) = [end for end in world.machines["worker-host-1"].inbox if isinstance(end, ins.EndTasks)]
    assert end.how == "term" and 0 < end.grace < world.plan.limits.grace


def test_a_recovery_is_timed_even_if_the_captain_died_in_between() -> None:
    world = up(make_plan(2))
    world.step(10)
    world.exit("worker-0", "signal")
    world.deliver_all()
    world.restart_captain()
    world.join_all()
    world.now += 2
    world.step(11)
    assert world.captain.failures.restarts[0].first_step_after_s == pytest.approx(2)


def test_an_early_request_for_a_group_snapshot_is_agreed_on_once_all_tasks_listen() -> None:
    world = up(make_plan(2))
    world.tell(ev.Heartbeat("worker-host-0", 1, {}, asking=("worker-0",)))
    world.tell(ev.SaveRequested("worker-host-0", "worker-0"))
    assert not hosts_asked_to_agree(world)
    world.tell(ev.Heartbeat("worker-host-1", 1, {}, asking=("worker-1",)))
    assert hosts_asked_to_agree(world) == {"worker-host-0", "worker-host-1"}


def agree_on_a_step(world: World, reason: ev.Event) -> int:
    """All tasks listen, a snapshot is needed, and all tasks have agreed on a step. Returns the number of the
    proposal."""
    for number in range(2):
        world.tell(ev.Heartbeat(f"worker-host-{number}", 1, {}, asking=(f"worker-{number}",)))
    world.tell(reason)
    proposal = int(received(world, ins.AgreeOnStep)[-1].words["which"])
    for say in ("here", "yes"):
        for number in range(2):
            world.tell(ev.AgreementReply(f"worker-host-{number}", f"worker-{number}", say, proposal, 3))
    assert received(world, ins.AgreeOnStep)[-1].words["say"] == "go"
    return proposal


def received(world: World, kind: type[Kind]) -> list[Kind]:
    return [each for each in world.machines["worker-host-1"].inbox if isinstance(each, kind)]


def commit_step(world: World, step: int) -> None:
    id = SnapshotId(step, 1)
    world.tell(ev.PartSaved("worker-host-0", "worker-0", id, 1, {}))
    world.place.send("worker-0", id)
    world.tell(ev.PartStored("worker-host-0", "worker-0", id, (File("state", 1, "0" * 64),)))
    world.answer()


def test_a_leaving_host_waits_for_the_agreed_snapshot_and_not_for_an_earlier_one() -> None:
    world = up(make_plan(2))
    proposal = agree_on_a_step(world, ev.HostLeaving("worker-host-1", "SIGTERM"))
    world.tell(ev.AgreementReply("worker-host-0", "worker-0", "saves", proposal, 9, step=105))
    commit_step(world, 100)
    assert received(world, ins.ReleaseHost) == []
    commit_step(world, 105)
    assert len(received(world, ins.ReleaseHost)) == 1


def test_no_other_step_is_agreed_on_until_all_tasks_have_saved_at_the_first() -> None:
    """A task that is past the first step would save at the first, and others at the second."""
    world = up(make_plan(2))
    proposal = agree_on_a_step(world, ev.SaveRequested("worker-host-0", "worker-0"))
    count_before = len(received(world, ins.AgreeOnStep))
    world.tell(ev.SaveRequested("worker-host-0", "worker-0"))
    world.tell(ev.AgreementReply("worker-host-0", "worker-0", "saves", proposal, 9, step=105))
    assert len(received(world, ins.AgreeOnStep)) == count_before
    world.tell(ev.AgreementReply("worker-host-1", "worker-1", "saves", proposal, 9, step=105))
    assert received(world, ins.AgreeOnStep)[count_before:][0].words == {"say": "where", "which": proposal + 1}


def hosts_asked_to_agree(world: World) -> set[str]:
    machines = world.machines.items()
    return {name for name, machine in machines if any(isinstance(each, ins.AgreeOnStep) for each in machine.inbox)}


# ---- notices


def notices(world: World) -> list[str]:
    return [fields["text"] for kind, _, fields in world.events if kind in ("note", "warning")]


def test_the_same_notice_of_several_hosts_is_emitted_once_in_ten_minutes() -> None:
    world = up(make_plan(2))
    for host in ("worker-host-0", "worker-host-1", "worker-host-0"):
        world.tell(ev.Notice(host, "the disk is full", warning=True))
    assert notices(world) == ["the disk is full"]
    world.now += 601
    world.tell(ev.Notice("worker-host-1", "the disk is full", warning=True))
    assert notices(world) == ["the disk is full"] * 2


def test_a_host_that_sends_notices_in_a_loop_does_not_fill_the_disk() -> None:
    world = up(make_plan(2))
    for number in range(5000):
        world.tell(ev.Notice("worker-host-0", f"notice {number}"))
    world.tell(ev.Notice("worker-host-1", "another host"))
    more = "worker-host-0 sent more than 100 messages within 10 minutes; the rest are not shown"
    assert notices(world) == [*(f"notice {number}" for number in range(100)), more, "another host"]
    world.now += 601
    world.tell(ev.Notice("worker-host-0", "ten minutes later"))
    assert notices(world)[-1] == "ten minutes later"


def test_what_a_host_repeats_becomes_an_event_only_if_it_is_new() -> None:
    world = up(make_plan(2))
    before = len(world.events)
    for _ in range(300):
        world.tell(ev.TaskStarted("worker-host-0", "worker-0", 1, 1, False))
        world.tell(ev.HostLeaving("worker-host-0", "SIGTERM"))
        world.tell(ev.MemberLeft("worker-host-0"))
    assert [fields for _, _, fields in world.events[before:]] == [{"text": "worker-host-0 is shutting down: SIGTERM"}]


@pytest.mark.parametrize(
    "event",
    [
        ev.SpareReady("worker-host-0", 1.0),
        ev.StartMeasured("worker-host-0", "worker-0", 1, ev.StartTimes(imports=1.0)),
    ],
)
def test_messages_of_a_host_in_a_loop_do_not_fill_the_disk(event: ev.MemberEvent) -> None:
    world = up(make_plan(2))
    before = len(world.events)
    for _ in range(1000):
        world.tell(event)
    assert len(world.events) == before + 100
    world.now += 601
    world.tell(event)
    assert len(world.events) == before + 101


# ---- names of tasks that a member sends


def test_the_captain_keeps_nothing_about_tasks_of_other_hosts() -> None:
    world = up(make_plan(2))
    for n in range(100):
        unknown = f"unknown-{n}"
        stacks = {unknown: "x", "worker-0": "mine", "worker-1": "another's"}
        world.tell(ev.TasksEnded("worker-host-0", {}, {}, {"worker-1": "stopped", unknown: "stopped"}, stacks))
        world.tell(ev.Heartbeat("worker-host-0", n, {}, asking=("worker-0", "worker-1", unknown)))
    assert world.captain.failures.stacks == {"worker-0": "mine"}
    assert world.captain._group_snapshot._polling == {"worker-0"}


def test_a_captain_that_returns_believes_a_member_only_about_its_own_tasks() -> None:
    world = up(make_plan(2))
    world.restart_captain()
    exits = tuple(ev.TaskExit(task, 1, 1, cause="program-error") for task in ("worker-0", "worker-1"))
    joined = ev.MemberJoined("worker-host-0", "worker-host-0-a", 1, True, "", 1, {}, exits)
    for _ in range(3):
        world.tell(joined)
    [failure] = world.captain._unit_of["worker-0"].failures
    assert failure.task == "worker-0"


def test_restarts_of_a_program_that_reports_no_steps_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.agent.captain.failures.RESTARTS_KEPT", 3)
    world = up(make_plan(1, limit=100, hang_after=None))
    for _ in range(5):
        before = world.captain.milestone()
        world.exit("worker-0", "signal")
        world.pass_time(60)
        world.deliver_all()
        assert names(world) == ["worker-0"] and world.captain.milestone() != before
    failures = world.captain.failures
    assert failures.recovering == failures.restarts and len(failures.restarts) == 3
    assert failures.to_notes()["recovering"] == [0, 1, 2]
