"""Trains a state of a given size and saves it now and then; says how long training was held by each save."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Save = Callable[[int], None]
Step = Callable[[], Any]  # may say how long it took to change the values, where that comes last in it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["tensorflow", "torch"])
    parser.add_argument("how", choices=["paceline", "sync", "async"])
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--arrays", type=int, default=50)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stall-", dir=os.environ.get("STALL_FOLDER")))
    os.environ["PACELINE_SNAPSHOT_DIR"] = str(folder / "snapshots")
    try:
        make = {"torch": with_torch, "tensorflow": with_tensorflow}[given.framework]
        print(json.dumps(measured(*make(given, folder), given.saves, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if given.framework == "torch" and given.how == "async":
            os._exit(0)  # its process group has threads that do not end


def measured(step: Step, save: Save, settle: Callable[[], Any], saves: int, folder: Path) -> dict[str, Any]:
    """Held: by the save itself, and by what the change of the values after it takes longer than else, as a copy may be
    put off until then. Slowed: until that whole step is done, with all that goes on beside it."""

    def timed() -> tuple[float, float]:
        begin = time.perf_counter()
        changing = step()
        whole = time.perf_counter() - begin
        return whole, whole if changing is None else changing

    step()
    plain = [timed() for _ in range(4)]
    after, calls = [], []
    for number in range(saves + 1):
        begin = time.perf_counter()
        save(number)
        calls.append(time.perf_counter() - begin)
        after.append(timed())
        settle()
        for old in folder.iterdir():
            shutil.rmtree(old, ignore_errors=True)
        step()
        plain.append(timed())
    whole, changing = (statistics.median(times) for times in zip(*plain, strict=True))
    slowed = [call + max(0.0, took[0] - whole) for call, took in zip(calls, after, strict=True)]
    held = [call + max(0.0, took[1] - changing) for call, took in zip(calls, after, strict=True)]
    # The first one takes memory that all later ones use again.
    return {"held": held[1:], "slowed": slowed[1:], "step": whole, "first": slowed[0]}


def with_torch(given: argparse.Namespace, folder: Path) -> tuple[Step, Save, Callable[[], Any]]:
    """Layers and Adam, which has two values more for each weight."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if given.gpu else "cpu")
    width = math.isqrt(given.mib * 2**20 // 4 // 3 // given.arrays)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(given.arrays))).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.rand(4096 if given.gpu else 128, width, device=device)

    def step() -> float | None:
        model(data).sum().backward()
        begin = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        if given.gpu:
            torch.cuda.synchronize()
            return None
        return time.perf_counter() - begin

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    if given.how == "paceline":
        from paceline.torch import Snapshots

        snapshots = Snapshots({"model": model, "optimizer": optimizer}, every=10**9)
        return step, lambda number: snapshots.save(number + 1), snapshots._background.wait
    if given.how == "sync":
        return step, lambda number: torch.save(state(), _new(folder, number) / "state.pt"), lambda: None
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", init_method=f"file://{folder}.group", rank=0, world_size=1)
    pending: list[Any] = []

    def save(number: int) -> None:
        pending.append(dcp.async_save(state(), checkpoint_id=str(_new(folder, number))))

    return step, save, lambda: pending[-1].result()


def with_tensorflow(given: argparse.Namespace, folder: Path) -> tuple[Step, Save, Callable[[], Any]]:
    import tensorflow as tf

    count = given.mib * 2**20 // 4 // given.arrays
    values = [tf.Variable(tf.random.uniform([count])) for _ in range(given.arrays)]
    checkpoint = tf.train.Checkpoint(**{f"value_{number}": value for number, value in enumerate(values)})

    @tf.function
    def train() -> None:
        for value in values:
            value.assign(value * 0.999)

    if given.how == "paceline":
        from paceline.tensorflow import Snapshots

        snapshots = Snapshots(checkpoint, every=10**9)
        return train, lambda number: snapshots.save(number + 1), snapshots._background.wait
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=given.how == "async")

    def save(number: int) -> None:
        checkpoint.save(str(_new(folder, number) / "state"), options=options)

    return train, save, checkpoint.sync if given.how == "async" else lambda: None


def _new(folder: Path, number: int) -> Path:
    made = folder / f"save-{number}"
    made.mkdir()
    return made


if __name__ == "__main__":
    main()
