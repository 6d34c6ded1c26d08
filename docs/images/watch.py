"""Generates watch.svg: `paceline watch` of a real run in which a worker is killed. `make picture` runs it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PICTURE = Path(__file__).with_name("watch.svg")
RUN, COLUMNS, ROWS = "digits-3f9a", 100, 28
STEPS_UNTIL_PICTURE = 620
LABEL = "paceline watch: progress, curves, tasks, generations, snapshots and output of a run"
# Saves a snapshot every 100 steps; worker-1 kills itself at step 250. The evaluator reads each snapshot.
PROGRAM = """
import math, os, random, signal, time
from pathlib import Path
import paceline

random.seed(1)
if os.environ["PACELINE_ROLE"] == "evaluator":
    for snapshot in paceline.snapshots.follow():
        time.sleep(1)
        snapshot.report(accuracy=round(1 - 0.5 * math.exp(-snapshot.step / 300), 4))
        print(f"evaluated step {snapshot.step}", flush=True)
    raise SystemExit(0)
task, restore = os.environ["PACELINE_TASK"], os.environ["PACELINE_RESTORE"]
step = int(Path(restore, "step").read_text()) if restore else 0
snapshots = Path(os.environ["PACELINE_SNAPSHOT_DIR"])
while step < 2000:
    time.sleep(0.05)
    step += 1
    loss = 2.3 * math.exp(-step / 250) + 0.08 + 0.05 * random.random()
    paceline.report(step=step, loss=loss, total_steps=2000)
    if step % 20 == 0 and task == "worker-0":
        print(f"step {step}: loss {loss:.3f}", flush=True)
    if step % 100 == 0 and task == "worker-0":
        partial = snapshots / "partial"
        partial.mkdir()
        (partial / "step").write_text(str(step))
        (partial / "weights").write_bytes(os.urandom(1 << 20))
        partial.rename(snapshots / f"step-{step}")
    if step == 250 and task == "worker-1" and os.environ["PACELINE_GENERATION"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""
JOB = """
name: digits
framework: none
command: [python, train.py]
roles:
  worker: {replicas: 3}
  evaluator: {replicas: 1}
snapshots: {best: {metric: accuracy, mode: max}}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PACELINE_HOME": f"{folder}/home", "TERM": "xterm-256color"}
        Path(folder, "train.py").write_text(PROGRAM)
        Path(folder, "job.yaml").write_text(JOB)
        paceline = [sys.executable, "-m", "paceline.cli"]
        subprocess.run([*paceline, "run", "job.yaml", "--detach", "--run", RUN], cwd=folder, check=True)
        try:
            condition = ["--for", f"step={STEPS_UNTIL_PICTURE}", "--timeout", "10m"]
            subprocess.run([*paceline, "wait", RUN, *condition], check=True)
            picture = asyncio.run(photograph())
        finally:
            subprocess.run([*paceline, "stop", RUN, "--now"], check=True)
    PICTURE.write_text(picture)


async def photograph() -> str:
    from paceline import client
    from paceline.client.reading.find_run import Target
    from paceline.watch.app import WatchApp
    from paceline.watch.run_screen import RunScreen

    app = WatchApp(client.get(RUN), Target())
    async with app.run_test(size=(COLUMNS, ROWS)) as pilot:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            await pilot.pause(0.5)
            screen = app.screen
            if isinstance(screen, RunScreen) and screen.is_complete:
                break
        await pilot.pause(1.0)
        drawn = app.export_screenshot(title=f"paceline watch {RUN}")
    # The picture needs no fonts from elsewhere.
    drawn = re.sub(r"@font-face \{[^}]*\}", "", drawn).replace("<svg ", f'<svg role="img" aria-label="{LABEL}" ', 1)
    return re.sub(r"font-family: Fira Code[^;]*;", "font-family: ui-monospace, Menlo, Consolas, monospace;", drawn)


if __name__ == "__main__":
    main()
