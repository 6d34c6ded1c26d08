"""SIGKILL of one worker to the next step of the group: Paceline's warm restart against the framework's usual way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from measure import Stamp

START_LIMIT = 120.0
RESTART_LIMIT = 60.0
IDLE = 1.0  # seconds without CPU time after which a spare is taken to have imported all
SETTLED = 5  # steps of every worker before a kill


@dataclass(frozen=True)
class Case:
    framework: str
    workers: int
    gpu: bool
    peer: str
    about: str
    goal: float  # of the peer's time
    goal_s: float | None


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=["tensorflow", "torch"], default="tensorflow")
    parser.add_argument("--gpu", action="store_true", help="torch: one nccl rank on a GPU")
    parser.add_argument("--rounds", type=int, default=3, help="fresh runs of each side")
    parser.add_argument("--kills", type=int, default=2, help="kills in each run")
    given = parser.parse_args()
    if given.gpu and given.framework != "torch":
        parser.error("--gpu is for --framework torch")
    case = _case(given.framework, given.gpu)
    where = measure.machine("tensorflow-cpu" if case.framework == "tensorflow" else "torch")
    if case.gpu:
        where["gpu"] = _gpu_name()
    measure.say(f"SIGKILL of one of {case.workers} {case.framework} worker(s){' (nccl)' if case.gpu else ''} until")
    measure.say("every worker has done a step in a process that is not one of those before. Interleaved.")
    measure.say(f"paceline: `paceline run job.yaml`, killed once its spares are ready; {case.peer}: {case.about}.")
    measure.say(f"On: {where}\n")
    taken: dict[str, list[float]] = {"paceline": [], case.peer: []}
    hung = {"paceline": 0, case.peer: 0}
    warm: list[bool] = []
    with measure.workspace() as folder:
        for number in range(given.rounds):
            for side in taken if number % 2 == 0 else reversed(taken):
                found, in_time, warmth = _run(folder, case, side, given.kills)
                taken[side] += found
                hung[side] += not in_time
                warm += warmth
                shown = ", ".join(f"{value:.3f} s" for value in found) + ("" if in_time else ", then it hung")
                measure.progress(f"round {number + 1} {side}: {shown}")
    _report(case, where, taken, hung, warm)


def _case(framework: str, gpu: bool) -> Case:
    if framework == "tensorflow":
        about = "bench/programs/launch.py kills the other with SIGKILL and starts both again"
        return Case(framework, 2, False, "cold", about, 0.3, 1.5)
    about = "torchrun --max-restarts with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    if gpu:
        return Case(framework, 1, True, "torchrun", about, 0.4, 3.0)
    return Case(framework, 2, False, "torchrun", about, 0.5, None)


def _report(
    case: Case, where: dict[str, Any], taken: dict[str, list[float]], hung: dict[str, int], warm: list[bool]
) -> None:
    ours, theirs = measure.median(taken["paceline"]), measure.median(taken[case.peer])
    share = measure.ratio(ours, theirs)
    rows = [
        [side, measure.seconds(measure.median(values)), measure.spread(values), str(len(values)), str(hung[side])]
        for side, values in taken.items()
    ]
    measure.table(["side", "median", "range", "kills", "hung"], rows)
    measure.say(f"ratio {share} (at most {case.goal}); {sum(warm)} of {len(warm)} tasks started from a spare\n")
    measure.finish(
        {
            "bench": "restart", "framework": case.framework, "gpu": case.gpu, "machine": where, "peer": case.peer,
            "paceline_s": ours, "peer_s": theirs, "ratio": share, "goal_ratio": case.goal, "goal_s": case.goal_s,
            "reached": share is not None and share <= case.goal and not hung["paceline"],
            "hung": hung, "warm_starts": sum(warm), "starts_after_kill": len(warm),
            "paceline_all_s": taken["paceline"], "peer_all_s": taken[case.peer],
        }
    )  # fmt: skip


def _run(parent: Path, case: Case, side: str, kills: int) -> tuple[list[float], bool, list[bool]]:
    """Seconds of each restart, whether all came in time, and for Paceline which tasks then came from a spare."""
    found: list[float] = []
    with measure.fresh(parent) as folder:
        stamps = folder / "stamps"
        process = _start(folder, case, side, stamps)
        old: frozenset[int] = frozenset()
        try:
            for number in range(kills):
                first = START_LIMIT if number == 0 else RESTART_LIMIT
                workers = _wait_for_steps(stamps, case, old, first, side)
                if side == "paceline":
                    _wait_for_spares(process.pid, case.workers, frozenset(workers.values()))
                old |= frozenset(workers.values())
                found.append(_kill(workers[case.workers - 1 - number % case.workers], old, stamps, case, side))
        except measure.TookTooLong as error:
            measure.progress(str(error))
            measure.show_output(folder)
            return found, False, _warm(folder)
        return found, True, _warm(folder)


def _start(folder: Path, case: Case, side: str, stamps: Path) -> subprocess.Popen[bytes]:
    more = {"BENCH_STAMPS": str(stamps), "PACELINE_HOME": str(folder / "home")}
    if case.gpu:
        more["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    program = f"{case.framework}_steps.py"
    arguments = ["--steps", "1000000", "--sleep", "0.05", *(["--gpu"] if case.gpu else [])]
    task = [str(measure.PROGRAMS / program), *arguments]
    if side == "paceline":
        job = measure.write_job(folder, case.framework, ["python", program, *arguments], case.workers, int(case.gpu))
        command = [*measure.PACELINE, "run", str(job)]
    elif side == "cold":
        launcher = [sys.executable, str(measure.PROGRAMS / "launch.py"), case.framework, str(case.workers)]
        command = [*launcher, sys.executable, *task]
    else:
        more["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={case.workers}", "--max-restarts=100", *task]
    return measure.spawn(command, folder, measure.environment(case.workers, more))


def _wait_for_steps(stamps: Path, case: Case, old: frozenset[int], limit: float, side: str) -> dict[int, int]:
    found: dict[int, int] = measure.wait_until(lambda: _settled(stamps, case, old), limit, f"steps under {side}")
    return found


def _settled(path: Path, case: Case, old: frozenset[int]) -> dict[int, int] | None:
    """rank -> pid, once every worker that is not one of the old has done some steps."""
    counts: dict[tuple[int, int], int] = {}
    for stamp in measure.stamps(path):
        if stamp.pid not in old:
            counts[stamp.rank, stamp.pid] = counts.get((stamp.rank, stamp.pid), 0) + 1
    settled = {rank: pid for (rank, pid), count in counts.items() if count >= SETTLED}
    return settled if len(settled) == case.workers else None


def _wait_for_spares(launcher: int, count: int, workers: frozenset[int]) -> None:
    """Until every agent has a spare that has done its imports: it uses no CPU time any more."""
    spent: dict[int, tuple[float, float]] = {}  # pid -> CPU seconds, since when they have been the same

    def idle() -> bool:
        ready = 0
        for pid in set(measure.descendants(launcher)) - workers:
            if b"PACELINE_STARTER=spare" not in measure.environment_of(pid):
                continue
            used, at = measure.cpu_seconds(pid), time.monotonic()
            if pid not in spent or spent[pid][0] != used:
                spent[pid] = used, at
            ready += used > 0.1 and at - spent[pid][1] > IDLE
        return ready >= count

    measure.wait_until(idle, START_LIMIT, f"{count} spares", every=0.1)


def _kill(pid: int, old: frozenset[int], path: Path, case: Case, side: str) -> float:
    def again() -> list[Stamp] | None:
        first = measure.first_steps(measure.stamps(path), without=old)
        return list(first.values()) if len(first) == case.workers else None

    before = measure.now()
    os.kill(pid, signal.SIGKILL)
    stepped: list[Stamp] = measure.wait_until(again, RESTART_LIMIT, f"the next step under {side}")
    return max(stamp.at for stamp in stepped) - before


def _warm(folder: Path) -> list[bool]:
    events = [json.loads(line) for path in folder.glob("home/runs/*/events.jsonl") for line in path.open()]
    return [event["warm"] for event in events if event["event"] == "task-started" and event["generation"] > 1]


def _gpu_name() -> str | None:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.splitlines()[0].partition(" (")[0] if found else None


if __name__ == "__main__":
    main()
