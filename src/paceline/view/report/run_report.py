"""The report of a run as text: its outcome, the paths of its files, and the next command to try."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.agent.captain import start_times
from paceline.view.files.run_folders import Run, read_object
from paceline.view.snapshots.snapshot_locations import origin_of
from paceline.view.state.events import number, seconds
from paceline.view.state.run_state import LIVE, Mark
from paceline.view.state.status_reader import Standing
from paceline.view.text.wording import clock, count, figure, join, metrics, natural, outcome, phases, since, span

_SHOWN_TASKS = 4


def text(report: dict[str, Any], committed: str = "") -> list[str]:
    """`committed`: the text about snapshots, which report.json does not contain."""
    folder = Path(str(report.get("folder", "")))
    lines = [headline(report)]
    lines += [f"  {line}" for line in _progress(report)]
    lines += [f"  {line}" for line in _restarts(report)]
    lines += [f"  {name:<12} {where}" for name, where in _locations(folder, committed, best(report.get("best")))]
    return [*lines, next_line(next_command(report) or f"paceline status {report.get('run')}")]


def next_line(command: str) -> str:
    return f"  {'next':<12} {command}"


def headline(report: dict[str, Any]) -> str:
    status, reason = str(report.get("status")), report.get("reason")
    ended = seconds(report.get("ended")) or time.time()
    took = since(report.get("started"), ended)
    line = f"{report.get('run')} {outcome(status)}"
    if took is not None and status not in ("damaged", "abandoned"):  # nobody knows when such a run ended
        line += f", started {span(took)} ago" if status in LIVE else f" after {span(took)}"
    return f"{line}: {reason}" if reason and status != "succeeded" else line


def _progress(report: dict[str, Any]) -> list[str]:
    steps, speed, generations = report.get("steps"), number(report.get("steps_per_s")), report.get("generations")
    parts = [count(steps, "step")] if isinstance(steps, int) and steps else []
    parts += [f"{figure(speed)} steps/s"] if speed else []
    parts += [count(generations, "generation")] if isinstance(generations, int) and generations else []
    lines = [", ".join(parts)] if parts else []
    return measured(report.get("metrics")) + lines


def measured(reported: Any) -> list[str]:
    """The last metrics; tasks with the same values share a line."""
    if not isinstance(reported, dict):
        return []
    tasks_by_text: dict[str, list[str]] = {}
    for task, values in reported.items():
        if text := metrics(values):
            tasks_by_text.setdefault(text, []).append(task)
    lines = [f"{text} ({join(sorted(tasks, key=natural))})" for text, tasks in tasks_by_text.items()]
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


def started(report: dict[str, Any]) -> list[str]:
    """How the newest generation started: the phases of the task that the others waited for, and what would help."""
    starts = report.get("starts") or []
    if not starts:
        return []
    tasks, advice = starts[-1]["tasks"], starts[-1].get("advice")
    task = start_times.slowest(tasks)
    measured = tasks.get(task, {})
    total = number(measured.get("first_step_s"))
    if not measured:
        return []
    reached = f"first step of {task} after {span(total)}" if total is not None else f"{task} has not reported a step"
    spent = start_times.phases(measured)
    lines = [f"{'start':<12} {reached}" + (f": {phases(spent)}" if len(spent) > 1 or total is None else "")]
    return [*lines, f"{'':<12} {advice}"] if advice else lines


def start_table(report: dict[str, Any]) -> list[list[str]]:
    """The starts of all generations: seconds of imports, and from a task's start until it had joined, and so on."""
    rows = [["GENERATION", "TASK", "FROM", "IMPORTS", "JOINED", "RESTORED", "FIRST STEP"]]
    for start in report.get("starts") or []:
        for task, measured in sorted(start["tasks"].items(), key=lambda item: natural(item[0])):
            origin = "spare" if measured.get("warm") else "cold"
            times = [number(measured.get(name)) for name in ("imports_s", "joined_s", "restored_s", "first_step_s")]
            rows.append([str(start["generation"]), task, origin, *("-" if t is None else span(t) for t in times)])
    return rows if len(rows) > 1 else []


def _locations(folder: Path, committed: str, best: str) -> list[tuple[str, str]]:
    logs, tensorboard = (str(folder / name) if _has_files(folder / name) else "" for name in ("logs", "tensorboard"))
    locations = (
        ("from", origin_of(folder)), ("logs", logs), ("snapshots", committed), ("best", best),
        ("tensorboard", tensorboard),
    )  # fmt: skip
    return [(name, location) for name, location in locations if location]


def best(snapshot: Any) -> str:
    """The snapshot that `snapshots.best` selects, with the value of its metric."""
    if not isinstance(snapshot, dict):
        return ""
    return f"{snapshot.get('snapshot')}: {metrics({str(snapshot.get('metric')): snapshot.get('value')})}"


def snapshots(standing: Standing, now: float | None = None) -> str:
    """The newest snapshot that is only saved, and the newest committed one with its address. `now`: add their age."""
    from paceline.view.snapshots.snapshot_locations import described

    saved, committed = standing.state.saved, standing.state.committed
    parts = []
    if saved is not None and (committed is None or saved.snapshot != committed.snapshot):
        parts.append(f"{saved} saved{_ago(saved, now)}")
    skipped = number(standing.report.get("skipped"))
    parts += [f"{skipped:g} skipped"] if skipped else []
    if committed is not None:
        location = described(Run(standing.run, standing.folder), committed.snapshot)
        parts.append(f"{committed} committed{_ago(committed, now)}: {location}")
    elif parts:
        parts.append("none committed yet" if standing.alive else "none committed")
    elif standing.state.generation and (watched := _watched(standing.folder)):
        parts.append(f"none{' yet' if standing.alive else ''}: nothing was captured from {watched} (snapshots.watch)")
    return ", ".join(parts)


def _watched(folder: Path) -> str:
    settings = (read_object(folder / "plan.json") or {}).get("snapshots")
    watched = settings.get("watch") if isinstance(settings, dict) else None
    return watched if isinstance(watched, str) else ""


def _ago(mark: Mark, now: float | None) -> str:
    age = since(mark.at, now) if now is not None else None
    return f" {span(round(age))} ago" if age is not None else ""


def _has_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def next_command(report: dict[str, Any]) -> str:
    """The command to try next; empty: only `paceline status` itself."""
    run, folder = report.get("run"), Path(str(report.get("folder", "")))
    if report.get("status") == "succeeded" and _has_files(folder / "tensorboard"):
        return f"paceline tensorboard {run}"
    if report.get("status") == "failed":
        restarts = report.get("restarts") or [{}]
        task = restarts[-1].get("task")
        return f"paceline logs {run}" + (f" --task {task}" if task else "")
    if report.get("status") in ("running", "starting"):
        return f"paceline logs -f {run}"
    if report.get("status") == "paused":
        return f"paceline resume {run}"
    return ""
