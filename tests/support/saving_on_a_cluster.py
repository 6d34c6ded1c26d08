"""A program for pods that saves a snapshot with every tenth step, and what its runs went on from."""

from __future__ import annotations

from support.people import Run, lines

# Saves a snapshot with every tenth step, each worker a part of it, and goes on from the newest.
TRAINING = """
import json, os, sys, time, pathlib
import paceline
rank, world = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_WORLD_SIZE"])
restore, saves = os.environ["PACELINE_RESTORE"], pathlib.Path(os.environ["PACELINE_SNAPSHOT_DIR"])
step = 0
if restore:
    found = sorted(pathlib.Path(restore).glob("part-*"))
    steps = {int(each.read_text()) for each in found}
    assert len(found) == world and len(steps) == 1, (found, steps)
    step = steps.pop()
print("start", step, flush=True)
while not pathlib.Path("/shared/finish").exists():
    time.sleep(0.05)
    step += 1
    paceline.report(step=step)
    if step % 10 == 0:
        partial = saves / "x.partial"
        partial.mkdir()
        (partial / f"part-{rank}").write_text(str(step))
        (partial / "paceline.json").write_text(json.dumps({"parts": world}))
        partial.rename(saves / f"step-{step}")
print("done", flush=True)
"""


def begun(run: Run, task: str) -> list[int]:
    """The steps that it has started from."""
    return [int(line.split()[-1]) for line in lines(run.folder, task) if "start " in line]


def restored(run: Run) -> int:
    step: str = run.events("generation-formed")[-1]["restore"]
    return int(step.split("-")[1])
