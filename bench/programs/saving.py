"""Trains a state of a given size; prints the peak memory without snapshots and with them."""

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("framework", choices=["torch", "tensorflow", "jax"])
parser.add_argument("--mib", type=int, default=400)
parser.add_argument("--arrays", type=int, default=4, help="number of arrays in the state")
parser.add_argument("--snapshots", type=int, default=3)
args = parser.parse_args()
numbers = args.mib * 2**20 // 4 // args.arrays
every = 4  # steps


def torch() -> tuple[Callable[[], None], Callable[[int], None], Callable[[], bool], Callable[[], None]]:
    import torch

    from paceline.torch import Snapshots

    model = torch.nn.ParameterList(torch.zeros(numbers) for _ in range(args.arrays))
    snapshots = Snapshots({"model": model}, every=every)

    def step() -> None:
        with torch.no_grad():
            for each in model:
                each.add_(1.0)

    return step, snapshots.step, snapshots._background.busy, snapshots.close


def tensorflow() -> tuple[Callable[[], None], Callable[[int], None], Callable[[], bool], Callable[[], None]]:
    import tensorflow as tf

    from paceline.tensorflow import Snapshots

    variables = [tf.Variable(tf.zeros([numbers])) for _ in range(args.arrays)]
    snapshots = Snapshots({"variables": variables}, every=every)
    snapshots.restore()
    one = tf.constant(1.0)

    @tf.function
    def step() -> None:
        for each in variables:
            each.assign_add(tf.broadcast_to(one, [numbers]))

    return step, snapshots.step, snapshots._background.busy, snapshots.close


def jax() -> tuple[Callable[[], None], Callable[[int], None], Callable[[], bool], Callable[[], None]]:
    import jax

    from paceline.jax import Snapshots

    state = [jax.numpy.zeros([numbers]) for _ in range(args.arrays)]
    snapshots = Snapshots(every=every)
    add = jax.jit(lambda state: [each + 1.0 for each in state], donate_argnums=0)

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(add(state))

    return step, lambda n: snapshots.step(n, state), snapshots._background.busy, snapshots.close


def memory(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def peak(work: Callable[[], None]) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return memory("VmHWM")


step, after_step, busy, close = {"torch": torch, "tensorflow": tensorflow, "jax": jax}[args.framework]()


def steps(count: int) -> None:
    for _ in range(count):
        step()


def steps_with_snapshots(count: int) -> None:
    for n in range(1, count + 1):
        step()
        after_step(n)
        while busy() and n % every == every - 1:  # it overlapped with training for long enough: wait for the write
            time.sleep(0.005)


steps(args.snapshots * every)
without = peak(lambda: steps(args.snapshots * every))
with_snapshots = peak(lambda: steps_with_snapshots(args.snapshots * every))
close()
written = sum(1 for _ in Path(os.environ["PACELINE_SNAPSHOT_DIR"]).glob("step-*/paceline.json"))
if written != args.snapshots:
    sys.exit(f"{written} of {args.snapshots} snapshots were written")
print(json.dumps({"without": without, "with": with_snapshots, "state": numbers * args.arrays * 4}))
