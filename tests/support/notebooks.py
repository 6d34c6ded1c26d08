"""A real notebook that trains with the Python API, and how tests execute it: with nbclient, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 420.0

TRAIN = """
def train(steps, pace):
    import json, os, time
    from pathlib import Path
    import paceline

    snapshots, restore = Path(os.environ["PACELINE_SNAPSHOT_DIR"]), os.environ["PACELINE_RESTORE"]
    step, weight = json.loads(Path(restore, "state").read_text()) if restore else (0, 0.0)
    print("start", step, flush=True)
    while step < steps:
        time.sleep(pace)
        if step >= 20 and os.environ["PACELINE_GENERATION"] == "1":
            continue  # until it is killed
        step, weight = step + 1, weight - 0.1 * (weight - 3.0)
        paceline.report(step=step, loss=(weight - 3.0) ** 2)
        if step % 10 == 0 and os.environ["PACELINE_RANK"] == "0":
            partial = snapshots / "partial"
            partial.mkdir()
            (partial / "state").write_text(json.dumps([step, weight]))
            partial.rename(snapshots / f"step-{step}")
"""
FOLLOW = """
kinds = []
for event in run.events(follow=True, timeout=360):
    kinds.append(event.kind)
    if event.kind == "committed" and event.data["step"] == 20:
        kill_a_worker()
assert "restart" in kinds and kinds[-1] == "run-ended", kinds
"""
READ = """
status = run.wait(timeout=180)
loss = [point.value for point in run.series("loss", task="worker-0")]
assert loss[-1] < loss[0] / 100, loss
state = json.loads((run.copy_snapshot("copy") / "state").read_text())
print(json.dumps({
    "run": run.id, "status": status.status, "generations": status.generations, "notes": run.notes,
    "snapshot": run.snapshots()[0].name, "state": state,
    "starts": [line.text for line in run.logs(task="worker-0", grep="^start")],
}))
"""


def cells(submit: str, kill: str) -> list[str]:
    """`submit`: an expression that starts the run. `kill`: the body of the function that kills a worker."""
    return [
        "import json, os, signal, subprocess\nfrom paceline import client",
        TRAIN,
        f"run = {submit}\nrun",
        f"killed = []\ndef kill_a_worker():\n    if not killed:\n        killed.append(True)\n        {kill}",
        FOLLOW,
        "run.watch(timeout=180)",
        READ,
        "client.runs()",
    ]


_EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
try:
    NotebookClient(notebook, timeout=390, kernel_name="python3").execute()
finally:
    nbformat.write(notebook, sys.argv[1])
"""


def execute(folder: Path, sources: list[str], env: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """The outputs of each cell. A cell that raises an error makes the test fail."""
    empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    notebook = {
        "cells": [{**empty, "id": f"cell-{number}", "source": source} for number, source in enumerate(sources)],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
    }  # fmt: skip
    path = folder / "notebook.ipynb"
    path.write_text(json.dumps(notebook))
    folders = {name: str(folder / "jupyter") for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", _EXECUTE, str(path)], cwd=folder, env={**env, **folders}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]


def html_of(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs)
