"""Trains a small model with torch and snapshots: DDP or FSDP2 on gloo; kills itself at a given step."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import groups
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from paceline import Shards, report
from paceline.torch import Snapshots

SIZE, BATCH = 60, 12


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(24, generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    """Its parameters are not in the order of their gradients, and are larger than DDP's first bucket."""

    def __init__(self, averages: bool) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(500, 3), nn.Linear(24, 700), nn.Linear(700, 500)
        # Under DDP each rank has its own statistics until the next step, and rank 0's are saved. FSDP has no such rule.
        self.norm, self.dropout = nn.BatchNorm1d(700, track_running_stats=averages), nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.first(inputs)).relu()
        result: torch.Tensor = self.last(self.dropout(self.middle(hidden).relu()))
        return result


def digest(value: Any) -> str:
    """A digest of all tensors and numbers in a state dict."""
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            hasher.update(value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                hasher.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for inner in value:
                add(inner)
        else:
            hasher.update(repr(value).encode())

    add(value)
    return hasher.hexdigest()


def train(rank: int, world: int, folder: Path | None, options: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    if folder is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    model: Any = Model(averages=options["kind"] == "ddp")
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(100 + rank)
    if options["kind"] == "fsdp":
        for layer in (model.first, model.middle, model.last):
            fully_shard(layer)
        fully_shard(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    order = Shards(SIZE, BATCH, seed=3)
    loader = DataLoader(
        Numbers(), batch_sampler=order.sampler(), num_workers=options.get("workers", 0), generator=torch.Generator()
    )  # type: ignore[arg-type]
    items = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    result: dict[str, Any] = {"seen": {}, "losses": {}}
    with Snapshots(items, every=options.get("every"), order=order) as snapshots:
        n = result["start"] = snapshots.restore()
        result["restored"] = digest([item.state_dict() for item in items.values()])
        while n < options["steps"]:
            for indices, inputs in order.through(loader):
                optimizer.zero_grad()
                noise = random.random() + float(np.random.rand())
                loss = (model(inputs) * noise).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                n += 1
                result["seen"][n], result["losses"][n] = indices.tolist(), loss.item()
                result["order"] = order.state()
                snapshots.step(n, loss=loss)
                report(step=n)
                print(f"step {n} {indices.tolist()}", flush=True)
                time.sleep(options.get("pace", 0))
                if n == options.get("kill") and rank == world - 1:
                    snapshots._background.settle()  # its part of the last snapshot is written
                    os.kill(os.getpid(), signal.SIGKILL)
                if n == options["steps"]:
                    break
        if "last" in options:
            snapshots.save(n)
    result["state"] = digest([item.state_dict() for item in items.values()])
    result["skipped"] = snapshots.skipped
    result["ended"] = [
        result["state"],
        result["order"],
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
    ]
    dist.barrier()
    return result


def train_while_blocked(rank: int, world: int, folder: Path, options: dict[str, Any]) -> Any:
    """The first snapshot is blocked in rank 0 only, while all ranks continue training."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    gate = groups.WriteGate()
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states: dict[int, Any] = {}
    with Snapshots({"model": model, "optimizer": optimizer}, every=2) as snapshots:
        for n in range(1, options["steps"] + 1):
            if n == 2 and rank == 0:
                gate.go.clear()
            model(torch.ones(2, 4) * n).sum().backward()
            optimizer.step()
            states[n] = [value.tolist() for value in model.module.state_dict().values()]
            snapshots.step(n)
            if n == 6:
                gate.go.set()
                n < options["steps"] and snapshots._background.settle()
    return {"states": states, "skipped": snapshots.skipped}


def failing(rank: int, world: int, root: Path, options: dict[str, Any]) -> Any:
    """The first write fails, the second succeeds, the third fails again."""
    folder = Path(os.environ["PACELINE_SNAPSHOT_DIR"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("in the way")
    snapshots = Snapshots({"model": nn.Linear(2, 2)}, every=1)
    snapshots.step(1)
    snapshots._background.settle()
    folder.unlink()
    snapshots.save(2)
    snapshots._background.settle()
    stored = sorted(path.name for path in folder.iterdir())
    os.environ["PACELINE_SNAPSHOT_DIR"] = str(folder / "step-2" / "state.pt")
    snapshots.save(3)
    try:
        snapshots.close()
    except OSError as error:
        return {"kept": stored, "raised": type(error).__name__}
    return {"kept": stored, "raised": None}


def task(rank: int, world: int, folder: Path, options: dict[str, Any]) -> Any:
    return {"ddp": train, "fsdp": train, "held": train_while_blocked, "failing": failing}[options["kind"]](
        rank, world, folder, options
    )


if __name__ == "__main__":
    groups.run(task)
