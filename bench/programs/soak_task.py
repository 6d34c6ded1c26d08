"""Trains by counting: reports each step, and saves its part of a snapshot all the time; resumes from its own part."""

import os
import time

import stamps

import paceline
from paceline.runtime import snapshot_folders

STEP_S, SAVE_EVERY, PRINT_EVERY, SIZE = 0.05, 40, 100, 1024 * 1024

rank, world = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_WORLD_SIZE"])
folder = snapshot_folders.restored()
step = int((folder / f"part-{rank}").read_bytes()[:20]) if folder else 0
print(f"starts at step {step}", flush=True)
while True:
    time.sleep(STEP_S)
    step += 1
    stamps.stamp(rank, step)
    paceline.report(step=step, loss=1.0 / step, accuracy=step % 100 / 100)
    if step % PRINT_EVERY == 0:
        print(f"step {step}", flush=True)
    if step % SAVE_EVERY == 0:
        with snapshot_folders.writing(step, parts=world, metrics={"loss": 1.0 / step}) as target:
            (target / f"part-{rank}").write_bytes(b"%-20d" % step + os.urandom(SIZE))
