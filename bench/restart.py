"""Time from SIGKILL of one worker to the next step of the group: Paceline's warm restart, compared with a peer."""

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

import example_restart
import measure
from measure import Stamp

START_LIMIT = 120.0
RESTART_LIMIT = 60.0
COMPILE_LIMIT = 300.0
COMPILED = {"jax": ["--length", "64"], "torch": ["--blocks", "10"]}  # the model then takes about 20 s to compile
CUDA_FILE = "/dev/nvidia-uvm"  # open in a process that has a CUDA context
CONTEXT_LIMIT = 15.0
IDLE = 1.0  # seconds without CPU time after which a spare is considered ready
SETTLED = 5  # steps of every worker before a kill
CHECKPOINTS = {"torchrun": "checkpoint.pt", "dcp": "checkpoint", "cold": "checkpoint"}  # of the peer
NEWEST = {"dcp": "newest", "cold": "newest"}  # the file in a folder of checkpoints that names the newest
EVERY, AFTER_SAVE = 40, 10  # with a large state: steps between two saves, and steps between a save and the kill


@dataclass(frozen=True)
class Case:
    framework: str
    workers: int
    gpu: bool
    peer: str
    about: str
    goal: float  # as a share of the peer's time
    goal_s: float | None
    gib: float = 0.0  # state; 0: a few kilobytes, which are not saved
    compiles: bool = False

    @property
    def restart_limit(self) -> float:
        return COMPILE_LIMIT if self.compiles else RESTART_LIMIT


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=["tensorflow", "torch", "jax"], default="tensorflow")
    parser.add_argument("--program", choices=sorted(example_restart.JOBS), help="an example, with its own job file")
    parser.add_argument("--gpu", action="store_true", help="torch: one nccl rank on a GPU")
    parser.add_argument("--state-gib", type=float, default=0.0, help="a state of this size, saved and restored")
    parser.add_argument("--dcp", action="store_true", help="torchrun with async_save of torch.distributed.checkpoint")
    parser.add_argument("--compile", action="store_true", help="a model that takes 20 s or more to compile")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--kills", type=int, default=2, help="kills in each run")
    args = parser.parse_args()
    if args.program:
        example_restart.main(args.program, args.rounds, args.kills)
        return
    if args.gpu and args.framework != "torch":
        parser.error("--gpu requires --framework torch")
    if args.state_gib and args.framework == "jax":
        parser.error("--state-gib requires --framework torch or tensorflow")
    if args.framework == "jax" and not args.compile:
        parser.error("--framework jax requires --compile")
    if args.compile and (args.framework == "tensorflow" or args.state_gib):
        parser.error("--compile requires --framework jax or torch, without --state-gib")
    if args.dcp and not (args.state_gib and args.framework == "torch"):
        parser.error("--dcp requires --framework torch and --state-gib")
    case = _case(args.framework, args.gpu, args.state_gib, args.dcp, args.compile)
    machine_info = measure.machine("tensorflow-cpu" if case.framework == "tensorflow" else case.framework)
    if case.gpu:
        machine_info["gpu"] = _gpu_name()
    measure.say(f"SIGKILL of one of {case.workers} {case.framework} worker(s){' (nccl)' if case.gpu else ''} until")
    measure.say("every worker has done a step in a new process. Interleaved.")
    if case.gib:
        measure.say(
            f"State: {case.gib:g} GiB, saved every {EVERY} steps; killed {AFTER_SAVE} steps after a save began."
        )
    measure.say(f"paceline: `paceline run job.yaml`, killed once its spares are ready; {case.peer}: {case.about}.")
    measure.say(f"On: {machine_info}\n")
    times: dict[str, list[float]] = {"paceline": [], case.peer: []}
    hangs = {"paceline": 0, case.peer: 0}
    warm: list[bool] = []
    with measure.workspace() as folder:
        for number in range(args.rounds):
            for side in times if number % 2 == 0 else reversed(times):
                restarts, all_in_time, warm_starts = _run(folder, case, side, args.kills)
                times[side] += restarts
                hangs[side] += not all_in_time
                warm += warm_starts
                summary = ", ".join(f"{value:.3f} s" for value in restarts) + ("" if all_in_time else ", then it hung")
                measure.progress(f"round {number + 1} {side}: {summary}")
    _report(case, machine_info, times, hangs, warm)


