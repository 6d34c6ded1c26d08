"""Keeps its checkpoints in its own folder and does not use Paceline: one file for each rank that saves, overwritten in
place, piece by piece. It exits with an error if it loads an incomplete file.

It does the step whose number is in the file `step` of another folder, saves it, and waits for the next; with --every it
does steps on its own. It ends when the file `finish` exists and nothing is left to do. A file `fail-<rank>` makes it
fail immediately, or in the middle of its next save, as that file says.
"""

import argparse
import hashlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PIECES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=float, metavar="S", help="seconds a step")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="between two pieces of a file")
    parser.add_argument("--savers", type=int, default=1, help="how many ranks save a file")
    parser.add_argument("--on-sigterm", action="store_true", help="save once more on SIGTERM, and end well")
    options = parser.parse_args()
    rank = int(os.environ["PACELINE_RANK"])
    step = load(options)
    together(options, rank)
    print(f"start {step}", flush=True)
    terminated: list[int] = []
    failure = ""
    if options.on_sigterm:
        signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    while True:
        last = bool(terminated)
        next_step = step + 1 if last else target(options, step)
        failure = failure or order(options, rank)  # read after the step: tests write the order before the step
        if failure and not failure.endswith("while it writes"):
            fail(failure, options.folder)
        if next_step != step:
            step = next_step
            if rank < options.savers:
                save(options, rank, step, failure)
            print(f"step {step}", flush=True)
        elif (options.orders / "finish").exists():
            break
        if last:
            break
        time.sleep(0.005)
    print("done", flush=True)


def target(options: argparse.Namespace, step: int) -> int:
    if options.every is not None and not (options.orders / "finish").exists():
        time.sleep(options.every)
        return step + 1
    try:
        return max(step, int((options.orders / "step").read_text()))
    except FileNotFoundError:
        return step


def save(options: argparse.Namespace, rank: int, step: int, failure: str) -> None:
    body = f"{step} of {rank}\n".encode() * 1000
    data = f"{step} {hashlib.sha256(body).hexdigest()}\n".encode() + body
    options.folder.mkdir(exist_ok=True)
    with (options.folder / f"state-{rank}").open("wb", buffering=0) as file:
        # Otherwise, files of two steps would be at rest while a rank is slow.
        all_have(options, f"opened-{step}", rank, options.savers)
        for piece in range(PIECES):
            file.write(data[piece * len(data) // PIECES : (piece + 1) * len(data) // PIECES])
            if failure and piece == PIECES // 2:
                fail(failure.removesuffix(" while it writes"), options.folder)
            time.sleep(options.pause)


def load(options: argparse.Namespace) -> int:
    if not options.folder.exists():
        return 0
    steps = set()
    for rank in range(options.savers):
        head, _, body = (options.folder / f"state-{rank}").read_bytes().partition(b"\n")
        step, _, digest = head.decode().partition(" ")
        if hashlib.sha256(body).hexdigest() != digest:
            sys.exit("half of a file was put back")
        steps.add(int(step))
    if len(steps) != 1:
        sys.exit(f"files of several steps were put back: {steps}")
    return steps.pop()


def together(options: argparse.Namespace, rank: int) -> None:
    """Waits until all ranks have loaded their files, so that none writes before."""
    all_have(options, "loaded", rank, int(os.environ["PACELINE_WORLD_SIZE"]))


def all_have(options: argparse.Namespace, done: str, rank: int, ranks: int) -> None:
    """Waits until so many ranks have come this far, in this generation."""
    name = f"{done}-{os.environ['PACELINE_GENERATION']}"
    (options.orders / f"{name}-{rank}").touch()
    while not all((options.orders / f"{name}-{other}").exists() for other in range(ranks)):
        time.sleep(0.005)


def order(options: argparse.Namespace, rank: int) -> str:
    """The order to fail, if there is one; it is carried out once."""
    try:
        (options.orders / f"fail-{rank}").rename(options.orders / f"failed-{rank}")
    except FileNotFoundError:
        return ""
    return (options.orders / f"failed-{rank}").read_text()


def fail(how: str, folder: Path) -> None:
    if how == "hang":
        print("hangs", flush=True)
        time.sleep(10**6)
    if how == "lose":
        shutil.rmtree(folder)  # as if the machine were lost
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
