"""How runs end: stopped, killed, succeeded, at a time limit, or without a supervisor. No process is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from support import runs
from support.runs import Run, Starter, alive, eventually, finish, job, kill, misbehave, orders, recovers

FOREVER = misbehave("--steps", 10**6, "--report")
WITH_CHILDREN = [*FOREVER, "--children", "1", "--strays", "1"]


def child_pids(run: Run, tasks: int = 2) -> set[int]:
    """PIDs of the processes that tasks have started, as they printed them."""

    def check() -> set[int]:
        lines = [line for name in run.tasks() for line in run.log(name).splitlines()]
        pids = {int(line.rpartition(" ")[2]) for line in lines if "| child " in line}
        return pids if len(pids) == 2 * tasks else set()

    return eventually("tasks have started their children", check, more=run.story)


def test_a_run_survives_that_its_installation_is_replaced(start: Starter, tmp_path: Path, state: Path) -> None:
    """Agents that are started later do not mix the modules of two versions."""
    copy = tmp_path / "installed" / "paceline"
    shutil.copytree(runs.SOURCE / "paceline", copy, ignore=shutil.ignore_patterns("__pycache__"))
    run = start(job(orders("none", state)), env={"PYTHONPATH": str(copy.parent)})
    run.all_step()
    agent = copy / "agent"
    for path in (agent / "member.py", *(agent / "captain_process").glob("*.py"), *(agent / "tasks").glob("*.py")):
        path.write_text("raise ImportError('of another version')\n")
    before = run.position()
    kill(run.agent("captain"))
    run.wait("captain-returned", after=before)
    kill(run.agent("worker-host-0"))
    recovers(run, before)
    finish(run, state)


# ---- stopped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_first_signal_sends_tasks_a_sigterm_and_waits_for_them(start: Starter, number: signal.Signals) -> None:
    run = start(job([*WITH_CHILDREN, "--slow-sigterm", "0.3"], limits={"grace": "20s"}))
    run.all_step()
    pids = child_pids(run)
    run.cli.send_signal(number)
    assert run.wait("ending")["grace_s"] == 20
    code, report = run.end()
    assert (code, report["status"], report["cause"], report["restarts"]) == (130, "stopped", None, [])
    assert report["reason"]
    for task in ("worker-0", "worker-1"):
        assert run.log(task).count("| leaving") == 1
    assert not [pid for pid in pids if alive(pid)]
    assert run.wait("run-ended")["status"] == "stopped"


def test_ctrl_c_interrupts_tasks_as_a_terminal_would(start: Starter) -> None:
    """The program's `except KeyboardInterrupt` and `finally` run."""
    run = start(job([*WITH_CHILDREN, "--clean-up", "--slow-sigterm", "0"], limits={"grace": "60s"}))
    run.all_step()
    pids = child_pids(run)
    run.cli.send_signal(signal.SIGINT)
    code, report = run.end()
    assert (code, report["status"], report["reason"], report["restarts"]) == (130, "stopped", "interrupted", [])
    for task in ("worker-0", "worker-1"):
        printed = [line.partition("| ")[2] for line in run.log(task).splitlines()]
        assert [line for line in printed if line in ("interrupted", "cleaned up", "leaving")] == [
            "interrupted",
            "cleaned up",
        ]
    assert {event["expected"] for event in run.events("task-exited")} == {True}
    assert not [pid for pid in pids if alive(pid)]


def test_a_task_that_ignores_ctrl_c_gets_a_sigterm_within_the_grace(start: Starter) -> None:
    script = "trap '' INT; trap 'echo leaving; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    run = start(job(["sh", "-c", script], workers=1, limits={"grace": "10s"}))
    eventually("the task is ready", lambda: "ready" in run.log("worker-0"), more=run.story)
    run.cli.send_signal(signal.SIGINT)
    code, report = run.end()
    assert (code, report["status"]) == (130, "stopped")
    assert "| leaving" in run.log("worker-0")


def test_a_task_that_ignores_sigterm_is_killed_after_the_grace(start: Starter) -> None:
    run = start(job([*FOREVER, "--ignore-sigterm"], limits={"grace": "2s"}))
    run.all_step()
    pids = list(run.tasks().values())
    run.cli.send_signal(signal.SIGINT)
    ending_at = datetime.fromisoformat(run.wait("ending")["at"]).timestamp()
    eventually("the tasks are ended", lambda: not any(map(alive, pids)), more=run.story)
    assert 1.5 < time.time() - ending_at < 20
    code, report = run.end()
    assert (code, report["status"]) == (130, "stopped")


