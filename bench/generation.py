"""Forming a generation with N connected members, compared with torch's c10d rendezvous with threads as members."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

sys.path.insert(0, str(measure.SOURCE))

from paceline import plan
from paceline.agent import free_ports
from paceline.agent.options import Options
from paceline.backends import certificates

AGENT = measure.SOURCE / "paceline" / "agent" / "__main__.py"
RUN = "bench-0000"
GOALS = {"ratio_at_64": 1 / 20, "form_5000_s": 2.0, "join_5000_s": 15.0, "memory_5000_mb": 600.0}


@dataclass
class Group:
    """Measurements with one captain and N members."""

    members: int
    join_s: float = 0.0  # from the first connection attempt to the last welcome, TLS handshakes included
    first_start_s: float = 0.0  # the same, until all have received their first start
    form_s: list[float] = field(default_factory=list)  # report of the last ended task -> all have received the start
    restart_s: list[float] = field(default_factory=list)  # report of a failed task -> all have received the start
    captain_mb: float = 0.0
    captain_cpu_s: list[float] = field(default_factory=list)  # the captain's CPU time in each restart
    join_cpu_s: float = 0.0  # the captain's CPU time in the first join
    profile: str = ""
    failed: str = ""


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--members", type=int, nargs="*", default=[2, 64, 1000, 5000])
    parser.add_argument("--torch", type=int, nargs="*", default=[2, 32, 64], help="numbers of members of the peer")
    parser.add_argument("--rounds", type=int, default=3, help="generations formed after the first")
    parser.add_argument("--torch-limit", type=float, default=60.0, help="seconds for one size of the peer")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each step of Paceline's measurement")
    parser.add_argument("--processes", type=int, default=2, help="number of processes for the simulated members")
    parser.add_argument("--profile", action="store_true", help="sample the captain and show where its time goes")
    args = parser.parse_args()
    machine_info = measure.machine("torch")
    measure.say("Forming a generation. A real captain process; members are simulated in other processes, with real TLS")
    measure.say(
        "and the real protocol with its heartbeats; one in 100 decodes the roster. They share the cores with the"
    )
    measure.say("captain, so the figures are an upper bound. Peer: torch's c10d rendezvous, members are threads.")
    measure.say(f"On: {machine_info}\n")
    ours: list[Group] = []
    theirs: dict[int, list[float] | None] = {}
    with measure.workspace() as folder:
        for size in sorted({*args.members, *args.torch}):
            if size in args.members:
                ours.append(_paceline(folder, size, args))
                measure.progress(
                    f"paceline {size}: joined in {ours[-1].join_s:.3f} s, restarts in {ours[-1].restart_s}"
                )
            if size in args.torch:
                theirs[size] = _torch(folder, size, args.rounds, args.torch_limit)
                measure.progress(f"torch {size}: {theirs[size]}")
    _report(machine_info, ours, theirs, args.torch_limit)


def _report(
    machine_info: dict[str, Any], ours: list[Group], theirs: dict[int, list[float] | None], limit: float
) -> None:
    rows = [
        [str(group.members), f"{group.join_s:.3f} s", _summary(group.form_s), _summary(group.restart_s),
         f"{group.captain_mb:.0f} MB", f"{group.join_cpu_s:.2f} s", _summary(group.captain_cpu_s)]
        for group in ours
    ]  # fmt: skip
    headings = ["members", "first join", "form (last ended -> all started)", "restart (failure -> all started)"]
    measure.table([*headings, "captain's peak memory", "its CPU: join", "restart"], rows)
    peer = [
        [str(size), f"over {limit:g} s", "-"]
        if times is None
        else [str(size), _summary(times[:1]), _summary(times[1:])]
        for size, times in theirs.items()
    ]
    measure.table(["torch's members", "first rendezvous", "next rendezvous"], peer)
    for group in ours:
        if group.failed:
            measure.say(f"{group.members} members: FAILED: {group.failed}")
        if group.profile:
            measure.say(f"captain with {group.members} members: {group.profile}")
    by_size = {group.members: group for group in ours}
    ratios = {}
    for size, times in theirs.items():
        if size in by_size:
            next_s = measure.median(times[1:]) if times is not None else limit
            ratios[size] = measure.ratio(measure.median(by_size[size].restart_s), next_s)
    for size, value in ratios.items():
        prefix = "at most " if theirs[size] is None else ""
        measure.say(
            f"{size} members: failure -> all started takes {prefix}{value} of the time of torch's next rendezvous"
        )
    reached: dict[str, bool] = {}
    at_64 = ratios.get(64)
    if at_64 is not None:
        reached["ratio_at_64"] = at_64 <= GOALS["ratio_at_64"]
    if 5000 in by_size:
        group = by_size[5000]
        restart_s = measure.median(group.restart_s)
        reached["form_5000_s"] = restart_s is not None and restart_s <= GOALS["form_5000_s"]
        reached["join_5000_s"] = 0 < group.join_s <= GOALS["join_5000_s"]
        reached["memory_5000_mb"] = 0 < group.captain_mb <= GOALS["memory_5000_mb"]
    measure.say(f"reached: {reached}\n")
    results = {
        group.members: {
            "join_s": group.join_s, "first_start_s": group.first_start_s, "form_s": measure.median(group.form_s),
            "restart_s": measure.median(group.restart_s), "captain_mb": group.captain_mb,
            "captain_join_cpu_s": group.join_cpu_s, "captain_restart_cpu_s": measure.median(group.captain_cpu_s),
            "restart_ms_per_member": _ms_per_member(group), "failed": group.failed,
        }
        for group in ours
    }  # fmt: skip
    peers = {size: None if times is None else measure.median(times[1:]) for size, times in theirs.items()}
    measure.finish(
        {
            "bench": "generation", "machine": machine_info, "paceline": results, "torch_next_s": peers,
            "ratios": ratios, "goals": GOALS, "reached": reached,
        }
    )  # fmt: skip


def _summary(values: list[float]) -> str:
    return f"{measure.median(values):.3f} s ({measure.spread(values)})" if values else "-"


def _ms_per_member(group: Group) -> float | None:
    median = measure.median(group.restart_s)
    return None if median is None else round(1000 * median / group.members, 4)


# ---- Paceline


def _paceline(parent: Path, size: int, args: Any) -> Group:
    group = Group(size)
    try:
        _measure(parent, group, args)
    except measure.MeasurementFailed as error:
        group.failed = str(error)
    return group


def _measure(parent: Path, group: Group, args: Any) -> None:
    size = group.members
    with measure.fresh(parent) as folder:
        captain, address = _start_captain(folder, size, args.profile)
        pid = captain.pid if args.profile else measure.descendants(captain.pid)[0]
        members = [
            Members(folder, address, first, min(size, first + _share(size, args.processes)) - first)
            for first in range(0, size, _share(size, args.processes))
        ]
        for process in members:
            process.expect("ready", args.limit)
        began = time.monotonic()
        for process in members:
            process.order("dial")
        group.join_s = max(process.expect("welcomed", args.limit)["at"] for process in members) - began
        group.first_start_s = max(process.expect("started", args.limit)["at"] for process in members) - began
        group.join_cpu_s = measure.cpu_seconds(pid)
        _settle(folder, 1, size, args.limit)
        for number in range(args.rounds):
            before = measure.cpu_seconds(pid)
            members[0].order("fail")
            failed_at = members[0].expect("failed", args.limit)["at"]
            started = [process.expect("started", args.limit) for process in members]
            group.captain_cpu_s.append(round(measure.cpu_seconds(pid) - before, 3))
            started_at = max(report["at"] for report in started)
            ended_at = max(report["last_ended"] for report in started)
            if not all(report["decoded"] % size == 0 for report in started):
                raise RuntimeError(f"a roster does not contain all {size} addresses: {started}")
            group.restart_s.append(started_at - failed_at)
            group.form_s.append(started_at - ended_at)
            _settle(folder, number + 2, size, args.limit)
        group.captain_mb = _peak_memory(pid)
        if args.profile:
            captain.send_signal(signal.SIGUSR2)
            captain.wait(30)
            group.profile = (folder / "profile").read_text()


def _share(size: int, processes: int) -> int:
    return -(-size // processes) if size > 64 else size


def _start_captain(folder: Path, size: int, profile: bool) -> tuple[subprocess.Popen[bytes], str]:
    (folder / "plan.json").write_text(plan.to_json(_plan(size)))
    certificates.make(folder / "tls")
    address = f"127.0.0.1:{free_ports.free_port()}"
    options = Options(RUN, plan.CAPTAIN, str(folder / "plan.json"), str(folder), str(folder / "tls"), address).to_json()
    command = [sys.executable, "-I", "-S", str(AGENT), options]
    if profile:
        command = [sys.executable, str(measure.PROGRAMS / "sampled.py"), str(folder / "profile"), options]
    captain = measure.spawn(command, folder, measure.environment(1))
    events = folder / "events.jsonl"
    measure.wait_until(events.exists, 30, "the captain's first event")
    return captain, address


def _plan(size: int) -> plan.Plan:
    role = plan.Role("worker", ("python", "train.py"), {}, plan.GROUP, watched=True, decides=True)
    hosts, tasks = [], []
    for index in range(size):
        host, task = f"worker-host-{index}", f"worker-{index}"
        hosts.append(plan.Host(host, "worker", index, 0, 0, None, None, (task,)))
        tasks.append(plan.Task(task, "worker", index, host, 0, index))
    restart, limits = plan.Restart(1000, None, True), plan.Limits(1800.0, None, 30.0)
    return plan.Plan(plan.VERSION, "bench", "torch", "", "/", (role,), tuple(hosts), tuple(tasks), restart, limits)


class Members:
    """A process that simulates members."""

    def __init__(self, folder: Path, captain: str, first: int, count: int) -> None:
        arguments = [RUN, captain, str(folder / "tls"), str(first), str(count)]
        self._process = subprocess.Popen(
            [sys.executable, str(measure.PROGRAMS / "members.py"), *arguments],
            env=measure.environment(1), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._text = b""

    def order(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()

    def expect(self, event: str, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + limit
        while True:
            line, newline, rest = self._text.partition(b"\n")
            if newline:
                self._text = rest
                report: dict[str, Any] = json.loads(line)
                if report["event"] == event:
                    return report
                if report["event"] == "lost":
                    measure.progress(f"a member lost its connection: {report}")
                continue
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise measure.MeasurementFailed(f"the members' {event!r}: not within {limit:g} s")
            data = os.read(fd, 65536)
            if not data:
                raise measure.MeasurementFailed(f"the members ended before {event!r}")
            self._text += data


def _settle(folder: Path, generation: int, size: int, limit: float) -> None:
    """Wait until the captain has recorded the start and a step of every task of the generation. The file is replaced
    when it has become too long; the new one has the next step of each task."""
    path, deadline = folder / "events.jsonl", time.monotonic() + limit
    seen: dict[str, set[str]] = {"task-started": set(), "step": set()}
    events = path.open()
    try:
        while any(len(tasks) < size for tasks in seen.values()):
            position, line = events.tell(), events.readline()
            if line.endswith("\n"):
                event = json.loads(line) if f'"generation": {generation},' in line else {"event": ""}
                if event["event"] in seen:
                    seen[event["event"]].add(event["task"])
                continue
            events.seek(position)
            if time.monotonic() > deadline:
                counts = f"{len(seen['task-started'])} of {size} started, {len(seen['step'])} with a step"
                raise measure.MeasurementFailed(f"generation {generation}: {counts}")
            if path.stat().st_ino != os.fstat(events.fileno()).st_ino:
                events.close()
                events = path.open()
            time.sleep(0.05)
    finally:
        events.close()


def _peak_memory(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().split()
    return round(int(status[status.index("VmHWM:") + 1]) / 1024, 1)


# ---- torch


def _torch(parent: Path, size: int, rounds: int, limit: float) -> list[float] | None:
    """Seconds of the first and of the next rendezvous; None if they took too long."""
    command = [sys.executable, str(measure.PROGRAMS / "rendezvous.py"), str(size), str(rounds + 1)]
    times: list[float] = []
    with measure.fresh(parent):
        process = subprocess.Popen(
            command, env=measure.environment(1), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        deadline = time.monotonic() + limit
        while len(times) < rounds + 1:
            time_left = deadline - time.monotonic()
            if not select.select([process.stdout], [], [], max(0.0, time_left))[0]:
                break
            line = process.stdout.readline()
            if not line:
                break
            times.append(json.loads(line))
    return times if len(times) > 1 else None


if __name__ == "__main__":
    main()
