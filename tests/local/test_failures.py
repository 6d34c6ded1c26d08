"""Failures of many kinds: the report names the cause of each, and training continues or ends as it should."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import runs
from support.ports import free_port
from support.runs import (
    TOGETHER,
    Run,
    Starter,
    alive,
    causes,
    eventually,
    fill,
    finish,
    job,
    misbehave,
    order,
    orders,
    recovers,
    small_disk,
    steps_done,
)
from support.short_lease import LEASE_S, SHORT

pytestmark = pytest.mark.timeout(400)


# ---- the program's own errors


def test_an_exception_once_is_recovered_from(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    order(state, 1, "raise")
    recovers(run, 0)
    report = finish(run, state)
    assert causes(report) == [("program-error", "worker-1")]
    (restart,) = report["restarts"]
    assert "Injected: asked for by the test" in restart["detail"] and "faults.py:" in restart["detail"]
    assert 0 < restart["first_step_after_s"] < 30
    assert report["generations"] == 2
    assert "g1 | Traceback (most recent call last):" in run.log("worker-1")


def test_the_same_error_twice_without_progress_ends_the_run(start: Starter) -> None:
    # One worker only: another task might get further than before, which would be progress.
    run = start(job(misbehave("--report", "--fail-at", 3, "--fail-rank", 0), workers=1))
    report = run.fails()
    assert causes(report) == [("program-error", "worker-0")]
    assert report["cause"] == "program-error" and report["generations"] == 2
    for text in ("worker-0", "Injected: asked for by the test", "faults.py:", "same error at the same line twice"):
        assert text in report["reason"]
    assert "Injected" in run.said() and "faults.py:" in run.said()


def test_a_failure_is_reported_without_the_secrets_in_its_text(start: Starter) -> None:
    program = "import os; raise ValueError('cannot log in with', os.environ['API_TOKEN'], 'at https://me:pw@host/')"
    env = {"API_TOKEN": "a-token-of-the-job"}
    run = start(job(["python", "-c", program], workers=1, restart={"limit": 0}, env=env))
    report = run.fails()
    assert "ValueError: ('cannot log in with', '***', 'at https://***@host/')" in report["reason"]
    kept = (run.folder / "events.jsonl").read_text() + (run.folder / "report.json").read_text()
    assert "a-token" not in kept and "me:pw" not in kept
    assert "a-token-of-the-job" in run.log("worker-0"), "the log is what the program wrote"


EPOCHS = """
import json, pathlib
checkpoint = pathlib.Path("checkpoint.json")
start = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
for epoch in range(start + 1, 41):
    print("epoch", epoch)
    if epoch % 10 == 0:
        checkpoint.write_text(json.dumps(epoch))
    if epoch in (15, 30) and start < epoch - 5:
        json.loads("damaged")
"""


def test_the_same_error_of_an_unmodified_program_is_tried_again_if_its_checkpoint_has_changed(
    start: Starter, tmp_path: Path
) -> None:
    program = tmp_path / "epochs.py"
    program.write_text(EPOCHS)
    run = start(job(["python", str(program)], workers=1))
    report = run.succeeds()
    assert causes(report) == [("program-error", "worker-0")] * 2
    place = f"at {program}:10 (raised in json/decoder.py:"
    assert all(place in restart["detail"] for restart in report["restarts"])
    assert "the same error as before, but checkpoint.json had changed" in run.said()


NAN_ONCE = """
import pathlib, sys, time
import paceline
from paceline.runtime import snapshot_folders
first_time, folder = not pathlib.Path("started").exists(), snapshot_folders.restored()
pathlib.Path("started").touch()
state = (folder / "state").read_text() if folder else "0 at 0.5"
print("from", state, flush=True)
for step in range(int(state.split()[0]) + 1, 1000 if first_time else 9):
    loss = float("nan") if first_time and step >= 5 else 1 / step
    paceline.report(step=step, loss=loss)
    with snapshot_folders.writing(step) as folder:
        (folder / "state").write_text(f"{step} at {loss}")
    time.sleep(0.05)
