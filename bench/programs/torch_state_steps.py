"""A torch program with a large state: AdamW on gloo or, with --gpu, nccl. It saves every --every steps: under Paceline
with its helper, otherwise with torch.save or, with --dcp, async_save of torch.distributed.checkpoint. Each step has a
stamp.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import stamps
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from paceline.torch import Snapshots

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds between two steps")
parser.add_argument("--gpu", action="store_true")
parser.add_argument("--gib", type=float, default=1.0, help="parameters and optimizer state")
parser.add_argument("--every", default="40", help="steps; or, under Paceline, seconds as in 30s")
parser.add_argument("--checkpoint", default="", help="for torch.save or DCP; default: snapshots of Paceline")
parser.add_argument("--groups", action="store_true", help="stamps name the group, by the time when it was formed")
parser.add_argument("--dcp", action="store_true", help="the checkpoint is a folder of torch.distributed.checkpoint")
args = parser.parse_args()
every = int(args.every) if args.every.isdigit() else args.every

local = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local) if args.gpu else torch.device("cpu")
if args.gpu:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if args.gpu else "gloo")  # async_save needs gloo
rank = dist.get_rank()
formed_at = torch.tensor(time.time_ns())
if args.groups:
    dist.broadcast(formed_at, 0)

tensors = 48
size = int(args.gib * 2**30 / 4 / 3 / tensors)  # the parameter and AdamW's two averages
model = torch.nn.ParameterList(torch.zeros(size, device=device) for _ in range(tensors))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for parameter in model:  # AdamW creates its state in the first step
    optimizer.state[parameter] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }

before = 0
snapshots = saving = None
newest = Path(args.checkpoint, "newest")


def state_at(step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


if args.dcp:
    if newest.exists():
        before = int(newest.read_text())
        restored = state_at(before)
        dcp.load(restored, checkpoint_id=f"{args.checkpoint}/{before}")
        model.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])
        del restored
elif args.checkpoint:
    if Path(args.checkpoint).exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        before = saved["step"]
        del saved
else:
    snapshots = Snapshots({"model": model, "optimizer": optimizer}, every=every)
    before = snapshots.restore()

for step in range(before + 1, before + args.steps + 1):
    # One tensor in turn, so that a step of a large state on a CPU is as short as that of a small one.
    parameter = model[step % tensors]
    parameter.grad = torch.full_like(parameter, 1e-3)
    dist.all_reduce(parameter.grad[:1024])
    optimizer.step()
    optimizer.zero_grad()
    if args.gpu:
        torch.cuda.synchronize()
    stamps.stamp(rank, step, int(formed_at) if args.groups else None)
    if snapshots is not None:
        snapshots.step(step)
    elif args.dcp:
        if saving is not None and saving[1].done():
            saving[1].result()
            newest.with_suffix(".partial").write_text(str(saving[0]))
            newest.with_suffix(".partial").rename(newest)
            saving = None
        if step % int(every) == 0 and saving is None:  # the last one may still be written
            saving = step, dcp.async_save(state_at(step), checkpoint_id=f"{args.checkpoint}/{step}")
    elif step % int(every) == 0 and rank == 0:
        torch.save(state_at(step), args.checkpoint + ".partial")
        Path(args.checkpoint + ".partial").rename(args.checkpoint)
    time.sleep(args.sleep)

dist.destroy_process_group()
