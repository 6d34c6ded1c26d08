"""What the captain decides when a user pauses and resumes a run."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import HALTING, NOT_PAUSED, PAUSED, RESUMING, SAVING
from paceline.agent.transfers.requests import STORE, Failure
from paceline.plan import TASK
from support.polling import PollingTasks
from support.worlds import LEASE, World, make_plan, up


def running(world: World) -> list[str]:
    return sorted(name for name, _ in world.running())


def settle(world: World, seconds: float) -> None:
    """Time passes, and all messages arrive."""
    for _ in range(int(seconds)):
        world.pass_time(1)
        world.deliver_all()


def stage(world: World) -> str:
    return world.captain.ledger.pause


def paused(**plan: Any) -> World:
    """A run that was paused at step 10."""
    world = up(make_plan(2, hang_after=None, **plan))
    world.step(10)
    world.pause()
    world.save("worker-0", 10)
    world.deliver_all()
    assert stage(world) == PAUSED
    return world


def come_back(world: World) -> None:
    world.resume()
    world.join_all()
    world.deliver_all()


# ---- pausing


def test_tasks_end_once_a_snapshot_that_was_taken_after_the_request_is_committed() -> None:
    world = up(make_plan(2, evaluator=1, hang_after=None))
    world.save("worker-0", 10)
    world.deliver_all()
    world.pause()
    world.deliver_all()
    assert stage(world) == SAVING and len(running(world)) == 3, "what was saved before the request does not count"
    world.place.fails = Failure(STORE, "away", True)
    world.step(20)
    world.save("worker-0", 20)
    settle(world, 5)
    assert len(running(world)) == 3, "it is not committed"
    world.place.fails = None
    settle(world, 60)
    assert running(world) == [] and stage(world) == PAUSED
    assert world.last("pausing") == {"limit_s": 600.0, "now": False}
    assert world.last("paused") == {"step": 20, "snapshot": "step-20-g1"}


def test_a_group_that_asks_whether_to_save_is_asked_for_a_snapshot() -> None:
    world = up(make_plan(2, hang_after=None))
    polling = PollingTasks(world)
    for name in polling.names():
        polling.call(name, 1)
    world.beat_all()
    world.pause()
    assert any(isinstance(each, ins.AgreeOnStep) for each in world.machines["worker-host-1"].inbox)


def test_members_are_dismissed_with_exit_code_0() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    world.save("worker-0", 10)
    for _ in range(20):
        world.answer()
        for host in ("worker-host-0", "worker-host-1"):
            inbox = world.machines[host].inbox
            if any(isinstance(each, ins.DismissMember) for each in inbox):
                assert ins.DismissMember(host, ins.RELEASED, "the run is paused") in inbox
            world.deliver(host)
    assert all(machine.finished for machine in world.machines.values())
    assert world.captain.pause.leaving_hosts() == []


def test_on_a_cluster_members_stay_until_their_pods_are_deleted() -> None:
    """A member that exits with 0 would complete its Job, which could not be resumed."""
    world = up(make_plan(2, hang_after=None))
    world.pause(releases=False)
    world.save("worker-0", 10)
    world.deliver_all()
    assert stage(world) == PAUSED and not any(machine.finished for machine in world.machines.values())
    assert world.captain.pause.leaving_hosts() == ["worker-host-0", "worker-host-1"]
    world.tell(ev.HostLeaving("worker-host-0", "SIGTERM"))
    assert world.machines["worker-host-0"].inbox[-1] == ins.ReleaseHost("worker-host-0")
    assert "note" not in world.kinds()


def test_a_pause_counts_as_no_failure_and_nothing_is_awaited() -> None:
    world = paused(evaluator=1, start=60.0)
    for host in world.machines:
        world.disconnect(host)
    settle(world, 3 * 60)
    assert not {"restart", "member-lost", "waiting", "hang", "run-ended"} & set(world.kinds())
    assert world.captain.failures.restarts == [] and stage(world) == PAUSED


def test_without_a_snapshot_in_time_the_run_continues_without_interruption() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause(within=30.0)
    settle(world, 31)
    assert len(running(world)) == 2 and stage(world) == NOT_PAUSED and world.captain.generation == 1
    assert world.last("pause-canceled") == {"reason": "no new snapshot was committed within 30 s"}
    world.save("worker-0", 10)
    world.deliver_all()
    assert len(running(world)) == 2, "it is no longer to be paused"


def test_now_does_not_wait_for_a_new_snapshot_but_for_the_commit_of_those_that_are_saved() -> None:
    world = up(make_plan(2, hang_after=None))
    world.place.fails = Failure(STORE, "away", True)
    world.save("worker-0", 10)
    world.deliver_all()
    world.pause(now=True)
    world.deliver_all()
    assert running(world) == [] and stage(world) == HALTING
    world.place.fails = None
    settle(world, 10)
    assert world.last("paused")["snapshot"] == "step-10-g1"


def test_a_snapshot_that_is_not_committed_before_hosts_leave_is_reported() -> None:
    world = up(make_plan(2, hang_after=None))
    world.place.fails = Failure(STORE, "away", True)
    world.save("worker-0", 10)
    world.pause(now=True)
    settle(world, world.plan.limits.commit + 10)
    assert stage(world) == PAUSED and world.last("paused")["snapshot"] is None
    assert world.last("warning") == {"text": "the snapshot of step 10 is not committed: away"}


def test_now_applies_to_a_pause_that_waits_for_a_snapshot() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    world.pause(now=True)
    world.deliver_all()
    assert stage(world) == PAUSED and world.last("paused")["snapshot"] is None


def test_a_run_that_waits_for_hosts_is_paused_at_once() -> None:
    world = World(make_plan(2, start=60.0))
    world.pass_time(LEASE)
    world.join("worker-host-0")
    world.pause()
    world.deliver_all()
    assert stage(world) == PAUSED
    settle(world, 120)
    assert not world.is_over
    come_back(world)
    assert len(running(world)) == 2 and world.captain.generation == 1


def test_a_group_that_fails_meanwhile_stays_stopped_once_its_snapshot_is_committed() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    world.save("worker-0", 10)
    world.exit("worker-1", "signal")
    settle(world, 5)
    assert stage(world) == PAUSED and world.last("paused")["snapshot"] == "step-10-g1"
    assert world.kinds().count("restart") == 1
    come_back(world)
    settle(world, 5)
    assert len(running(world)) == 2 and world.last("generation-formed")["restore"] == "step-10-g1"


def test_training_that_succeeds_meanwhile_ends_the_run() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    for task in ("worker-0", "worker-1"):
        world.exit(task, "")
    settle(world, LEASE)
    assert world.over is not None and world.over.status == "succeeded"


def test_a_task_that_restarts_alone_does_so_while_the_run_waits_for_a_snapshot() -> None:
    world = up(make_plan(3, scope=TASK, evaluator=1, hang_after=None))
    world.pause()
    for task in ("worker-1", "evaluator-0"):
        world.exit(task, "signal")
        settle(world, 5)
        assert len(running(world)) == 4 and stage(world) == SAVING
    world.save("worker-0", 10)
    settle(world, 5)
    assert running(world) == [] and world.last("paused")["snapshot"] == "step-10-g1"


def test_a_worker_of_a_parameter_server_job_restarts_while_the_run_waits_for_a_snapshot() -> None:
    world = up(make_plan(2, ps=1, chief=True, hang_after=None))
    world.pause()
    world.exit("worker-1", "signal")
    settle(world, 5)
    assert len(running(world)) == 4 and stage(world) == SAVING
    world.save("chief-0", 10)
    settle(world, 5)
    assert running(world) == [] and stage(world) == PAUSED


def test_tasks_that_restart_alone_are_paused_without_one_whose_host_is_lost() -> None:
    world = up(make_plan(2, scope=TASK, hang_after=None))
    world.disconnect("worker-host-1")
    settle(world, LEASE + 2)
    world.pause()
    world.save("worker-0", 10)
    settle(world, 5)
    assert stage(world) == PAUSED and world.last("paused")["snapshot"] == "step-10-g1"


def test_a_pause_that_the_end_of_the_run_prevents_is_not_late() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    world.tell(ev.StopRequested("stop"))
    assert (world.captain.pause.problem, world.captain.pause.is_late) == ("the run is ending", False)


@pytest.mark.parametrize("chief", [True, False])
def test_all_tasks_of_a_parameter_server_job_end_and_start_again(chief: bool) -> None:
    world = up(make_plan(2, ps=1, chief=chief, hang_after=None))
    names = running(world)
    world.pause(now=True)
    world.deliver_all()
    assert running(world) == [] and stage(world) == PAUSED
    come_back(world)
    assert running(world) == names and world.captain.failures.restarts == []


# ---- resuming


def test_a_resumed_run_continues_from_the_newest_snapshot_in_a_new_generation() -> None:
    world = paused()
    settle(world, 100)
    come_back(world)
    assert len(running(world)) == 2 and world.captain.generation == 2 and stage(world) == NOT_PAUSED
    assert world.last("generation-formed")["restore"] == "step-10-g1"
    assert world.last("resumed")["paused_s"] == pytest.approx(100, abs=5)
    assert "restart" not in world.kinds()


def test_hosts_of_a_resumed_run_may_be_queued_for_hours() -> None:
    world = paused(start=60.0)
    world.resume()
    settle(world, 300)
    assert stage(world) == RESUMING and not world.is_over and "waiting" not in world.kinds()
    world.join("worker-host-0")
    settle(world, 30)
    assert world.last("waiting")["missing"] == ["worker-host-1"]
    settle(world, 40)
    assert world.over is not None and world.over.cause == "start-timeout", "limits.start counts from the first host"


def test_tasks_get_new_addresses_when_a_run_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may use the old ports by then."""
    for plan in (make_plan(2, scope=TASK, hang_after=None), make_plan(2, ps=1, chief=True, hang_after=None)):
        world = up(plan)
        before = dict(world.captain.ledger.addresses)
        world.pause(now=True)
        world.deliver_all()
        monkeypatch.setattr(world, "_offer", lambda task: f"other-host:{task}")
        come_back(world)
        after = world.captain.ledger.addresses
        assert after.keys() == before.keys() and not set(after.values()) & set(before.values())