"""


def test_a_loss_that_is_nan_sends_training_back_to_the_snapshot_before(start: Starter, tmp_path: Path) -> None:
    program = tmp_path / "nan_once.py"
    program.write_text(NAN_ONCE)
    run = start(job(["python", str(program)], workers=1, restart={"on_nan": "rollback"}))
    report = run.succeeds()
    assert causes(report) == [("nan", "worker-0")] and report["restarts"][0]["detail"] == "loss is NaN at step 5"
    [event] = run.events("not-finite")
    assert [event[name] for name in ("task", "metric", "value", "step")] == ["worker-0", "loss", "NaN", 5]
    assert [formed["restore"] for formed in run.events("generation-formed")] == [None, "step-4-g1"]
    assert "worker-0: loss is NaN at step 5" in run.said() and "from 4 at 0.25" in run.log("worker-0")
    stored = [path.read_text() for path in run.folder.glob("snapshots/*/step-*/worker-0/state")]
    assert "8 at 0.125" in stored and not any("nan" in state for state in stored)


def test_an_exit_code_without_a_message_is_a_program_error(start: Starter) -> None:
    run = start(job(misbehave("--fail-at", 1, "--fail-how", "exit:7"), restart={"limit": 0}))
    report = run.fails()
    assert (report["cause"], report["restarts"]) == ("program-error", [])
    assert "exit code 7" in report["reason"] and "restart.limit is 0" in report["reason"]


def test_a_command_that_cannot_be_started_ends_the_run(start: Starter, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nowhere/at/all\n")
    program.chmod(0o755)
    report = start(job([str(program)])).fails()
    assert report["cause"] == "program-error"
    assert "No such file" in report["reason"]


# ---- signals, memory, ports


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_task_killed_by_a_signal(start: Starter, state: Path, name: str) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    os.kill(run.task("worker-1"), signal.Signals[name])
    restart = recovers(run, 0)
    assert restart["scope"] == ["worker-0", "worker-1"] and restart["delay_s"] == 0
    report = finish(run, state)
    assert causes(report) == [("signal", "worker-1")]
    assert name in report["restarts"][0]["detail"]
    exited = run.events("task-exited")[0]
    assert (exited["task"], exited["signal"], exited["code"], exited["expected"]) == ("worker-1", name, None, False)


class Cgroup:
    """A memory cgroup for one run, of either version."""

    def __init__(self, limit: int) -> None:
        first = Path("/sys/fs/cgroup/memory")
        self.second = not first.is_dir()
        root = Path("/sys/fs/cgroup") if self.second else first
        if self.second:
            (root / "cgroup.subtree_control").write_text("+memory")
        self.folder = root / f"paceline-test-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        (self.folder / ("memory.max" if self.second else "memory.limit_in_bytes")).write_text(str(limit))
        swap = self.folder / ("memory.swap.max" if self.second else "memory.memsw.limit_in_bytes")
        with contextlib.suppress(OSError):
            swap.write_text("0" if self.second else str(limit))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        until = time.monotonic() + runs.GONE_S
        while self.folder.exists():
            for pid in (self.folder / "cgroup.procs").read_text().split():
                runs.kill(int(pid))
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            assert time.monotonic() < until, f"{self.folder} is still in use"


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    group = Cgroup(768 << 20)
    yield group
    group.remove()


@pytest.mark.long  # needs root, for a cgroup
def test_out_of_memory_is_distinguished_from_other_kills(cgroup: Cgroup, state: Path, tmp_path: Path) -> None:
    with runs.starter(tmp_path) as start:
        run = start(job(orders("none", state)), preexec_fn=cgroup.enter)
        run.all_step()
        order(state, 0, "memory")
        restart = recovers(run, 0)
        assert (restart["cause"], restart["task"]) == ("out-of-memory", "worker-0")
        assert "memory" in restart["detail"]
        # The kernel has killed in this cgroup before, but not this time.
        after = run.position()
        os.kill(run.task("worker-1"), signal.SIGKILL)
        recovers(run, after)
        report = finish(run, state)
        assert causes(report) == [("out-of-memory", "worker-0"), ("signal", "worker-1")]


def test_a_port_in_use(start: Starter) -> None:
    port = str(free_port())  # once it is closed, no other process may listen there
    with socket.create_server(("127.0.0.1", int(port))):
        command = misbehave("--listen", "TAKEN", "--steps", 3, "--report")
        run = start(job(command, workers=1, env={"TAKEN": port}))
        restart = run.wait("restart")
    assert (restart["cause"], restart["task"]) == ("port-in-use", "worker-0")
    assert "Address already in use" in restart["detail"]
    report = run.succeeds()
    assert {cause for cause, _ in causes(report)} == {"port-in-use"}


# ---- hosts


@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_a_lost_host(start: Starter, state: Path, victim: str) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    os.kill(run.agent("worker-host-1") if victim == "agent" else run.keeper("worker-host-1"), signal.SIGKILL)
    recovers(run, 0)
    report = finish(run, state)
    assert causes(report) == [("host-lost", "worker-1")]
    assert "worker-host-1" in report["restarts"][0]["detail"]


def test_a_task_that_gets_a_sigterm_from_outside_was_preempted(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    os.kill(run.task("worker-0"), signal.SIGTERM)
    recovers(run, 0)
    assert causes(finish(run, state)) == [("preempted", "worker-0")]


def test_a_host_that_gets_a_sigterm_was_preempted(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    keeper = run.keeper("worker-host-0")
    os.kill(keeper, signal.SIGTERM)
    recovers(run, 0)
    assert run.keeper("worker-host-0") != keeper
    assert causes(finish(run, state)) == [("preempted", "worker-0")]


def test_a_task_that_exits_cleanly_when_its_host_is_preempted_has_not_succeeded(start: Starter) -> None:
    run = start(job(misbehave("--steps", 10**6, "--report", "--slow-sigterm", 0)))
    run.all_step()
    for host in ("worker-host-0", "worker-host-1"):
        os.kill(run.keeper(host), signal.SIGTERM)
    restart = run.wait("restart")
    assert restart["cause"] == "preempted"
    run.wait_for_step(generation=2)
    assert not run.events("run-ended")


BROKEN_HOST = """
import signal, sys
from paceline.agent import __main__ as agent
from paceline.cli import main
real = agent.main
agent.main = lambda options: signal.pause() if options.host == "worker-host-1" else real(options)
sys.argv[0] = "paceline"
sys.exit(main())
"""


def test_a_host_that_never_joins_is_named_when_the_wait_ends(start: Starter) -> None:
    run = start(job(misbehave(), limits={"start": "12s"}), command=[sys.executable, "-c", BROKEN_HOST])
    report = run.fails()
    assert (report["cause"], report["generations"], report["restarts"]) == ("start-timeout", 0, [])
    assert "worker-1 did not start" in report["reason"] and "limits.start" in report["reason"]
    assert "worker-0" not in report["reason"]


def test_a_host_that_does_not_return_is_named_when_the_wait_ends(start: Starter) -> None:
    run = start(job(misbehave("--report", "--steps", 10**6), limits={"start": "12s"}), command=SHORT)
    run.all_step()
    os.kill(run.supervisor, signal.SIGSTOP)  # so that nobody replaces the host
    try:
        os.kill(run.keeper("worker-host-0"), signal.SIGKILL)
        run.wait("restart", cause="host-lost")
        ended = run.wait("run-ended")
    finally:
        os.kill(run.supervisor, signal.SIGCONT)
    assert ended["cause"] == "start-timeout" and "worker-0 did not start" in ended["reason"]
    assert run.fails()["cause"] == "start-timeout"


# ---- hangs


def check_stacks(run: Run, report: dict[str, Any], tasks: tuple[str, ...] = ("worker-0", "worker-1")) -> None:
    assert set(report["stacks"]) == set(tasks)
    for task in tasks:
        assert 'File "' in report["stacks"][task] and "orders.py" in report["stacks"][task]
        log = run.log(task)
        assert "Fatal Python error: Aborted" in log and "orders.py" in log[log.index("Fatal Python error") :]


def test_a_stopped_task_is_a_hang(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state), restart={"hang_after": "8s"}))
    run.all_step()  # a task that is stopped earlier may have no stacks to show
    # Without a collective the others would continue, and the group with them.
    os.kill(run.task("worker-1"), signal.SIGSTOP)
    order(state, 0, "sleep")
    recovers(run, 0)
    hang = run.wait("hang")
    assert hang["progress"] == "step" and hang["limit_s"] == 8 and hang["silent_s"] >= 8
    report = finish(run, state)
    assert causes(report) == [("hang", "worker-1")]
    assert "suspended" in report["restarts"][0]["detail"]
    check_stacks(run, report)


def test_an_endless_loop_that_holds_the_gil_is_a_hang(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state), restart={"hang_after": "8s"}))
    run.all_step()
    order(state, 0, "sleep")
    order(state, 1, "gil")
    recovers(run, 0)
    report = finish(run, state)
    assert causes(report) == [("hang", "worker-1")]
    assert "busy" in report["restarts"][0]["detail"]
    check_stacks(run, report)
    assert "faults.py" in report["stacks"]["worker-1"]


def test_a_collective_that_waits_for_a_sleeping_rank_is_a_hang(start: Starter, state: Path) -> None:
    run = start(job(orders("torch", state), framework="torch", restart={"hang_after": "20s"}))
    run.all_step()
    order(state, 1, "sleep")
    recovers(run, 0)
    report = finish(run, state, ahead=TOGETHER)
    assert [cause for cause, _ in causes(report)] == ["hang"]
    check_stacks(run, report)
    assert "all_reduce" in report["stacks"]["worker-0"]
    assert "faults.py" in report["stacks"]["worker-1"]
    starts = {start["generation"]: start["tasks"] for start in report["starts"]}
    assert sorted(starts) == list(range(1, report["generations"] + 1))
    for tasks in starts.values():
        for task in ("worker-0", "worker-1"):
            times = [tasks[task][name] for name in ("imports_s", "joining_s", "joined_s", "first_step_s")]
            assert times == sorted(times), report["starts"]
    assert starts[1]["worker-0"]["imports_s"] > 0.1  # torch


@pytest.mark.long
def test_a_chief_that_waits_for_a_missing_worker_is_a_hang(start: Starter, state: Path) -> None:
    order(state, 1, "sleep", when="start")
    roles = {"chief": {"replicas": 1}, "worker": {"replicas": 1}}
    fields = job(
        orders("tensorflow", state, "--steps", 5), framework="tensorflow", strategy="multi-worker", roles=roles
    )
    restart = {"hang_after": "30s", "warm": False}  # longer than the import of TensorFlow takes
    run = start({**fields, "restart": restart})
    report = run.succeeds(limit=300)
    assert [cause for cause, _ in causes(report)] == ["hang"]
    check_stacks(run, report, ("chief-0", "worker-0"))
    assert run.wait("hang")["progress"] == "output"


def test_a_task_that_catches_sigabrt_is_killed_anyway(start: Starter) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGABRT, lambda *_: None)\nwhile True: time.sleep(1)"
    run = start(job(["python", "-c", program], workers=1, restart={"hang_after": "1s", "limit": 1}))
    report = run.fails()
    assert (report["cause"], causes(report)) == ("hang", [("hang", "worker-0")])


# ---- budgets


def test_restart_limit_ends_a_run_that_makes_no_progress(start: Starter) -> None:
    run = start(job(misbehave("--fail-at", 1, "--fail-how", "SIGKILL"), restart={"limit": 2}))
    report = run.fails()
    assert causes(report) == [("signal", "worker-1")] * 2
    assert report["cause"] == "signal" and "restart.limit is 2" in report["reason"]
    restarts = run.events("restart")
    assert [(r["count"], r["limit"], r["delay_s"]) for r in restarts] == [(1, 2, 0), (2, 2, 1)]
    formed = [event["generation"] for event in run.events("generation-formed")]
    assert formed == [1, 2, 3]


def test_restarts_are_counted_separately_for_each_cause(start: Starter) -> None:
    program = (
        "import os, signal, sys; generation = int(os.environ['PACELINE_GENERATION']);"
        "generation in (1, 3) and os.kill(os.getpid(), signal.SIGKILL);"
        "generation in (2, 4) and sys.exit(generation)"
    )
    run = start(job(["python", "-c", program], workers=1, restart={"limit": 2}))
    report = run.succeeds()
    assert [cause for cause, _ in causes(report)] == ["signal", "program-error", "signal", "program-error"]
    assert [restart["count"] for restart in run.events("restart")] == [1, 1, 2, 2]
    assert report["generations"] == 5


def test_new_steps_reset_the_restart_count(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state), restart={"limit": 1}))

    def newest() -> int:
        return max((event["step"] for event in run.events("step")), default=0)

    for _ in range(3):
        best = newest()  # the last step of a task may be reported only when it ends
        eventually("a new step", lambda best=best: newest() > best, more=run.story)
        after = run.position()
        os.kill(run.task("worker-1"), signal.SIGKILL)
        restart = recovers(run, after)
        assert (restart["count"], restart["delay_s"]) == (1, 0)
    assert len(finish(run, state)["restarts"]) == 3


# ---- the captain


@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_training_does_not_notice_that_the_captain_died(start: Starter, state: Path, victim: str) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    tasks = run.tasks()
    for _ in range(2):
        after = run.position()
        os.kill(run.agent("captain") if victim == "agent" else run.keeper("captain"), signal.SIGKILL)
        assert run.wait("captain-returned", after=after)["adopted"] is True
        run.wait_for_step(after=after)
    assert run.tasks() == tasks and all(map(alive, tasks.values()))
    after = run.position()
    os.kill(run.task("worker-0"), signal.SIGKILL)
    recovers(run, after)
    report = finish(run, state)
    assert (report["generations"], causes(report)) == (2, [("signal", "worker-0")])


def test_a_task_that_ends_while_the_captain_is_away(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    os.kill(run.agent("captain"), signal.SIGKILL)
    os.kill(run.task("worker-1"), signal.SIGKILL)
    recovers(run, 0)
    report = finish(run, state)
    assert len(report["restarts"]) == 1 and report["restarts"][0]["task"] == "worker-1"
    assert report["restarts"][0]["cause"] in ("signal", "host-lost")


def test_members_end_their_tasks_when_the_captain_is_dead_for_longer_than_a_lease(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)), command=SHORT)
    run.all_step()
    tasks = run.tasks()
    os.kill(run.supervisor, signal.SIGSTOP)  # so that nobody replaces the captain
    try:
        killed = time.monotonic()
        os.kill(run.keeper("captain"), signal.SIGKILL)
        eventually("the tasks are ended", lambda: not any(map(alive, tasks.values())), more=run.story)
        assert time.monotonic() - killed > LEASE_S - 5  # it runs from the last heartbeat that was answered
    finally:
        os.kill(run.supervisor, signal.SIGCONT)
    assert run.wait("captain-returned")["adopted"] is False
    run.wait("recovered")
    report = finish(run, state)
    assert report["generations"] == 2
    assert len(report["restarts"]) == 1 and report["restarts"][0]["cause"] == "host-lost"


def test_a_captain_that_was_stopped_for_longer_than_a_lease(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)), command=SHORT)
    run.all_step()
    tasks = run.tasks()
    captain = [run.keeper("captain"), run.agent("captain")]
    try:
        for pid in captain:
            os.kill(pid, signal.SIGSTOP)
        eventually("the tasks are ended", lambda: not any(map(alive, tasks.values())), more=run.story)
    finally:
        for pid in reversed(captain):
            os.kill(pid, signal.SIGCONT)
    run.wait_for_step(generation=2)
    report = finish(run, state)
    assert report["generations"] in (2, 3), run.story()  # its keeper may replace it before it responds again
    assert {restart["cause"] for restart in report["restarts"]} == {"host-lost"}


def test_a_stopped_captain_is_replaced_by_its_keeper(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)), command=SHORT)
    run.all_step()
    stopped = run.agent("captain")
    os.kill(stopped, signal.SIGSTOP)
    eventually("another captain", lambda: run.agent("captain") != stopped, more=run.story)
    after = run.position()
    run.wait("captain-returned")
    run.wait_for_step(after=after)
    finish(run, state)


def test_a_stopped_agent_loses_its_tasks(start: Starter, state: Path) -> None:
    """It can no longer enforce its lease on them: its keeper kills it and its tasks."""
    run = start(job(orders("none", state)), command=SHORT)
    run.all_step()
    agent, task = run.agent("worker-host-1"), run.task("worker-1")
    os.kill(agent, signal.SIGSTOP)
    eventually("the task is ended", lambda: not alive(task), more=run.story)
    run.wait_for_step(generation=2)
    report = finish(run, state)
    assert causes(report) == [("host-lost", "worker-1")]


# ---- the disk


@pytest.mark.long  # needs root, to mount a disk
def test_a_full_log_disk_is_reported_once_and_training_succeeds(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state, "--gate", "--words", 2000)))
    eventually("both tasks wait", lambda: len(list(state.glob("ready-*"))) == 2, more=run.story)
    with small_disk(run.folder / "logs", "64k"):
        fill(run.folder / "logs")
        (state / "go").touch()
        for task in ("worker-0", "worker-1"):
            run.wait_for_step(task=task)
        run.wait("warning")
        after = run.position()
        os.kill(run.task("worker-1"), signal.SIGKILL)
        recovers(run, after)
        report = finish(run, state)
    assert causes(report) == [("signal", "worker-1")]
    warnings = [event["text"] for event in run.events("warning")]
    assert all("No space left" in text or "no space left" in text for text in warnings)
    assert len(warnings) == len(set(warnings)) <= 2, "each log reports it once"


@pytest.mark.long  # needs root, to mount a disk
def test_a_full_home_does_not_stop_training(tmp_path: Path, state: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with small_disk(home, "2m"), runs.starter(tmp_path) as start:
        run = start(job(orders("none", state)), home=home)
        run.all_step()
        tasks = run.tasks()
        ballast = fill(home)
        before = steps_done(state)
        eventually("50 more steps", lambda: steps_done(state) > before + 50, more=run.story)
        assert all(map(alive, tasks.values()))
        os.kill(tasks["worker-1"], signal.SIGKILL)
        eventually("the task is gone", lambda: not alive(tasks["worker-1"]))
        before = steps_done(state)
        eventually("50 more steps", lambda: steps_done(state) > before + 50, more=run.story)
        runs.last_step(state)
        code, report = run.end()
        assert (code, report["status"]) == (0, "succeeded"), run.story()
        ballast.unlink()


# ---- starting again


def test_two_kills_one_second_apart_both_recover(start: Starter, state: Path) -> None:
    run = start(job(orders("none", state)))
    run.all_step()
    first = time.monotonic()
    os.kill(run.task("worker-0"), signal.SIGKILL)
    run.wait("generation-formed", generation=2)
    eventually("a second has passed", lambda: time.monotonic() - first >= 1)
    after = run.position()
    os.kill(run.task("worker-1"), signal.SIGKILL)
    recovers(run, after)
    report = finish(run, state)
    assert causes(report) == [("signal", "worker-0"), ("signal", "worker-1")]
    assert all(restart["first_step_after_s"] is not None for restart in report["restarts"])


@pytest.mark.parametrize("warm", [True, False])
def test_a_restart_is_warm_unless_the_job_says_otherwise(start: Starter, state: Path, warm: bool) -> None:
    run = start(job(orders("none", state), restart={"warm": warm}))
    run.all_step()
    if warm:
        for host in ("worker-host-0", "worker-host-1"):
            run.wait("spare-ready", host=host)
    os.kill(run.task("worker-0"), signal.SIGKILL)
    recovers(run, 0)
    for task in ("worker-0", "worker-1"):
        assert run.wait("task-started", task=task, generation=2)["warm"] is warm
    finish(run, state)


def test_tasks_of_parameter_server_jobs_restart_according_to_their_role(start: Starter) -> None:
    command = misbehave("--steps", 10**6, "--report")
    roles = {role: {"replicas": 1 if role != "worker" else 2, "command": command} for role in ("chief", "worker", "ps")}
    fields = {"name": "attack", "framework": "tensorflow", "strategy": "parameter-server", "roles": roles}
    run = start(fields)
    eventually("all run", lambda: len(run.tasks()) == 4, more=run.story)
    run.wait_for_step(task="worker-1")
    before = run.tasks()
    os.kill(before["worker-1"], signal.SIGKILL)
    assert run.wait("restart")["scope"] == ["worker-1"]
    eventually("worker-1 runs again", lambda: run.tasks().get("worker-1", 0) not in (0, before["worker-1"]))
    between = run.tasks()
    assert {name for name in before if between[name] != before[name]} == {"worker-1"}
    after = run.position()
    os.kill(before["ps-0"], signal.SIGKILL)
    assert sorted(run.wait("restart", after=after)["scope"]) == ["chief-0", "ps-0", "worker-0", "worker-1"]

    def all_restarted() -> bool:
        now = run.tasks()
        return now.keys() == before.keys() and not set(now.values()) & set(between.values())

    eventually("all tasks run again, the workers too", all_restarted, more=run.story)
