"""Keeps its checkpoints in a folder of its own and knows nothing of Paceline: one file of each rank that has something
to save, written anew in place, piece by piece. A file that is not whole is the end of it.

It does the step whose number is in the file `step` of another folder, saves it, and waits for the next; with --every it
does steps by itself. It ends when there is a file `finish` and nothing else to do. A file `fail-<rank>` has it fail at
once, or in the middle of its next save, as that file says.
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
    given = parser.parse_args()
    rank = int(os.environ["PACELINE_RANK"])
    step = load(given)
    together(given, rank)
    print(f"start {step}", flush=True)
    terminated: list[int] = []
    failure = ""
    if given.on_sigterm:
        signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    while True:
        last = bool(terminated)
        wanted = step + 1 if last else target(given, step)
        failure = failure or order(given, rank)  # after the step, which comes later: whoever sees that one sees both
        if failure and not failure.endswith("while it writes"):
            fail(failure, given.folder)
        if wanted != step:
            step = wanted
            if rank < given.savers:
                save(given, rank, step, failure)
            print(f"step {step}", flush=True)
        elif (given.orders / "finish").exists():
            break
        if last:
            break
        time.sleep(0.005)
    print("done", flush=True)


def target(given: argparse.Namespace, step: int) -> int:
    if given.every is not None and not (given.orders / "finish").exists():
        time.sleep(given.every)
        return step + 1
    try:
        return max(step, int((given.orders / "step").read_text()))
    except FileNotFoundError:
        return step


def save(given: argparse.Namespace, rank: int, step: int, failure: str) -> None:
    body = f"{step} of {rank}\n".encode() * 1000
    data = f"{step} {hashlib.sha256(body).hexdigest()}\n".encode() + body
    given.folder.mkdir(exist_ok=True)
    with (given.folder / f"state-{rank}").open("wb", buffering=0) as file:
        for piece in range(PIECES):
            file.write(data[piece * len(data) // PIECES : (piece + 1) * len(data) // PIECES])
            if failure and piece == PIECES // 2:
                fail(failure.removesuffix(" while it writes"), given.folder)
            time.sleep(given.pause)


def load(given: argparse.Namespace) -> int:
    if not given.folder.exists():
        return 0
    steps = set()
    for rank in range(given.savers):
        head, _, body = (given.folder / f"state-{rank}").read_bytes().partition(b"\n")
        step, _, digest = head.decode().partition(" ")
        if hashlib.sha256(body).hexdigest() != digest:
            sys.exit("half of a file was put back")
        steps.add(int(step))
    if len(steps) != 1:
        sys.exit(f"files of several steps were put back: {steps}")
    return steps.pop()


def together(given: argparse.Namespace, rank: int) -> None:
    """All ranks have loaded what there is, and nobody has written yet."""
    generation, world = os.environ["PACELINE_GENERATION"], int(os.environ["PACELINE_WORLD_SIZE"])
    (given.orders / f"loaded-{generation}-{rank}").touch()
    while not all((given.orders / f"loaded-{generation}-{each}").exists() for each in range(world)):
        time.sleep(0.005)


def order(given: argparse.Namespace, rank: int) -> str:
    """Carried out once."""
    try:
        (given.orders / f"fail-{rank}").rename(given.orders / f"failed-{rank}")
    except FileNotFoundError:
        return ""
    return (given.orders / f"failed-{rank}").read_text()


def fail(how: str, folder: Path) -> None:
    if how == "hang":
        print("hangs", flush=True)
        time.sleep(10**6)
    if how == "lose":
        shutil.rmtree(folder)  # as if the machine were gone
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
