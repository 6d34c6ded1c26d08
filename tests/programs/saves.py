"""Saves snapshots without training, and checks their contents when it resumes from one.

It does the step whose number is in the file `step` of its folder, saves it, and waits for the next; with --every it
does steps on its own, and saves each of them. While a file `pause` exists, it does no steps and writes its step to
`paused`. It ends when the file `finish` exists and nothing is left to do.
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import paceline
from paceline.runtime import snapshot_folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=float, metavar="S", help="seconds a step")
    parser.add_argument("--size", type=int, default=1000, help="bytes of a snapshot, or of a part")
    parser.add_argument("--parts", type=int, default=1, help="how many ranks save a part; 1: rank 0 saves all of it")
    parser.add_argument("--losses", type=float, nargs="*", default=[], help="a metric of the first snapshots")
    parser.add_argument(
        "--follow", action="store_true", help="the evaluator follows snapshots, each when a file allows it"
    )
    parser.add_argument("--stop-in", type=int, metavar="STEP", help="wait half way through this snapshot, once")
    options = parser.parse_args()
    role, rank = os.environ["PACELINE_ROLE"], int(os.environ["PACELINE_RANK"])
    if role == "evaluator":
        (follow if options.follow else evaluate)(options.folder)
        return
    folder = snapshot_folders.restored()
    step = first = check(folder, options.parts) if folder else 0
    print(f"start {step}", flush=True)
    note(options.folder / f"start-{rank}", step)
    while True:
        over = (options.folder / "finish").exists()
        next_step = target(options, step)
        if next_step == step:
            if over:
                break
            time.sleep(0.005)
            continue
        step = next_step
        if rank < options.parts:
            background = snapshot_folders.Background()
            background.start(step, lambda step=step: save(options, step, rank, options.losses[:1]))
            while background.busy():  # until it has been written, or has failed
                time.sleep(0.001)
            options.losses[:] = options.losses[1:]
        paceline.report(step=step)
        note(options.folder / f"done-{rank}", step)
    print(f"done {first} to {step}", flush=True)


def target(options: argparse.Namespace, step: int) -> int:
    if options.every is not None:
        if (options.folder / "finish").exists():
            return step
        if (options.folder / "pause").exists():
            if os.environ["PACELINE_RANK"] == "0":
                note(options.folder / "paused", step)
            return step
        time.sleep(options.every)
        return step + 1
    try:
        return max(step, int((options.folder / "step").read_text()))
    except FileNotFoundError:
        return step


def save(options: argparse.Namespace, step: int, rank: int, losses: list[float]) -> None:
    data = f"{step} of {rank}\n".encode()
    data = (data * (options.size // len(data) + 1))[: options.size]
    metrics = {"loss": losses[0]} if losses else {}
    with snapshot_folders.writing(step, options.parts, metrics) as folder:
        (folder / f"weights-{rank}").write_bytes(data[: options.size // 2])
        if step == options.stop_in and not (options.folder / "half").exists():
            (options.folder / "half").touch()
            time.sleep(10**6)
        (folder / f"weights-{rank}").write_bytes(data)
        (folder / f"sum-{rank}").write_text(f"{step} {hashlib.sha256(data).hexdigest()}")


def check(folder: Path, parts: int) -> int:
    """The step of a snapshot; exits with an error if the snapshot is incomplete."""
    steps = set()
    for rank in range(parts):
        step, digest = (folder / f"sum-{rank}").read_text().split()
        if hashlib.sha256((folder / f"weights-{rank}").read_bytes()).hexdigest() != digest:
            sys.exit(f"half-loaded: {folder}")
        steps.add(int(step))
    if len(steps) != 1:
        sys.exit(f"parts of several snapshots: {folder}")
    return steps.pop()


def evaluate(state: Path) -> None:
    """Prints each snapshot it has seen, until it has seen the last one, whose step is in `last`."""
    committed, checked = Path(os.environ["PACELINE_COMMITTED_DIR"]), set()
    while True:
        for folder in sorted(committed.glob("step-*")):
            if folder.name not in checked:
                checked.add(folder.name)
                print(f"seen {check(folder, 1)}", flush=True)
        if (state / "last").exists() and f"step-{(state / 'last').read_text()}" in checked:
            return
        time.sleep(0.01)


def follow(state: Path) -> None:
    """Prints when it begins and ends the evaluation of each snapshot; it ends once a file `go` or `go-<step>` exists.
    The snapshot of step 20 is the best."""
    for snapshot in paceline.snapshots.follow():
        print(f"begins {snapshot.step}", flush=True)
        while not any((state / name).exists() for name in ("go", f"go-{snapshot.step}")):
            time.sleep(0.01)
        if check(snapshot.path, 1) != snapshot.step or os.environ["PACELINE_RESTORE"] != str(snapshot.path):
            sys.exit(f"not the snapshot of step {snapshot.step}: {snapshot.path}")
        snapshot.report(accuracy=1 / (1 + abs(snapshot.step - 20)))
        print(f"evaluated {snapshot.step}", flush=True)
    print("no more", flush=True)


def note(path: Path, step: int) -> None:
    path.with_suffix(".partial").write_text(str(step))
    path.with_suffix(".partial").replace(path)


if __name__ == "__main__":
    main()
