"""A program for pods that saves a snapshot every tenth step, and the steps that its runs resumed from."""

from __future__ import annotations

from support.people import Run, lines

# Saves a snapshot every tenth step, each worker one part of it, and resumes from the newest.
TRAINING = """
import json, os, sys, time, pathlib
import paceline
rank, world = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_WORLD_SIZE"])
restore, saves = os.environ["PACELINE_RESTORE"], pathlib.Path(os.environ["PACELINE_SNAPSHOT_DIR"])
step = 0
if restore:
    parts = sorted(pathlib.Path(restore).glob("part-*"))
    steps = {int(part.read_text()) for part in parts}
    assert len(parts) == world and len(steps) == 1, (parts, steps)
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
    """The steps that the task has started from."""
    return [int(line.split()[-1]) for line in lines(run.folder, task) if "start " in line]


def restored(run: Run) -> int:
    step: str = run.events("generation-formed")[-1]["restore"]
    return int(step.split("-")[1])
