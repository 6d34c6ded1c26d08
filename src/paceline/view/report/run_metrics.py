"""The metrics of runs, from their files; see agent/metrics/ for what they are. What only a captain knows (leases,
snapshots on hosts, records that are not written yet) is not in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from paceline.agent.metrics import families as fam
from paceline.agent.metrics.openmetrics_text import Samples, render
from paceline.agent.metrics.run_samples import (
    add_disk,
    add_goodput,
    add_reported,
    add_resources,
    add_restarts,
    known_cause,
)
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.state import status_reader
from paceline.view.state.events import seconds
from paceline.view.state.run_state import Mark
from paceline.view.state.status_reader import Standing

RECENT_S = 3600.0  # how long the metrics of a run are shown after its end


def text(runs: Iterable[Run], now: float, openmetrics: bool) -> bytes:
    """`now`: in seconds since 1970."""
    return render((samples(status_reader.read(run), now) for run in runs), fam.FAMILIES, openmetrics)


def recent(now: float) -> list[Run]:
    """The runs on this machine that are alive, or ended less than RECENT_S ago."""
    here = [run for run in run_folders.all_runs() if not run_folders.on_cluster(run.folder)]
    return [run for run in here if run_folders.alive(run.folder) or now - _changed(run.folder) < RECENT_S]


def _changed(folder: Path) -> float:
    """When the run last wrote its report or an event."""
    times = []
    for name in ("report.json", "events.jsonl"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def samples(standing: Standing, now: float) -> Samples:
    state, report, info = standing.state, standing.report, standing.info
    result = Samples(standing.run)
    texts = [str(info.get(name) or "") for name in ("job", "framework", "strategy", "version")]
    result.add(fam.RUN, 1, *texts)
    status = str(report.get("status"))
    result.add(fam.STATUS, 1, "ending" if status == "running" and state.ending else status)
    result.add(fam.STARTED, seconds(report.get("started")))
    result.add(fam.GENERATION, state.generation)
    add_restarts(result, Counter(known_cause(str(restart.get("cause"))) for restart in state.restarts))
    add_goodput(result, report.get("goodput"))
    if standing.alive:
        add_disk(result, str(standing.folder))
    _add_progress(result, standing, now)
    _add_snapshots(result, standing, now)
    if standing.alive:
        running = {task.name: task.host for task in state.tasks.values() if task.state == "running"}
        add_resources(result, report.get("resources"), running.keys(), set(running.values()))
    return result.end()


def _add_progress(result: Samples, standing: Standing, now: float) -> None:
    state = standing.state
    if state.steps:
        result.add(fam.STEP, state.steps)
    if standing.alive:
        result.add(fam.SPEED, state.speed)
        result.add(fam.PROGRESS_AGE, _age(state.progress_at, now))
    for task in result.first(state.tasks.values()):
        result.add(fam.TASK_UP, standing.alive and task.state == "running", task.name)
        result.add(fam.TASK_STEP, task.step, task.name)
    add_reported(result, state.metrics)


def _add_snapshots(result: Samples, standing: Standing, now: float) -> None:
    saved, committed = standing.state.saved, standing.state.committed
    for kind, mark in ((fam.SAVED, saved), (fam.COMMITTED, committed)):
        if mark is not None:
            result.add(fam.SNAPSHOT_STEP, mark.step, kind)
            if standing.alive:
                result.add(fam.SNAPSHOT_AGE, _age_of(mark, now), kind)
    if committed is not None:
        result.add(fam.SNAPSHOT_SIZE, committed.size)
        result.add(fam.COMMIT_TIME, committed.took_s)
    if saved is not None:
        result.add(fam.STALL, saved.stall_s)
    evaluators = [task for task in standing.state.tasks.values() if task.name.startswith("evaluator-")]
    if committed is not None and evaluators:
        evaluated = max(task.step or 0 for task in evaluators)
        result.add(fam.EVALUATOR_LAG, max(0, committed.step - evaluated))


def _age_of(mark: Mark, now: float) -> float | None:
    """Since it was saved, even if it was committed later."""
    age = _age(mark.at, now)
    return None if age is None else age + (mark.took_s or 0.0)


def _age(at: str, now: float) -> float | None:
    since = seconds(at)
    return None if since is None else max(0.0, now - since)