def _case(framework: str, gpu: bool, gib: float, dcp: bool, compiles: bool) -> Case:
    if framework == "tensorflow":
        about = "bench/programs/launch.py kills the other worker with SIGKILL and restarts both"
        if gib:
            return Case(framework, 2, False, "cold", f"{about}, with tf.train.Checkpoint", 0.4, 2.5, gib)
        return Case(framework, 2, False, "cold", about, 0.3, 1.5)
    if compiles:
        about = "bench/programs/launch.py kills the other worker with SIGKILL and restarts both, which compile again"
        return Case(framework, 1 if gpu else 2, gpu, "cold", about, 0.2, None, compiles=True)
    about = "torchrun --max-restarts with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    if gib:
        goal, goal_s = (0.2, 2.5 if gib <= 4 else 5.0) if gpu else (0.4, 2.0)
        peer, how = ("dcp", "DCP async_save") if dcp else ("torchrun", "torch.save and torch.load")
        return Case(framework, 1 if gpu else 2, gpu, peer, f"{about}, {how}", goal, goal_s, gib)
    if gpu:
        return Case(framework, 1, True, "torchrun", about, 0.4, 3.0)
    return Case(framework, 2, False, "torchrun", about, 0.5, None)


def _report(
    case: Case, machine_info: dict[str, Any], times: dict[str, list[float]], hangs: dict[str, int], warm: list[bool]
) -> None:
    ours, theirs = measure.median(times["paceline"]), measure.median(times[case.peer])
    ratio = measure.ratio(ours, theirs)
    rows = [
        [side, measure.seconds(measure.median(values)), measure.spread(values), str(len(values)), str(hangs[side])]
        for side, values in times.items()
    ]
    measure.table(["side", "median", "range", "kills", "hung"], rows)
    measure.say(f"ratio {ratio} (at most {case.goal}); {sum(warm)} of {len(warm)} tasks started from a spare\n")
    measure.finish(
        {
            "bench": "restart", "framework": case.framework, "gpu": case.gpu, "state_gib": case.gib,
            "compile": case.compiles, "machine": machine_info, "peer": case.peer, "paceline_s": ours,
            "peer_s": theirs, "ratio": ratio, "goal_ratio": case.goal, "goal_s": case.goal_s,
            "reached": ratio is not None and ratio <= case.goal and not hangs["paceline"]
            and (ours is not None and (case.goal_s is None or ours <= case.goal_s)),
            "hung": hangs, "warm_starts": sum(warm), "starts_after_kill": len(warm),
            "paceline_all_s": times["paceline"], "peer_all_s": times[case.peer],
        }
    )  # fmt: skip


def _run(parent: Path, case: Case, side: str, kills: int) -> tuple[list[float], bool, list[bool]]:
    """Seconds of each restart, whether all were in time, and for Paceline which tasks then started from a spare."""
    restarts: list[float] = []
    with measure.fresh(parent) as folder:
        stamps = folder / "stamps"
        process = _start(folder, case, side, stamps)
        old: frozenset[int] = frozenset()
        try:
            for number in range(kills):
                limit = max(START_LIMIT, case.restart_limit) if number == 0 else case.restart_limit
                workers = _wait_for_steps(stamps, case, old, limit, side)
                if side == "paceline":
                    _wait_for_spares(process.pid, case, frozenset(workers.values()))
                if case.gib:
                    _wait_for_save(folder, stamps, workers, side)
                old |= frozenset(workers.values())
                restarts.append(_kill(workers[case.workers - 1 - number % case.workers], old, stamps, case, side))
        except measure.MeasurementFailed as error:
            measure.progress(str(error))
            measure.show_output(folder)
            return restarts, False, _warm_starts(folder)
        _show_stages(folder)
        return restarts, True, _warm_starts(folder)


