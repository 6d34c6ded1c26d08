"""The report of a run in words: how it went, where things are, what to try next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.view.events import number, seconds
from paceline.view.origin import of_run
from paceline.view.runs import Run
from paceline.view.state import Mark, Standing
from paceline.view.words import clock, count, figure, join, metrics, natural, outcome, since, span

_SHOWN_TASKS = 4


def text(report: dict[str, Any], committed: str = "") -> list[str]:
    """`committed`: what is known of snapshots; the report itself says nothing of them."""
    folder = Path(str(report.get("folder", "")))
    lines = [_headline(report)]
    lines += [f"  {line}" for line in _progress(report)]
    lines += [f"  {line}" for line in _restarts(report)]
    lines += [f"  {name:<12} {where}" for name, where in _places(folder, committed, best(report.get("best")))]
    lines += [f"  {'next':<12} {_next(report, folder)}"]
    return lines


def _headline(report: dict[str, Any]) -> str:
    status, reason = str(report.get("status")), report.get("reason")
    ended = seconds(report.get("ended") or "") or time.time()
    took = since(report.get("started"), ended)
    line = f"{report.get('run')} {outcome(status)}"
    line += f" after {span(took)}" if took is not None else ""
    return f"{line}: {reason}" if reason and status != "succeeded" else line


def _progress(report: dict[str, Any]) -> list[str]:
    steps, speed, generations = report.get("steps"), number(report.get("steps_per_s")), report.get("generations")
    parts = [count(steps, "step")] if isinstance(steps, int) and steps else []
    parts += [f"{figure(speed)} steps/s"] if speed else []
    parts += [count(generations, "generation")] if isinstance(generations, int) and generations else []
    lines = [", ".join(parts)] if parts else []
    return measured(report.get("metrics")) + lines


def measured(reported: Any) -> list[str]:
    """The last metrics; tasks of a group that say the same are said once."""
    if not isinstance(reported, dict):
        return []
    by_words: dict[str, list[str]] = {}
    for task, values in reported.items():
        if words := metrics(values):
            by_words.setdefault(words, []).append(task)
    lines = [f"{words} ({join(sorted(tasks, key=natural))})" for words, tasks in by_words.items()]
    if len(lines) > _SHOWN_TASKS:
        lines = [*lines[:_SHOWN_TASKS], f"... and {len(lines) - _SHOWN_TASKS} more in report.json"]
    return lines


def _restarts(report: dict[str, Any]) -> list[str]:
    restarts = report.get("restarts") or []
    if not restarts:
        return ["no restarts"]
    return [f"{count(len(restarts), 'restart')}:", *(f"  {restarted(restart)}" for restart in restarts[-10:])]


def restarted(restart: dict[str, Any]) -> str:
    line = f"{clock(str(restart.get('at')))} {restart.get('task') or ''} {restart.get('cause')}".replace("  ", " ")
    line += f": {restart['detail']}" if restart.get("detail") else ""
    after = number(restart.get("first_step_after_s"))
    return f"{line}; next step after {span(after)}" if after is not None else line


def _places(folder: Path, committed: str, best: str) -> list[tuple[str, str]]:
    logs, tensorboard = (str(folder / name) if _filled(folder / name) else "" for name in ("logs", "tensorboard"))
    places = (
        ("from", of_run(folder)), ("logs", logs), ("snapshots", committed), ("best", best),
        ("tensorboard", tensorboard),
    )  # fmt: skip
    return [(name, where) for name, where in places if where]


def best(found: Any) -> str:
    """The snapshot that `snapshots.best` chooses, and by what."""
    if not isinstance(found, dict):
        return ""
    return f"{found.get('snapshot')}: {metrics({str(found.get('metric')): found.get('value')})}"


def snapshots(standing: Standing, now: float | None = None) -> str:
    """What is saved only, and the newest that is committed, with where it is. `now`: also how long ago."""
    from paceline.view.places import described

    saved, committed = standing.state.saved, standing.state.committed
    parts = []
    if saved is not None and (committed is None or saved.snapshot != committed.snapshot):
        parts.append(f"step {saved.step} saved{_ago(saved, now)}")
    skipped = number(standing.report.get("skipped"))
    parts += [f"{skipped:g} skipped"] if skipped else []
    if committed is not None:
        where = described(Run(standing.run, standing.folder), committed.snapshot)
        parts.append(f"step {committed.step} committed{_ago(committed, now)}: {where}")
    elif parts:
        parts.append("none committed yet" if standing.alive else "none committed")
    return ", ".join(parts)


def _ago(mark: Mark, now: float | None) -> str:
    age = since(mark.at, now) if now is not None else None
    return f" {span(round(age))} ago" if age is not None else ""


def _filled(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _next(report: dict[str, Any], folder: Path) -> str:
    run = report.get("run")
    if report.get("status") == "succeeded" and _filled(folder / "tensorboard"):
        return f"paceline tensorboard {run}"
    if report.get("status") == "failed":
        restarts = report.get("restarts") or [{}]
        task = restarts[-1].get("task")
        return f"paceline logs {run}" + (f" --task {task}" if task else "")
    if report.get("status") in ("running", "starting"):
        return f"paceline logs -f {run}"
    return f"paceline status {run}"
