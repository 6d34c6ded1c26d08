"""`make test-cluster` where no cluster can run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_cluster_tests_are_left_out_with_a_line_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "nobody.py").write_text("import os\nos.geteuid = lambda: 65534\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "nobody", "-n", "2", "--dist", "loadgroup", "tests/cluster",
         "--basetemp", str(tmp_path / "base")],
        cwd=PROJECT, env={**env, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"\d+ cluster tests left out: .*", done.stdout + done.stderr)
    assert len(said) == 1 and said[0].endswith("it needs root, for namespaces and mounts")
