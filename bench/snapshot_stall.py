"""How long training is held by a snapshot: Paceline's helpers against a synchronous save and the framework's own
asynchronous one, in processes of their own, interleaved."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import measure

PROGRAM = measure.PROGRAMS / "stall.py"
HOWS = ("paceline", "sync", "async")
PEERS = {
    "torch": {"sync": "torch.save", "async": "torch.distributed.checkpoint.async_save"},
    "tensorflow": {"sync": "Checkpoint.save", "async": "Checkpoint.save with enable_async_checkpoint"},
}
GOAL, GOAL_GPU_S = 0.1, 0.1
LIMIT = 300.0


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=[*PEERS], action="append", help="unless given, both")
    parser.add_argument("--mib", type=int, action="append", help="of state; unless given, 200 and 1024")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind")
    parser.add_argument("--saves", type=int, default=4, help="that are counted in each process")
    parser.add_argument("--gpu", action="store_true", help="torch alone, 4 GiB on a GPU")
    given = parser.parse_args()
    frameworks = ["torch"] if given.gpu else given.framework or [*PEERS]
    sizes = given.mib or ([4096] if given.gpu else [200, 1024])
    where = measure.machine("tensorflow-cpu", "torch")
    measure.say(
        "Time that training is held by a snapshot: the call, and what the step after it takes more than others."
    )
    measure.say(f"On: {where}\n")
    found: dict[str, dict[str, float]] = {}
    with measure.workspace() as folder:
        for framework in frameworks:
            for mib in sizes:
                held: dict[str, list[float]] = {how: [] for how in HOWS}
                for number in range(given.rounds):
                    for how in HOWS if number % 2 == 0 else HOWS[::-1]:
                        held[how] += _session(folder, framework, how, mib, given.saves, given.gpu)
                        measure.progress(f"{framework}, {mib} MiB, {how}: {1000 * held[how][-1]:.1f} ms")
                found[f"{framework} {mib} MiB"] = _report(framework, mib, held, given.gpu)
    print(json.dumps({"bench": "snapshot_stall", "gpu": given.gpu, "machine": where, "held_s": found}))


def _session(folder: Path, framework: str, how: str, mib: int, saves: int, gpu: bool) -> list[float]:
    more = {"STALL_FOLDER": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", **({"CUDA_VISIBLE_DEVICES": "0"} if gpu else {})}
    words = [sys.executable, str(PROGRAM), framework, how, "--mib", str(mib), "--saves", str(saves)]
    done = subprocess.run(
        [*words, *(["--gpu"] if gpu else [])], capture_output=True, text=True, timeout=LIMIT, check=False,
        env=measure.environment(1, more),
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{framework} {how} failed:\n{done.stderr[-2000:]}")
    held: list[float] = json.loads(done.stdout.splitlines()[-1])["held"]
    return held


def _report(framework: str, mib: int, held: dict[str, list[float]], gpu: bool) -> dict[str, float]:
    medians = {how: statistics.median(times) for how, times in held.items()}
    measure.say(f"{framework}, {mib} MiB{' from a GPU' if gpu else ''}")
    for how in HOWS:
        times, name = held[how], {"paceline": "Paceline", **PEERS[framework]}[how]
        ratio = f"{medians['paceline'] / medians[how]:.3f}" if how != "paceline" else ""
        spread = f"({1000 * min(times):.1f} .. {1000 * max(times):.1f})"
        measure.say(f"  {name:48} {1000 * medians[how]:9.1f} ms {spread:22} {ratio}")
    measure.say(f"  must reach {GOAL} of the synchronous one, and not be above the asynchronous one")
    if gpu:
        measure.say(f"  and {1000 * GOAL_GPU_S:g} ms")
    return {how: round(value, 5) for how, value in medians.items()}


if __name__ == "__main__":
    main()
