"""Runs of the examples: shortened by options, with injected failures, and their final state."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from support.environment import without
from support.runs import PROGRAMS, SOURCE, TENSORFLOW_PATH, Event, Run, Starter, eventually, kill

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300.0  # enough for a framework to start a few times on a busy machine
TRIED = range(20)  # indices of held-out images

_ANSWER = re.compile(r"\w+ (\d+): \D+ (\d) \(\d+\.\d%\), actual (\d)")

Begin = Callable[..., Run]


def job(name: str, file: str = "job.yaml") -> dict[str, Any]:
    """The job file of an example, with an absolute path to its code."""
    fields: dict[str, Any] = YAML(typ="safe").load(EXAMPLES / name / file)
    return {**fields, "code": str(EXAMPLES / name / fields.get("code", "."))}


def begin(
    start: Starter,
    home: Path,
    name: str,
    *options: object,
    sets: Mapping[str, object] | None = None,
    file: str = "job.yaml",
    hold: tuple[str, int] | None = None,
    slow: tuple[Path, int] | None = None,
) -> Run:
    """Starts a run of an example; `options` are added to its command, `sets` become `--set` options.

    `hold`: a task that waits to be killed, and after which step. `slow`: after which step steps take longer, while the
    file does not exist.
    """
    fields = job(name, file)
    if options:
        fields["command"] = [*fields["command"], *map(str, options)]
    if hold:
        fields["command"] = held(fields["command"], *hold)
    if slow:
        python, *program = fields["command"]
        fields["command"] = [python, str(PROGRAMS / "slowed.py"), *map(str, slow), *program]
    set_options = [argument for field, value in (sets or {}).items() for argument in ("--set", f"{field}={value}")]
    return start(fields, *set_options, home=home)


def by_hand(name: str, *arguments: object, **env: object) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in the folder of an example, without Paceline."""
    inherited = without("PACELINE", "PYTEST", "TF_")
    extra = {name: str(value) for name, value in env.items()}
    path = TENSORFLOW_PATH if job(name)["framework"] == "tensorflow" else str(SOURCE)
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=EXAMPLES / name, capture_output=True, text=True, timeout=LIMIT_S,
        env={**inherited, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", **extra}, check=False,
    )  # fmt: skip


def done(name: str, *arguments: object, **env: object) -> str:
    """Like `by_hand`; asserts success and returns the standard output."""
    result = by_hand(name, *arguments, **env)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def answers_when_tried_and_exported(run: Run, name: str, code: str, *arguments: object, least: int = 17) -> None:
    """`paceline try` is mostly right on the first held-out images, and the exported model gives the same answers.

    `code`: a program that loads the exported model; `sys.argv` contains the model's folder and `arguments`.
    `arguments`: extra arguments for both programs.
    """
    command = ("try", run.folder.name, "--", *map(str, arguments), *map(str, TRIED))
    tried = run.call(*command, limit=LIMIT_S)
    assert tried.returncode == 0, tried.stderr[-4000:]
    matches = [_ANSWER.fullmatch(line) for line in tried.stdout.splitlines()]
    answers = [tuple(map(int, each.groups())) for each in matches if each is not None]
    assert [index for index, _, _ in answers] == list(TRIED), tried.stdout
    assert sum(predicted == label for _, predicted, label in answers) >= least, tried.stdout

    model = run.place / "model"
    exported = run.call("export", run.folder.name, "--to", str(model), limit=LIMIT_S)
    assert exported.returncode == 0, exported.stderr[-4000:]
    assert list(map(int, done(name, "-c", code, model, *arguments).split())) == [
        predicted for _, predicted, _ in answers
    ]


def held(command: Sequence[object], task: str, moment: int | str) -> list[str]:
    """The command of a program whose task waits to be killed after this step, or before it prints this text."""
    python, *program = map(str, command)
    return [python, str(PROGRAMS / "held.py"), task, str(moment), *program]


def kill_held(run: Run, task: str) -> None:
    """Kills the waiting task when there is a snapshot to resume from."""
    run.wait("committed", LIMIT_S)
    eventually(f"{task} waits", lambda: " | held\n" in run.log(task), LIMIT_S, run.story)
    kill(run.task(task))


def reached(run: Run, step: int, after: int = 0) -> Event:
    """The first event by any task that reports at least this step, at or after position `after` among all events."""

    def check() -> Event | None:
        events = run.events()
        for event in events[after:]:
            if event["event"] == "step" and event["step"] >= step:
                return event
        assert not events or events[-1]["event"] != "run-ended", f"ended before step {step}\n{run.story()}"
        return None

    event = eventually(f"step {step}", check, LIMIT_S, run.story)
    assert event is not None
    return event


def last(run: Run) -> Path:
    """The folder of the newest committed snapshot, in the run's own folder."""
    committed: str = run.events("committed")[-1]["snapshot"]
    return run.folder / "snapshots" / run.folder.name / committed
