"""Evaluators that follow snapshots, one situation at a time: each is evaluated once, whatever dies in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.agent.captain import events as ev
from paceline.agent.captain.hangs import MOST_METRICS, ProgressWatch
from paceline.agent.captain.snapshots.drafts import MOST_ENTRIES
from paceline.agent.captain.snapshots.evaluations import MOST_UNRECORDED
from paceline.agent.transfers.requests import DeleteSnapshot
from paceline.plan import Snapshots
from paceline.storage.snapshots.manifest import SnapshotId
from support.committing import AWAY, a_plan, asked, committed, counted, warnings
from support.worlds import LEASE, World, make_plan, up

EVALUATOR, HOST = "evaluator-0", "evaluator-host-0"


def following(evaluator: int = 1, keep: int = 10, best: tuple[str, bool] | None = None, **more: Any) -> World:
    world = up(a_plan(1, evaluator=evaluator, snapshots=Snapshots("s3://bucket/runs", keep=keep, best=best), **more))
    for number in range(evaluator):
        world.follow(f"evaluator-{number}")
    world.deliver_all()
    return world


def assigned(world: World, task: str = EVALUATOR) -> SnapshotId | None:
    return world.machines[task.replace("evaluator", "evaluator-host")].follows.get(task)


def evaluate(world: World, task: str = EVALUATOR, **metrics: float) -> None:
    assert world.evaluate(task, **metrics) is not None
    world.deliver_all()


def evaluated_steps(world: World) -> list[int]:
    return [fields["step"] for kind, _, fields in world.events if kind == "evaluated"]


def restart_evaluator(world: World) -> None:
    world.pass_time(5)  # until it may start again
    world.deliver_all()
    world.follow(EVALUATOR)
    world.deliver_all()


def captain_returns(world: World, notes: bool = True) -> None:
    world.restart_captain(notes)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 1)
    world.deliver_all()


def test_each_snapshot_is_assigned_once_in_order_and_its_evaluation_is_stored() -> None:
    world = committed(following(), 10, 20, 30)
    for step in (10, 20, 30):
        assert assigned(world) == SnapshotId(step, 1)
        evaluate(world, accuracy=step / 100)
    assert assigned(world) is None and world.evaluated == [SnapshotId(10, 1), SnapshotId(20, 1), SnapshotId(30, 1)]
    assert world.last("evaluated") == {
        "task": EVALUATOR, "step": 30, "snapshot": "step-30-g1", "metrics": {"accuracy": 0.3},
    }  # fmt: skip
    evaluation = world.place.snapshots.evaluation(SnapshotId(20, 1))
    assert evaluation is not None and (evaluation.task, evaluation.metrics) == (EVALUATOR, {"accuracy": 0.2})
    assert world.captain.watch.metrics[EVALUATOR] == {"accuracy": 0.3}
    committed(world, 40)
    assert assigned(world) == SnapshotId(40, 1), "a waiting evaluator gets the next snapshot"


def test_only_the_host_of_an_evaluator_reports_its_results() -> None:
    world = committed(following(2), 10)
    for host in ("worker-host-0", "evaluator-host-1"):
        world.tell(ev.SnapshotEvaluated(host, EVALUATOR, SnapshotId(10, 1), {"accuracy": 99.0}))
        world.tell(ev.SnapshotEvaluated(host, EVALUATOR, SnapshotId(10, 1), error="damaged"))
    assert not world.place.asked and warnings(world) == []
    evaluate(world, accuracy=0.5)
    assert world.last("evaluated")["metrics"] == {"accuracy": 0.5}


def test_results_that_cannot_be_stored_are_limited() -> None:
    world = committed(following(2), 10)
    world.place.fails = AWAY
    metrics = {f"metric {number}": 1.0 for number in range(2 * MOST_ENTRIES)}
    for step in range(2 * MOST_UNRECORDED):
        world.tell(ev.SnapshotEvaluated(HOST, EVALUATOR, SnapshotId(1000 + step, 1), metrics))
    unrecorded = world.captain.evaluations._unrecorded
    assert len(unrecorded) == MOST_UNRECORDED and {len(each.metrics) for each in unrecorded.values()} == {MOST_ENTRIES}
    (text,) = [each for each in warnings(world) if "more than" in each]
    assert text.startswith(
        f"more than {MOST_UNRECORDED} results of evaluators on {HOST} are not stored yet: others are"
    )
    world.tell(ev.SnapshotEvaluated("evaluator-host-1", "evaluator-1", SnapshotId(10, 1), {"accuracy": 0.5}))
    assert SnapshotId(10, 1) in unrecorded
    world.place.fails = None
    world.pass_time(10)
    assert evaluated_steps(world) == [10] and not unrecorded, "the store has no others"


def test_two_evaluators_share_the_snapshots() -> None:
    world = committed(following(2), 10, 20, 30)
    assert (assigned(world), assigned(world, "evaluator-1")) == (SnapshotId(10, 1), SnapshotId(20, 1))
    evaluate(world, "evaluator-1")
    assert assigned(world, "evaluator-1") == SnapshotId(30, 1)
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    evaluate(world, "evaluator-1")
    assert assigned(world, "evaluator-1") == SnapshotId(10, 1), "the snapshot of the evaluator that died comes first"


def test_an_evaluator_that_dies_gets_its_snapshot_again_unless_it_has_evaluated_it() -> None:
    world = committed(following(), 10, 20)
    world.exit(EVALUATOR, "signal")
    restart_evaluator(world)
    assert assigned(world) == SnapshotId(10, 1)
    world.evaluate(EVALUATOR)
    world.exit(EVALUATOR, "signal")  # before the captain knows that the evaluation is stored
    restart_evaluator(world)
    assert assigned(world) == SnapshotId(20, 1) and evaluated_steps(world) == [10]


def test_a_host_that_is_replaced_does_not_evaluate_again() -> None:
    world = committed(following(), 10, 20)
    evaluate(world)
    world.host_is_replaced(HOST, dead=True)
    world.join_all()
    restart_evaluator(world)
    assert assigned(world) == SnapshotId(20, 1)


def test_a_snapshot_evaluated_while_the_captain_was_away_is_not_assigned_to_another_evaluator() -> None:
    world = committed(following(2), 10)
    assert (assigned(world), assigned(world, "evaluator-1")) == (SnapshotId(10, 1), None)
    world.restart_captain()
    world.evaluate(EVALUATOR)
    for host in ("worker-host-0", "evaluator-host-1"):
        world.join(host)
        world.deliver_all()
    assert assigned(world, "evaluator-1") is None, "evaluator-0 may have it, and has not joined yet"
    world.join_all()
    world.deliver_all()
    committed(world, 20)
    assert world.evaluated == [SnapshotId(10, 1)] and assigned(world) == SnapshotId(20, 1)


def test_a_returning_captain_knows_finished_and_current_evaluations() -> None:
    for notes in (True, False):
        world = committed(following(2), 10, 20, 30)
        evaluate(world)
        assert assigned(world) == SnapshotId(30, 1)
        captain_returns(world, notes)
        assert (assigned(world), assigned(world, "evaluator-1")) == (SnapshotId(30, 1), SnapshotId(20, 1))
        evaluate(world)
        evaluate(world, "evaluator-1")
        committed(world, 40)
        assert assigned(world) == SnapshotId(40, 1) and assigned(world, "evaluator-1") is None
        assert sorted(evaluated_steps(world)) == [10, 20, 30]


def test_an_evaluation_reported_while_the_captain_is_away_is_not_lost() -> None:
    world = committed(following(), 10, 20)
    world.restart_captain()
    world.evaluate(EVALUATOR, accuracy=0.5)
    world.join_all()
    world.pass_time(1)
    world.deliver_all()
    assert evaluated_steps(world) == [10] and assigned(world) == SnapshotId(20, 1)


def test_an_unavailable_store_is_tried_again_before_the_next_snapshot_is_assigned() -> None:
    world = committed(following(), 10, 20)
    world.place.fails = AWAY
    world.evaluate(EVALUATOR)
    world.answer()
    world.deliver_all()
    assert evaluated_steps(world) == [] and assigned(world) == SnapshotId(10, 1)
    assert warnings(world) == [
        "the evaluation of step 10 by evaluator-0 is not stored yet: the bucket does not answer"
    ]  # fmt: skip
    world.place.fails = None
    world.pass_time(3)
    world.deliver_all()
    assert evaluated_steps(world) == [10] and assigned(world) == SnapshotId(20, 1) and len(warnings(world)) == 1


def test_snapshots_are_kept_until_they_are_evaluated() -> None:
    world = committed(following(keep=1), 10, 20, 30)
    assert counted(world) == [SnapshotId(30, 1), SnapshotId(20, 1), SnapshotId(10, 1)]
    evaluate(world)
    assert counted(world) == [SnapshotId(30, 1), SnapshotId(20, 1)]
    evaluate(world)
    assert counted(world) == [SnapshotId(30, 1)]


def test_nothing_is_remembered_of_snapshots_that_were_deleted() -> None:
    """A run may commit, evaluate and delete a snapshot every minute, for months."""
    world = following(keep=2, best=("accuracy", False))
    for step in range(10, 2000, 10):
        committed(world, step)
        evaluate(world, accuracy=1 / step)
    world.place.fails = AWAY
    committed(world, 2000)
    world.place.fails = None
    world.pass_time(100)
    remembered = referenced_by(world.captain)
    assert set(counted(world)) <= remembered and len(remembered) < 10


def referenced_by(captain: Any) -> set[SnapshotId]:
    """The snapshots that any attribute of the captain, or of its parts, contains."""
    snapshots, seen, objects = set(), set(), [captain]
    while objects:
        each = objects.pop()
        if isinstance(each, SnapshotId):
            snapshots.add(each)
        elif id(each) not in seen:
            seen.add(id(each))
            objects += [*each, *each.values()] if isinstance(each, dict) else []
            objects += each if isinstance(each, (list, set, tuple)) else []
            objects += vars(each).values() if hasattr(each, "__dict__") and not isinstance(each, type) else []
    return snapshots


def test_the_evaluator_decides_the_best_snapshot_even_if_it_is_slow() -> None:
    world = following(keep=1, best=("accuracy", False))
    for step in (10, 20, 30):
        world.save("worker-0", step, accuracy=1 - step / 1000)  # by its own metrics, the first is the best
        world.deliver_all()
    evaluate(world, accuracy=0.1)
    assert world.last("evaluated")["best"] == {"snapshot": "step-10-g1", "metric": "accuracy", "value": 0.1}
    assert SnapshotId(10, 1) in counted(world), "another may still be better"
    evaluate(world, accuracy=0.9)
    evaluate(world, accuracy=0.3)
    assert counted(world) == [SnapshotId(30, 1), SnapshotId(20, 1)] and warnings(world) == []
    assert world.last("evaluated")["best"] == {"snapshot": "step-20-g1", "metric": "accuracy", "value": 0.9}
    captain_returns(world)
    committed(world, 40)
    evaluate(world, accuracy=0.4)
    assert counted(world) == [SnapshotId(40, 1), SnapshotId(20, 1)]


def test_a_missing_metric_is_reported_once_the_first_snapshot_is_evaluated() -> None:
    world = committed(following(best=("accuracy", False)), 10)
    assert warnings(world) == []
    evaluate(world, loss=0.5)
    assert warnings(world) == ["the snapshot of step 10 has no accuracy, which snapshots.best needs; it has only loss"]


def test_nothing_is_kept_for_an_evaluator_that_does_not_follow_or_is_given_up() -> None:
    world = up(a_plan(1, evaluator=1, snapshots=Snapshots("s3://bucket/runs", keep=1)))
    assert counted(committed(world, 10, 20)) == [SnapshotId(20, 1), SnapshotId(10, 1)], "it may still ask"
    world.step(20, [EVALUATOR])
    assert counted(committed(world, 30)) == [SnapshotId(30, 1)]
    world = committed(following(keep=1), 10, 20)
    for _ in range(2):
        world.exit(EVALUATOR, "program-error", "test.py:1")
        world.deliver_all()
    assert "gave up on evaluator-0" in warnings(world)[-1]
    assert counted(world) == [SnapshotId(20, 1)]
    world = up(a_plan(1, evaluator=1, start=60.0, snapshots=Snapshots("s3://bucket/runs", keep=1)))
    committed(world, 10, 20)
    world.pass_time(61)
    assert counted(committed(world, 30)) == [SnapshotId(30, 1)], "it has had its time to ask"


def test_a_damaged_snapshot_is_skipped() -> None:
    world = following()
    world.place.damaged.add(SnapshotId(10, 1))
    committed(world, 10, 20)
    assert warnings(world) == ["the snapshot of step 10 cannot be evaluated: step-10-g1 is damaged"]
    assert assigned(world) == SnapshotId(20, 1) and evaluated_steps(world) == []


# ---- the end


def test_the_run_waits_for_the_last_evaluation_and_tells_the_evaluator_that_it_was_the_last() -> None:
    world = committed(following(), 10, 20)
    world.exit("worker-0", "")
    world.deliver_all()
    assert "training succeeded; waiting for evaluator-0 to finish" in world.last("ending")["reason"]
    for _ in range(2):
        world.pass_time(500)
        assert world.over is None and world.no_more == []
        evaluate(world)
    world.deliver_all()
    assert world.no_more == [EVALUATOR] and evaluated_steps(world) == [10, 20]
    assert world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_takes_too_long_does_not_block_the_run_forever() -> None:
    for limit, passes in ((None, 601), (20.0, 21)):
        plan = a_plan(1, evaluator=1)
        world = up(replace(plan, limits=replace(plan.limits, evaluation=limit)))
        world.follow(EVALUATOR)
        committed(world, 10, 20)
        world.exit("worker-0", "")
        world.pass_time(passes - 2)
        assert world.over is None
        world.pass_time(LEASE + 20)
        world.deliver_all()
        assert world.over is not None and world.over.status == "succeeded"
        reason = f"limits.evaluation of {limit or 600:g} s was exceeded"
        assert warnings(world) == [f"the run ends before step 10, 20 was evaluated: {reason}"]


def test_limits_runtime_ends_evaluations_after_training() -> None:
    world = committed(following(runtime=100.0), 10)
    world.exit("worker-0", "")
    world.pass_time(101 + world.plan.limits.grace)
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"
    assert warnings(world) == ["the run ends before step 10 was evaluated: limits.runtime was exceeded"]


def test_an_evaluator_that_dies_after_training_restarts_for_the_remaining_snapshots() -> None:
    world = committed(following(), 10)
    world.exit("worker-0", "")
    world.deliver_all()
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    assert [name for name, _ in world.running()] == [EVALUATOR]
    world.host_is_replaced(HOST, dead=True)
    world.join_all()
    restart_evaluator(world)
    evaluate(world)
    world.deliver_all()
    assert evaluated_steps(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_dies_before_the_last_commit_restarts_for_it() -> None:
    world = following()
    world.save("worker-0", 10)
    world.exit("worker-0", "")
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    restart_evaluator(world)
    evaluate(world)
    world.deliver_all()
    assert evaluated_steps(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_dies_after_the_last_evaluation_is_not_restarted() -> None:
    world = committed(following(), 10)
    evaluate(world)
    world.exit("worker-0", "")
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"


def test_a_captain_that_dies_after_training_still_waits_for_the_last_evaluation() -> None:
    for notes in (True, False):
        world = committed(following(), 10)
        world.exit("worker-0", "")
        world.deliver_all()
        captain_returns(world, notes)
        assert world.over is None and assigned(world) == SnapshotId(10, 1)
        evaluate(world)
        world.deliver_all()
        assert evaluated_steps(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_captain_and_evaluator_may_die_together_after_training() -> None:
    world = committed(following(), 10)
    world.exit("worker-0", "")
    world.deliver_all()
    world.agent_dies(HOST)
    captain_returns(world)
    restart_evaluator(world)
    evaluate(world)
    world.deliver_all()
    assert evaluated_steps(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_restarts_even_if_a_returning_captain_does_not_know_the_remaining_snapshots_yet() -> None:
    world = committed(following(), 10)
    world.exit("worker-0", "")
    world.deliver_all()
    world.restart_captain()
    world.join_all()
    world.exit(EVALUATOR, "signal")
    restart_evaluator(world)
    evaluate(world)
    world.deliver_all()
    assert evaluated_steps(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_snapshots_beyond_keep_are_deleted_when_a_run_is_stopped() -> None:
    world = committed(following(keep=1), 10, 20, 30)
    world.tell(ev.StopRequested("stop"))
    world.deliver_all()
    world.pass_time(LEASE)
    assert world.over is not None and counted(world) == [SnapshotId(30, 1)]
    assert asked(world, DeleteSnapshot) == []


def test_of_names_that_differ_each_time_the_latest_are_kept() -> None:
    """The captain saves them, and they are part of the report."""
    watch = ProgressWatch(make_plan(1))
    for number in range(300):
        watch.add_metrics("evaluator-0", {"loss": float(number), **{f"{number}/{name}": 1.0 for name in range(9)}})
    assert len(watch.metrics["evaluator-0"]) == MOST_METRICS
    assert watch.metrics["evaluator-0"]["loss"] == 299.0 and "299/0" in watch.metrics["evaluator-0"]
