"""How long training is held by a snapshot: Paceline's helpers against a synchronous save and the framework's own
asynchronous one, in processes of their own, interleaved."""

from __future__ import annotations

import itertools
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

Times = dict[str, list[float]]  # in seconds, one for each save


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=[*PEERS], action="append", help="unless given, both")
    parser.add_argument("--mib", type=int, action="append", help="of state; unless given, 200 and 1024")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind")
    parser.add_argument("--saves", type=int, default=4, help="that are counted in each process")
    parser.add_argument("--spare", type=int, action="append", help="cores that torch leaves; unless given, 0 and 1")
    parser.add_argument("--gpu", action="store_true", help="torch alone, 4 GiB on a GPU")
    given = parser.parse_args()
    frameworks = ["torch"] if given.gpu else given.framework or [*PEERS]
    sizes = given.mib or ([4096] if given.gpu else [200, 1024])
    where = measure.machine("tensorflow-cpu", "torch")
    measure.say(
        "Time that training is held by a snapshot: by the call, and before values change; and by how much it is slowed."
    )
    measure.say(f"On: {where}\n")
    found: dict[str, dict[str, float]] = {}
    with measure.workspace() as folder:
        for framework in frameworks:
            spares = given.spare or [0, 1] if framework == "torch" and not given.gpu else [0]
            for mib, spare in itertools.product(sizes, spares):
                held: dict[str, list[float]] = {how: [] for how in HOWS}
                slowed: dict[str, list[float]] = {how: [] for how in HOWS}
                for number in range(given.rounds):
                    for how in HOWS if number % 2 == 0 else HOWS[::-1]:
                        times = _session(folder, framework, how, mib, given.saves, given.gpu, spare)
                        held[how] += times["held"]
                        slowed[how] += times["slowed"]
                        measure.progress(f"{framework}, {mib} MiB, {how}: {1000 * held[how][-1]:.1f} ms")
                where_from = " from a GPU" if given.gpu else f", {spare} cores left" if len(spares) > 1 else ""
                name = f"{framework}, {mib} MiB{where_from}"
                found[name] = _report(framework, name, held, slowed, given.gpu)
    print(json.dumps({"bench": "snapshot_stall", "gpu": given.gpu, "machine": where, "held_s": found}))


def _session(folder: Path, framework: str, how: str, mib: int, saves: int, gpu: bool, spare: int) -> Times:
    more = {"STALL_FOLDER": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", **({"CUDA_VISIBLE_DEVICES": "0"} if gpu else {})}
    if spare:
        more["OMP_NUM_THREADS"] = str(measure.cores() - spare)
    words = [sys.executable, str(PROGRAM), framework, how, "--mib", str(mib), "--saves", str(saves)]
    done = subprocess.run(
        [*words, *(["--gpu"] if gpu else [])], capture_output=True, text=True, timeout=LIMIT, check=False,
        env=measure.environment(1, more),
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{framework} {how} failed:\n{done.stderr[-2000:]}")
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def _report(framework: str, name: str, held: Times, slowed: Times, gpu: bool) -> dict[str, float]:
    medians = {how: statistics.median(times) for how, times in held.items()}
    measure.say(name)
    for how in HOWS:
        times, side = held[how], {"paceline": "Paceline", **PEERS[framework]}[how]
        ratio = f"{medians['paceline'] / medians[how]:.3f}" if how != "paceline" else ""
        spread = f"({1000 * min(times):.1f} .. {1000 * max(times):.1f})"
        whole = f"slowed {1000 * statistics.median(slowed[how]):.1f} ms"
        measure.say(f"  {side:48} {1000 * medians[how]:9.1f} ms {spread:22} {ratio:6} {whole}")
    measure.say(f"  must reach {GOAL} of the synchronous one, and not be above the asynchronous one")
    if gpu:
        measure.say(f"  and {1000 * GOAL_GPU_S:g} ms")
    return {how: round(value, 5) for how, value in medians.items()}


if __name__ == "__main__":
    main()
