"""`pause` and `resume`: the captain's process, the supervisor, Jobs on a cluster, what users are told, and views."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightkube import Client

from paceline.agent.captain import events as ev
from paceline.agent.captain_process import pause_requests
from paceline.agent.goodput import Goodput
from paceline.agent.metrics.captain_samples import CaptainSamples
from paceline.agent.net.frames import WireError
from paceline.agent.resource_usage import Resources
from paceline.agent.state_events import needed
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs import job_suspension
from paceline.backends.local import supervisor
from paceline.client.control import pause as control
from paceline.client.control.wait import Deadline, WaitTimeout
from paceline.client.diagnosis.task_requests import NoReply
from paceline.errors import PacelineError
from paceline.view.files.run_folders import Run
from paceline.view.report import run_report
from paceline.view.state import run_state, status_reader
from paceline.view.state.events import Event
from paceline.view.state.timeline import Timeline
from paceline.view.text.option_names import text_of
from support import recorded
from support.worlds import World, make_plan, up


def begin() -> World:
    return up(make_plan(2, evaluator=1, hang_after=None))


def ask(world: World, kind: str, **fields: Any) -> dict[str, Any]:
    return pause_requests.reply_to({"type": kind, **fields}, world.captain, world.tell)[0]


# ---- the captain's process


def test_a_request_is_accepted_and_tells_how_far_it_is() -> None:
    world = begin()
    replies = pause_requests.reply_to({"type": "pause", "within": 60, "releases": True}, world.captain, world.tell)
    assert replies == [
        {
            "type": "pause",
            "stage": "saving",
            "problem": "",
            "late": False,
            "snapshot": None,
            "step": 0,
            "leaving": [],
            "missing": [],
        },
        {"type": "pause-end"},
    ]
    world.step(10)
    world.save("worker-0", 10)
    world.deliver_all()
    reply = ask(world, "pause", query=True)
    assert (reply["stage"], reply["snapshot"], reply["step"], reply["leaving"]) == ("paused", "step-10-g1", 10, [])
    for host in world.machines:
        world.disconnect(host)
    reply = ask(world, "resume")
    assert reply["stage"] == "resuming" and reply["missing"] == [host.name for host in world.plan.hosts]


def test_a_query_changes_nothing() -> None:
    world = begin()
    assert ask(world, "pause", query=True, now=True)["stage"] == ""
    assert ask(world, "resume", query=True)["stage"] == ""
    assert "pausing" not in world.kinds()


def test_a_captain_refuses_what_is_impossible() -> None:
    world = begin()
    assert ask(world, "resume") == {"type": "refused", "reason": "the run is not paused"}
    world.tell(ev.StopRequested("stop"))
    assert ask(world, "pause", within=1) == {"type": "refused", "reason": "the run is ending"}


@pytest.mark.parametrize(
    "fields", [{"within": "1"}, {"within": -1}, {"within": True}, {"within": 1e10}, {"now": 1}, {"query": "yes"}]
)
def test_an_invalid_request_ends_the_connection(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        ask(begin(), "pause", **fields)


def test_metrics_say_that_the_run_is_paused(tmp_path: Path) -> None:
    world = begin()
    world.pause(now=True)
    world.deliver_all()
    samples = CaptainSamples(world.captain, Goodput(), Resources(), str(tmp_path), 0.0, "1", world.now)
    assert 'status="paused"} 1' in samples.text(False, world.now).decode()


# ---- on this machine


def test_the_supervisor_starts_all_hosts_of_a_resumed_run_and_none_of_a_paused_one(tmp_path: Path) -> None:
    world = begin()

    def requested() -> list[str]:
        (tmp_path / "captain.json").write_text(json.dumps({"captain": world.captain.to_notes()}))
        return supervisor._requested_hosts(world.plan, tmp_path)

    assert requested() == [], "it was never paused"
    world.pause()
    assert requested() == []
    world.save("worker-0", 10)
    world.deliver_all()
    assert requested() == [] and supervisor._stage_of_pause(supervisor._notes_of(tmp_path)) == "paused"
    world.resume()
    assert requested() == [host.name for host in world.plan.hosts]
    world.tell(ev.StopRequested("stop"))
    assert requested() == [], "the run is ending"
    for damaged in ("", "[]", '{"captain": []}', '{"captain": {"pause": []}}'):
        (tmp_path / "captain.json").write_text(damaged)
        assert supervisor._requested_hosts(world.plan, tmp_path) == []
        assert supervisor._stage_of_pause(supervisor._notes_of(tmp_path)) == ""


# ---- on a cluster


class FakeJobs:
    """The Jobs of a run, and their controller."""

    def __init__(self, runtime: int | None) -> None:
        self.started = datetime.fromtimestamp(time.time() - 1000, UTC)
        roles = {"digits-1": "captain", "digits-1-worker": "worker", "digits-1-evaluator": "evaluator"}
        owner = [SimpleNamespace(uid="uid-1", controller=False)]
        self.jobs = {
            name: SimpleNamespace(
                metadata=SimpleNamespace(
                    name=name,
                    uid="uid-1" if role == "captain" else name,
                    labels={names.RUN_LABEL: "digits-1", names.ROLE_LABEL: role},
                    ownerReferences=None if role == "captain" else owner,
                ),
                spec=SimpleNamespace(suspend=False, activeDeadlineSeconds=runtime),
                status=SimpleNamespace(active=2, terminating=None, startTime=self.started),
            )
            for name, role in roles.items()
        }
        self.cluster = Cluster(cast(Client, self), "shared", "team", "https://127.0.0.1:1")

    def list(self, kind: Any, labels: Any) -> list[Any]:
        assert labels == {names.RUN_LABEL: "digits-1"}
        return list(self.jobs.values())

    def patch(self, kind: Any, name: str, patch: Any, **_: Any) -> None:
        vars(self.jobs[name].spec).update(patch["spec"])

    def specs(self) -> list[tuple[bool, int | None]]:
        return [(job.spec.suspend, job.spec.activeDeadlineSeconds) for job in self.jobs.values()]

    def pods_end(self, **counts: int | None) -> None:
        for job in list(self.jobs.values())[1:]:
            vars(job.status).update(counts)


def test_the_jobs_of_members_are_suspended_and_the_captains_deadline_does_not_apply() -> None:
    fake = FakeJobs(3600)
    assert job_suspension.suspend(fake.cluster, "digits-1") is False, "its pods still run"
    assert fake.specs() == [(False, None), (True, 3600), (True, 3600)]
    assert job_suspension.is_any_suspended(fake.cluster, "digits-1")
    assert not job_suspension.is_suspended(fake.cluster, "digits-1")
    fake.pods_end(active=0, terminating=2)
    assert job_suspension.suspend(fake.cluster, "digits-1") is False, "its pods are being deleted"
    fake.pods_end(terminating=0)
    assert job_suspension.suspend(fake.cluster, "digits-1") is True
    assert job_suspension.is_suspended(fake.cluster, "digits-1")


def test_a_resumed_run_gets_its_pods_and_all_of_its_deadline_again() -> None:
    fake = FakeJobs(3600)
    job_suspension.suspend(fake.cluster, "digits-1")
    job_suspension.unsuspend(fake.cluster, "digits-1")
    (_, captain), *members = fake.specs()
    assert members == [(False, 3600), (False, 3600)]
    assert captain is not None and 4600 <= captain <= 4900, "the time since its start does not count"
    job_suspension.unsuspend(fake.cluster, "digits-1")
    assert fake.specs()[0] == (False, captain)


def test_a_run_without_a_time_limit_has_no_deadline_afterwards_either() -> None:
    fake = FakeJobs(None)
    job_suspension.suspend(fake.cluster, "digits-1")
    job_suspension.unsuspend(fake.cluster, "digits-1")
    assert fake.specs() == [(False, None)] * 3


def test_a_job_of_somebody_else_with_the_labels_of_the_run_is_not_suspended() -> None:
    fake = FakeJobs(None)
    fake.pods_end(active=0)
    fake.jobs["other"] = deepcopy(fake.jobs["digits-1-worker"])
    vars(fake.jobs["other"].metadata).update(name="other", ownerReferences=None)
    vars(fake.jobs["other"].status).update(active=2)
    assert job_suspension.suspend(fake.cluster, "digits-1") is True
    assert fake.specs() == [(False, None), (True, None), (True, None), (False, None)]
    assert job_suspension.is_suspended(fake.cluster, "digits-1")


def test_a_run_whose_job_was_deleted_cannot_be_paused() -> None:
    fake = FakeJobs(None)
    del fake.jobs["digits-1"]
    with pytest.raises(PacelineError, match="the Job digits-1 does not exist"):
        job_suspension.suspend(fake.cluster, "digits-1")


# ---- what users are told

Requests = Callable[..., list[str]]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Requests:
    """Pauses or resumes a local run, with these replies of its captain. Returns the requests, notes and signals."""

    def run(kind: str, *replies: dict[str, Any] | None, **options: Any) -> list[str]:
        calls: list[str] = []
        remaining = iter(replies)

        def ask(run: Run, request: dict[str, Any], seconds: float) -> Any:
            if not request.get("query"):
                calls.append(f"request {request['type']}")
            reply = next(remaining)
            if reply is None:
                raise NoReply("no reply")
            yield {"type": kind, "stage": "", "problem": "", "snapshot": None, "step": 0, **reply}

        monkeypatch.setattr(control, "ask", ask)
        monkeypatch.setattr(control, "is_running", lambda run: True)
        monkeypatch.setattr(control, "POLL_S", 0.0)
        monkeypatch.setattr("paceline.backends.local.scale_request.start_hosts", lambda _: calls.append("start"))
        target, deadline = Run("digits-1", tmp_path), Deadline("digits-1", options.pop("timeout", None))
        function = control.pause if kind == "pause" else control.resume
        function(target, deadline, lambda text: calls.append(str(text)), **options)
        return calls

    return run


SAVING, HALTING, RESUMING = {"stage": "saving"}, {"stage": "halting"}, {"stage": "resuming"}
LEAVING = {"stage": "paused", "leaving": ["worker-host-0"], "snapshot": "step-10-g1"}
PAUSED = {"stage": "paused", "snapshot": "step-10-g1"}


def test_a_pause_is_complete_once_all_hosts_have_left(requests: Requests) -> None:
    assert requests("pause", {}, SAVING, SAVING, None, HALTING, LEAVING, PAUSED) == [
        "request pause", "waiting for a snapshot to be committed", "waiting for tasks to end",
        "waiting for worker-host-0 to leave",
    ]  # fmt: skip


def test_a_run_that_commits_no_snapshot_in_time_is_not_paused(requests: Requests) -> None:
    problem = {"problem": "no new snapshot was committed within 60 s", "late": True, "snapshot": "step-10-g1"}
    with pytest.raises(control.NotPaused) as error:
        requests("pause", {}, SAVING, problem, within=60.0)
    assert text_of(error.value) == (
        "digits-1 was not paused and continues: no new snapshot was committed within 60 s; "
        "set a longer --within; or use --now: the run then continues later from step 10"
    )


@pytest.mark.parametrize(
    "kind, replies, message",
    [
        ("pause", [PAUSED], "digits-1 is already paused; to continue: paceline resume digits-1"),
        ("pause", [{}, SAVING, RESUMING], "digits-1 was not paused: another request has resumed it"),
        ("pause", [{}, SAVING, {"problem": "the run is ending"}], "digits-1 was not paused: the run is ending"),
        ("pause", [{"stage": "asleep"}], "the captain of digits-1 sent an invalid reply"),
        ("resume", [{}], "digits-1 is not paused; see: paceline status digits-1"),
        ("resume", [PAUSED, RESUMING, SAVING], "another request has paused digits-1"),
    ],
)
def test_errors(requests: Requests, kind: str, replies: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(PacelineError) as error:
        requests(kind, *replies)
    assert text_of(error.value) == message


def test_a_pause_whose_hosts_have_not_left_is_completed(requests: Requests) -> None:
    assert requests("pause", LEAVING, LEAVING, PAUSED)[-1] == "waiting for worker-host-0 to leave"


def test_hosts_are_started_until_the_group_trains(requests: Requests) -> None:
    missing = {**RESUMING, "missing": ["worker-host-0", "worker-host-1"]}
    assert requests("resume", PAUSED, missing, RESUMING, {}) == [
        "request resume", "start", "waiting for worker-host-0 and worker-host-1", "start",
        "waiting for tasks to start", "start",
    ]  # fmt: skip


def test_a_resume_that_was_interrupted_goes_on(requests: Requests) -> None:
    assert requests("resume", RESUMING, {}) == ["start", "waiting for tasks to start", "start"]


def test_hosts_that_cannot_be_started_are_reported(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_hosts(self: object) -> None:
        raise PacelineError("the cluster cannot be reached", remedy="try again")

    monkeypatch.setattr(control._Local, "get_hosts", get_hosts)
    with pytest.raises(PacelineError) as error:
        requests("resume", PAUSED, RESUMING)
    reason = "the cluster cannot be reached; try again"
    assert text_of(error.value) == f"digits-1 is being resumed, but its hosts may not start: {reason}"


def test_replies_of_another_users_run_are_bounded(requests: Requests) -> None:
    endless = {"problem": "x" * 10**6, "leaving": ["y" * 10**6] * 100}
    assert max(map(len, requests("pause", {}, SAVING, {**PAUSED, **endless}, PAUSED))) < 10_000
    with pytest.raises(PacelineError) as error:
        requests("pause", {}, SAVING, endless)
    assert len(str(error.value)) < 2000


def test_hosts_that_a_captain_without_notes_waits_for_come_back(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod was on a node that is lost: it does not know that the run is paused."""
    monkeypatch.setattr(control._Local, "are_hosts_gone", lambda self: True)
    assert requests("resume", {}) == ["start"]


