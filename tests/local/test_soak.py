"""bench/soak.py takes 20 minutes and is started by hand: an hour of its simulated month shows that it still works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MONTH = Path(__file__).parents[2] / "bench/programs/month.py"


def test_a_simulated_run_survives_failures_and_restarts_of_its_captain(tmp_path: Path) -> None:
    arguments = ["--folder", tmp_path, "--members", 8, "--days", 0.1, "--restart-every", 0.05]
    process = subprocess.run([sys.executable, MONTH, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    last = json.loads(process.stdout.splitlines()[-1])
    assert last["day"] == 0.1 and last["captains"] > 1
    assert last["generation"] > 1 and last["messages"] > 8
