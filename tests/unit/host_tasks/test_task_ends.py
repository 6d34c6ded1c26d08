"""The tasks of a host that have to end: which signals they get, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.agent.captain import instructions as ins
from paceline.agent.tasks import attempt as attempts
from paceline.agent.tasks import host_tasks as module
from paceline.agent.tasks.stop_signals import STACKS_WITHIN
from paceline.agent.transfers import requests as req
from paceline.plan import INGEST, Plan
from support.task_hosts import ABORT, CONT, GRACE, INT, KILL, SHELL, TERM, TWO, Host, Process, with_role
from support.worlds import make_plan

# ---- ending tasks


@pytest.mark.parametrize(("plan", "sign"), [(TWO, 1), (SHELL, -1)], ids=["python", "shell"])
def test_a_task_is_asked_to_end_and_killed_after_its_grace(make: Callable[..., Host], plan: Plan, sign: int) -> None:
    """A Python program is signaled alone, as it takes care of its own children; a shell together with its children."""
    host = make(plan)
    process = host.start_one()
    host.end("term", worker_0=1)
    assert host.signals() == [(sign * process.pid, TERM), (-process.pid, CONT)]
    host.clock.pass_time(GRACE - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]


def test_ctrl_c_interrupts_a_task_then_asks_it_to_end_then_kills_it(host: Host) -> None:
    process = host.start_one()
    host.end("int", worker_0=1)
    assert host.signals() == [(-process.pid, INT), (-process.pid, CONT)]
    host.end("int", worker_0=1)  # from a captain that has returned
    assert host.signals() == [], "a second SIGINT would interrupt the clean-up"
    host.clock.pass_time(GRACE / 2 - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(process.pid, TERM)]
    host.clock.pass_time(GRACE / 2)
    assert host.signals() == [(-process.pid, KILL)]


def test_an_interrupted_task_that_ends_gets_no_more_signals_and_has_not_failed(host: Host) -> None:
    process = host.start_one()
    host.end("int", worker_0=1)
    process.prints('Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nKeyboardInterrupt\n')
    host.exits(process, INT)
    host.signals()
    host.clock.pass_time(GRACE)
    assert host.signals() == [] and host.connection.take("exited") == []


@pytest.mark.parametrize("how", ["kill", "abort", "term", "int"])
def test_a_task_that_had_ended_before_the_request_is_reported_with_its_own_cause(host: Host, how: str) -> None:
    """Otherwise the error of another task, whose connection to it broke, would be taken for the cause."""
    process = host.start_one()
    host.clock.pass_time(5.0)
    host.machine.states[process.pid] = ("Z", 0.0)  # killed by the kernel, which the agent learns later
    host.end(how, worker_0=1)
    host.exits(process, KILL)
    exit = host.exit()
    assert (exit["signal"], exit["cause"], exit["expected"]) == ("SIGKILL", "signal", False)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_end_of_all_tasks_is_reported_if_one_had_ended_before_the_request(host: Host, is_first: bool) -> None:
    ended, killed = host.start("worker-0", "worker-1")
    host.machine.states[ended.pid] = ("Z", 0.0)
    host.connection.sent.clear()
    host.end("kill", worker_0=1, worker_1=1)
    for process in (ended, killed) if is_first else (killed, ended):
        host.exits(process, KILL)
    reported = [message["tasks"] for message in host.connection.take("ended")]
    assert [tasks for tasks in reported if tasks] == [{"worker-0": 1, "worker-1": 1}]


@pytest.mark.parametrize("task", ["ps-0", "worker-0", "chief-0"])
def test_ctrl_c_terminates_servers(make: Callable[..., Host], task: str) -> None:
    host = make(make_plan(1, ps=1, chief=True), f"{task[:-2]}-host-0")
    process = host.start_one(task)
    host.tasks.end(ins.EndTasks(host.name, {task: 1}, ins.INTERRUPT, GRACE))
    assert host.signals()[0] == ((-process.pid, INT) if task == "chief-0" else (process.pid, TERM))


def test_an_ingest_is_asked_to_end_together_with_its_command(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST)
    host.tasks.end(ins.EndTasks(host.name, {INGEST: 1}, ins.TERMINATE, GRACE))
    assert host.signals()[0] == (-process.pid, TERM)


def test_a_task_that_was_asked_to_end_has_not_failed(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.end("term", worker_0=1)
    host.connection.sent.clear()
    host.exits(process, 1 << 8)
    [ended] = host.connection.sent
    assert (ended["type"], ended["tasks"]) == ("ended", {"worker-0": 1})
    [exit] = host.tasks.exits()
    assert exit.expected and exit.cause == ""


def test_a_task_that_is_killed_is_reported_with_its_earlier_error(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.clock.run_ready()
    host.end("kill", worker_0=1)
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    exit = host.exit()
    assert (exit["expected"], exit["cause"], exit["detail"]) == (True, "program-error", "ValueError: no at train.py:3")


def test_the_end_is_reported_with_addresses_once_all_tasks_have_ended(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.connection.sent.clear()
    host.end("kill", worker_0=1, worker_1=1)
    host.exits(first, KILL)
    assert host.connection.sent == []
    host.exits(second, KILL)
    [ended] = host.connection.sent
    assert ended["tasks"] == {"worker-0": 1, "worker-1": 1}
    assert set(ended["offers"]) == {"worker-0", "worker-1"}
    host.connection.sent.clear()
    process = host.start_one(attempt=2)
    host.end("kill", worker_0=2)
    host.exits(process, KILL)
    assert [message["tasks"] for message in host.connection.take("ended")] == [
        {"worker-0": 2}
    ]  # the first is reported only once


def test_a_task_that_does_not_run_has_ended_immediately(host: Host) -> None:
    process = host.start_one(attempt=2)
    host.connection.sent.clear()
    host.end("kill", worker_0=1, worker_1=7)  # an attempt before this one, and a task that was never started here
    [ended] = host.connection.sent
    assert ended["tasks"] == {"worker-0": 1, "worker-1": 7} and set(ended["offers"]) == {"worker-1"}
    assert host.signals() == [] and host.tasks.attempts["worker-0"].pid == process.pid


def test_a_failure_of_another_task_does_not_complete_an_end(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.end("term", worker_0=1)
    host.connection.sent.clear()
    host.exits(second, 1 << 8)
    assert [message.get("tasks") for message in host.connection.take("ended")] == [{}]
    host.exits(first, 0)
    assert [message["tasks"] for message in host.connection.take("ended")] == [{"worker-0": 1}]


def test_a_stopped_task_is_reported_as_such(host: Host) -> None:
    process = host.start_one()
    host.machine.states[process.pid] = "T", 1.0
    host.end("kill", worker_0=1)
    host.exits(process, KILL)
    [ended] = host.connection.take("ended")
    assert ended["states"] == {"worker-0": "stopped"} and ended["stacks"] == {}


@pytest.mark.parametrize(
    ("cpu", "waited", "state"), [(9.5, 0.0, "busy 0.95"), (0.1, 0.2, "waiting"), (1.0, 8.0, "busy 0.90")]
)
def test_a_hung_task_shows_its_stacks_and_its_state(host: Host, cpu: float, waited: float, state: str) -> None:
    """On a busy machine, an endless loop waits for a core most of the time."""
    process = host.start_one()
    process.prints("step 1\nFatal Python error: of another day\n")
    host.clock.run_ready()
    host.clock.pass_time(10.0)
    host.machine.states[process.pid] = "S", cpu
    host.machine.waits_for_core[process.pid] = waited
    host.end("abort", worker_0=1)
    assert host.signals() == [(process.pid, ABORT), (process.pid, CONT)]
    process.prints('Fatal Python error: Aborted\n  File "train.py", line 3\n')
    host.exits(process, ABORT)
    [ended] = host.connection.take("ended")
    assert ended["states"] == {"worker-0": state}
    assert ended["stacks"] == {"worker-0": 'Fatal Python error: Aborted\n  File "train.py", line 3'}
    assert host.connection.take("exited") == []


def test_a_hung_task_that_shows_nothing_is_killed(host: Host) -> None:
    process = host.start_one()
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    host.signals()
    host.clock.pass_time(STACKS_WITHIN - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]


def test_the_children_of_a_shell_show_their_stacks(make: Callable[..., Host]) -> None:
    host = make(SHELL)
    process = host.start_one()
    host.clock.pass_time(10.0)
    host.machine.below[process.pid] = [6001, 6002]
    host.end("abort", worker_0=1)
    assert [pid for pid, number in host.signals() if number == ABORT] == [6001, 6002]


def test_the_children_of_torchrun_show_their_stacks(make: Callable[..., Host]) -> None:
    torch = replace(with_role(command=("python", "-m", "torch.distributed.run", "train.py")), framework="torch")
    host = make(torch)
    process = host.start_one()
    host.clock.pass_time(1.0)
    host.machine.below[process.pid] = [77]
    host.end(ins.ABORT, worker_0=1)
    assert [pid for pid, number in host.signals() if number == ABORT] == [77]


def test_only_the_end_of_long_stacks_is_reported(host: Host) -> None:
    process = host.start_one()
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    process.prints("Fatal Python error: Aborted\n" + "x" * 2 * module.STACKS_LIMIT + "\n")
    host.exits(process, ABORT)
    [ended] = host.connection.take("ended")
    assert ended["stacks"] == {"worker-0": "x" * module.STACKS_LIMIT}


def test_the_deadlines_of_a_task_that_has_ended_send_no_signal(host: Host) -> None:
    """Its PID may be used again by then. It has several deadlines: by its exception, by its host, by the captain."""
    process = host.start_one()
    host.tasks.leave(GRACE)
    process.raises()
    host.clock.run_ready()
    host.tasks.leave(GRACE)
    host.end("term", worker_0=1)
    host.exits(process, 1 << 8)
    host.signals()
    host.machine.alive[process.pid] = process  # another process with the same PID and its own group
    host.clock.pass_time(2 * GRACE)
    del host.machine.alive[process.pid]
    assert host.signals() == []


def test_the_first_of_several_deadlines_counts(host: Host) -> None:
    process = host.start_one()
    host.tasks.leave(GRACE)
    process.raises()
    host.clock.run_ready()
    host.end("term", grace=2 * GRACE, worker_0=1)
    host.signals()
    host.clock.pass_time(attempts.EXIT_WITHIN + 0.1)
    assert host.signals() == [(-process.pid, KILL)]


def test_an_exception_does_not_shorten_the_grace_of_a_task_that_was_asked_to_end(host: Host) -> None:
    process = host.start_one()
    host.end("term", worker_0=1)
    process.raises()
    host.clock.run_ready()
    host.signals()
    host.clock.pass_time(attempts.EXIT_WITHIN + 0.1)
    assert host.signals() == []


def test_an_exception_does_not_extend_the_grace_of_a_leaving_host(host: Host) -> None:
    process = host.start_one()
    host.tasks.leave(1.0)
    process.raises()
    host.clock.run_ready()
    host.clock.pass_time(1.1)
    assert host.signals() == [(-process.pid, KILL)]


def test_tasks_without_a_captain_are_killed_and_reported_when_it_is_back(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1", attempt=4)
    host.connection.sent.clear()
    host.tasks.kill_unasked()
    assert host.signals() == [(-first.pid, KILL), (-second.pid, KILL)]
    host.exits(first, KILL)
    assert host.connection.sent == []
    host.exits(second, KILL)
    assert [message["tasks"] for message in host.connection.sent] == [{"worker-0": 4, "worker-1": 4}]
    assert [(exit.task, exit.expected) for exit in host.tasks.exits()] == [("worker-0", True), ("worker-1", True)]


def test_how_a_task_was_asked_to_end_is_not_forgotten_when_it_is_killed(host: Host) -> None:
    process = host.start_one()
    host.end("term", worker_0=1)
    process.raises()
    host.tasks.kill()
    host.exits(process, KILL)
    assert host.connection.take("exited") == []  # it was asked to end, so its exception is not a failure


# ---- leaving


def test_a_leaving_host_is_done_once_its_last_task_has_ended(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.tasks.leave(GRACE)
    assert host.signals() == []
    host.tasks.terminate()
    assert host.signals() == [(first.pid, TERM), (second.pid, TERM)]
    host.exits(first, 0)
    assert (host.exit()["cause"], host.none_left_calls) == ("preempted", 0)
    host.clock.pass_time(GRACE)
    assert host.signals() == [(-second.pid, KILL)]
    host.exits(second, KILL)
    assert (host.exit()["cause"], host.none_left_calls) == ("preempted", 1)
    assert host.connection.take("ended") == []  # no addresses for a next start


def test_a_leaving_host_reports_the_tasks_that_the_captain_asked_to_end(host: Host) -> None:
    process = host.start_one()
    host.tasks.leave(GRACE)
    host.end("term", worker_0=1)
    host.exits(process, 0)
    [ended] = host.connection.take("ended")
    assert (ended["tasks"], ended["offers"], host.none_left_calls) == ({"worker-0": 1}, {}, 1)


# ---- a watched folder


def watched(make: Callable[..., Host]) -> tuple[Host, Process]:
    host = make(replace(make_plan(1), snapshots=replace(make_plan(1).snapshots, watch="checkpoints")))
    return host, host.start_one()


def test_the_end_of_a_task_is_reported_once_its_last_checkpoint_is_captured(make: Callable[..., Host]) -> None:
    host, process = watched(make)
    host.exits(process, 0)
    assert host.connection.take("exited") == [] and list(host.tasks.attempts) == ["worker-0"]
    [(request, answered)] = [each for each in host.porter.requests if isinstance(each[0], req.CaptureWatched)]
    assert request == replace(request, leader="")
    answered(req.WatchedCaptured(False))
    assert host.exit()["cause"] == "" and not host.tasks.attempts


def test_aborting_a_task_whose_last_checkpoint_is_being_captured_sends_no_signal(make: Callable[..., Host]) -> None:
    host, process = watched(make)
    host.exits(process, 0)
    host.end("abort", worker_0=1)
    host.clock.run_ready()
    assert host.signals() == []
    assert host.connection.take("ended")[-1]["tasks"] == {"worker-0": 1}
    assert "it did not finish in time" in host.connection.texts[-1]