def test_a_time_limit_ends_the_wait(requests: Requests) -> None:
    text = "digits-1 has not been paused within 0 s: it is still waiting for a snapshot to be committed"
    with pytest.raises(WaitTimeout, match=text):
        requests("pause", {}, SAVING, timeout=0.0)


def test_a_run_that_has_ended_cannot_be_paused(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as error:
        control.pause(Run("digits-1", tmp_path), Deadline("digits-1"))
    assert text_of(error.value) == ("digits-1 cannot be paused: it is not running; see: paceline status digits-1")


# ---- views

FORMED = recorded.event(2, "generation-formed", 1, tasks=["worker-0", "worker-1"], restore=None)
PAUSING = recorded.event(5, "pausing", 1, limit_s=600.0, now=False)
CANCELED = recorded.event(5.5, "pause-canceled", 1, reason="no new snapshot was committed within 600 s")
EXITED = [
    recorded.event(6, "task-exited", 1, task=f"worker-{index}", code=None, signal=None, expected=True)
    for index in range(2)
]
AT_REST = recorded.event(6.5, "paused", 1, step=120, snapshot="step-100-g1")
RESUMED = recorded.event(46.5, "resumed", 1, paused_s=40.0)
AGAIN = recorded.event(48, "generation-formed", 2, tasks=["worker-0", "worker-1"], restore="step-100-g1")


def parsed(*events: dict[str, Any]) -> list[Event]:
    return [Event(each["at"], each["event"], each["generation"], each) for each in events]


def test_status_shows_a_pause_and_its_reason(tmp_path: Path) -> None:
    def shown(*events: dict[str, Any]) -> tuple[str, str, str]:
        state = run_state.fold(parsed(recorded.STARTED, FORMED, *events))
        report = status_reader.derive(Run("digits-1", tmp_path), state)
        return report["status"], report["reason"], state.tasks["worker-0"].state

    waiting = "the run is being paused: waiting for a new snapshot to be committed (limit 10 min)"
    assert shown(PAUSING) == ("running", waiting, "starting")
    assert shown(PAUSING, CANCELED) == ("running", "", "starting")
    reason = "the run is paused at step 120; it will continue from step 100"
    assert shown(PAUSING, *EXITED, AT_REST) == ("paused", reason, "waiting")
    assert shown(PAUSING, *EXITED, AT_REST, RESUMED) == ("running", "", "waiting")
    assert shown(PAUSING, *EXITED, AT_REST, RESUMED, AGAIN) == ("running", "", "starting")
    assert run_report.next_command({"status": "paused", "run": "digits-1"}) == "paceline resume digits-1"


def test_a_run_stays_paused_when_its_events_are_replaced() -> None:
    kept = needed([recorded.STARTED, FORMED, PAUSING, *EXITED, AT_REST])
    assert run_state.fold(parsed(*kept)).status == "paused"


def test_paused_time_is_a_kind_of_its_own_and_all_kinds_add_up() -> None:
    goodput = Goodput()
    joined = [recorded.event(1, "member-joined", 0, host=host) for host in recorded.STARTED["hosts"]]
    started = recorded.event(2.5, "task-started", 1, task="worker-0", pid=1, warm=False, host="worker-host-0")
    step = recorded.event(3, "step", 1, task="worker-0", step=100)
    for event in (recorded.STARTED, *joined, FORMED, started, step, PAUSING, *EXITED, AT_REST, RESUMED, AGAIN):
        goodput.add(event)
    times = goodput.milliseconds()
    assert times["paused"] == 40_000 and times["waiting"] == 1500 and sum(times.values()) == 48_000
    earlier = {**goodput.to_json(), "times": {kind: ms for kind, ms in times.items() if kind != "paused"}}
    earlier["first"] = earlier["now"] - sum(earlier["times"].values())
    again = Goodput()
    again.add({"event": "rotated", "goodput": earlier})
    assert again.milliseconds()["paused"] == 0 and again.has_begun, "an earlier version did not write it"


def test_a_timeline_shows_that_tasks_wait_because_of_the_pause() -> None:
    timeline = Timeline({f"worker-{index}": f"worker-host-{index}" for index in range(2)})
    for event in parsed(recorded.STARTED, FORMED, *EXITED, AT_REST):
        timeline.add(event)
    phase = timeline.phase("worker-0")
    assert phase is not None and (phase.kind, phase.detail) == ("waiting", "the run is paused")
