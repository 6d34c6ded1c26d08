"""A torch program as written for torchrun: DDP, gloo on CPU, nccl on GPU; it does not use Paceline."""

import argparse
import hashlib
import os
import time
from pathlib import Path

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=0, help="seconds a step")
    parser.add_argument("--checkpoint-dir", type=Path)
    faults.add_options(parser)
    options = parser.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(layers, device_ids=[local] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    start = 0
    checkpoint = options.checkpoint_dir / "state.pt" if options.checkpoint_dir else None
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    print(f"start {start}", flush=True)
    for step in range(start, options.steps):
        faults.before_step(step + 1, rank, options)
        source = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 16, generator=source)[rank::size].to(device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}", flush=True)
        if checkpoint and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").replace(checkpoint)
        time.sleep(options.sleep)

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(f"rank {rank} of {size}, local rank {local}, {dist.get_backend()}")
    print(f"answer {model.module(torch.ones(1, 16, device=device)).item():.6f}")
    print(f"weights {digest.hexdigest()}", flush=True)
    dist.barrier()  # no rank exits while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
