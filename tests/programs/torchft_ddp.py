"""Fault-tolerant data parallelism with torchft: each task is a replica, which gets its state from the others.

usage: torchft_ddp.py FOLDER; ends after the step in FOLDER/finish. TORCHFT_LIGHTHOUSE: the address of a lighthouse.
"""

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import paceline

folder, rank = Path(sys.argv[1]), int(os.environ["PACELINE_RANK"])
dist.init_process_group("gloo")  # of this replica alone: torchft uses its store
assert dist.get_world_size() == 1
print(f"begins as replica {rank} in generation {os.environ['PACELINE_GENERATION']}", flush=True)

torch.manual_seed(rank)  # the replicas have different weights until one gets those of another
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def load(state: dict) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    replica_id=f"replica-{rank}-",
    hostname="127.0.0.1",
    timeout=timedelta(seconds=20),
)
replicas, steps = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)

while True:
    steps.zero_grad()
    loss = replicas(torch.randn(16, 8)).square().mean()
    loss.backward()
    steps.step()
    step = manager.current_step()
    paceline.report(step=step, replicas=manager.num_participants())
    finish = folder / "finish"
    if finish.exists() and step >= int(finish.read_text()):
        break
    time.sleep(0.02)

weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
print(f"weights {hashlib.sha256(weights).hexdigest()} after step {step}", flush=True)
manager.shutdown(wait=False)
dist.destroy_process_group()