def test_a_worker_that_has_succeeded_is_not_started_again_after_a_pause() -> None:
    world = up(make_plan(2, ps=1, chief=True, hang_after=None))
    world.exit("worker-1", "")
    settle(world, 2)
    world.pause(now=True)
    world.deliver_all()
    come_back(world)
    assert running(world) == ["chief-0", "ps-0", "worker-0"]


def test_an_elastic_run_waits_for_all_its_hosts_for_a_while() -> None:
    world = paused(least=1)
    world.resume()
    world.join("worker-host-0")
    world.deliver_all()
    assert running(world) == []
    world.join("worker-host-1")
    world.deliver_all()
    assert len(running(world)) == 2


def test_a_request_to_resume_cancels_a_pause_that_waits_for_a_snapshot() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    world.resume()
    assert world.last("pause-canceled") == {"reason": "a user has resumed the run"}
    assert len(running(world)) == 2 and world.captain.generation == 1


@pytest.mark.parametrize("reason", ["late", "resumed"])
def test_a_queued_run_is_still_queued_if_it_is_not_paused_again(reason: str) -> None:
    world = up(make_plan(2, evaluator=1, hang_after=None, start=60.0))
    world.place.fails = Failure(STORE, "away", True)
    world.save("worker-0", 10)
    world.pause(now=True)
    settle(world, world.plan.limits.commit + 10)
    world.resume()
    for host in world.machines:
        world.disconnect(host)
    world.pause(within=30.0)
    world.join("evaluator-host-0")
    world.deliver_all()
    assert stage(world) == SAVING and running(world) == [], "the snapshot of step 10 is not committed"
    world.disconnect("evaluator-host-0")
    if reason == "resumed":
        world.resume()
    settle(world, 300)
    assert not world.is_over and stage(world) == RESUMING and "waiting" not in world.kinds()
    world.place.fails = None
    come_back(world)
    settle(world, 5)
    assert len(running(world)) == 3 and stage(world) == NOT_PAUSED


