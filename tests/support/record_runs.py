"""Records what a version of Paceline leaves behind: run folders, snapshots and messages, for tests of later versions.

`PYTHONPATH=tests .venv/bin/python -m support.record_runs SOURCE` runs the checkout in the folder SOURCE, and writes
`tests/recorded_runs/<version>/`. Keys are not recorded.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.environment import without
from support.runs import eventually, kill, processes

RECORDED = Path(__file__).parents[1] / "recorded_runs"
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


def main(source: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-recorded-") as scratch:
        code, home = Path(scratch, "code"), Path(scratch, "home")
        code.mkdir()
        (code / "job.yaml").write_text(JOB)
        for name, text in PROGRAMS.items():
            (code / name).write_text(text)
        env = {**without("PACELINE"), "PACELINE_HOME": str(home), "PYTHONPATH": str(source / "src")}
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
        target = RECORDED / version.stdout.split()[-1]
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            home / "runs", target, ignore=shutil.ignore_patterns(*_NEVER, "*.partial", "*.sock", "*.imports")
        )
        script = WIRE.format(tests=str(source / "tests"))
        wire = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        json.loads(wire.stdout)
        (target / "wire.json").write_text(wire.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
