"""Step time under the agent with a report every step, compared with the same program without Paceline."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import measure

STEP = 0.010
GOAL = 0.005
LIMIT = 120.0
TRIMMED = 0.01
SCRAPE_S = 5.0  # between two reads of the metrics; Prometheus reads them every 15 s or less often
FIRST = 100  # steps that are not counted: other processes of the run still start then, which start.py measures


@dataclass(frozen=True)
class Session:
    step_s: float  # trimmed mean of all processes
    report_s: float  # median of one call
    report_cpu_s: float  # mean CPU time of one call, without the work of the agent that it wakes
    agents: float  # CPU time of all other processes, as a share of one core


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of sessions")
    parser.add_argument("--steps", type=int, default=600, help="steps of about 10 ms in each session")
    parser.add_argument(
        "--workers", type=int, default=measure.cores(), help="number of processes; as many as cores leaves no core free"
    )
    args = parser.parse_args()
    machine_info = measure.machine()
    work = _calibrate()
    measure.say(f"Mean time of a step of fixed CPU work ({1000 * STEP:g} ms on a free core, {work} kB hashed), with")
    measure.say(f"{args.workers} processes on {measure.cores()} cores; without the longest and shortest {TRIMMED:.0%}.")
    measure.say("paceline: `paceline run` with a report every step, and metrics that are read every 5 s; alone: the")
    measure.say("same program and processes without Paceline: a report does nothing. Interleaved.")
    measure.say(f"On: {machine_info}\n")
    ours: list[Session] = []
    alone: list[Session] = []
    with measure.workspace() as folder:
        for number in range(args.rounds):
            for side in ("paceline", "alone") if number % 2 == 0 else ("alone", "paceline"):
                session = _session(folder, side, args.workers, args.steps, work)
                (ours if side == "paceline" else alone).append(session)
            measure.progress(
                f"round {number + 1}: {1000 * ours[-1].step_s:.3f} ms, alone {1000 * alone[-1].step_s:.3f} ms"
            )
    _report(machine_info, ours, alone)


def _report(machine_info: dict[str, object], ours: list[Session], alone: list[Session]) -> None:
    pairs = [one.step_s / other.step_s - 1 for one, other in zip(ours, alone, strict=True)]
    overhead = statistics.median(pairs)
    # The standard error of the median, estimated from the distance between the quartiles.
    quartiles = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [0.0, 0.0, 0.0]
    noise = 1.25 * (quartiles[2] - quartiles[0]) / 1.35 / len(pairs) ** 0.5
    step, step_alone = (statistics.median(session.step_s for session in side) for side in (ours, alone))
    report, report_alone = (statistics.median(session.report_s for session in side) for side in (ours, alone))
    agents = statistics.median(session.agents for session in ours)
    cpu, cpu_alone = (statistics.median(session.report_cpu_s for session in side) for side in (ours, alone))
    accounted = (cpu - cpu_alone) / step_alone + agents / measure.cores()
    measure.table(
        ["side", "step", "report call", "its CPU time"],
        [
            ["paceline", f"{1000 * step:.4f} ms", f"{1e6 * report:.1f} us", f"{1e6 * cpu:.1f} us"],
            ["alone", f"{1000 * step_alone:.4f} ms", f"{1e6 * report_alone:.1f} us", f"{1e6 * cpu_alone:.1f} us"],
        ],
    )
    measure.say(f"measured:  {overhead:+.3%} per step (median of {len(pairs)} pairs), ±{noise:.3%}")
    measure.say(f"accounted: {accounted:+.3%}: the calls, and the CPU time of agents, supervisor and command line")
    measure.say(
        f"           ({agents:.3%} of one core, divided by {measure.cores()} cores); not affected by that noise"
    )
    measure.say(f"at most:   {GOAL:+.3%}\n")
    measure.finish(
        {
            "bench": "overhead", "machine": machine_info, "step_ms": 1000 * step, "alone_ms": 1000 * step_alone,
            "more": round(overhead, 6), "noise": round(noise, 6), "accounted": round(accounted, 6),
            "report_us": round(1e6 * report, 2), "report_cpu_us": round(1e6 * cpu, 2),
            "report_outside_us": round(1e6 * report_alone, 2),
            "agents_cpu_share_of_a_core": round(agents, 6), "goal": GOAL, "reached": overhead <= GOAL,
            "pairs": [round(pair, 6) for pair in pairs],
        }
    )  # fmt: skip


def _calibrate() -> int:
    """Number of kilobytes whose hash takes about as long as one step, in blocks as in the program."""
    block, best = bytes(1024), float("inf")
    for _ in range(20):
        digest, before = hashlib.sha256(), time.perf_counter()
        for _ in range(2000):
            digest.update(block)
        best = min(best, time.perf_counter() - before)
    return round(2000 * STEP / best)


def _session(parent: Path, side: str, workers: int, steps: int, work: int) -> Session:
    with measure.fresh(parent) as folder:
        env = measure.environment(workers, {"PACELINE_HOME": str(folder / "home")})
        arguments = ["--steps", str(steps), "--work", str(work), "--output", str(folder / "times")]
        if side == "paceline":
            job = measure.write_job(folder, "none", ["python", "loop.py", *arguments], workers, metrics=True)
            started = [measure.spawn([*measure.PACELINE, "run", str(job)], folder, env)]
            Thread(target=_scrape, args=(folder / "home" / "runs", started[0]), daemon=True).start()
        else:
            program = [sys.executable, str(measure.PROGRAMS / "loop.py"), *arguments]
            started = [measure.spawn(program, folder, env) for _ in range(workers)]

        agents = _agents_cpu_share(started[0], workers, steps) if side == "paceline" else 0.0
        measure.wait_until(lambda: all(each.poll() is not None for each in started), LIMIT, f"the end of {side}")
        if any(each.returncode for each in started):
            measure.show_output(folder)
            raise SystemExit(f"the program failed: {side}")
        outputs = [json.loads(path.read_text()) for path in folder.glob("times.*")]
        if len(outputs) != workers:
            raise SystemExit(f"{len(outputs)} of {workers} processes wrote their times")
    times = sorted(seconds for each in outputs for seconds in each["steps"][FIRST:])
    trimmed = int(len(times) * TRIMMED)
    call = statistics.median(seconds for each in outputs for seconds in each["calls"])
    cpu = statistics.fmean(each["call_cpu_s"] for each in outputs)
    return Session(statistics.fmean(times[trimmed : len(times) - trimmed]), call, cpu, agents)


def _scrape(runs: Path, run: subprocess.Popen[bytes]) -> None:
    """Reads the metrics again and again, as Prometheus does, until the run has ended."""
    while run.poll() is None:
        time.sleep(SCRAPE_S)
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            info = json.loads(next(iter(runs.glob("*/run.json")), runs).read_text())
            request = urllib.request.Request(info["metrics_url"], headers={"Accept": "application/openmetrics-text"})
            urllib.request.urlopen(request, timeout=10).read()


def _agents_cpu_share(launcher: subprocess.Popen[bytes], workers: int, steps: int) -> float:
    """CPU time of all other processes during the run, as a share of one core; measured only twice."""

    def others() -> dict[int, float] | None:
        pids = [launcher.pid, *measure.descendants(launcher.pid)]
        program = [pid for pid in pids if b"PACELINE_TASK=" in measure.environment_of(pid)]
        if len(program) < workers:
            return None
        return {pid: measure.cpu_seconds(pid) for pid in pids if pid not in program}

    measure.wait_until(others, LIMIT, "all workers", every=0.1)
    began, before = _measure_after(0.2 * steps * STEP, others)
    ended, after = _measure_after(0.6 * steps * STEP, others)
    cpu = sum(after[pid] - before[pid] for pid in before if pid in after)
    return cpu / (ended - began)


def _measure_after(
    seconds: float, measure_cpu: Callable[[], dict[int, float] | None]
) -> tuple[float, dict[int, float]]:
    """A step takes at least STEP seconds, so the program still runs after `seconds`."""
    time.sleep(seconds)
    return time.monotonic(), measure_cpu() or {}


if __name__ == "__main__":
    main()
