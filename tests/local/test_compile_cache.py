"""What JAX compiles is found by later generations and runs, in every process."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from support.runs import PROGRAMS, Run, job


def test_later_generations_and_runs_find_what_jax_has_compiled(tmp_path: Path) -> None:
    command = ["python", str(PROGRAMS / "jax_compiles.py"), str(tmp_path / "killed")]
    spec = job(command, framework="jax", restart={"warm": False})
    home, env = tmp_path / "home", {"JAX_PLATFORMS": "cpu"}

    first = Run(tmp_path / "first", spec, home=home, env=env)
    assert len(first.succeeds()["restarts"]) == 1
    # Rank 0 may be killed before it prints; rank 1 kills itself after that.
    assert counts(first, "worker-1") == [(0, 1), (1, 0)] and counts(first, "worker-0")[-1] == (1, 0)
    entries = sorted((home / "compiled").rglob("*-cache"))
    assert len(entries) == 2  # one of each process
    assert stat.S_IMODE((home / "compiled").stat().st_mode) == 0o700

    damaged, contents = entries[0], entries[0].read_bytes()
    damaged.write_bytes(contents[: len(contents) // 2])
    second = Run(tmp_path / "second", spec, home=home, env=env)
    assert second.succeeds()["restarts"] == []
    # One process compiles again, and replaces the damaged file.
    assert sorted([*counts(second, "worker-0"), *counts(second, "worker-1")]) == [(0, 1), (1, 0)]
    assert sorted((home / "compiled").rglob("*-cache")) == entries and len(damaged.read_bytes()) > len(contents) // 2


LEAVES_A_DAMAGED_FILE = """
import os
from pathlib import Path
library = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "library.so"
print("found it" if library.exists() else "compiling", flush=True)
if os.environ["PACELINE_GENERATION"] == "1":
    library.parent.mkdir(parents=True)
    library.write_text("half of it")
    os.kill(os.getpid(), 9)
if library.exists():
    {failure}
"""


@pytest.mark.parametrize("failure", ["os.kill(os.getpid(), 7)", "raise OSError(f'{library}: file too short')"])
def test_a_damaged_file_fails_one_start_at_most(failure: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES_A_DAMAGED_FILE.format(failure=failure))
    spec = job(["python", str(tmp_path / "train.py")], 1, framework="torch", restart={"warm": False})
    run = Run(tmp_path / "run", spec)
    assert len(run.succeeds()["restarts"]) == 2
    assert re.findall(r"compiling|found it", run.log("worker-0")) == ["compiling", "found it", "compiling"]
    [note] = [e["text"] for e in run.events("note") if "compiled" in e["text"]]
    assert note.startswith("worker-0 failed before its first step: the compiled code kept from earlier may be damaged")


def counts(run: Run, task: str) -> list[tuple[int, int]]:
    """What each generation of a task found in the cache, and what it stored there."""
    lines = re.findall(r"cache: (\d+) found, (\d+) stored", run.log(task))
    return [(int(hits), int(stored)) for hits, stored in lines]
