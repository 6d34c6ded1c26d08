"""The command line's own time: --help, and the plan of 8 and of 1,000 tasks, against TorchX."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import measure

TORCHX = "torchx==0.7.0"
SIZES = (8, 1000)
GOALS = {"help": 0.15, "plan 1000": 1.0}


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-torchx", action="store_true", help="Paceline's own figures alone")
    given = parser.parse_args()
    where = measure.machine("pydantic", "typer")
    measure.say("Wall time of one command, started fresh each time, files in the page cache. Interleaved.")
    measure.say("torchx: `run --dryrun -s local_cwd dist.ddp -j Nx1`, in an environment of its own.")
    measure.say(f"On: {where}")
    with measure.workspace() as folder:
        torchx = None if given.no_torchx else _torchx()
        where["torchx"] = TORCHX.partition("==")[2] if torchx else None
        measure.say(f"torchx: {TORCHX}\n" if torchx else "torchx: not measured\n")
        commands = _commands(folder, torchx)
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in commands}
        for number in range(given.rounds + 1):
            for key, command in commands.items():
                took = _once(folder, command)
                if number:  # the first fills the page cache and writes byte code
                    taken[key].append(took)
    rows, results = [], {}
    for what in ("help", *(f"plan {size}" for size in SIZES)):
        ours, theirs = taken["paceline", what], taken.get(("torchx", what), [])
        goal, middle, peer = GOALS.get(what), measure.median(ours), measure.median(theirs)
        assert middle is not None
        faster = peer is None or what != "help" or middle < peer
        results[what] = {
            "paceline_s": middle, "torchx_s": peer, "ratio": measure.ratio(middle, peer), "goal_s": goal,
            "reached": None if goal is None else middle <= goal and faster,
        }  # fmt: skip
        shown = "-" if goal is None else f"{goal:g} s"
        rows.append([what, measure.seconds(middle), measure.spread(ours), measure.seconds(peer), measure.spread(theirs),
                     str(measure.ratio(middle, peer)), shown])  # fmt: skip
    measure.table(["command", "paceline", "(range)", "torchx", "(range)", "ratio", "at most"], rows)
    measure.finish({"bench": "cli", "machine": where, "rounds": given.rounds, "results": results})


def _commands(folder: Path, torchx: Path | None) -> dict[tuple[str, str], list[str]]:
    script = Path(sys.executable).with_name("paceline")
    paceline = [str(script)] if script.exists() else measure.PACELINE
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


def _once(folder: Path, command: list[str]) -> float:
    before = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=measure.environment(1), capture_output=True, text=True, check=False)
    took = time.perf_counter() - before
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return took


def _torchx() -> Path | None:
    """TorchX in an environment that is thrown away with the cache folder: its pins are not ours."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline-bench" / TORCHX
    program = cache / "bin" / "torchx"
    if program.exists():
        return program
    bundled = measure.ROOT / ".tools" / "bin" / "uv"
    uv = str(bundled) if bundled.exists() else shutil.which("uv")
    if uv is None:
        measure.say("torchx cannot be installed: there is no uv")
        return None
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(cache)],
        [uv, "pip", "install", "--quiet", "--python", str(cache / "bin" / "python"), TORCHX],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(cache, ignore_errors=True)
            measure.say(f"torchx cannot be installed: {done.stderr.strip()[-500:]}")
            return None
    return program


if __name__ == "__main__":
    main()
