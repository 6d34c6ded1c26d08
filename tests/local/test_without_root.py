"""`make test-cluster` on a machine that cannot run a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_cluster_tests_are_left_out_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "nobody.py").write_text("import os\nos.geteuid = lambda: 65534\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "nobody", "-n", "2", "--dist", "loadgroup", "tests/cluster",
         "--basetemp", str(tmp_path / "base")],
        cwd=PROJECT, env={**env, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    messages = re.findall(r"\d+ cluster tests deselected: .*", result.stdout + result.stderr)
    assert len(messages) == 1 and messages[0].endswith("it needs root, for namespaces and mounts")
