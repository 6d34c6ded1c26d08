"""Evaluators that follow, one situation at a time: each committed snapshot once, whoever dies in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.agent import events as ev
from paceline.plan import Snapshots
from paceline.storage.manifest import Id
from support.committing import AWAY, a_plan, asked, committed, counted, warnings
from support.worlds import LEASE, World, up

EVALUATOR, HOST = "evaluator-0", "evaluator-host-0"


def following(evaluator: int = 1, keep: int = 10, best: tuple[str, bool] | None = None, **more: Any) -> World:
    world = up(a_plan(1, evaluator=evaluator, snapshots=Snapshots("s3://bucket/runs", keep=keep, best=best), **more))
    for number in range(evaluator):
        world.follow(f"evaluator-{number}")
    world.deliver_all()
    return world


def has(world: World, task: str = EVALUATOR) -> Id | None:
    return world.machines[task.replace("evaluator", "evaluator-host")].follows.get(task)


def evaluate(world: World, task: str = EVALUATOR, **metrics: float) -> None:
    assert world.evaluate(task, **metrics) is not None
    world.deliver_all()


def told(world: World) -> list[int]:
    return [fields["step"] for kind, _, fields in world.events if kind == "evaluated"]


def comes_back(world: World) -> None:
    world.pass_time(5)  # until it may start again
    world.deliver_all()
    world.follow(EVALUATOR)
    world.deliver_all()


def restarted(world: World, notes: bool = True) -> None:
    world.restart_captain(notes)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 1)
    world.deliver_all()


def test_each_is_given_once_in_order_and_what_came_of_it_is_at_the_place() -> None:
    world = committed(following(), 10, 20, 30)
    for step in (10, 20, 30):
        assert has(world) == Id(step, 1)
        evaluate(world, accuracy=step / 100)
    assert has(world) is None and world.evaluated == [Id(10, 1), Id(20, 1), Id(30, 1)]
    assert world.last("evaluated") == {
        "task": EVALUATOR, "step": 30, "snapshot": "step-30-g1", "metrics": {"accuracy": 0.3},
    }  # fmt: skip
    found = world.place.snapshots.evaluation(Id(20, 1))
    assert found is not None and (found.task, found.metrics) == (EVALUATOR, {"accuracy": 0.2})
    assert world.captain.watch.metrics[EVALUATOR] == {"accuracy": 0.3}
    committed(world, 40)
    assert has(world) == Id(40, 1), "who waits is woken"


def test_two_evaluators_share_them() -> None:
    world = committed(following(2), 10, 20, 30)
    assert (has(world), has(world, "evaluator-1")) == (Id(10, 1), Id(20, 1))
    evaluate(world, "evaluator-1")
    assert has(world, "evaluator-1") == Id(30, 1)
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    evaluate(world, "evaluator-1")
    assert has(world, "evaluator-1") == Id(10, 1), "what was given to the one that died comes first"


def test_one_that_dies_in_the_middle_gets_it_again_and_one_that_dies_after_it_does_not() -> None:
    world = committed(following(), 10, 20)
    world.exit(EVALUATOR, "signal")
    comes_back(world)
    assert has(world) == Id(10, 1)
    world.evaluate(EVALUATOR)
    world.exit(EVALUATOR, "signal")  # before the captain has heard that it is at the place
    comes_back(world)
    assert has(world) == Id(20, 1) and told(world) == [10]


def test_a_host_that_is_replaced_does_not_evaluate_again() -> None:
    world = committed(following(), 10, 20)
    evaluate(world)
    world.host_is_replaced(HOST, dead=True)
    world.join_all()
    comes_back(world)
    assert has(world) == Id(20, 1)


def test_a_captain_that_returns_knows_what_was_evaluated_and_who_evaluates_what() -> None:
    for notes in (True, False):
        world = committed(following(2), 10, 20, 30)
        evaluate(world)
        assert has(world) == Id(30, 1)
        restarted(world, notes)
        assert (has(world), has(world, "evaluator-1")) == (Id(30, 1), Id(20, 1))
        evaluate(world)
        evaluate(world, "evaluator-1")
        committed(world, 40)
        assert has(world) == Id(40, 1) and has(world, "evaluator-1") is None
        assert sorted(told(world)) == [10, 20, 30]


def test_what_an_evaluator_says_while_the_captain_is_away_is_not_lost() -> None:
    world = committed(following(), 10, 20)
    world.restart_captain()
    world.evaluate(EVALUATOR, accuracy=0.5)
    world.join_all()
    world.pass_time(1)
    world.deliver_all()
    assert told(world) == [10] and has(world) == Id(20, 1)


def test_a_place_that_is_away_is_asked_again_before_the_next_one_is_given() -> None:
    world = committed(following(), 10, 20)
    world.place.fails = AWAY
    world.evaluate(EVALUATOR)
    world.answer()
    world.deliver_all()
    assert told(world) == [] and has(world) == Id(10, 1)
    assert warnings(world) == [
        "what evaluator-0 says of step 10 is not at its place yet: the bucket does not answer"
    ]  # fmt: skip
    world.place.fails = None
    world.pass_time(3)
    world.deliver_all()
    assert told(world) == [10] and has(world) == Id(20, 1) and len(warnings(world)) == 1


def test_what_waits_is_kept_and_then_let_go() -> None:
    world = committed(following(keep=1), 10, 20, 30)
    assert counted(world) == [Id(30, 1), Id(20, 1), Id(10, 1)]
    evaluate(world)
    assert counted(world) == [Id(30, 1), Id(20, 1)]
    evaluate(world)
    assert counted(world) == [Id(30, 1)]


def test_the_best_is_that_of_the_evaluator_even_where_it_is_slow() -> None:
    world = following(keep=1, best=("accuracy", False))
    for step in (10, 20, 30):
        world.save("worker-0", step, accuracy=1 - step / 1000)  # of itself, the first is the best
        world.deliver_all()
    evaluate(world, accuracy=0.1)
    assert world.last("evaluated")["best"] == {"snapshot": "step-10-g1", "metric": "accuracy", "value": 0.1}
    assert Id(10, 1) in counted(world), "nobody knows yet whether another is better"
    evaluate(world, accuracy=0.9)
    evaluate(world, accuracy=0.3)
    assert counted(world) == [Id(30, 1), Id(20, 1)] and warnings(world) == []
    assert world.last("evaluated")["best"] == {"snapshot": "step-20-g1", "metric": "accuracy", "value": 0.9}
    restarted(world)
    committed(world, 40)
    evaluate(world, accuracy=0.4)
    assert counted(world) == [Id(40, 1), Id(20, 1)]


def test_a_metric_that_nobody_gives_is_told_once_the_first_is_evaluated() -> None:
    world = committed(following(best=("accuracy", False)), 10)
    assert warnings(world) == []
    evaluate(world, loss=0.5)
    assert warnings(world) == ["the snapshot of step 10 has no accuracy, by which snapshots.best chooses: only loss"]


def test_nothing_is_kept_for_an_evaluator_that_looks_for_itself_or_is_given_up() -> None:
    world = up(a_plan(1, evaluator=1, snapshots=Snapshots("s3://bucket/runs", keep=1)))
    assert counted(committed(world, 10, 20)) == [Id(20, 1), Id(10, 1)], "it may still ask"
    world.step(20, [EVALUATOR])
    assert counted(committed(world, 30)) == [Id(30, 1)]
    world = committed(following(keep=1), 10, 20)
    for _ in range(2):
        world.exit(EVALUATOR, "program-error", "test.py:1")
        world.deliver_all()
    assert "evaluator-0 is given up" in warnings(world)[-1]
    assert counted(world) == [Id(20, 1)]
    world = up(a_plan(1, evaluator=1, start=60.0, snapshots=Snapshots("s3://bucket/runs", keep=1)))
    committed(world, 10, 20)
    world.pass_time(61)
    assert counted(committed(world, 30)) == [Id(30, 1)], "it has had its time to ask"


def test_one_that_is_damaged_is_passed_over() -> None:
    world = following()
    world.place.damaged.add(Id(10, 1))
    committed(world, 10, 20)
    assert warnings(world) == ["the snapshot of step 10 is not evaluated: step-10-g1 is damaged"]
    assert has(world) == Id(20, 1) and told(world) == []


# ---- the end


def test_the_run_waits_for_the_last_one_and_the_evaluator_is_told_that_it_was() -> None:
    world = committed(following(), 10, 20)
    world.exit("worker-0", "")
    world.deliver_all()
    assert "training has succeeded; evaluator-0 may finish" in world.last("ending")["reason"]
    for _ in range(2):
        world.pass_time(500)
        assert world.over is None and world.no_more == []
        evaluate(world)
    world.deliver_all()
    assert world.no_more == [EVALUATOR] and told(world) == [10, 20]
    assert world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_takes_too_long_does_not_hold_the_run_for_ever() -> None:
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
        words = f"{limit or 600:g} s (limits.evaluation) has passed"
        assert warnings(world) == [f"the run ends before step 10, 20 was evaluated: {words}"]


def test_limits_runtime_ends_what_an_evaluator_does_after_training() -> None:
    world = committed(following(runtime=100.0), 10)
    world.exit("worker-0", "")
    world.pass_time(101 + world.plan.limits.grace)
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"
    assert warnings(world) == ["the run ends before step 10 was evaluated: limits.runtime has passed"]


def test_an_evaluator_that_dies_after_training_starts_again_for_what_is_left() -> None:
    world = committed(following(), 10)
    world.exit("worker-0", "")
    world.deliver_all()
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    assert [name for name, _ in world.running()] == [EVALUATOR]
    world.host_is_replaced(HOST, dead=True)
    world.join_all()
    comes_back(world)
    evaluate(world)
    world.deliver_all()
    assert told(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_dies_after_the_last_one_stays_dead() -> None:
    world = committed(following(), 10)
    evaluate(world)
    world.exit("worker-0", "")
    world.exit(EVALUATOR, "signal")
    world.deliver_all()
    assert world.over is not None and world.over.status == "succeeded"


def test_a_captain_that_dies_after_training_still_waits_for_the_last_one() -> None:
    for notes in (True, False):
        world = committed(following(), 10)
        world.exit("worker-0", "")
        world.deliver_all()
        restarted(world, notes)
        assert world.over is None and has(world) == Id(10, 1)
        evaluate(world)
        world.deliver_all()
        assert told(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_captain_and_evaluator_may_die_together_after_training() -> None:
    world = committed(following(), 10)
    world.exit("worker-0", "")
    world.deliver_all()
    world.agent_dies(HOST)
    restarted(world)
    comes_back(world)
    evaluate(world)
    world.deliver_all()
    assert told(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_an_evaluator_that_dies_before_a_captain_that_returned_knows_what_is_left_starts_again() -> None:
    world = committed(following(), 10)
    world.exit("worker-0", "")
    world.deliver_all()
    world.restart_captain()
    world.join_all()
    world.exit(EVALUATOR, "signal")
    comes_back(world)
    evaluate(world)
    world.deliver_all()
    assert told(world) == [10] and world.over is not None and world.over.status == "succeeded"


def test_what_waits_beyond_keep_is_gone_when_a_run_is_stopped() -> None:
    world = committed(following(keep=1), 10, 20, 30)
    world.tell(ev.Stop("stop"))
    world.deliver_all()
    world.pass_time(LEASE)
    assert world.over is not None and counted(world) == [Id(30, 1)]
    assert asked(world, "delete") == []
