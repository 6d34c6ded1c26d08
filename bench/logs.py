"""Time of a program that writes 100,000 lines a second, compared with `program | cat > file`, and the disk used."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measure

RATE = 100_000  # lines per second
GOAL = 0.05
LIMIT = 300.0
MIB = 1024 * 1024
CALIBRATED_LINES = 100_000


@dataclass(frozen=True)
class Session:
    seconds: float  # for all lines
    cpu_s: float  # of the program
    kept: int  # bytes on the disk
    agents: float  # CPU time of agents and supervisor, as a share of one core


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of sessions")
    parser.add_argument("--lines", type=int, default=10 * RATE, help="lines of a session")
    parser.add_argument("--limit", type=int, default=64, help="limits.log, in MiB")
    parser.add_argument("--follow", action="store_true", help="`paceline run` prints the lines to a file meanwhile")
    args = parser.parse_args()
    machine_info = measure.machine()
    ours: list[Session] = []
    cat: list[Session] = []
    with measure.workspace() as folder:
        work = _calibrate(folder)
        measure.say(
            f"Time of a program that writes {args.lines:,} lines of about 90 bytes, each with a system call and"
        )
        measure.say(f"and after the same work ({work} bytes hashed), so that it writes about {RATE:,} lines a second.")
        measure.say(
            f"paceline: `paceline run{'' if args.follow else ' -d'}`; cat: `program | cat > file`. Interleaved."
        )
        measure.say(f"On: {machine_info}\n")
        for number in range(args.rounds):
            for side in ("paceline", "cat") if number % 2 == 0 else ("cat", "paceline"):
                session = _session(folder, side, args.lines, work, args.limit, args.follow)
                (ours if side == "paceline" else cat).append(session)
            measure.progress(f"round {number + 1}: {ours[-1].seconds:.3f} s, cat {cat[-1].seconds:.3f} s")
    _report(machine_info, args.lines, args.limit * MIB, ours, cat)


def _report(machine_info: dict[str, object], lines: int, limit: int, ours: list[Session], cat: list[Session]) -> None:
    pairs = [one.seconds / other.seconds - 1 for one, other in zip(ours, cat, strict=True)]
    slowdown = statistics.median(pairs)
    # The standard error of the median, estimated from the distance between the quartiles.
    quartiles = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [0.0, 0.0, 0.0]
    noise = 1.25 * (quartiles[2] - quartiles[0]) / 1.35 / len(pairs) ** 0.5
    rows = []
    for name, sessions in (("paceline", ours), ("cat", cat)):
        seconds, cpu = (statistics.median(getattr(each, field) for each in sessions) for field in ("seconds", "cpu_s"))
        kept = max(each.kept for each in sessions)
        rows.append(
            [name, measure.seconds(seconds), f"{lines / seconds:,.0f}", measure.seconds(cpu), f"{kept / MIB:.1f}"]
        )
    measure.table(["side", "time", "lines/s", "CPU time of the program", "MiB on disk"], rows)
    agents, kept = statistics.median(each.agents for each in ours), max(each.kept for each in ours)
    measure.say(f"slower:  {slowdown:+.2%} (median of {len(pairs)} pairs), ±{noise:.2%}; at most {GOAL:+.0%}")
    measure.say(f"agents:  {agents:.1%} of one core")
    measure.say(f"on disk: {kept / MIB:.1f} MiB of output; at most {limit / MIB:.0f} MiB\n")
    measure.finish(
        {
            "bench": "logs", "machine": machine_info, "lines": lines,
            "seconds": measure.median([each.seconds for each in ours]),
            "cat_s": measure.median([each.seconds for each in cat]),
            "more": round(slowdown, 6), "noise": round(noise, 6), "agents_cpu_share_of_a_core": round(agents, 4),
            "kept_bytes": kept, "limit_bytes": limit, "goal": GOAL, "reached": slowdown <= GOAL and kept <= limit,
            "pairs": [round(pair, 6) for pair in pairs],
        }
    )  # fmt: skip


def _calibrate(folder: Path) -> int:
    """Number of bytes whose hash takes as long as a line has left, after writing it."""
    without_work = min(_session(folder, "cat", CALIBRATED_LINES, 0).cpu_s for _ in range(3)) / CALIBRATED_LINES
    block, best = bytes(4096), float("inf")
    for _ in range(20):
        before = time.process_time()
        for _ in range(2000):
            hashlib.sha256(block)
        best = min(best, (time.process_time() - before) / 2000)
    return max(0, round((1 / RATE - without_work) / best * len(block)))


def _session(parent: Path, side: str, lines: int, work: int, limit: int = 64, follow: bool = False) -> Session:
    with measure.fresh(parent) as folder:
        env = measure.environment(1, {"PACELINE_HOME": str(folder / "home")})
        output = folder / "result"
        arguments = ["lines.py", "--lines", str(lines), "--work", str(work), "--output", str(output)]
        if side == "cat":
            program = shlex.join([sys.executable, str(measure.PROGRAMS / arguments[0]), *arguments[1:]])
            command = ["sh", "-c", f"{program} | cat > {shlex.quote(str(folder / 'lines'))}"]
        else:
            job = measure.write_job(folder, "none", ["python", *arguments], workers=1)
            options = ["--set", f"limits.log={limit}Mi", *([] if follow else ["--detach"])]
            command = [*measure.PACELINE, "run", str(job), *options]
        started = measure.spawn(command, folder, env)
        measure.wait_until(output.exists, LIMIT, f"the end of {side}")
        result = json.loads(output.read_text())
        agents = _agents_cpu() / result["seconds"] if side == "paceline" else 0.0
        measure.wait_until(lambda: started.poll() is not None, LIMIT, f"the end of {side}")
        if started.returncode:
            raise measure.MeasurementFailed(f"{side} failed")
        logs = folder / "lines" if side == "cat" else next((folder / "home" / "runs").iterdir()) / "logs"
        files = [logs] if logs.is_file() else [path for path in logs.rglob("*") if path.is_file()]
        kept = sum(path.stat().st_size for path in files)
        for path in files:
            path.unlink()
    return Session(result["seconds"], result["cpu_s"], kept, agents)


def _agents_cpu() -> float:
    """CPU time of all processes of this bench but the program and the command line, since they were started."""
    processes = measure.descendants(os.getpid())
    return sum(measure.cpu_seconds(pid) for pid in processes if b"PACELINE_TASK=" not in measure.environment_of(pid))


if __name__ == "__main__":
    main()