def test_a_second_ctrl_c_kills_everything_immediately(start: Starter) -> None:
    run = start(job([*WITH_CHILDREN, "--ignore-sigterm"], limits={"grace": "10m"}))
    run.all_step()
    child_pids(run)
    run.cli.send_signal(signal.SIGINT)
    run.wait("ending")
    ending_at = time.monotonic()
    # Two signals within a moment count as one press.
    eventually("a moment has passed", lambda: time.monotonic() - ending_at > 0.5)
    run.cli.send_signal(signal.SIGINT)
    code, report = run.end()
    assert (code, report["status"]) == (130, "stopped")


def test_ctrl_c_before_anything_has_started(start: Starter) -> None:
    run = start(job(FOREVER))
    run.cli.send_signal(signal.SIGINT)
    code, report = run.end()
    assert (code, report["status"]) == (130, "stopped")


def test_a_detached_run_outlives_its_command_line_and_ends_on_request(start: Starter) -> None:
    run = start(job([*WITH_CHILDREN, "--slow-sigterm", "0.1"], limits={"grace": "20s"}), "--detach")
    assert run.cli.wait(runs.LIMIT_S) == 0
    run.all_step()
    pids = run.tasks()
    os.kill(run.supervisor, signal.SIGHUP)
    for host in ("worker-host-0", "captain"):
        os.kill(run.keeper(host), signal.SIGHUP)
    after = run.position()
    run.wait_for_step(after=after)
    assert run.tasks() == pids
    stopped = run.call("stop", run.folder.name)
    assert stopped.returncode == 0, stopped.stderr
    run.nothing_left()
    report = run.report()
    assert (report["status"], report["restarts"], report["generations"]) == ("stopped", [], 1)
    assert "| leaving" in run.log("worker-0")


def test_stop_now_kills_tasks_immediately(start: Starter) -> None:
    run = start(job([*WITH_CHILDREN, "--ignore-sigterm"], limits={"grace": "10m"}), "--detach")
    assert run.cli.wait(runs.LIMIT_S) == 0
    run.all_step()
    child_pids(run)
    stopped = run.call("stop", "--now", run.folder.name)
    assert stopped.returncode == 0, stopped.stderr
    run.nothing_left()
    assert run.report()["status"] == "stopped"


# ---- killed


@pytest.mark.parametrize("victims", ["cli", "supervisor", "cli supervisor", "supervisor cli"])
def test_nothing_outlives_the_command_line_or_the_supervisor_of_a_run(start: Starter, victims: str) -> None:
    run = start(job([*WITH_CHILDREN, "--ignore-sigterm"], limits={"grace": "10m"}))
    run.all_step()
    child_pids(run)

    def are_found() -> bool:
        """Whether all are among those of which nothing may be left. A spare may be replaced meanwhile."""
        spares = {run.spare("worker-host-0"), run.spare("worker-host-1")}
        expected = {*spares, *run.tasks().values(), run.supervisor, run.agent("captain"), run.cli.pid}
        return expected <= {process.pid for process in run.left()}

    eventually("its processes are found", are_found, more=run.story)
    pids = {"cli": run.cli.pid, "supervisor": run.supervisor}
    for victim in victims.split():
        os.kill(pids[victim], signal.SIGKILL)
    run.cli.wait(runs.LIMIT_S)
    run.nothing_left()


@pytest.mark.parametrize("milliseconds", [1, 2, 4, 8, 16])
def test_a_supervisor_killed_while_it_ends_the_run(start: Starter, milliseconds: int) -> None:
    """The process that ends the others may die in the middle of it: those that it has not reached must end anyway."""
    run = start(job([*WITH_CHILDREN, "--ignore-sigterm"]))
    run.all_step()
    child_pids(run)
    supervisor = run.supervisor
    run.cli.kill()
    killed = time.monotonic()
    while time.monotonic() < killed + milliseconds / 1000:
        pass
    runs.kill(supervisor)
    run.cli.wait(runs.LIMIT_S)
    run.nothing_left()


