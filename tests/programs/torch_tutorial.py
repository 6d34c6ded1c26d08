"""Trains as torch's tutorial on fault-tolerant training does: every process trains, LOCAL_RANK 0 writes snapshot.pt."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

path = Path(sys.argv[1])
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    optimizer.zero_grad()
    model(torch.rand(32, 20)).square().mean().backward()
    optimizer.step()
    if local_rank == 0:
        torch.save({"MODEL_STATE": model.module.state_dict(), "EPOCHS_RUN": epoch}, path)
        print(f"epoch {epoch} saved by rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.barrier()
dist.destroy_process_group()
