"""Tasks that restart together train as a group of torch.distributed. usage: torch_units.py FOLDER; ends once FOLDER/end
exists."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

end = Path(sys.argv[1]) / "end"
dist.init_process_group("gloo")
names = [""] * dist.get_world_size()
dist.all_gather_object(names, os.environ["PACELINE_TASK"])
print(f"trains with {' '.join(names)} of {os.environ['PACELINE_WORLD_SIZE']}", flush=True)
step, has_ended = 0, torch.zeros(1)
while not has_ended:
    step += 1
    time.sleep(0.02)
    has_ended = torch.tensor([float(end.exists())])
    dist.all_reduce(has_ended)
    paceline.report(step=step)
dist.destroy_process_group()
