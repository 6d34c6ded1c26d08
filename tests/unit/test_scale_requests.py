"""Requests to scale a run: what the captain's process replies, what backends do, and what users are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from lightkube import ApiError, Client

from paceline.agent.captain import events as ev
from paceline.agent.captain_process import scale_requests
from paceline.agent.goodput import Goodput
from paceline.agent.metrics.captain_samples import CaptainSamples
from paceline.agent.net.frames import WireError
from paceline.agent.resource_usage import Resources
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.runs.job_size import resize
from paceline.backends.local import host_shares, supervisor
from paceline.client.control import scale as control
from paceline.client.control.wait import Deadline, WaitTimeout
from paceline.client.diagnosis import task_requests
from paceline.client.diagnosis.task_requests import NoReply
from paceline.errors import PacelineError, UsageError
from paceline.job import load_text, planning
from paceline.plan import Plan
from paceline.view.files.run_folders import Run
from paceline.view.state import run_state
from paceline.view.state.events import Event
from paceline.view.state.timeline import Timeline
from paceline.view.text.wording import describe
from support import recorded
from support.worlds import World, make_plan

JOB = "name: digits\nframework: none\ncommand: ['true']\n"


def plan_of(roles: str, more: str = "") -> Plan:
    return planning.make_plan(load_text(f"{JOB}roles: {roles}\n{more}", "job.yaml", Path("/")).job)


def begin() -> World:
    world = World(make_plan(4, hang_after=None, least=1, first=2))
    for host in world.plan.first_hosts:
        world.join(host.name)
    world.deliver_all()
    return world


# ---- the captain's process


def test_a_request_is_accepted_and_tells_which_hosts_are_to_come() -> None:
    world = begin()
    replies = scale_requests.reply_to({"type": "scale", "role": "worker", "hosts": 3}, world.captain, world.tell)
    assert replies == [
        {"type": "scale", "hosts": 3, "joining": ["worker-host-2"], "leaving": []}, {"type": "scale-end"},
    ]  # fmt: skip
    assert world.kinds().count("scaled") == 1


def test_a_request_without_a_number_changes_nothing() -> None:
    world = begin()
    replies = scale_requests.reply_to({"type": "scale", "role": "worker"}, world.captain, world.tell)
    assert replies[0] == {"type": "scale", "hosts": 2, "joining": [], "leaving": []}
    assert "scaled" not in world.kinds()


def test_a_captain_refuses_what_is_impossible() -> None:
    world = begin()
    replies = scale_requests.reply_to({"type": "scale", "role": "worker", "hosts": 9}, world.captain, world.tell)
    assert replies == [{"type": "refused", "reason": "worker can have 1 to 4 hosts"}]
    replies = scale_requests.reply_to({"type": "scale", "role": "ps"}, world.captain, world.tell)
    assert replies == [{"type": "refused", "reason": "the number of hosts of ps cannot change"}]


@pytest.mark.parametrize(
    "fields", [{}, {"role": 1}, {"role": "worker", "hosts": "3"}, {"role": "worker", "hosts": True}]
)
def test_an_invalid_request_ends_the_connection(fields: dict[str, Any]) -> None:
    world = begin()
    with pytest.raises(WireError):
        scale_requests.reply_to({"type": "scale", **fields}, world.captain, world.tell)


def test_metrics_have_only_hosts_that_are_wanted(tmp_path: Path) -> None:
    world = begin()
    world.scale(1)
    samples = CaptainSamples(world.captain, Goodput(), Resources(), str(tmp_path), 0.0, "1", world.now)
    text = samples.text(False, world.now).decode()
    assert 'host="worker-host-0"' in text and 'task="worker-0"' in text
    assert "worker-host-1" not in text and "worker-host-3" not in text


# ---- on this machine


def test_cores_are_shared_among_the_tasks_that_the_run_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.agent.os_processes.cores", lambda: 8)
    plan = plan_of("{worker: {replicas: 2, max: 4}}")
    shares = host_shares.assign(plan)
    assert {host: share.cores for host, share in shares.items()} == {f"worker-host-{n}": 4.0 for n in range(4)}
    assert host_shares.fitting(plan, shares) is plan


@pytest.mark.parametrize(
    "roles, gpus, message",
    [
        ("{worker: {gpus: 1}, evaluator: {}}", (), "needs 1 GPU (worker 1), but this machine has no GPU"),
        ("{worker: {gpus: 1}, evaluator: {gpus: 1}}", ("0",), "needs 2 GPUs (worker 1, evaluator 1), but this machine "
         "has 1 GPU"),
    ],
)  # fmt: skip
def test_a_job_with_more_gpus_than_this_machine_cannot_run(
    roles: str, gpus: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_shares, "gpus", lambda: gpus)
    with pytest.raises(host_shares.CannotRun) as error:
        host_shares.assign(plan_of(roles))
    assert str(error.value) == f"the job {message}; lower gpus or replicas"


def test_the_gpus_of_this_machine_limit_max(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_shares, "gpus", lambda: ("0", "1", "2"))
    plan = plan_of("{worker: {replicas: 1, max: 4, gpus: 1}, evaluator: {gpus: 1}}")
    shares = host_shares.assign(plan)
    assert {host: share.devices for host, share in shares.items()} == {
        "worker-host-0": ("0",), "evaluator-host-0": ("1",), "worker-host-1": ("2",),
    }  # fmt: skip
    fitting = host_shares.fitting(plan, shares)
    assert [task.name for task in fitting.tasks] == ["worker-0", "worker-1", "evaluator-0"]
    assert fitting.sizes == {"worker": 1}
    with pytest.raises(UsageError, match="can have 1 to 2 hosts"):
        control.check_sizes("digits-1", fitting, {"worker": 3})


def test_the_supervisor_learns_from_the_notes_of_the_captain_which_hosts_to_start(tmp_path: Path) -> None:
    world = begin()

    def requested() -> list[str]:
        (tmp_path / "captain.json").write_text(json.dumps({"captain": world.captain.to_notes()}))
        return supervisor._requested_hosts(world.plan, tmp_path)

    assert supervisor._requested_hosts(world.plan, tmp_path) == [], "there are no notes"
    world.scale(3)
    assert requested() == ["worker-host-0", "worker-host-1", "worker-host-2"]
    world.scale(1)
    assert requested() == ["worker-host-0"]
    world.tell(ev.StopRequested("stop"))
    assert requested() == [], "the run is ending"
    for damaged in ("", "[]", '{"captain": {}}', '{"captain": {"books": {"sizes": {"worker": []}}, "outcome": [""]}}'):
        (tmp_path / "captain.json").write_text(damaged)
        assert supervisor._requested_hosts(world.plan, tmp_path) == []


# ---- on a cluster


class FakeJob:
    """An Indexed Job and its controller."""

    def __init__(self, size: int, completed: str = "") -> None:
        self.size, self.completed = size, completed
        self.patches: list[int] = []
        self.refused = False

    def get(self, kind: Any, name: str) -> Any:
        assert name == "digits-1-worker"
        spec = SimpleNamespace(completions=self.size, parallelism=self.size)
        return SimpleNamespace(spec=spec, status=SimpleNamespace(completedIndexes=self.completed))

    def patch(self, kind: Any, name: str, patch: Any, **_: Any) -> None:
        if self.refused:
            status = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "not allowed"}
            raise ApiError(response=httpx2.Response(403, json=status, request=httpx2.Request("GET", "https://any")))
        assert patch["spec"]["completions"] == patch["spec"]["parallelism"], "a Job allows only both together"
        self.size = patch["spec"]["completions"]
        self.patches.append(self.size)

    def resize(self, hosts: int, can_remove: bool = True) -> bool:
        cluster = Cluster(cast(Client, self), "shared", "team", "https://127.0.0.1:1")
        return resize(cluster, "digits-1", "worker", hosts, can_remove)


def test_a_job_gets_more_pods_and_loses_them_once_they_have_exited() -> None:
    job = FakeJob(2)
    assert job.resize(2) is True and job.patches == []
    assert job.resize(4) is False and job.resize(4) is True
    assert job.resize(3, can_remove=False) is False and job.patches == [4]
    job.completed = "3"
    assert job.resize(3) is False and job.patches == [4, 3]
    assert job.resize(3) is False, "the cluster has not noticed it yet"
    job.completed = ""
    assert job.resize(3) is True


def test_an_index_whose_pod_has_exited_is_removed_before_it_is_added_again() -> None:
    """A command that was interrupted has not removed it."""
    job = FakeJob(4, completed="2-3")
    assert job.resize(4) is False and job.patches == [2]
    assert job.resize(4) is False and job.patches == [2], "the cluster has not noticed it yet"
    job.completed = ""
    assert job.resize(4) is False and job.patches == [2, 4]
    assert job.resize(4) is True


@pytest.mark.parametrize("completed", ["0-99999999999", "1-x", "5-2", "-1", "99999999999"])
def test_indexes_that_no_job_can_have_are_an_error(completed: str) -> None:
    """Anyone who may change the status of Jobs can write them."""
    with pytest.raises(PacelineError, match="the Job digits-1-worker has an invalid list of completed indexes"):
        FakeJob(2, completed=completed).resize(2)


def test_a_refused_change_says_what_the_captain_expects() -> None:
    job = FakeJob(2)
    job.refused = True
    with pytest.raises(PacelineError) as error:
        job.resize(3)
    assert error.value.what.startswith("the captain of digits-1 expects 3 worker hosts: cannot change the size of")


# ---- what users are told


@pytest.mark.parametrize(
    "roles, sizes, message",
    [
        ("{worker: {replicas: 2}}", {"worker": 1}, "worker=1: digits-1: the number of worker hosts is fixed; set "
         "roles.worker.min or roles.worker.max in the job file, and start a new run"),
        ("{worker: [{replicas: 1}, {replicas: 2, min: 1}]}", {"worker": 1}, "worker=1: digits-1: the number of worker "
         "hosts is fixed; its workers have several host pools: only workers with one host pool can be scaled"),
        ("{worker: {replicas: 2, min: 1}, evaluator: {}}", {"evaluator": 2}, "evaluator=2: digits-1: the number of "
         "evaluator hosts is fixed; only workers can be scaled, and not in parameter-server jobs"),
        ("{worker: {replicas: 2, min: 1}}", {"wroker": 2}, "wroker=2: digits-1 has no role 'wroker'; did you mean "
         '"worker"?'),
        ("{worker: {replicas: 2, min: 1}}", {"worker": 3}, "worker=3: role worker of digits-1 can have 1 to 2 hosts"),
        ("{worker: {replicas: 2, max: 4}}", {"worker": 1}, "worker=1: role worker of digits-1 can have 2 to 4 hosts"),
        ("{worker: {replicas: 2, max: 4}}", {"worker": "3"}, "worker=3: role worker of digits-1 can have 2 to 4 hosts"),
        ("{worker: {replicas: 2, max: 4}}", {}, "scale requires one role and its number of hosts; "
         "for example worker=4"),
    ],
)  # fmt: skip
def test_what_cannot_be_scaled(roles: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        control.check_sizes("digits-1", plan_of(roles), sizes)
    assert str(error.value) == message


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Scales a local run to 3 workers, with these replies of its captain. Returns the notes and signals."""
    calls: list[str] = []

    def run(*replies: dict[str, Any] | None, timeout: float | None = None) -> list[str]:
        remaining = iter(replies)

        def ask(run: Run, request: dict[str, Any], seconds: float) -> Any:
            reply = next(remaining)
            if reply is None:
                raise NoReply("no reply")
            yield {"type": "scale", "joining": [], "leaving": [], **reply}

        monkeypatch.setattr(control, "ask", ask)
        monkeypatch.setattr(control, "read_plan", lambda folder: plan_of("{worker: {replicas: 2, max: 4}}"))
        monkeypatch.setattr(control, "POLL_S", 0.0)
        monkeypatch.setattr("paceline.backends.local.scale_request.start_hosts", lambda _: calls.append("start"))
        control.scale(
            Run("digits-1", tmp_path), {"worker": 3}, Deadline("digits-1", timeout), lambda n: calls.append(str(n))
        )
        return calls

    return run