def test_a_run_can_be_paused_again_before_it_trains() -> None:
    world = paused()
    world.resume()
    world.join("worker-host-0")
    world.pause()
    world.deliver_all()
    assert stage(world) == PAUSED
    come_back(world)
    assert len(running(world)) == 2 and world.last("generation-formed")["restore"] == "step-10-g1"


def test_an_evaluator_evaluates_after_the_pause_what_it_had_begun() -> None:
    world = up(make_plan(1, evaluator=1, hang_after=None))
    world.follow("evaluator-0")
    world.save("worker-0", 10)
    world.deliver_all()
    world.pause()
    world.save("worker-0", 20)
    world.deliver_all()
    assert stage(world) == PAUSED and world.evaluated == []
    come_back(world)
    world.follow("evaluator-0")
    for _ in range(3):
        world.deliver_all()
        world.evaluate("evaluator-0", accuracy=1.0)
    assert [snapshot.step for snapshot in world.evaluated] == [10, 20]


@pytest.mark.parametrize("plan", [{"least": 1}, {"ps": 1, "chief": True}, {"ps": 1, "chief": True, "least": 1}])
def test_an_evaluator_of_a_resumed_run_knows_the_tasks_that_train(plan: dict[str, Any]) -> None:
    """Even if its host is the first that joins."""
    world = up(make_plan(2, evaluator=1, hang_after=None, **plan))
    names = running(world)
    world.pause(now=True)
    world.deliver_all()
    world.resume()
    world.join("evaluator-host-0")
    settle(world, 3)
    assert running(world) == []
    world.join_all()
    settle(world, 3)
    assert running(world) == names
    evaluator = next(process for name, process in world.running() if name == "evaluator-0")
    assert evaluator.generation == 2


