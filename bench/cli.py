"""Wall time of the command line: --help, and the plan of 8 and of 1,000 tasks, compared with TorchX; the list of 200
runs, and the status of a run with 64 tasks, that have lasted for four weeks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import measure
from long_runs import long_runs

TORCHX = "torchx==0.7.0"
SIZES = (8, 1000)
LISTED, LIVE, LISTED_WORKERS, WORKERS = 200, 2, 8, 64
LS, STATUS = f"ls {LISTED}", f"status {WORKERS}"
GOALS = {"help": 0.15, "plan 1000": 1.0, LS: 0.5, STATUS: 0.3}


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-torchx", action="store_true", help="measure only Paceline")
    args = parser.parse_args()
    machine_info = measure.machine("pydantic", "typer")
    measure.say("Wall time of one command in a new process, files in the page cache. Interleaved.")
    measure.say("torchx: `run --dryrun -s local_cwd dist.ddp -j Nx1`, in its own environment.")
    measure.say(f"On: {machine_info}")
    measure.say(
        f"ls: {LISTED} runs of {LISTED_WORKERS} tasks, {LIVE} of them live. status: a live run of {WORKERS} tasks."
    )
    with measure.workspace() as folder, ExitStack() as runs:
        torchx = None if args.no_torchx else _torchx()
        machine_info["torchx"] = TORCHX.partition("==")[2] if torchx else None
        measure.say(f"torchx: {TORCHX}\n" if torchx else "torchx: not measured\n")
        commands = _commands(folder, torchx)
        runs.enter_context(long_runs(folder / LS, LISTED, LIVE, LISTED_WORKERS))
        runs.enter_context(long_runs(folder / STATUS, 1, 1, WORKERS))
        commands["paceline", LS] = [*_paceline(), "ls"]
        commands["paceline", STATUS] = [*_paceline(), "status"]
        times: dict[tuple[str, str], list[float]] = {key: [] for key in commands}
        for number in range(args.rounds + 1):
            for key, command in commands.items():
                duration = _once(folder, command, folder / key[1])
                if number:  # the first round fills the page cache and writes byte code
                    times[key].append(duration)
    rows, results = [], {}
    for name in ("help", *(f"plan {size}" for size in SIZES), LS, STATUS):
        ours, theirs = times["paceline", name], times.get(("torchx", name), [])
        goal, our_median, their_median = GOALS.get(name), measure.median(ours), measure.median(theirs)
        assert our_median is not None
        faster = their_median is None or name != "help" or our_median < their_median
        results[name] = {
            "paceline_s": our_median, "torchx_s": their_median, "ratio": measure.ratio(our_median, their_median),
            "goal_s": goal, "reached": None if goal is None else our_median <= goal and faster,
        }  # fmt: skip
        limit = "-" if goal is None else f"{goal:g} s"
        rows.append([name, measure.seconds(our_median), measure.spread(ours), measure.seconds(their_median),
                     measure.spread(theirs), str(measure.ratio(our_median, their_median)), limit])  # fmt: skip
    measure.table(["command", "paceline", "(range)", "torchx", "(range)", "ratio", "at most"], rows)
    measure.finish({"bench": "cli", "machine": machine_info, "rounds": args.rounds, "results": results})


def _paceline() -> list[str]:
    script = Path(sys.executable).with_name("paceline")
    return [str(script)] if script.exists() else measure.PACELINE


def _commands(folder: Path, torchx: Path | None) -> dict[tuple[str, str], list[str]]:
    paceline = _paceline()
    (folder / "train.py").write_text("print('training')\n")
    commands = {("paceline", "help"): [*paceline, "--help"]}
    if torchx is not None:
        commands["torchx", "help"] = [str(torchx), "--help"]
    for size in SIZES:
        (folder / str(size)).mkdir()
        job = measure.write_job(folder / str(size), "torch", ["python", "train.py"], size, code=folder)
        commands["paceline", f"plan {size}"] = [*paceline, "plan", str(job)]
        if torchx is not None:
            component = ["dist.ddp", "-j", f"{size}x1", "--script", "train.py"]
            commands["torchx", f"plan {size}"] = [str(torchx), "run", "--dryrun", "-s", "local_cwd", *component]
    return commands


def _once(folder: Path, command: list[str], home: Path) -> float:
    """`home`: with the runs of this command, if it needs some."""
    environment = measure.environment(1, {"PACELINE_HOME": str(home)})
    before = time.perf_counter()
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    duration = time.perf_counter() - before
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return duration


def _torchx() -> Path | None:
    """TorchX in its own environment in the cache folder, because its dependencies differ from ours."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline-bench" / TORCHX
    program = cache / "bin" / "torchx"
    if program.exists():
        return program
    bundled = measure.ROOT / ".tools" / "bin" / "uv"
    uv = str(bundled) if bundled.exists() else shutil.which("uv")
    if uv is None:
        measure.say("torchx cannot be installed: uv was not found")
        return None
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(cache)],
        [uv, "pip", "install", "--quiet", "--python", str(cache / "bin" / "python"), TORCHX],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            shutil.rmtree(cache, ignore_errors=True)
            measure.say(f"torchx cannot be installed: {result.stderr.strip()[-500:]}")
            return None
    return program


if __name__ == "__main__":
    main()