def _start(folder: Path, case: Case, side: str, stamps: Path) -> subprocess.Popen[bytes]:
    more = {"BENCH_STAMPS": str(stamps), "PACELINE_HOME": str(folder / "home")}
    if case.gpu:
        more["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    program = f"{case.framework}_state_steps.py" if case.gib else f"{case.framework}_steps.py"
    if case.compiles and case.framework == "torch":
        program = "torch_compile_steps.py"
    arguments = ["--steps", "1000000", "--sleep", "0.05", *(["--gpu"] if case.gpu else [])]
    if case.gib:
        checkpoint = [] if side == "paceline" else ["--checkpoint", str(folder / CHECKPOINTS[side])]
        checkpoint += ["--dcp"] if side == "dcp" else []
        arguments += ["--gib", str(case.gib), "--every", str(EVERY), *checkpoint]
    arguments += COMPILED[case.framework] if case.compiles else []
    task = [str(measure.PROGRAMS / program), *arguments]
    if side == "paceline":
        job = measure.write_job(folder, case.framework, ["python", program, *arguments], case.workers, int(case.gpu))
        command = [*measure.PACELINE, "run", str(job)]
    elif side == "cold":
        more["BENCH_COLD"] = str(folder)
        launcher = [sys.executable, str(measure.PROGRAMS / "launch.py"), case.framework, str(case.workers)]
        command = [*launcher, sys.executable, *task]
    else:
        more["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={case.workers}", "--max-restarts=100", *task]
    return measure.spawn(command, folder, measure.environment(case.workers, more))


def _wait_for_steps(stamps: Path, case: Case, old: frozenset[int], limit: float, side: str) -> dict[int, int]:
    pids: dict[int, int] = measure.wait_until(lambda: _settled(stamps, case, old), limit, f"steps under {side}")
    return pids


def _settled(path: Path, case: Case, old: frozenset[int]) -> dict[int, int] | None:
    """rank -> PID, once every worker has done some steps in a process that is not in `old`."""
    counts: dict[tuple[int, int], int] = {}
    for stamp in measure.stamps(path):
        if stamp.pid not in old:
            counts[stamp.rank, stamp.pid] = counts.get((stamp.rank, stamp.pid), 0) + 1
    settled = {rank: pid for (rank, pid), count in counts.items() if count >= SETTLED}
    return settled if len(settled) == case.workers else None


def _wait_for_spares(launcher: int, case: Case, workers: frozenset[int]) -> None:
    """Wait until every agent has a spare that has finished its imports: it uses no more CPU time. With a GPU, wait for
    a standby, too; there may be none.
    """
    spent: dict[int, tuple[float, float]] = {}  # PID -> CPU seconds, and since when they have not changed

    def spares() -> list[int]:
        others = set(measure.descendants(launcher)) - workers
        return [pid for pid in others if b"PACELINE_STARTER=spare" in measure.environment_of(pid)]

    def idle() -> bool:
        ready = 0
        for pid in spares():
            used, at = measure.cpu_seconds(pid), time.monotonic()
            if pid not in spent or spent[pid][0] != used:
                spent[pid] = used, at
            ready += used > 0.1 and at - spent[pid][1] > IDLE
        return ready >= case.workers

    measure.wait_until(idle, START_LIMIT, f"{case.workers} spares", every=0.1)
    deadline = time.monotonic() + CONTEXT_LIMIT
    while case.gpu and time.monotonic() < deadline and not any(CUDA_FILE in measure.open_files(p) for p in spares()):
        time.sleep(0.1)
    time.sleep(IDLE if case.gpu else 0.0)


def _wait_for_save(folder: Path, path: Path, workers: dict[int, int], side: str) -> None:
    """Wait until a state is saved, and every worker has done some steps since the next save began."""

    def is_saved() -> bool:
        if side != "paceline":
            return (folder / CHECKPOINTS[side] / NEWEST.get(side, "")).exists()
        events = "".join(file.read_text() for file in folder.glob("home/runs/*/events.jsonl"))
        generation = max((event["generation"] for event in map(json.loads, events.splitlines())), default=0)
        return f'"event": "saved", "generation": {generation}' in events

    measure.wait_until(is_saved, START_LIMIT, f"a save under {side}", every=0.1)
    begin = max(stamp.step for stamp in measure.stamps(path))
    target = (begin // EVERY + 1) * EVERY + AFTER_SAVE

    def reached() -> bool:
        done = {stamp.pid for stamp in measure.stamps(path) if stamp.step >= target}
        return done >= set(workers.values())

    measure.wait_until(reached, START_LIMIT, f"steps after a save under {side}", every=0.1)


def _kill(pid: int, old: frozenset[int], path: Path, case: Case, side: str) -> float:
    def next_steps() -> list[Stamp] | None:
        first = measure.first_steps(measure.stamps(path), excluded=old)
        return list(first.values()) if len(first) == case.workers else None

    before = measure.now()
    os.kill(pid, signal.SIGKILL)
    stepped: list[Stamp] = measure.wait_until(next_steps, case.restart_limit, f"the next step under {side}")
    return max(stamp.at for stamp in stepped) - before


def _warm_starts(folder: Path) -> list[bool]:
    events = [json.loads(line) for path in folder.glob("home/runs/*/events.jsonl") for line in path.open()]
    return [event["warm"] for event in events if event["event"] == "task-started" and event["generation"] > 1]


def _show_stages(folder: Path) -> None:
    for path in folder.glob("home/runs/*/events.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] == "start-times":
                measure.progress(f"    {json.dumps(event)}")


def _gpu_name() -> str | None:
    try:
        output = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return output.splitlines()[0].partition(" (")[0] if output else None


if __name__ == "__main__":
    main()