def test_an_evaluator_has_as_long_for_its_first_request_as_without_the_pause() -> None:
    world = up(make_plan(2, evaluator=1, hang_after=None, start=60.0))
    world.pause(now=True)
    settle(world, 300)
    assert stage(world) == PAUSED
    come_back(world)
    settle(world, 3)
    assert world.captain.evaluations.is_evaluator_expected(world.now)


# ---- limits, stop, scale


def test_paused_time_does_not_count_towards_limits_runtime() -> None:
    world = up(make_plan(2, hang_after=None, runtime=100.0))
    settle(world, 50)
    world.pause()
    world.save("worker-0", 10)
    world.deliver_all()
    settle(world, 300)
    assert not world.is_over
    come_back(world)
    settle(world, 40)
    assert len(running(world)) == 2
    settle(world, 40)
    assert world.over is not None and world.over.cause == "runtime-limit"


@pytest.mark.parametrize("again", [False, True])
def test_the_time_in_which_a_resumed_run_is_queued_does_not_count_either(again: bool) -> None:
    world = up(make_plan(2, hang_after=None, runtime=100.0))
    settle(world, 50)
    world.pause(now=True)
    world.deliver_all()
    world.resume()
    settle(world, 300)
    assert stage(world) == RESUMING and not world.is_over
    if again:
        world.pause()
        settle(world, 300)
        world.resume()
        settle(world, 300)
    come_back(world) if again else world.join_all()
    settle(world, 40)
    assert len(running(world)) == 2
    settle(world, 40)
    assert world.over is not None and world.over.cause == "runtime-limit"


def test_paused_time_does_not_count_towards_the_time_of_a_recovery() -> None:
    world = up(make_plan(2, hang_after=None))
    world.exit("worker-0", "signal")
    world.pause(now=True)
    world.deliver_all()
    assert stage(world) == PAUSED
    settle(world, 300)
    world.resume()
    settle(world, 300)
    come_back(world)
    settle(world, 5)
    world.step(1)
    assert world.last("recovered")["first_step_after_s"] < 60


def test_a_paused_run_can_be_stopped() -> None:
    world = paused()
    world.tell(ev.StopRequested("stop"))
    settle(world, 1)
    assert world.over is not None and world.over.status == "stopped"


def test_a_paused_run_that_is_stopped_does_not_wait_for_a_snapshot_that_nobody_can_commit() -> None:
    world = up(make_plan(2, hang_after=None))
    world.place.fails = Failure(STORE, "away", True)
    world.save("worker-0", 10)
    world.pause(now=True)
    settle(world, world.plan.limits.commit + 10)
    assert stage(world) == PAUSED
    world.tell(ev.StopRequested("stop"))
    settle(world, 1)
    assert world.over is not None and world.over.status == "stopped"
    assert "exists only on worker-host-0" in world.last("warning")["text"]


