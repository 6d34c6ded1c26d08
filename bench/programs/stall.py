"""Trains a state of a given size and saves it from time to time; prints how long each save delayed training."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Save = Callable[[int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["tensorflow", "torch"])
    parser.add_argument("how", choices=["paceline", "sync", "async"])
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--arrays", type=int, default=50)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stall-", dir=os.environ.get("STALL_FOLDER")))
    os.environ["PACELINE_SNAPSHOT_DIR"] = str(folder / "snapshots")
    try:
        make = {"torch": with_torch, "tensorflow": with_tensorflow}[args.framework]
        print(json.dumps(measured(*make(args, folder), args.saves, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if args.framework == "torch" and args.how == "async":
            os._exit(0)  # its process group has threads that do not end


def measured(
    step: Callable[[], Any], save: Save, settle: Callable[[], Any], saves: int, folder: Path
) -> dict[str, Any]:
    """The delay is measured from before the save until the step after it is done, minus the usual duration of a step.
    This includes a copy that is postponed until values change."""
    steps: list[float] = []

    def timed(act: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        act()
        return time.perf_counter() - begin

    for _ in range(5):
        steps.append(timed(step))
    plain = statistics.median(steps[1:])
    delays, calls = [], []
    for number in range(saves + 1):
        call = timed(lambda number=number: save(number))  # type: ignore[misc]
        after = timed(step)
        settle()
        for old in folder.iterdir():
            shutil.rmtree(old, ignore_errors=True)
        step()
        if number:  # the first save allocates memory that later ones reuse
            delays.append(max(0.0, call + after - plain))
            calls.append(call)
        else:
            first = call + after - plain
    return {"delays": delays, "calls": calls, "step": plain, "first": first}


def with_torch(args: argparse.Namespace, folder: Path) -> tuple[Callable[[], Any], Save, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if args.gpu else "cpu")
    count = args.mib * 2**20 // 4 // args.arrays
    model = torch.nn.ParameterList([torch.rand(count, device=device) for _ in range(args.arrays)])

    def step() -> None:
        with torch.no_grad():
            for parameter in model:
                parameter.mul_(0.999)
        if args.gpu:
            torch.cuda.synchronize()

    if args.how == "paceline":
        from paceline.torch import Snapshots

        snapshots = Snapshots({"model": model}, every=10**9)
        snapshots.step(1)
        return step, lambda number: snapshots.save(number + 1), snapshots._background.wait
    if args.how == "sync":
        return step, lambda number: torch.save(model.state_dict(), _new(folder, number) / "state.pt"), lambda: None
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", init_method=f"file://{folder}.group", rank=0, world_size=1)
    pending: list[Any] = []

    def save(number: int) -> None:
        pending.append(dcp.async_save({"model": model.state_dict()}, checkpoint_id=str(_new(folder, number))))

    return step, save, lambda: pending[-1].result()


def with_tensorflow(args: argparse.Namespace, folder: Path) -> tuple[Callable[[], Any], Save, Callable[[], Any]]:
    import tensorflow as tf

    count = args.mib * 2**20 // 4 // args.arrays
    values = [tf.Variable(tf.random.uniform([count])) for _ in range(args.arrays)]
    checkpoint = tf.train.Checkpoint(**{f"value_{number}": value for number, value in enumerate(values)})

    @tf.function
    def train() -> None:
        for value in values:
            value.assign(value * 0.999)

    if args.how == "paceline":
        from paceline.tensorflow import Snapshots

        snapshots = Snapshots(checkpoint, every=10**9)
        return train, lambda number: snapshots.save(number + 1), snapshots._background.wait
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=args.how == "async")

    def save(number: int) -> None:
        checkpoint.save(str(_new(folder, number) / "state"), options=options)

    return train, save, checkpoint.sync if args.how == "async" else lambda: None


def _new(folder: Path, number: int) -> Path:
    path = folder / f"save-{number}"
    path.mkdir()
    return path


if __name__ == "__main__":
    main()
