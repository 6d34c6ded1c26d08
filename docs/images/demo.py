"""Generates demo.svg: the output of a run of examples/digits in which a worker is killed. `make picture` runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("demo.svg")
COMMAND = "paceline run examples/digits/job.yaml"
RUN, VICTIM, KILLED_AT = "digits-3f9a", "worker-1", "worker-0    | step 300 "
CONNECTION_LOST = re.compile(r"\.cc:\d+\]|Additional GRPC error|^\S+ +\| :UNKNOWN:")
HOME_SHOWN = "~/.local/state/paceline"
COLUMNS, LINE_HEIGHT, CHARACTER, MARGIN = 100, 18, 7.8, 16
BACKGROUND, TEXT, DIM, OURS = "#16191f", "#d5d9e0", "#8a93a3", "#ffffff"
TASKS = {"worker-0": "#6cb6ff", "worker-1": "#8ddb8c", "evaluator-0": "#dcbdfb"}


def record() -> list[str]:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PACELINE_HOME": home}
        command = [sys.executable, "-m", "paceline.cli", *COMMAND.split()[1:], "--run", RUN]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        lines = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip().replace(home, HOME_SHOWN))
            if line.startswith(KILLED_AT):
                os.kill(pid_of(VICTIM, Path(home)), signal.SIGKILL)
        if process.wait() != 0:
            raise SystemExit("\n".join([*lines, f"the run ended with exit code {process.returncode}"]))
        return lines


def shorten(lines: list[str]) -> list[str]:
    """Replace TensorFlow's messages about the lost connection, and some of the steps, by dots."""
    shown: list[str] = []
    for line in lines:
        if CONNECTION_LOST.search(line):
            line = "worker-0    | ..."
        elif re.search(r"\| step [567]00", line):
            line = "..."
        if not shown or line != shown[-1]:
            shown.append(line)
    return shown


def pid_of(task: str, home: Path) -> int:
    events = map(json.loads, (home / "runs" / RUN / "events.jsonl").read_text().splitlines())
    [pid] = [event["pid"] for event in events if event["event"] == "task-started" and event["task"] == task]
    return int(pid)


def draw(lines: list[str]) -> str:
    width, height = int(COLUMNS * CHARACTER) + 2 * MARGIN, len(lines) * LINE_HEIGHT + 2 * MARGIN
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + 13 + number * LINE_HEIGHT}">{spans(line)}</text>'
        for number, line in enumerate(lines)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-label="A run of two workers and an evaluator: a worker is killed, and training continues from a snapshot" \
font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" xml:space="preserve" \
fill="{TEXT}">
<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>
{texts}
</svg>
"""


def spans(line: str) -> str:
    line = line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..."
    if prefix := re.match(r"(\S+) +\|", line):
        return f'<tspan fill="{TASKS[prefix[1]]}">{prefix[0]}</tspan>{escape(line[prefix.end() :])}'
    if line.startswith(("* ", "$ ")):
        return f'<tspan fill="{OURS}" font-weight="bold">{escape(line)}</tspan>'
    if label := re.match(r"  (logs|snapshots|tensorboard|next) +", line):
        return f'<tspan fill="{DIM}">{label[0]}</tspan>{escape(line[label.end() :])}'
    return escape(line)


if __name__ == "__main__":
    PICTURE.write_text(draw([f"$ {COMMAND}", *shorten(record())]))