def test_a_paused_run_cannot_be_scaled() -> None:
    world = paused(least=1)
    assert world.captain.scaling.problem_with("worker", 1) == "the run is paused: resume it first"
    assert world.captain.scaling.problem_with("worker", 2) == "", "it is how far a change is"
    world.scale(1)
    assert "scaled" not in world.kinds()


def test_what_cannot_be_paused_or_resumed() -> None:
    world = up(make_plan(2))
    assert world.captain.pause.problem_with_resume() == "the run is not paused"
    world.exit("worker-0", "")
    assert world.captain.pause.problem_with_pause() == "training is about to end: some of its tasks have succeeded"
    world.tell(ev.StopRequested("stop"))
    assert world.captain.pause.problem_with_pause() == "the run is ending"
    assert world.captain.pause.problem_with_resume() == "the run is ending"
    world = World(make_plan(1, ingest=True))
    world.join_all()
    world.deliver_all()
    assert world.captain.pause.problem_with_pause() == "its data is being built: pause it once that is done"


# ---- a captain that returns


def test_a_captain_that_restarts_stays_paused() -> None:
    world = paused(start=60.0)
    world.restart_captain()
    settle(world, 300)
    assert stage(world) == PAUSED and not world.is_over
    come_back(world)
    settle(world, LEASE)
    assert len(running(world)) == 2 and world.last("generation-formed")["restore"] == "step-10-g1"
    assert world.captain.failures.restarts == []


def test_a_captain_that_restarts_before_the_first_generation_stays_paused() -> None:
    world = World(make_plan(2))
    world.pause()
    world.pass_time(LEASE)
    world.restart_captain()
    assert stage(world) == PAUSED
    come_back(world)
    assert len(running(world)) == 2


@pytest.mark.parametrize("delivered", [True, False])
def test_a_captain_that_restarts_while_tasks_end_counts_no_failure(delivered: bool) -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause(now=True)
    if delivered:
        world.deliver("worker-host-0")
    world.restart_captain()
    world.join_all()
    settle(world, LEASE + 2)
    assert running(world) == [] and stage(world) == PAUSED and world.captain.failures.restarts == []


def test_a_run_whose_tasks_a_returning_captain_adopts_is_resumed_at_once() -> None:
    world = up(make_plan(2, evaluator=1, hang_after=None))
    world.restart_captain()
    world.pause(now=True)
    world.resume()
    world.join_all()
    settle(world, 2)
    assert len(running(world)) == 3 and world.captain.generation == 1 and stage(world) == NOT_PAUSED


def test_a_captain_that_restarts_waits_for_the_snapshot_like_the_previous_one() -> None:
    world = up(make_plan(2, hang_after=None))
    world.pause()
    world.restart_captain()
    world.join_all()
    settle(world, LEASE + 2)
    assert stage(world) == SAVING and len(running(world)) == 2
    world.save("worker-0", 10)
    settle(world, 5)
    assert stage(world) == PAUSED and world.captain.failures.restarts == []


def test_failures_after_a_pause_count_again() -> None:
    world = paused()
    world.restart_captain()
    come_back(world)
    settle(world, LEASE + 2)
    world.exit("worker-0", "signal", survivor=True)
    settle(world, 5)
    assert len(world.captain.failures.restarts) == 1


def test_a_captain_without_notes_waits_for_a_snapshot_of_the_tasks_that_it_did_not_know() -> None:
    world = up(make_plan(2, hang_after=None))
    world.restart_captain(with_notes=False)
    world.pause(releases=False)
    settle(world, LEASE - 2)
    assert stage(world) == SAVING, "on a cluster, pods would be ended"
    world.join_all()
    settle(world, LEASE + 2)
    assert stage(world) == SAVING and len(running(world)) == 2
    world.save("worker-0", 10)
    settle(world, 5)
    assert stage(world) == PAUSED and world.last("paused")["snapshot"] == "step-10-g1"


def test_a_captain_whose_notes_are_old_pauses_the_run_again_and_says_so() -> None:
    world = paused()
    old = world.captain.to_notes()
    come_back(world)
    world.restart_captain(notes=old)
    world.join_all()
    settle(world, 2)
    assert stage(world) == SAVING and world.kinds()[-1] == "pausing"
    world.save("worker-0", 20)
    settle(world, 5)
    assert stage(world) == PAUSED and world.last("paused")["snapshot"] == "step-20-g2"