def test_hosts_are_started_until_they_take_part(scale: Callable[..., list[str]]) -> None:
    joining = {"hosts": 3, "joining": ["worker-host-2"]}
    waiting = "waiting for worker-host-2 to take part"
    assert scale(joining, joining, {"hosts": 3}) == ["start", waiting, "start"]


def test_of_what_a_captain_replies_only_a_part_is_shown(scale: Callable[..., list[str]]) -> None:
    """That of another user's run may send millions of names."""
    notices = scale({"hosts": 3, "joining": ["x" * 100_000] * 100_000}, {"hosts": 3})
    assert max(map(len, notices)) < 20 * 260 + 100


def test_a_captain_may_restart_meanwhile(scale: Callable[..., list[str]]) -> None:
    leaving = {"hosts": 3, "leaving": ["worker-host-3"]}
    text = "waiting for worker-host-3 to leave, once a snapshot of the group is committed"
    assert scale(leaving, None, {"hosts": 3}) == [text]


def test_a_captain_that_does_not_know_the_request_is_an_error(scale: Callable[..., list[str]]) -> None:
    with pytest.raises(NoReply):
        scale(None)


def test_of_the_reason_of_a_refusal_only_a_part_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(task_requests, "is_running", lambda run: True)
    monkeypatch.setattr(task_requests, "_messages", lambda *_: iter([{"type": "refused", "reason": "x" * 10**7}]))
    with pytest.raises(PacelineError, match="digits-1: the request was refused: x") as error:
        list(task_requests.ask(Run("digits-1", tmp_path), {"type": "scale"}, 1.0))
    assert len(str(error.value)) < 1100