def test_nothing_outlives_the_processes_of_paceline_if_all_are_killed(start: Starter) -> None:
    run = start(job([*FOREVER, "--children", "1"], limits={"grace": "10m"}))
    run.all_step()
    spare = run.spare("worker-host-0")
    hosts = ("captain", "worker-host-0", "worker-host-1")
    pids = [run.cli.pid, run.supervisor, *(run.keeper(host) for host in hosts), *(run.agent(host) for host in hosts)]
    tasks = [*run.tasks().values(), spare]
    for pid in pids:
        runs.kill(pid)
    run.cli.wait(runs.LIMIT_S)
    eventually("tasks and spares are gone", lambda: not any(map(alive, tasks)), runs.GONE_S)


@pytest.mark.parametrize("victim", ["agent", "keeper", "both"])
def test_nothing_of_a_host_outlives_its_agent(start: Starter, victim: str) -> None:
    run = start(job([*WITH_CHILDREN, "--ignore-sigterm"]))
    run.all_step()
    agent, keeper = run.agent("worker-host-0"), run.keeper("worker-host-0")
    expected = {run.task("worker-0"), *(child_pids(run) & run.below(agent))}
    assert len(expected) == 3, "a task and its two children"

    def found() -> set[int]:
        """They and a spare, which may be replaced meanwhile."""
        below = {*run.below(agent), run.spare("worker-host-0")}
        return below if below >= expected else set()

    descendants = eventually("all are found", found, more=run.story)
    before = run.position()
    for pid in {"agent": [agent], "keeper": [keeper], "both": [agent, keeper]}[victim]:
        runs.kill(pid)
    eventually(
        "all processes of the host are gone", lambda: not any(map(alive, [agent, *descendants])), runs.GONE_S, run.story
    )
    restart = run.wait("restart", after=before)
    assert (restart["cause"], restart["task"]) == ("host-lost", "worker-0")
    run.wait("generation-formed", after=before)
    run.wait_for_step(generation=2)
    assert alive(run.keeper("worker-host-0"))
    assert (run.keeper("worker-host-0") == keeper) is (victim == "agent")
    run.cli.kill()
    run.cli.wait(runs.LIMIT_S)
    run.nothing_left()


def test_a_killed_spare_is_replaced_and_training_does_not_notice(start: Starter) -> None:
    run = start(job(FOREVER))
    run.all_step()
    tasks = run.tasks()
    first = run.spare("worker-host-0")
    kill(first)
    eventually("another spare", lambda: run.spare("worker-host-0") not in (0, first), more=run.story)
    run.wait_for_step(after=run.position())
    assert run.tasks() == tasks
    assert not run.events("restart", "task-exited", "member-lost")


IMPORTS_LATE = """
import os, time, paceline
step = 0
while step < 10**6:
    if os.path.exists({path!r}):
        import email.mime.text
    step += 1
    paceline.report(step=step)
    time.sleep(0.05)
"""


def test_a_spare_is_renewed_once_the_program_has_imported_more(start: Starter, tmp_path: Path) -> None:
    path = tmp_path / "go"
    run = start(job([sys.executable, "-c", IMPORTS_LATE.format(path=str(path))], workers=1))
    run.wait("spare-ready")
    first, position = run.spare("worker-host-0"), run.position()
    path.touch()
    run.wait("spare-ready", after=position)
    eventually("the first one has ended", lambda: run.spare("worker-host-0") != first, more=run.story)
    assert not run.events("restart", "task-exited")


def test_a_stray_ends_with_its_task(start: Starter, tmp_path: Path) -> None:
    """A process that a task started in its own session ends with the task, while the run continues."""
    fault = ["--fail-at", "4", "--fail-when", str(tmp_path / "go"), "--fail-how", "SIGKILL", "--fail-rank", "0"]
    run = start(job([*WITH_CHILDREN, *fault], workers=2))
    child_pids(run)
    (tmp_path / "go").touch()
    restart = run.wait("restart")
    assert restart["cause"] == "signal"
    old_tasks = [event["pid"] for event in run.events("task-started") if event["generation"] == 1]
    logs = "".join(run.log(task) for task in ("worker-0", "worker-1"))
    strays = [int(line.rpartition(" ")[2]) for line in logs.splitlines() if " g1 | child " in line]
    assert len(strays) == 4
    eventually(
        "the first generation is gone", lambda: not any(map(alive, [*old_tasks, *strays])), runs.GONE_S, run.story
    )


# ---- ends on its own


