"""The tasks of a host: what is reported when they exit, and the addresses they are offered."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import pytest

from paceline.agent import free_ports, os_processes
from paceline.agent.free_ports import PortReservations
from paceline.agent.net.loop import SLICE
from paceline.agent.tasks import attempt as attempts
from paceline.frameworks import amx_probe
from paceline.plan import INGEST, Plan
from support.task_hosts import GRACE, KILL, TERM, TWO, Host
from support.worlds import make_plan

# ---- exits


def test_a_task_that_succeeds_is_reported_with_an_address_for_the_next_start(host: Host) -> None:
    process = host.start_one()
    host.connection.sent.clear()
    host.exits(process, 0)
    assert [message["type"] for message in host.connection.sent] == ["exited", "ended"]
    exit = host.exit()
    assert (exit["task"], exit["attempt"], exit["code"], exit["signal"]) == ("worker-0", 1, 0, None)
    assert (exit["expected"], exit["cause"], exit["age"]) == (False, "", 0.0)
    [ended] = host.connection.take("ended")
    assert ended["tasks"] == {} and set(ended["offers"]) == {"worker-0", "worker-1"}


@pytest.mark.parametrize(
    ("status", "code", "name", "cause"),
    [(3 << 8, 3, None, "program-error"), (KILL, None, "SIGKILL", "signal"), (TERM, None, "SIGTERM", "preempted")],
)
def test_a_failed_task_is_reported_with_its_cause(
    host: Host, status: int, code: int | None, name: str | None, cause: str
) -> None:
    host.exits(host.start_one(), status)
    exit = host.exit()
    assert (exit["code"], exit["signal"], exit["cause"], exit["expected"]) == (code, name, cause, False)


def test_an_instruction_that_the_cpu_does_not_allow_is_explained(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_probe, "likely_reason", lambda _: "it may be AMX")
    host.exits(host.start_one(), signal.SIGILL)
    assert host.exit()["detail"] == "killed by SIGILL: it may be AMX"


def test_the_remaining_output_and_reports_are_read_when_a_task_ends(host: Host) -> None:
    process = host.start_one()
    process.prints("almost done\nand the end")
    process.reports(step=42)
    host.exits(process, 5 << 8)
    assert host.log() == ["almost done", "and the end"]
    assert host.exit()["detail"] == "exit code 5; last line of output: and the end"
    assert host.tasks.reached == 42 and host.connection.beats > 0


def test_the_highest_step_of_all_ended_attempts_counts(host: Host) -> None:
    for attempt, step in enumerate((30, 10), 1):
        process = host.start_one(attempt=attempt)
        process.reports(step=step)
        host.exits(process, 1 << 8)
    assert host.tasks.reached == 30


def test_a_failure_is_as_old_as_its_exception(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.clock.run_ready()
    host.clock.pass_time(2.0)
    host.exits(process, 1 << 8)
    exit = host.exit()
    assert (exit["cause"], exit["detail"], exit["age"]) == ("program-error", "ValueError: no at train.py:3", 2.0)
    host.clock.pass_time(3.0)
    [last_exit] = host.tasks.exits()
    assert (last_exit.task, last_exit.age, last_exit.detail) == ("worker-0", 5.0, exit["detail"])


def test_exits_are_those_of_tasks_that_do_not_run(host: Host) -> None:
    host.exits(host.start_one("worker-0"), 0)
    host.start_one("worker-1")
    assert [exit.task for exit in host.tasks.exits()] == ["worker-0"]


def test_a_task_that_raised_and_does_not_exit_is_killed(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.clock.run_ready()
    host.clock.pass_time(attempts.EXIT_WITHIN - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    assert host.exit()["detail"] == "ValueError: no at train.py:3"


@pytest.mark.parametrize(("plan", "survivor"), [(TWO, True), (make_plan(1), False)], ids=["with-peers", "alone"])
def test_the_loss_of_a_peer_is_reported_as_such_if_there_are_peers(
    make: Callable[..., Host], plan: Plan, survivor: bool
) -> None:
    host = make(plan)
    process = host.start_one()
    process.raises("ConnectionError", "Connection reset by peer")
    host.exits(process, 1 << 8)
    assert host.exit()["survivor"] is survivor


def test_the_rest_of_its_process_group_is_killed_when_a_task_ends(host: Host) -> None:
    process = host.start_one()
    host.tasks.child_ended(process.pid, 0)  # the group still exists
    assert host.signals() == [(-process.pid, KILL)]


def test_a_task_without_a_remaining_group_is_not_signaled_by_its_pid(host: Host) -> None:
    process = host.start_one()
    host.machine.dies(process.pid)
    host.machine.adopted[process.pid] = "another program"  # the PID is used again
    host.tasks.child_ended(process.pid, 0)
    assert host.signals() == []


def test_orphans_of_a_task_are_killed_and_those_of_others_are_not(host: Host) -> None:
    first = host.start_one("worker-0")
    host.start_one("worker-1")
    host.machine.adopted = {6001: "worker-0", 6002: "worker-1", 6003: "", 6004: "worker-0"}
    host.porter.pid = 6004
    host.exits(first, 0)
    assert host.signals() == [(6001, KILL)]


def test_orphans_of_an_unknown_task_are_killed_once_no_task_runs(host: Host) -> None:
    """Their environment is overwritten, or that of a spare."""
    first, second = host.start("worker-0", "worker-1")
    host.machine.adopted, host.porter.pid = {6001: "", 6002: ""}, 6002
    host.machine.below = {6001: [6005]}
    host.exits(first, 1 << 8)
    assert host.signals() == []
    host.exits(second, 1 << 8)
    assert host.signals() == [(6001, KILL), (6005, KILL)]


def test_a_task_that_a_spare_has_just_forked_is_no_orphan(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    process = warm_spare.forks()
    host.machine.adopted[process.pid] = ""  # its environment is the spare's
    host.tasks.child_ended(6000, 0)
    host.tasks.children_ended()
    assert host.signals() == []


@pytest.mark.parametrize(
    ("status", "command", "is_noted"),
    [(0, "python train.py --key hunter2", True), (1 << 8, "python train.py", False),
     (0, "python -c from multiprocessing.resource_tracker import main", False), (0, "", False)],
)  # fmt: skip
def test_processes_that_a_successful_task_leaves_behind_are_named(
    host: Host, monkeypatch: pytest.MonkeyPatch, status: int, command: str, is_noted: bool
) -> None:
    monkeypatch.setattr(os_processes, "command_of", lambda _: command)
    process = host.start_one()
    host.machine.adopted = {6001: "worker-0"}
    host.exits(process, status)
    text = "worker-0 succeeded and left 1 process running, which was killed: python train.py"
    assert [each.startswith(text) for each in host.connection.texts] == [True] * is_noted
    assert host.signals() == [(6001, KILL)]


def test_the_exit_of_a_later_orphan_kills_the_remaining_orphans(host: Host) -> None:
    host.exits(host.start_one("worker-0"), 0)
    host.start_one("worker-1")
    host.machine.adopted = {6001: "worker-0", 6002: "worker-1"}
    host.tasks.child_ended(6000, 0)
    host.tasks.children_ended()
    assert host.signals() == [(6001, KILL)]


def test_thousands_of_orphans_that_end_at_once_are_looked_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look reads the environment of all others: the agent would not send heartbeats meanwhile."""
    host.exits(host.start_one("worker-0"), 0)
    host.machine.adopted = dict.fromkeys(range(7000, 7010), "worker-0")
    looks: list[int] = []
    children = os_processes.children

    def look(pid: int) -> list[int]:
        looks.append(pid) if pid == os.getpid() else None
        return children(pid)

    monkeypatch.setattr(os_processes, "children", look)
    for pid in range(6000, 7000):
        host.tasks.child_ended(pid, KILL)
    host.tasks.children_ended()
    host.tasks.children_ended()
    assert len(looks) == 1
    assert host.signals() == [(pid, KILL) for pid in range(7000, 7010)]