def test_another_request_ends_the_wait(scale: Callable[..., list[str]]) -> None:
    with pytest.raises(PacelineError, match="another request has changed worker of digits-1 to 4 hosts"):
        scale({"hosts": 3, "joining": ["worker-host-2"]}, {"hosts": 4})


def test_a_time_limit_ends_the_wait(scale: Callable[..., list[str]]) -> None:
    with pytest.raises(WaitTimeout, match="has not been scaled within 0 s: it is still waiting for worker-host-2"):
        scale({"hosts": 3, "joining": ["worker-host-2"]}, timeout=0.0)


# ---- views


def shown(*events: dict[str, Any]) -> dict[str, str]:
    parsed = [Event(each["at"], each["event"], each["generation"], each) for each in events]
    return {task.name: task.state for task in run_state.fold(parsed).tasks.values()}


FORMED = recorded.event(2, "generation-formed", 1, tasks=["worker-0", "worker-1"], restore=None)
MORE = recorded.event(3, "scaled", 1, role="worker", count=3, was=2, tasks=["worker-0", "worker-1", "worker-2"])
FEWER = recorded.event(9, "scaled", 2, role="worker", count=2, was=3, tasks=["worker-0", "worker-1"])


def test_status_shows_tasks_from_the_request_on_and_those_that_have_run() -> None:
    assert describe(Event("", "scaled", 1, MORE)) == "scaling worker from 2 to 3 hosts"
    assert shown(recorded.STARTED, FORMED, MORE)["worker-2"] == "absent"
    assert "worker-2" not in shown(recorded.STARTED, FORMED, MORE, FEWER), "it has never run"
    larger = recorded.event(4, "generation-formed", 2, tasks=["worker-0", "worker-1", "worker-2"], restore=None)
    exited = recorded.event(9.5, "task-exited", 2, task="worker-2", code=None, signal=None, expected=True)
    assert shown(recorded.STARTED, FORMED, MORE, larger, FEWER, exited)["worker-2"] == "ended"
    assert shown(recorded.STARTED, FORMED, MORE, larger, FEWER, exited, MORE)["worker-2"] == "absent"