def test_two_runs_in_one_home_do_not_disturb_each_other(start: Starter, tmp_path: Path) -> None:
    first_state, second_state = tmp_path / "first", tmp_path / "second"
    for state in (first_state, second_state):
        state.mkdir()
    first = start(job(orders("none", first_state)), home=tmp_path / "home")
    second = start(job(orders("none", second_state)), home=tmp_path / "home")
    assert first.folder != second.folder
    second.all_step()
    first.all_step()
    tasks = second.tasks()
    os.kill(first.task("worker-1"), signal.SIGKILL)
    first.wait_for_step(generation=2)
    os.kill(first.cli.pid, signal.SIGKILL)
    first.cli.wait(runs.LIMIT_S)
    first.nothing_left()
    after = second.position()
    second.wait_for_step(after=after)
    assert second.tasks() == tasks
    report = runs.finish(second, second_state)
    assert (report["restarts"], report["generations"]) == ([], 1)


def test_the_runtime_limit_ends_a_run_with_its_own_reason(start: Starter) -> None:
    run = start(job([*FOREVER, "--slow-sigterm", "0"], limits={"runtime": "12s", "grace": "10s"}))
    report = run.fails()
    assert report["cause"] == "runtime-limit"
    assert "limits.runtime" in report["reason"] and "12 s" in report["reason"]
    assert "| leaving" in run.log("worker-0")
    formed, ending = run.wait("generation-formed"), run.wait("ending")
    assert formed["at"] < ending["at"]


def test_the_success_of_the_chief_ends_the_workers(start: Starter) -> None:
    roles = {
        "chief": {"replicas": 1, "command": misbehave("--steps", 3)},
        "worker": {"replicas": 2, "command": [*WITH_CHILDREN, "--slow-sigterm", "0"]},
    }
    fields = {"name": "attack", "framework": "tensorflow", "strategy": "multi-worker", "limits": {"grace": "2s"}}
    run = start({**fields, "roles": roles})
    report = run.succeeds()
    assert report["restarts"] == []


def test_a_run_succeeds_when_all_workers_do(start: Starter) -> None:
    run = start(job(misbehave("--steps", 3, "--report", "--strays", 1), workers=3))
    report = run.succeeds()
    assert (report["steps"], report["generations"]) == (3, 1)


def test_only_its_owner_can_read_a_run(start: Starter) -> None:
    run = start(job(FOREVER))
    run.all_step()

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(run.folder) == 0o700
    assert mode(run.folder / "tls") == 0o700
    for key in ("captain.key", "member.key"):
        assert mode(run.folder / "tls" / key) == 0o600
    assert not list(run.folder.glob("**/ca.key"))
    for process in run.left():
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            texts = [*process.cmdline(), *process.environ().values()]
            assert not [text for text in texts if "PRIVATE KEY" in text]


def test_a_run_does_not_keep_the_terminal_or_the_session_of_its_command_line(start: Starter) -> None:
    run = start(job(FOREVER))
    run.all_step()
    session, checked = os.getsid(run.cli.pid), 0
    for process in run.left():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it may have ended meanwhile
            if process.pid != run.cli.pid:
                assert os.getsid(process.pid) != session
                assert process.terminal() is None
                checked += 1
    assert checked


def test_a_program_that_writes_without_end_does_not_fill_the_disk(start: Starter) -> None:
    """The last part of its output is kept, in whole lines, also if its agent is replaced; the rest is mentioned."""
    program = "import os\nfor number in range(30_000):\n    print(os.environ['PACELINE_GENERATION'], number, 'x' * 40)"
    waits = f"{program}\nif os.environ['PACELINE_GENERATION'] == '1':\n    import time; time.sleep(600)"
    run = start(job(["python", "-c", waits], workers=1, limits={"log": "1Mi"}))
    eventually("all is written", lambda: " 29999 " in run.call("logs", "--tail", "1").stdout, more=run.story)
    kill(run.agent("worker-host-0"))
    run.succeeds()
    assert sum(path.stat().st_size for path in (run.folder / "logs").rglob("*") if path.is_file()) < 1.1 * 2**20
    shown = run.call("logs")
    lines = [line.split()[2:4] for line in shown.stdout.splitlines()]
    assert lines == [["2", str(number)] for number in range(30_000 - len(lines), 30_000)] and len(lines) > 8000
    assert re.fullmatch(r"note: not shown: \d MiB of the output of worker-0, .* 1 MiB of each task\n", shown.stderr)
