"""Step time under the agent with a report every step, against the same program without Paceline."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import measure

STEP = 0.010
GOAL = 0.005
LIMIT = 120.0
TRIMMED = 0.01
FIRST = 100  # steps that are not counted: beside them the rest of the run still starts, which start.py measures


@dataclass(frozen=True)
class Session:
    step_s: float  # trimmed mean over all processes
    report_s: float  # median of one call
    report_cpu_s: float  # mean CPU time of one call: what the agent does when it is woken is not in it
    agents: float  # CPU time of everything but the program, as a share of one core


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of sessions")
    parser.add_argument("--steps", type=int, default=600, help="of about 10 ms, in each session")
    parser.add_argument(
        "--workers", type=int, default=measure.cores(), help="processes; as many as cores leaves none free"
    )
    given = parser.parse_args()
    where = measure.machine()
    work = _calibrate()
    measure.say(f"Mean time of a step of fixed CPU work ({1000 * STEP:g} ms on a free core, {work} kB hashed), with")
    measure.say(
        f"{given.workers} processes on {measure.cores()} cores; the longest and shortest {TRIMMED:.0%} left out."
    )
    measure.say("paceline: `paceline run` with a report every step; alone: the same program and processes without")
    measure.say("Paceline, where a report does nothing. Interleaved.")
    measure.say(f"On: {where}\n")
    ours: list[Session] = []
    alone: list[Session] = []
    with measure.workspace() as folder:
        for number in range(given.rounds):
            for side in ("paceline", "alone") if number % 2 == 0 else ("alone", "paceline"):
                session = _session(folder, side, given.workers, given.steps, work)
                (ours if side == "paceline" else alone).append(session)
            measure.progress(
                f"round {number + 1}: {1000 * ours[-1].step_s:.3f} ms, alone {1000 * alone[-1].step_s:.3f} ms"
            )
    _report(where, ours, alone)


def _report(where: dict[str, object], ours: list[Session], alone: list[Session]) -> None:
    pairs = [one.step_s / other.step_s - 1 for one, other in zip(ours, alone, strict=True)]
    more = statistics.median(pairs)
    # Half the distance between the quartiles, over the root of the number of pairs: what the median may be off by.
    quarters = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [0.0, 0.0, 0.0]
    noise = 1.25 * (quarters[2] - quarters[0]) / 1.35 / len(pairs) ** 0.5
    step, plain = (statistics.median(session.step_s for session in side) for side in (ours, alone))
    call, nothing = (statistics.median(session.report_s for session in side) for side in (ours, alone))
    agents = statistics.median(session.agents for session in ours)
    cpu, cpu_nothing = (statistics.median(session.report_cpu_s for session in side) for side in (ours, alone))
    accounted = (cpu - cpu_nothing) / plain + agents / measure.cores()
    measure.table(
        ["side", "step", "report call", "its CPU time"],
        [
            ["paceline", f"{1000 * step:.4f} ms", f"{1e6 * call:.1f} us", f"{1e6 * cpu:.1f} us"],
            ["alone", f"{1000 * plain:.4f} ms", f"{1e6 * nothing:.1f} us", f"{1e6 * cpu_nothing:.1f} us"],
        ],
    )
    measure.say(f"measured:  {more:+.3%} more a step (median of {len(pairs)} pairs), give or take {noise:.3%}")
    measure.say(f"accounted: {accounted:+.3%}: the calls, and the CPU time of agents, supervisor and command line")
    measure.say(f"           ({agents:.3%} of one core, spread over {measure.cores()}); not subject to that noise")
    measure.say(f"at most:   {GOAL:+.3%}\n")
    measure.finish(
        {
            "bench": "overhead", "machine": where, "step_ms": 1000 * step, "alone_ms": 1000 * plain,
            "more": round(more, 6), "noise": round(noise, 6), "accounted": round(accounted, 6),
            "report_us": round(1e6 * call, 2), "report_cpu_us": round(1e6 * cpu, 2),
            "report_outside_us": round(1e6 * nothing, 2),
            "agents_cpu_share_of_a_core": round(agents, 6), "goal": GOAL, "reached": more <= GOAL,
            "pairs": [round(pair, 6) for pair in pairs],
        }
    )  # fmt: skip


def _calibrate() -> int:
    """Kilobytes that take about one step to hash, in pieces as the program does it."""
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
            job = measure.write_job(folder, "none", ["python", "loop.py", *arguments], workers)
            started = [measure.spawn([*measure.PACELINE, "run", str(job)], folder, env)]
        else:
            program = [sys.executable, str(measure.PROGRAMS / "loop.py"), *arguments]
            started = [measure.spawn(program, folder, env) for _ in range(workers)]

        agents = _watch(started[0], workers, steps) if side == "paceline" else 0.0
        measure.wait_until(lambda: all(each.poll() is not None for each in started), LIMIT, f"the end under {side}")
        if any(each.returncode for each in started):
            measure.show_output(folder)
            raise SystemExit(f"the program failed under {side}")
        found = [json.loads(path.read_text()) for path in folder.glob("times.*")]
        if len(found) != workers:
            raise SystemExit(f"{len(found)} of {workers} processes wrote their times")
    times = sorted(taken for each in found for taken in each["steps"][FIRST:])
    cut = int(len(times) * TRIMMED)
    call = statistics.median(taken for each in found for taken in each["calls"])
    cpu = statistics.fmean(each["call_cpu_s"] for each in found)
    return Session(statistics.fmean(times[cut : len(times) - cut]), call, cpu, agents)


def _watch(launcher: subprocess.Popen[bytes], workers: int, steps: int) -> float:
    """CPU time of all but the program in the middle of its run, as a share of one core; looks twice, not to disturb."""

    def others() -> dict[int, float] | None:
        every = [launcher.pid, *measure.descendants(launcher.pid)]
        program = [pid for pid in every if b"PACELINE_TASK=" in measure.environment_of(pid)]
        if len(program) < workers:
            return None
        return {pid: measure.cpu_seconds(pid) for pid in every if pid not in program}

    measure.wait_until(others, LIMIT, "all workers", every=0.1)
    began, before = _later(0.2 * steps * STEP, others)
    ended, after = _later(0.6 * steps * STEP, others)
    used = sum(after[pid] - before[pid] for pid in before if pid in after)
    return used / (ended - began)


def _later(seconds: float, look: Callable[[], dict[int, float] | None]) -> tuple[float, dict[int, float]]:
    """Steps take at least as long as they were made for, so the program is still there by then."""
    time.sleep(seconds)
    return time.monotonic(), look() or {}


if __name__ == "__main__":
    main()
