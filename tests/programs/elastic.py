"""Trains on paceline.Shards with any number of tasks, notes which examples each step used, and saves snapshots.

Each task writes `seen/STEP-GENERATION-RANK` with the indices of its share. It ends at the step in the file `finish`.
"""

import argparse
import json
import os
import time
from pathlib import Path

import paceline
from paceline.runtime import snapshot_folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=("none", "torch"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=120)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds a step")
    options = parser.parse_args()
    (options.folder / "seen").mkdir(exist_ok=True)
    order = paceline.Shards(options.size, options.batch, seed=5)
    {"none": plain, "torch": torch}[options.framework](order, options)
    print("done", flush=True)


def plain(order: paceline.Shards, options: argparse.Namespace) -> None:
    folder, step = snapshot_folders.restored(), 0
    if folder is not None:
        state = json.loads((folder / "state.json").read_text())
        step = state.pop("step")
        order.load(state)
    begin(order, step)
    while step < last(options.folder):
        for share in order:
            step += 1
            note(options.folder, step, share)
            wait_for_all(options.folder, step, order.world)
            paceline.report(step=step)
            if paceline.should_save(step) and order.rank == 0:
                with snapshot_folders.writing(step, 1) as saving:
                    (saving / "state.json").write_text(json.dumps({"step": step, **order.state()}))
            time.sleep(options.sleep)
            if step >= last(options.folder):
                return


def torch(order: paceline.Shards, options: argparse.Namespace) -> None:
    import torch as module
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import paceline.torch

    module.set_num_threads(1)
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (order.rank, order.world)
    module.manual_seed(0)
    model = DistributedDataParallel(module.nn.Linear(4, 1))
    optimizer = module.optim.SGD(model.parameters(), lr=0.01)
    items = {"model": model, "optimizer": optimizer}
    with paceline.torch.Snapshots(items, every=1000, order=order) as snapshots:
        step = snapshots.restore()
        begin(order, step)
        while step < last(options.folder):
            for share in order:
                inputs = module.tensor([[float(index % (place + 2)) for place in range(4)] for index in share or [0]])
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                step += 1
                note(options.folder, step, share)
                snapshots.step(step)
                paceline.report(step=step)
                time.sleep(options.sleep)
                if step >= last(options.folder):
                    break


def begin(order: paceline.Shards, step: int) -> None:
    print(f"start {step} as {order.rank} of {order.world}", flush=True)


def note(folder: Path, step: int, share: list[int]) -> None:
    name = f"{step}-{os.environ['PACELINE_GENERATION']}-{os.environ['PACELINE_RANK']}"
    (folder / name).write_text(json.dumps(share))
    (folder / name).rename(folder / "seen" / name)  # the task may be killed at any time


def wait_for_all(folder: Path, step: int, world: int) -> None:
    """As a collective does: otherwise, a snapshot of this step could be taken before all tasks have done it."""
    generation, until = os.environ["PACELINE_GENERATION"], time.monotonic() + 300
    while not all((folder / "seen" / f"{step}-{generation}-{rank}").exists() for rank in range(world)):
        assert time.monotonic() < until, f"not all tasks have done step {step}"
        time.sleep(0.002)


def last(folder: Path) -> float:
    """The step after which all tasks end; written well before, so that all of them read it in time."""
    try:
        return int((folder / "finish").read_text())
    except FileNotFoundError:
        return float("inf")


if __name__ == "__main__":
    main()