def test_only_tasks_that_are_to_run_are_asked_for_stacks() -> None:
    parsed = [Event(each["at"], each["event"], each["generation"], each) for each in (recorded.STARTED, FORMED)]
    state = run_state.fold(parsed)
    assert [state.is_wanted(f"worker-{index}") for index in range(3)] == [True, True, False]
    state = run_state.fold([Event(MORE["at"], "scaled", 1, MORE)], state)
    assert [state.is_wanted(f"worker-{index}") for index in range(4)] == [True, True, True, False]


def test_a_timeline_ends_with_the_tasks_that_are_not_wanted() -> None:
    timeline = Timeline({f"worker-{index}": f"worker-host-{index}" for index in range(3)})
    for each in (recorded.STARTED, FORMED, MORE, FEWER):
        timeline.add(Event(each["at"], each["event"], each["generation"], each))
    assert [segment.kind for segment in timeline.tasks["worker-2"]] == ["queued", "ended"]


def test_training_has_finished_once_the_wanted_tasks_have() -> None:
    goodput = Goodput()
    finished = [
        recorded.event(20 + index, "task-exited", 2, task=f"worker-{index}", code=0, signal=None, expected=False)
        for index in range(2)
    ]
    started = recorded.event(0, "run-started", 0, strategy="", tasks=["worker-0", "worker-1", "worker-2"], hosts=[])
    for each in (started, FORMED, recorded.event(3, "step", 1, task="worker-0", step=1), FEWER, *finished):
        goodput.add(each)
    assert goodput._phase == "finished"
