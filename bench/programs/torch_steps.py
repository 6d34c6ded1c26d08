"""A torch program written for torchrun: DDP on gloo or, with --gpu, nccl; small steps, each with a stamp."""

import argparse
import os
import time

import stamps
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds between two steps")
parser.add_argument("--gpu", action="store_true")
args = parser.parse_args()

local = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local) if args.gpu else torch.device("cpu")
if args.gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if args.gpu else "gloo")
rank = dist.get_rank()

layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
model = DistributedDataParallel(layers, device_ids=[local] if args.gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(rank)).to(device)

before = stamps.last_step(rank)
for step in range(before + 1, before + args.steps + 1):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.gpu:
        torch.cuda.synchronize()
    stamps.stamp(rank, step)
    paceline.report(step=step)
    time.sleep(args.sleep)

dist.destroy_process_group()
