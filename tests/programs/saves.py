"""Trains nothing and saves all the more: snapshots whose contents it checks when it goes on from one.

It does the step whose number is in the file `step` of its folder, saves it, and waits for the next; with --every it
does steps by itself, and saves each of them; while there is a file `pause`, it does none, and says where it is in
`paused`. It ends when there is a file `finish` and nothing else to do.
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import paceline
from paceline.runtime import contract


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=float, metavar="S", help="seconds a step")
    parser.add_argument("--size", type=int, default=1000, help="bytes of a snapshot, or of a part")
    parser.add_argument("--parts", type=int, default=1, help="how many ranks save a part; 1: rank 0 saves all of it")
    parser.add_argument("--losses", type=float, nargs="*", default=[], help="a metric of the first snapshots")
    parser.add_argument("--follow", action="store_true", help="an evaluator follows, each time it is let")
    parser.add_argument("--stop-in", type=int, metavar="STEP", help="wait half way through this snapshot, once")
    given = parser.parse_args()
    role, rank = os.environ["PACELINE_ROLE"], int(os.environ["PACELINE_RANK"])
    if role == "evaluator":
        (follow if given.follow else evaluate)(given.folder)
        return
    folder = contract.restored()
    step = begun = check(folder, given.parts) if folder else 0
    print(f"start {step}", flush=True)
    note(given.folder / f"start-{rank}", step)
    while True:
        over = (given.folder / "finish").exists()
        wanted = target(given, step)
        if wanted == step:
            if over:
                break
            time.sleep(0.005)
            continue
        step = wanted
        if rank < given.parts:
            written = contract.Background()
            written.start(step, lambda step=step: save(given, step, rank, given.losses[:1]))
            while written.busy():  # whether it could be written or not
                time.sleep(0.001)
            given.losses[:] = given.losses[1:]
        paceline.report(step=step)
        note(given.folder / f"done-{rank}", step)
    print(f"done {begun} to {step}", flush=True)


def target(given: argparse.Namespace, step: int) -> int:
    if given.every is not None:
        if (given.folder / "finish").exists():
            return step
        if (given.folder / "pause").exists():
            if os.environ["PACELINE_RANK"] == "0":
                note(given.folder / "paused", step)
            return step
        time.sleep(given.every)
        return step + 1
    try:
        return max(step, int((given.folder / "step").read_text()))
    except FileNotFoundError:
        return step


def save(given: argparse.Namespace, step: int, rank: int, losses: list[float]) -> None:
    data = f"{step} of {rank}\n".encode()
    data = (data * (given.size // len(data) + 1))[: given.size]
    metrics = {"loss": losses[0]} if losses else {}
    with contract.writing(step, given.parts, metrics) as folder:
        (folder / f"weights-{rank}").write_bytes(data[: given.size // 2])
        if step == given.stop_in and not (given.folder / "half").exists():
            (given.folder / "half").touch()
            time.sleep(10**6)
        (folder / f"weights-{rank}").write_bytes(data)
        (folder / f"sum-{rank}").write_text(f"{step} {hashlib.sha256(data).hexdigest()}")


def check(folder: Path, parts: int) -> int:
    """Its step; a folder that is not whole is the end of this program."""
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
    """Says which snapshots it has seen, until it has seen the last one, whose number is in `last`."""
    committed, seen = Path(os.environ["PACELINE_COMMITTED_DIR"]), set()
    while True:
        for folder in sorted(committed.glob("step-*")):
            if folder.name not in seen:
                seen.add(folder.name)
                print(f"seen {check(folder, 1)}", flush=True)
        if (state / "last").exists() and f"step-{(state / 'last').read_text()}" in seen:
            return
        time.sleep(0.01)


def follow(state: Path) -> None:
    """Says of each snapshot when it begins and when it is done with it, once there is a file `go` or `go-<step>`. That
    of step 20 is the best."""
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
