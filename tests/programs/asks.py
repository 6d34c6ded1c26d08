"""Trains by counting, asks at each step whether to save, and saves its part of a snapshot only if the answer is yes."""

import json
import os
import time
from pathlib import Path

import paceline

rank, world = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_WORLD_SIZE"])
restore, saves = os.environ["PACELINE_RESTORE"], Path(os.environ["PACELINE_SNAPSHOT_DIR"])
step = 0
if restore:
    steps = {int(path.read_text()) for path in Path(restore).glob("part-*")}
    assert len(steps) == 1, steps
    step = steps.pop()
print(f"start {step}", flush=True)
while not Path(os.environ["FINISH"]).exists():
    time.sleep(float(os.environ.get("STEP_S", "0.01")) * (1 + rank * float(os.environ.get("APART", "1"))))
    step += 1
    paceline.report(step=step)
    if step == int(os.environ.get("SAVE_NOW_AT", "-1")) and rank == 0:
        paceline.save_now()
    if paceline.should_save():
        print(f"saves {step}", flush=True)
        partial = saves / "x.partial"
        partial.mkdir()
        (partial / f"part-{rank}").write_text(str(step))
        (partial / "paceline.json").write_text(json.dumps({"parts": world}))
        partial.rename(saves / f"step-{step}")