class SlowMachine:
    """Looking at a process takes a millisecond."""

    def __init__(self, host: Host, patch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0  # without a timer
        self._clock, self._beat_at = host.clock, host.clock.time
        owner = os_processes.environment_of
        patch.setattr(os_processes, "environment_of", lambda pid, name: self._takes_a_while(owner(pid, name)))
        patch.setattr(os_processes, "command_of", lambda pid: "sleep 100")
        self._beat()

    def _takes_a_while(self, owner: str | None) -> str | None:
        self._clock.time += 0.001
        return owner

    def _beat(self) -> None:
        self.longest = max(self.longest, self._clock.time - self._beat_at)
        self._beat_at = self._clock.time
        self._clock.after(0.01, self._beat)


def run_slices(host: Host) -> None:
    for _ in range(500):
        host.clock.run_ready()


@pytest.mark.parametrize("status", [0, 1 << 8])
def test_thousands_of_orphans_do_not_delay_heartbeats(host: Host, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    process = host.start_one("worker-0")
    host.machine.adopted = dict.fromkeys(range(7000, 10_000), "worker-0")
    slow = SlowMachine(host, monkeypatch)
    began = host.clock.time
    host.exits(process, status)
    assert host.connection.take("exited") == [], "its next attempt must not start before all are killed"
    run_slices(host)
    assert slow.longest < 2 * SLICE and host.clock.time - began > 2.9
    assert host.signals() == [(pid, KILL) for pid in range(7000, 10_000)]
    assert host.exit()["age"] == pytest.approx(host.clock.time - began, abs=0.01), "it failed when it ended"
    assert ["left 3000 processes running, which were killed: sleep" in text for text in host.connection.texts] == [
        True
    ] * (status == 0)


def test_a_tree_of_thousands_of_orphans_does_not_delay_heartbeats(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    process = host.start_one("worker-0")
    host.machine.adopted = {7000: "worker-0"}
    host.machine.below = {pid: [pid + 1] for pid in range(7000, 7299)}
    slow, children = SlowMachine(host, monkeypatch), os_processes.children

    def look(pid: int) -> list[int]:
        host.clock.time += 0.001
        return children(pid)

    monkeypatch.setattr(os_processes, "children", look)
    host.exits(process, 1 << 8)
    run_slices(host)
    assert slow.longest < 2 * SLICE and host.signals() == [(pid, KILL) for pid in range(7000, 7300)]


def test_a_pid_that_is_used_again_while_orphans_are_killed_is_spared(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = host.start_one("worker-0")
    host.machine.adopted = dict.fromkeys(range(7000, 7200), "worker-0")
    SlowMachine(host, monkeypatch)
    host.exits(process, 1 << 8)
    host.tasks.child_ended(7199, 9)  # of itself
    run_slices(host)
    assert host.signals() == [(pid, KILL) for pid in range(7000, 7199)]


def test_orphans_that_were_killed_are_not_looked_at_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end in many groups, and each time all others would be looked at."""
    process = host.start_one("worker-0")
    host.machine.adopted = dict.fromkeys(range(7000, 7200), "worker-0")
    SlowMachine(host, monkeypatch)
    host.exits(process, 1 << 8)
    run_slices(host)
    host.signals()
    before = host.clock.time
    host.machine.adopted[8000] = "worker-0"  # a child of the next one
    host.machine.adopted.pop(7000)
    host.tasks.child_ended(7000, 9)
    host.tasks.children_ended()
    assert host.signals() == [(8000, KILL)] and host.clock.time - before == pytest.approx(0.001)


def test_an_orphan_with_the_pid_of_the_task_does_not_end_it_twice(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    process = host.start_one("worker-0")
    host.machine.adopted = dict.fromkeys(range(7000, 7200), "worker-0")
    SlowMachine(host, monkeypatch)
    host.exits(process, 1 << 8)
    host.tasks.child_ended(process.pid, 9)
    run_slices(host)
    assert host.exit()["code"] == 1


def test_the_porter_is_not_a_task(host: Host) -> None:
    host.porter.pid = 6001
    host.machine.adopted = {6002: "worker-0"}
    host.tasks.child_ended(6001, KILL)
    host.tasks.children_ended()
    assert host.signals() == [] and host.connection.sent == []


@pytest.mark.parametrize("status", [KILL, (128 + KILL) << 8], ids=["itself", "below-a-shell"])
def test_a_task_that_the_kernel_killed_for_its_memory_is_reported_as_such(host: Host, status: int) -> None:
    process = host.start_one()
    host.machine.killed += 1
    host.exits(process, status)
    exit = host.exit()
    assert (exit["cause"], exit["detail"]) == (
        "out-of-memory", "killed by the kernel: out of memory (the limit is 4096 MiB)",
    )  # fmt: skip


# ---- addresses


def test_each_task_that_does_not_run_is_offered_its_own_address(host: Host) -> None:
    host.machine.ports = iter([20001, 20001, 20001, 20002, 20003])
    assert host.tasks.offers() == {"worker-0": "127.0.0.1:20001", "worker-1": "127.0.0.1:20002"}
    host.start_one("worker-0")
    assert host.tasks.offers() == {"worker-1": "127.0.0.1:20003"}


def test_two_agents_of_a_machine_never_offer_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as probe:
        free = probe.getsockname()[1]  # no other test of this machine uses it
    first, second = PortReservations(), PortReservations()
    ports = iter([free, free, free, free + 1, free])
    monkeypatch.setattr(free_ports, "free_port", lambda: next(ports))
    assert first.reserve() == free
    assert second.reserve() == free + 1  # although nobody listens yet
    first.release(except_for=[free])
    second.release(except_for=[])
    ports = iter([free, free + 1])
    assert second.reserve() == free + 1
    first.release(except_for=[])
    ports = iter([free])
    assert second.reserve() == free
    second.release(except_for=[])


def test_a_port_that_is_reserved_for_a_task_is_not_chosen_for_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    reservations = PortReservations()
    reserved = reservations.reserve()
    monkeypatch.setattr(free_ports, "_PORTS", (reserved, reserved + 1))
    assert free_ports.free_port() != reserved  # although nobody listens yet
    reservations.release(except_for=[])


def test_the_address_of_a_task_stays_reserved_while_the_run_uses_it(host: Host) -> None:
    assert host.tasks.offers() == {"worker-0": "127.0.0.1:20000", "worker-1": "127.0.0.1:20001"}
    host.tasks.roster = {"worker-0": "127.0.0.1:20000", "worker-9": "127.0.0.1:20001"}
    host.machine.ports = iter([20000, 20001, 20002])
    assert host.tasks.offers() == {"worker-0": "127.0.0.1:20001", "worker-1": "127.0.0.1:20002"}


def test_a_port_is_found_even_if_another_user_occupies_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        used = other.getsockname()[1]
        monkeypatch.setattr(free_ports, "_PORTS", (used, used + 1))
        assert free_ports.free_port() not in (0, used)


def test_a_host_that_was_asked_to_leave_offers_no_addresses(host: Host) -> None:
    host.tasks.leave(GRACE)
    assert host.tasks.offers() == {}


def test_another_killed_task_is_not_reported_as_out_of_memory(host: Host) -> None:
    """One kill by the kernel explains the end of one task."""
    first, second = host.start("worker-0", "worker-1")
    host.machine.killed += 1
    host.exits(first, KILL)
    host.exits(second, KILL)
    assert [message["exit"]["cause"] for message in host.connection.take("exited")] == ["out-of-memory", "signal"]


def test_kills_from_before_a_task_started_do_not_count(host: Host) -> None:
    host.machine.killed = 4
    host.exits(host.start_one(), KILL)
    assert host.exit()["cause"] == "signal"


def test_the_log_of_the_kernel_is_used_if_kills_are_not_counted(host: Host) -> None:
    process = host.start_one()
    host.machine.log = True
    host.exits(process, KILL)
    assert host.exit()["cause"] == "out-of-memory"


def test_a_failed_ingest_reports_its_own_reason(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST)
    process.reports(_="ingest", stage="failed", cause="ingest-failed", detail="no such bucket")
    host.exits(process, 1 << 8)
    exit = host.exit()
    assert (exit["task"], exit["cause"], exit["detail"]) == (INGEST, "ingest-failed", "no such bucket")
    assert host.connection.take("ingest") == []
