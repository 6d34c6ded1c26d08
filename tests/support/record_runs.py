"""Records what a version of Paceline leaves behind: run folders, snapshots and messages, for tests of later versions.

`PYTHONPATH=tests .venv/bin/python -m support.record_runs CHECKOUT` runs the checkout in that folder, and writes
`tests/recorded_runs/<version>/`, or another folder there with `--name`. Keys are not recorded. `--source` also stores
the source: `support.older_version` runs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from support.environment import without
from support.runs import eventually, kill, processes

RECORDED = Path(__file__).parents[1] / "recorded_runs"
SOURCE = "source.tar.xz"  # with src/paceline
_NEVER = ("tls", ".reserve", "lock", "agents.log", "*.partial", "*.sock", "*.imports")

JOB = """\
name: recorded
framework: none
command: [python, train.py]
roles:
  worker: {replicas: 2}
  evaluator: {replicas: 1, command: [python, evaluate.py]}
snapshots: {keep: 5, best: {metric: accuracy, mode: max}}
try: {command: [python, try.py]}
export: {command: [python, export.py]}
"""
PROGRAMS = {
    "train.py": """\
import os, sys, time
from pathlib import Path
import paceline
from paceline.runtime import snapshot_folders

here, rank = Path(__file__).parent, os.environ["PACELINE_RANK"]
restored = snapshot_folders.restored()
step = int((restored / "step").read_text()) if restored else 0
print("from", step, flush=True)
while step < 4 or (here / "wait").exists():
    step += 1
    time.sleep(0.1)
    if rank == "0":
        with snapshot_folders.writing(step, 1, {"loss": 1 / step}) as folder:
            (folder / "step").write_text(str(step))
    paceline.report(step=step, loss=1 / step)
    print("step", step, flush=True)
    if rank == "1" and step == 2 and not (here / "failed").exists():
        (here / "failed").touch()
        time.sleep(1)
        sys.exit(3)
""",
    "evaluate.py": """\
import paceline

for snapshot in paceline.snapshots.follow():
    snapshot.report(accuracy=snapshot.step / 10)
""",
    "try.py": """\
import os
from pathlib import Path

print("step", Path(os.environ["PACELINE_RESTORE"], "step").read_text())
""",
    "export.py": """\
import os
from pathlib import Path

model = Path(os.environ["PACELINE_EXPORT_DIR"], "model.pt2")
model.write_bytes(Path(os.environ["PACELINE_RESTORE"], "step").read_bytes())
""",
}
WIRE = """\
import sys
sys.path.insert(0, {tests!r})
from unit.test_wire import FROM_CAPTAIN, FROM_MEMBERS, JOINED
from paceline.agent.net import messages
import json
print(json.dumps({{
    "join": messages.join_message("recorded-done", JOINED),
    "members": [messages.member_message(each) for each in FROM_MEMBERS],
    "captain": [messages.captain_message(each) for each in FROM_CAPTAIN],
    "stop": {{"type": "stop", "reason": "stopped by `paceline stop`"}},
}}, indent=1))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.record_runs", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the checkout of the version")
    parser.add_argument("--name", help="the folder in tests/recorded_runs; default: the version")
    parser.add_argument("--source", action="store_true", help="also store the source, to run it in tests")
    options = parser.parse_args()
    checkout = options.checkout.absolute()
    target = record(checkout, options.name)
    if options.source:
        store_source(checkout, target)


def record(checkout: Path, name: str | None) -> Path:
    """The folder with what was recorded."""
    with tempfile.TemporaryDirectory(prefix="paceline-recorded-") as scratch:
        code, home = Path(scratch, "code"), Path(scratch, "home")
        code.mkdir()
        (code / "job.yaml").write_text(JOB)
        for program, text in PROGRAMS.items():
            (code / program).write_text(text)
        env = {**without("PACELINE"), "PACELINE_HOME": str(home), "PYTHONPATH": str(checkout / "src")}
        command = [sys.executable, "-m", "paceline.cli"]
        subprocess.run([*command, "run", "job.yaml", "--run", "recorded-done"], cwd=code, env=env, check=True)
        (code / "wait").touch()
        subprocess.run([*command, "run", "-d", "job.yaml", "--run", "recorded-lost"], cwd=code, env=env, check=True)
        lost = home / "runs" / "recorded-lost"
        events = lost / "events.jsonl"
        try:
            eventually("an evaluation", lambda: events.exists() and '"evaluated"' in events.read_text())
        finally:
            while remaining := processes(home):
                for process in remaining:
                    kill(process.pid)
        version = subprocess.run([*command, "--version"], env=env, capture_output=True, text=True, check=True)
        target = RECORDED / (name or version.stdout.split()[-1])
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(home / "runs", target, ignore=shutil.ignore_patterns(*_NEVER))
        script = WIRE.format(tests=str(checkout / "tests"))
        wire = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        json.loads(wire.stdout)
        (target / "wire.json").write_text(wire.stdout)
        return target


def store_source(checkout: Path, target: Path) -> None:
    def cleaned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Without what differs from one checkout to another."""
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        return None if "__pycache__" in entry.name else entry

    with tarfile.open(target / SOURCE, "w:xz", preset=9) as archive:
        archive.add(checkout / "src" / "paceline", "src/paceline", filter=cleaned)


if __name__ == "__main__":
    main()
