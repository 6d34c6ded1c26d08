"""A torch program whose training step takes long to compile: a transformer in which each block has another width, so
that few kernels are alike. On nccl with --gpu, otherwise on gloo; each step has a stamp.
"""

import argparse
import os
import tempfile
import time

if "BENCH_COLD" in os.environ:  # an empty cache, as in a new container; otherwise torch finds that of earlier processes
    folder = tempfile.mkdtemp(dir=os.environ["BENCH_COLD"])
    os.environ.update({"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"})

import stamps
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import paceline

HEADS, LENGTH, BATCH = 4, 64, 2

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds between two steps")
parser.add_argument("--gpu", action="store_true")
parser.add_argument("--blocks", type=int, default=1, help="compile time is about proportional to it")
args = parser.parse_args()

local = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local) if args.gpu else torch.device("cpu")
if args.gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if args.gpu else "gloo")
rank = dist.get_rank()


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mixed, self.joined = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.next = torch.nn.Linear(width, width + 8 * HEADS)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(self.before(values)).chunk(3, -1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        values = values + self.joined(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        values = values + self.inner(self.after(values))
        result: torch.Tensor = self.next(values)
        return result


torch.manual_seed(7)
widths = [64 + 8 * HEADS * number for number in range(args.blocks)]
model = torch.nn.Sequential(*map(Block, widths)).to(device)
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(BATCH, LENGTH, widths[0], device=device)

before = stamps.last_step(rank)
for step in range(before + 1, before + args.steps + 1):
    loss = compiled(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if args.gpu:
        torch.cuda.synchronize()
    stamps.stamp(rank, step)
    paceline.report(step=step)
    time.sleep(args.sleep)

dist.destroy_process_group()
