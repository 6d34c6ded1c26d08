"""Runs of the examples: shortened by options, attacked, and what they ended with."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from support.environment import without
from support.runs import SOURCE, Event, Run, Starter, causes, eventually, kill

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300.0  # for a framework to start a few times, beside others
TRIED = range(20)  # of the held-out images

_ANSWER = re.compile(r"\w+ (\d+) \D+ (\d) \(\d+\.\d%\), and \D+ (\d)")

Begin = Callable[..., Run]


def job(name: str, file: str = "job.yaml") -> dict[str, Any]:
    """A job file of an example, with its code where it is."""
    made: dict[str, Any] = YAML(typ="safe").load(EXAMPLES / name / file)
    return {**made, "code": str(EXAMPLES / name / made.get("code", "."))}


def begin(
    start: Starter,
    home: Path,
    name: str,
    *options: object,
    sets: Mapping[str, object] | None = None,
    file: str = "job.yaml",
) -> Run:
    """A run of an example, with options for its command, and `--set` for its job file."""
    made = job(name, file)
    if options:
        made["command"] = [*made["command"], *map(str, options)]
    words = [word for field, value in (sets or {}).items() for word in ("--set", f"{field}={value}")]
    return start(made, *words, home=home)


def by_hand(name: str, *words: object, **env: object) -> subprocess.CompletedProcess[str]:
    """A program in the folder of an example, without Paceline around it."""
    kept = without("PACELINE", "PYTEST", "TF_")
    more = {name: str(value) for name, value in env.items()}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=EXAMPLES / name, capture_output=True, text=True, timeout=LIMIT_S,
        env={**kept, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "2", **more}, check=False,
    )  # fmt: skip


def done(name: str, *words: object, **env: object) -> str:
    """What it says, where it ends well."""
    ended = by_hand(name, *words, **env)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def answers_when_tried_and_exported(run: Run, name: str, code: str, *words: object, least: int = 17) -> None:
    """`paceline try` is mostly right about the first held-out images, and the exported model, by `code`, says the same.

    `words`: for both programs, besides. `code` finds the model's folder and them in `sys.argv`.
    """
    asked = ("try", run.folder.name, "--", *map(str, words), *map(str, TRIED))
    tried = run.call(*asked, limit=LIMIT_S)
    assert tried.returncode == 0, tried.stderr[-4000:]
    found = [_ANSWER.fullmatch(line) for line in tried.stdout.splitlines()]
    answers = [tuple(map(int, each.groups())) for each in found if each is not None]
    assert [number for number, _, _ in answers] == list(TRIED), tried.stdout
    assert sum(said == is_ for _, said, is_ in answers) >= least, tried.stdout

    model = run.place / "model"
    exported = run.call("export", run.folder.name, "--to", str(model), limit=LIMIT_S)
    assert exported.returncode == 0, exported.stderr[-4000:]
    assert list(map(int, done(name, "-c", code, model, *words).split())) == [said for _, said, _ in answers]


def kill_at(run: Run, *kills: tuple[str, int]) -> None:
    """Kills these tasks, one after the other, each once a step so far is reported and training has recovered."""
    after = 0
    for number, (task, step) in enumerate(kills):
        if number:  # what is still reported of before must not have the next one killed while all are ended anyway
            run.wait("recovered", LIMIT_S, after)
        reached(run, step, after)
        after = run.position()
        kill(run.task(task))
        run.wait("restart", LIMIT_S, after)
        after = run.position()  # what others had reported before they were ended, too, is over


def reached(run: Run, step: int, after: int = 0) -> Event:
    """The first report of a step so far, by any task, at or after position `after` among all events."""

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


def survived(report: Mapping[str, Any], kills: Sequence[tuple[str, int]]) -> bool:
    return causes(dict(report)) == [("signal", task) for task, _ in kills]


def last(run: Run) -> Path:
    """The folder of the newest committed snapshot, in the run's own folder."""
    committed: str = run.events("committed")[-1]["snapshot"]
    return run.folder / "snapshots" / run.folder.name / committed


def digest(run: Run) -> str:
    """Of what the last snapshot holds: the same for the same training, whatever happened. But for random state, where
    Python's and numpy's is that of a process that never asked for it."""
    seen = hashlib.sha256()
    tasks = sorted(path for path in last(run).iterdir() if path.is_dir())
    assert tasks, f"{last(run)} holds no part of a task"
    for path in sorted(path for task in tasks for path in task.rglob("*") if path.is_file()):
        seen.update(f"{path.relative_to(last(run))}\n".encode())
        if path.suffix == ".pt":
            _add(seen, _without_random(_loaded(path)))
        elif path.suffix == ".json":
            _add(seen, _without_random(json.loads(path.read_text())))
        else:
            seen.update(path.read_bytes())
    return seen.hexdigest()


def _loaded(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=True)


def _without_random(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {name: _without_random(value) for name, value in tree.items() if name != "random"}


def _add(seen: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name in value:
            seen.update(f"{name}\n".encode())
            _add(seen, value[name])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _add(seen, inner)
    else:
        seen.update(value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode())
