"""Metrics that are NaN or infinite: one event, and by choice the end of the run or a return to the snapshot before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots import abandoned_steps
from paceline.agent.transfers import requests as req
from paceline.plan import ROLLBACK, STOP, WARN, Plan, Snapshots
from paceline.storage.snapshots.manifest import SnapshotId, parse_id
from support.committing import AWAY, a_plan, committed, counted
from support.worlds import World, up


def rolling_back(workers: int = 2, **more: Any) -> Plan:
    return a_plan(workers, on_nan=ROLLBACK, **more)


def reports(world: World) -> list[tuple[int, dict[str, Any]]]:
    return [(generation, fields) for kind, generation, fields in world.events if kind == "not-finite"]


def restored(world: World) -> list[str | None]:
    """By the group, or by the chief of a parameter-server job."""
    formed = [fields for kind, _, fields in world.events if kind == "generation-formed"]
    return [fields["restore"] for fields in formed if {"worker-0", "chief-0"} & set(fields["tasks"])]


def notes(world: World) -> list[str]:
    return [fields["text"] for kind, _, fields in world.events if kind == "note"]


def settle(world: World) -> World:
    """Tasks that end are replaced, also after a delay."""
    for _ in range(4):
        world.deliver_all()
        world.output()
        world.pass_time(4)
    return world


# ---- the event


def test_the_group_reports_a_metric_once_in_a_generation() -> None:
    world = up(a_plan(2))
    world.report("worker-0", 25)
    world.report("worker-1", 25)
    world.report("worker-1", 26, "norm", "-Infinity")
    assert reports(world) == [
        (1, {"task": "worker-0", "metric": "loss", "value": "NaN", "step": 25}),
        (1, {"task": "worker-1", "metric": "norm", "value": "-Infinity", "step": 26}),
    ]
    world.exit("worker-0", "signal")
    settle(world)
    world.report("worker-1", 27)
    assert [generation for generation, _ in reports(world)] == [1, 1, 2]


def test_a_warning_changes_nothing_else() -> None:
    world = committed(up(a_plan(2, on_nan=WARN)), 10)
    world.report("worker-0", 5)
    settle(world)
    assert world.captain.generation == 1 and len(world.running()) == 2
    assert counted(committed(world, 20)) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_report_of_another_host_or_of_an_earlier_attempt_is_ignored() -> None:
    world = up(rolling_back())
    world.exit("worker-0", "signal")
    settle(world)
    world.tell(ev.MetricNotFinite("worker-host-0", "worker-1", 2, "loss", "NaN", 5))
    world.tell(ev.MetricNotFinite("worker-host-0", "worker-0", 1, "loss", "NaN", 5))
    world.tell(ev.MetricNotFinite("worker-host-0", "nobody-0", 2, "loss", "NaN", 5))
    assert reports(world) == [] and world.captain.generation == 2 and len(world.running()) == 2


@pytest.mark.parametrize("choice", [WARN, STOP, ROLLBACK])
def test_a_metric_of_an_evaluator_is_only_an_event(choice: str) -> None:
    world = up(a_plan(1, evaluator=1, on_nan=choice))
    world.report("evaluator-0", 10, "accuracy")
    world.tell(ev.PartSaved("evaluator-host-0", "evaluator-0", SnapshotId(10, 1), not_finite={"loss": "NaN"}))
    settle(world)
    assert reports(world) == [(1, {"task": "evaluator-0", "metric": "accuracy", "value": "NaN", "step": 10})]
    assert world.captain.generation == 1 and world.over is None


def test_the_events_are_not_repeated_by_the_next_captain() -> None:
    world = up(a_plan(1, evaluator=1))
    world.report("worker-0", 25)
    world.report("evaluator-0", 20)
    world.restart_captain()
    world.join_all()
    settle(world)
    assert [fields["task"] for _, fields in reports(world)] == ["worker-0", "evaluator-0"]


# ---- stop


def test_the_run_stops() -> None:
    world = up(a_plan(2, on_nan=STOP))
    world.report("worker-1", 25, value="Infinity")
    settle(world)
    assert world.over is not None
    assert (world.over.status, world.over.cause) == ("failed", "nan")
    assert world.over.reason == "worker-1: loss is Infinity at step 25 (restart.on_nan is stop)"


def test_a_run_without_steps_stops() -> None:
    world = up(a_plan(1, on_nan=STOP))
    world.report("worker-0", None)
    settle(world)
    assert world.over is not None and world.over.reason == "worker-0: loss is NaN (restart.on_nan is stop)"


def test_the_next_captain_stops_the_run() -> None:
    world = up(a_plan(1, on_nan=STOP))
    world.disconnect("worker-host-0")
    world.report("worker-0", 25)
    world.restart_captain(with_notes=False)
    world.join_all()
    settle(world)
    assert world.over is not None and world.over.cause == "nan"


def test_a_worker_of_a_job_without_a_chief_stops_the_run_in_any_generation() -> None:
    world = up(a_plan(2, ps=1, on_nan=STOP))
    world.exit("ps-0", "signal")
    settle(world)
    assert world.captain.generation == 2 and world.over is None
    world.report("worker-0", 25)
    settle(world)
    assert world.over is not None and world.over.cause == "nan"


# ---- rollback


def test_the_group_goes_back_to_the_snapshot_before() -> None:
    world = committed(up(rolling_back()), 10, 20, 30)
    world.report("worker-1", 25)
    settle(world)
    assert restored(world) == [None, "step-20-g1"] and len(world.running()) == 2
    restart = world.last("restart")
    assert (restart["cause"], restart["task"], restart["count"]) == ("nan", "worker-1", 1)
    assert restart["detail"] == "loss is NaN at step 25"
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]
    assert not world.place.snapshots.has(SnapshotId(30, 1)), "it is deleted"
    assert counted(committed(world, 30)) == [SnapshotId(30, 2), SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_snapshot_of_the_same_step_is_not_used() -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.report("worker-0", 20)
    settle(world)
    assert restored(world) == [None, "step-10-g1"] and counted(world) == [SnapshotId(10, 1)]


def test_the_earliest_step_of_all_tasks_counts() -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.report("worker-0", 25)
    world.report("worker-1", 15)
    settle(world)
    assert restored(world) == [None, "step-10-g1"]


def test_without_a_snapshot_before_training_starts_from_the_beginning() -> None:
    world = committed(up(rolling_back()), 30)
    world.report("worker-0", 25)
    settle(world)
    assert restored(world) == [None, None] and world.last("generation-formed")["from_scratch"]
    assert notes(world) == ["there is no snapshot from before step 25: training starts from the beginning"]
    assert counted(world) == []
    assert counted(committed(world, 30)) == [SnapshotId(30, 2)]


def test_a_run_that_started_from_another_goes_back_to_its_snapshot() -> None:
    world = World(rolling_back(snapshots=Snapshots("s3://bucket/runs", keep=10, origin="another")))
    answer = world.place.answer
    adopted = req.OriginAdopted(SnapshotId(1000, 0), "another", 1000)
    world.place.answer = lambda request: (  # type: ignore[method-assign]
        adopted if isinstance(request, req.AdoptOrigin) else answer(request)
    )
    world.join_all()
    world.deliver_all()
    assert restored(world) == ["step-1000-g0"]
    committed(world, 10)
    world.report("worker-0", 5)
    settle(world)
    assert restored(world) == ["step-1000-g0", "step-1000-g0"], "its steps are counted differently"


def test_a_snapshot_that_is_saved_afterwards_is_not_used() -> None:
    world = committed(up(rolling_back()), 10)
    world.report("worker-0", 15)
    world.save("worker-1", 20)
    assert "saved" not in world.kinds()[world.kinds().index("not-finite") :]
    settle(world)
    assert restored(world) == [None, "step-10-g1"] and counted(world) == [SnapshotId(10, 1)]
    assert SnapshotId(20, 1) not in [snapshot for machine in world.machines.values() for _, snapshot in machine.held]


def test_a_snapshot_that_is_being_committed_is_not_used() -> None:
    world = committed(up(rolling_back()), 10)
    world.save("worker-0", 20)
    world.deliver("worker-host-0")
    assert [type(request) for request, _ in world.place.asked] == [req.CommitSnapshot]
    world.report("worker-0", 15)
    settle(world)
    assert restored(world) == [None, "step-10-g1"], "not started a second time, either"
    assert counted(world) == [SnapshotId(10, 1)] and not world.place.snapshots.has(SnapshotId(20, 1))


def test_a_commit_whose_answer_is_lost_is_not_used() -> None:
    world = committed(up(rolling_back()), 10)
    world.save("worker-0", 20)
    world.deliver("worker-host-0")
    world.report("worker-0", 15)
    world.restart_captain(answers_are_lost=True)
    world.join_all()
    settle(world)
    assert restored(world)[1:] == ["step-10-g1"] and counted(world) == [SnapshotId(10, 1)]
    assert world.last("restart")["cause"] == "nan"


def test_a_snapshot_whose_own_metrics_are_not_finite_is_not_used() -> None:
    """On a GPU, a loss is read twice a second, and when a snapshot is saved."""
    world = committed(up(rolling_back()), 10)
    world.tell(ev.PartSaved("worker-host-0", "worker-0", SnapshotId(20, 1), not_finite={"loss": "NaN"}))
    settle(world)
    assert reports(world) == [(1, {"task": "worker-0", "metric": "loss", "value": "NaN", "step": 20})]
    assert restored(world) == [None, "step-10-g1"] and counted(world) == [SnapshotId(10, 1)]


def test_a_report_that_arrives_while_the_next_generation_starts_counts() -> None:
    world = committed(up(rolling_back(), serves=""), 10, 20)
    world.exit("worker-0", "signal")
    world.disconnect("worker-host-1")
    world.report("worker-1", 15)
    world.pass_time(12)
    world.join("worker-host-1")
    settle(world)
    assert restored(world) == [None, "step-10-g1"]


def test_a_task_that_succeeds_meanwhile_trains_again() -> None:
    world = committed(up(rolling_back(1)), 10)
    world.report("worker-0", 15)
    world.exit("worker-0", "")
    settle(world)
    assert world.over is None and restored(world) == [None, "step-10-g1"]
    world.exit("worker-0", "")
    settle(world)
    assert world.over is not None and world.over.status == "succeeded"


@pytest.mark.parametrize("captain", ["the same", "the next", "without notes"])
def test_a_task_that_succeeds_without_a_connection_trains_again(captain: str) -> None:
    world = committed(up(rolling_back(1)), 10, 20)
    world.disconnect("worker-host-0")
    world.report("worker-0", 15)
    world.exit("worker-0", "")
    if captain != "the same":
        world.restart_captain(with_notes=captain == "the next")
    world.join_all()
    settle(world)
    assert world.over is None and restored(world) == [None, "step-10-g1"]


def test_a_report_that_arrives_once_a_snapshot_is_chosen_counts() -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.exit("worker-0", "signal")
    world.deliver("worker-host-1")
    assert any(isinstance(each, ins.PrepareHost) for each in world.machines["worker-host-0"].inbox)
    world.tell(ev.MetricNotFinite("worker-host-1", "worker-1", 1, "loss", "NaN", 15))
    settle(world)
    assert restored(world) == [None, "step-10-g1"] and world.captain.generation == 2


def test_an_error_that_follows_is_not_the_cause() -> None:
    world = committed(up(rolling_back()), 10)
    world.report("worker-0", 15)
    world.exit("worker-0", "program-error", "train.py:3")
    settle(world)
    assert world.last("restart")["cause"] == "nan" and restored(world) == [None, "step-10-g1"]


def test_the_chief_of_a_parameter_server_job_goes_back() -> None:
    world = up(rolling_back(2, ps=1, chief=True))
    for step in (10, 20):
        world.save("chief-0", step)
        world.deliver_all()
    world.report("chief-0", 15)
    settle(world)
    assert restored(world)[-1] == "step-10-g1" and len(world.running()) == 4
    assert {process.attempt for _, process in world.running()} == {2}


def test_a_worker_of_a_chief_sends_it_back() -> None:
    world = up(rolling_back(2, ps=1, chief=True))
    world.save("chief-0", 10)
    world.deliver_all()
    world.report("worker-1", 15)
    settle(world)
    assert restored(world)[-1] == "step-10-g1" and len(world.running()) == 4
    world.report("worker-1", 20)
    settle(world)
    assert world.captain.generation == 3 and world.over is None


@pytest.mark.parametrize("step", [0, 15, 30])
def test_what_a_generation_has_resumed_from_is_kept_whatever_step_a_task_reports(step: int) -> None:
    world = committed(up(rolling_back()), 10, 20, 30)
    world.exit("worker-0", "signal")
    settle(world)
    committed(world, 40)
    world.report("worker-1", step)
    settle(world)
    assert restored(world) == [None, "step-30-g1", "step-30-g1"]
    assert counted(world) == [SnapshotId(30, 1), SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_negative_step_says_nothing() -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.report("worker-1", -7)
    settle(world)
    assert restored(world) == [None, "step-20-g1"] and counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_captain_without_notes_keeps_what_its_generation_has_resumed_from() -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.exit("worker-0", "signal")
    settle(world)
    committed(world, 30)
    world.disconnect("worker-host-0")
    world.report("worker-0", 5)
    world.restart_captain(with_notes=False)
    world.join_all()
    settle(world)
    assert restored(world)[2:] == ["step-20-g1"] and counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_program_that_counts_its_steps_anew_after_a_restart_goes_back_within_its_generation() -> None:
    world = committed(up(rolling_back()), 30)
    world.exit("worker-0", "signal")
    settle(world)
    committed(world, 5, 10)
    world.report("worker-1", 7)
    settle(world)
    assert restored(world) == [None, "step-30-g1", "step-5-g2"]
    assert counted(world) == [SnapshotId(5, 2), SnapshotId(30, 1)]


@pytest.mark.parametrize("by", ["the same", "the next", "an earlier version"])
def test_the_next_captain_knows_what_was_abandoned_of_a_generation_alone(by: str) -> None:
    world = committed(up(rolling_back()), 30)
    world.exit("worker-0", "signal")
    settle(world)
    committed(world, 40)
    world.report("worker-1", 7)
    if by != "the same":
        saved = world.captain.to_notes()
        if by == "an earlier version":
            del saved["not_finite"]["abandoned_own"]
        world.restart_captain(notes=saved)
        world.join_all()
    settle(world)
    assert restored(world)[-1] == "step-30-g1" and counted(world) == [SnapshotId(30, 1)]


# ---- again


def test_the_same_step_again_ends_the_run() -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.report("worker-0", 25)
    settle(world)
    world.step(24)
    world.report("worker-1", 25)
    settle(world)
    assert world.over is not None and (world.over.status, world.over.cause) == ("failed", "nan")
    assert world.over.reason == (
        "worker-1: loss is NaN at step 25 again: rolling back to a snapshot did not help (the last time, it "
        "happened at step 25); lower the learning rate, or skip the data that leads to it"
    )
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_later_step_is_progress() -> None:
    world = committed(up(rolling_back()), 10, 20)
    for step in (25, 35, 45):
        world.report("worker-0", step)
        settle(world)
        world.step(step)
        committed(world, step + 5)
    assert world.over is None
    assert restored(world) == [None, "step-20-g1", "step-30-g2", "step-40-g3"]


def test_another_failure_in_between_is_no_progress() -> None:
    world = committed(up(rolling_back()), 10)
    world.report("worker-0", 25)
    settle(world)
    world.exit("worker-0", "signal")
    settle(world)
    assert world.captain.generation == 3 and world.over is None
    world.report("worker-0", 25)
    settle(world)
    assert world.over is not None and "did not help" in world.over.reason


def test_it_counts_against_the_restart_limit() -> None:
    world = committed(up(replace(rolling_back(), restart=replace(rolling_back().restart, limit=0))), 10)
    world.report("worker-0", 25)
    settle(world)
    assert world.over is not None and world.over.cause == "nan"
    assert world.over.reason == "worker-0: loss is NaN at step 25 (restart.limit is 0)"


# ---- without steps


def test_without_steps_the_newest_snapshot_is_the_one_before() -> None:
    world = committed(up(rolling_back()), 1, 2)
    world.report("worker-0", None)
    world.save("worker-1", 3)
    settle(world)
    assert restored(world) == [None, "step-2-g1"] and counted(world) == [SnapshotId(2, 1), SnapshotId(1, 1)]
    world.report("worker-0", None)
    settle(world)
    assert world.over is not None
    assert world.over.reason.startswith("worker-0: loss is NaN again: rolling back to a snapshot did not help")


def test_without_steps_and_snapshots_training_starts_from_the_beginning() -> None:
    world = up(rolling_back())
    world.report("worker-0", None)
    settle(world)
    assert restored(world) == [None, None]
    assert notes(world) == ["there is no snapshot from before: training starts from the beginning"]


# ---- the next captain


@pytest.mark.parametrize("with_notes", [True, False])
def test_the_next_captain_goes_back(with_notes: bool) -> None:
    world = committed(up(rolling_back()), 10, 20)
    world.report("worker-0", 15)
    world.restart_captain(with_notes)
    world.join_all()
    settle(world)
    assert restored(world)[1:] == ["step-10-g1"] and world.captain.generation == 2
    assert counted(world) == [SnapshotId(10, 1)]
    assert world.last("restart")["cause"] == "nan"


@pytest.mark.parametrize("with_notes", [True, False])
def test_the_next_captain_learns_what_it_missed(with_notes: bool) -> None:
    world = committed(up(rolling_back()), 10, 20)
    for host in world.machines:
        world.disconnect(host)
    world.report("worker-0", 15)
    world.restart_captain(with_notes)
    world.join_all()
    settle(world)
    assert restored(world)[1:] == ["step-10-g1"] and [fields["step"] for _, fields in reports(world)] == [15]


def test_the_next_captain_knows_that_it_happens_again() -> None:
    world = committed(up(rolling_back()), 10)
    world.report("worker-0", 15)
    settle(world)
    world.restart_captain()
    world.join_all()
    settle(world)
    assert world.captain.generation == 2 and len(world.running()) == 2
    world.report("worker-0", 15)
    settle(world)
    assert world.over is not None and "did not help" in world.over.reason


def test_notes_of_earlier_versions_have_none() -> None:
    world = committed(up(rolling_back()), 10)
    saved = world.captain.to_notes()
    del saved["not_finite"]
    world.captain.to_notes = lambda: saved  # type: ignore[method-assign]
    world.restart_captain()
    world.join_all()
    settle(world)
    assert world.captain.generation == 1 and len(world.running()) == 2


# ---- in any order

Bad = tuple[int, int, int]  # of a report: its generation, its step, and the step that the generation has resumed from
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 5)),
        st.tuples(st.just("report"), st.integers(-3, 3)),
        st.tuples(st.just("fail"), st.integers(0, 1)),
        st.tuples(st.just("deliver"), st.integers(0, 2)),
        st.tuples(st.just("answer"), st.just(0)),
        st.tuples(st.just("store"), st.integers(0, 1)),
        st.tuples(st.just("captain"), st.integers(0, 1)),
        st.tuples(st.just("reconnect"), st.integers(0, 1)),
        st.tuples(st.just("time"), st.sampled_from([1, 5, 15])),
    ),
    max_size=30,
)


@pytest.mark.generated
@settings(max_examples=300)
@given(ACTIONS)
def test_no_snapshot_from_the_step_on_is_restored(actions: list[tuple[str, int]]) -> None:
    """The store and the captain may fail meanwhile; a captain has the notes of its predecessor."""
    world = up(rolling_back(limit=50))
    step = 0
    bad: list[Bad] = []
    for action, number in actions:
        if action == "save":
            step += number
            world.save("worker-0", step)
        elif action == "report":
            process = dict(world.running()).get("worker-1")
            if process is not None and not world.is_over:
                formed = {of: fields for kind, of, fields in world.events if kind == "generation-formed"}
                origin = parse_id(formed[process.generation]["restore"] or "")
                bad.append((process.generation, step + number, -1 if origin is None else origin.step))
                world.report("worker-1", step + number, f"metric {len(bad)}")
        elif action == "fail":
            world.exit(f"worker-{number}", "signal")
        elif action == "deliver":
            world.deliver_all() if number == 2 else world.deliver(f"worker-host-{number}")
        elif action == "answer":
            world.answer()
        elif action == "store":
            world.place.fails = AWAY if number else None
        elif action == "captain" and not world.is_over:
            world.restart_captain(answers_are_lost=bool(number))
            world.join_all()
        elif action == "reconnect":
            world.disconnect(f"worker-host-{number}")
            world.join(f"worker-host-{number}")
        elif action == "time":
            world.pass_time(number)
    world.place.fails = None
    world.join_all()
    for _ in range(20):
        settle(world)
        world.pass_time(20)
    starts = [(generation, fields) for kind, generation, fields in world.events if kind == "generation-formed"]
    for generation, fields in starts:
        before = [each for each in bad if each[0] < generation]
        assert not is_bad(parse_id(fields["restore"] or ""), before), (starts, bad)
    newest = world.captain.generation + (world.over is not None)  # what its successor would find
    before = [each for each in bad if each[0] < newest]
    assert not any(is_bad(snapshot, before) for snapshot in counted(world)), (counted(world), bad)


def is_bad(snapshot: SnapshotId | None, reports: list[Bad]) -> bool:
    for of, step, resumed in reports if snapshot is not None else ():
        first = step if snapshot.generation == of else max(step, resumed + 1)
        if step >= 0 and snapshot.generation <= of and snapshot.step >= first:
            return True
    return False


def test_what_was_abandoned_long_ago_is_forgotten() -> None:
    steps = abandoned_steps.AbandonedSteps()
    for generation in range(1, 3 * abandoned_steps.MOST):
        steps.add(generation, 10 * generation)
    assert len(steps.to_notes()) == abandoned_steps.MOST and steps.cover(SnapshotId(10 * generation, generation))


def test_examples_in_the_docstrings() -> None:
    import doctest

    from paceline.agent.net import codec

    assert doctest.testmod(abandoned_steps).failed == doctest.testmod(codec).failed == 0
