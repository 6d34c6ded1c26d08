"""How long a snapshot delays training: Paceline's helpers, compared with a synchronous save and with the framework's
own asynchronous save, in separate processes, interleaved."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import measure

PROGRAM = measure.PROGRAMS / "stall.py"
METHODS = ("paceline", "sync", "async")
PEERS = {
    "torch": {"sync": "torch.save", "async": "torch.distributed.checkpoint.async_save"},
    "tensorflow": {"sync": "Checkpoint.save", "async": "Checkpoint.save with enable_async_checkpoint"},
}
GOAL, GOAL_GPU_S = 0.1, 0.1
LIMIT = 300.0


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--framework", choices=[*PEERS], action="append", help="both if omitted")
    parser.add_argument("--mib", type=int, action="append", help="MiB of state; 200 and 1024 if omitted")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind")
    parser.add_argument("--saves", type=int, default=4, help="saves counted in each process")
    parser.add_argument("--gpu", action="store_true", help="only torch, 4 GiB on a GPU")
    args = parser.parse_args()
    frameworks = ["torch"] if args.gpu else args.framework or [*PEERS]
    sizes = args.mib or ([4096] if args.gpu else [200, 1024])
    machine_info = measure.machine("tensorflow-cpu", "torch")
    measure.say("Time by which a snapshot delays training: the call, and the additional time of the next step.")
    measure.say(f"On: {machine_info}\n")
    results: dict[str, dict[str, float]] = {}
    with measure.workspace() as folder:
        for framework in frameworks:
            for mib in sizes:
                delays: dict[str, list[float]] = {method: [] for method in METHODS}
                for number in range(args.rounds):
                    for method in METHODS if number % 2 == 0 else METHODS[::-1]:
                        delays[method] += _session(folder, framework, method, mib, args.saves, args.gpu)
                        measure.progress(f"{framework}, {mib} MiB, {method}: {1000 * delays[method][-1]:.1f} ms")
                results[f"{framework} {mib} MiB"] = _report(framework, mib, delays, args.gpu)
    print(json.dumps({"bench": "snapshot_stall", "gpu": args.gpu, "machine": machine_info, "delay_s": results}))


def _session(folder: Path, framework: str, method: str, mib: int, saves: int, gpu: bool) -> list[float]:
    more = {"STALL_FOLDER": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3", **({"CUDA_VISIBLE_DEVICES": "0"} if gpu else {})}
    command = [sys.executable, str(PROGRAM), framework, method, "--mib", str(mib), "--saves", str(saves)]
    result = subprocess.run(
        [*command, *(["--gpu"] if gpu else [])], capture_output=True, text=True, timeout=LIMIT, check=False,
        env=measure.environment(1, more),
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(f"{framework} {method} failed:\n{result.stderr[-2000:]}")
    delays: list[float] = json.loads(result.stdout.splitlines()[-1])["delays"]
    return delays


def _report(framework: str, mib: int, delays: dict[str, list[float]], gpu: bool) -> dict[str, float]:
    medians = {method: statistics.median(times) for method, times in delays.items()}
    measure.say(f"{framework}, {mib} MiB{' from a GPU' if gpu else ''}")
    for method in METHODS:
        times, name = delays[method], {"paceline": "Paceline", **PEERS[framework]}[method]
        ratio = f"{medians['paceline'] / medians[method]:.3f}" if method != "paceline" else ""
        spread = f"({1000 * min(times):.1f} .. {1000 * max(times):.1f})"
        measure.say(f"  {name:48} {1000 * medians[method]:9.1f} ms {spread:22} {ratio}")
    measure.say(f"  at most {GOAL} of the synchronous save, and not more than the asynchronous one")
    if gpu:
        measure.say(f"  and at most {1000 * GOAL_GPU_S:g} ms")
    return {method: round(value, 5) for method, value in medians.items()}


if __name__ == "__main__":
    main()
