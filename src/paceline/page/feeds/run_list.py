"""All runs in one list, kept up to date while someone looks at it: those of this machine and those of clusters."""

from __future__ import annotations

import os
import pwd
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.page.feeds.clusters import Cluster, Clusters
from paceline.page.feeds.feed import Feed
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.state import run_state, status_reader
from paceline.view.state.run_reader import StateReader

_POLL_S = 1.0
_LONGEST_PAUSE_S = 10.0  # between two searches for runs that have changed although they had ended
_PIECE = 100  # runs that are shown at once while the list is read for the first time
_BUSY = 5  # a search that takes long is done less often: at most a sixth of the time
_LIVE = ("starting", "running", "paused")

Item = dict[str, Any]


class RunList(Feed):
    def __init__(self, clusters: Clusters) -> None:
        super().__init__(_POLL_S)
        self._clusters = clusters
        self._ended: dict[str, tuple[object, Item]] = {}  # what their files looked like, and the item
        self._live: dict[str, StateReader] = {}
        self._runs: list[Run] = []
        self._folder: object = None
        self._scan_at = 0.0
        self.items: dict[str, Item] = {}
        self.sources: list[dict[str, Any]] = []

    def update(self) -> None:
        began, is_first = time.monotonic(), not self.sources
        folder = _stat(run_folders.runs_folder())  # changes with each new run
        is_scan = is_first or began >= self._scan_at or folder != self._folder
        runs = run_folders.all_runs() if is_scan else self._runs
        items: dict[str, Item] = {}
        for run in runs:
            ended = None if is_scan else self._ended.get(run.name)
            items[run.name] = self._item(run) if ended is None else ended[1]
            if is_first and len(items) % _PIECE == 0:
                self._show(items, [_here("asking", len(items))])
        if is_first:
            self._show(items, [_here("listed", len(items))])  # reading the kubeconfig takes a while
        for name in [name for name in self._live if name not in items]:
            self._live.pop(name).close()
        self._ended = {name: each for name, each in self._ended.items() if name in items}
        self._clusters.look(run for run in runs if items[run.name]["on"] == "kubernetes" and items[run.name]["is_live"])
        clusters = self._clusters.all()
        for cluster in clusters:
            items.update((item["key"], item) for item in _of_cluster(cluster, items))
        self._show(items, [_here("listed", len(runs)), *(cluster.to_json() for cluster in clusters)])
        self._runs, self._folder = runs, folder
        if is_scan:
            now = time.monotonic()
            self._scan_at = now + min(_LONGEST_PAUSE_S, _BUSY * (now - began))

    def _show(self, items: dict[str, Item], sources: list[dict[str, Any]]) -> None:
        # Streams recognize what has changed by identity.
        items = {key: self.items[key] if self.items.get(key) == item else item for key, item in items.items()}
        with self.lock:
            is_new = self.sources != sources or self.items.keys() != items.keys()
            is_new = is_new or any(self.items[key] is not item for key, item in items.items())
            self.items, self.sources = items, sources if self.sources != sources else self.sources
        if is_new:
            self.publish()
            self.set_ready()

    def close(self) -> None:
        for reader in self._live.values():
            reader.close()
        self._live = {}

    def to_json(self) -> dict[str, Any]:
        with self.lock:
            return {"schema_version": 1, "runs": list(self.items.values()), "sources": self.sources}

    def _item(self, run: Run) -> Item:
        signature = _signature(run.folder)
        cached = self._ended.get(run.name)
        if cached is not None and cached[0] == signature:
            return cached[1]
        alive = run_folders.alive(run.folder)
        if not alive and not run_folders.is_starting(run.folder):
            if (reader := self._live.pop(run.name, None)) is not None:
                reader.close()
            item = describe(run, status_reader.summary(run), run_folders.info(run.folder), False)
            self._ended[run.name] = signature, item
            return item
        reader = self._live.setdefault(run.name, StateReader(run))
        reader.update()
        standing = reader.standing(alive)
        return describe(run, standing.report, standing.info, alive, standing.state)


def _here(state: str, count: int) -> dict[str, Any]:
    return {"source": "local", "name": socket.gethostname(), "state": state, "error": None, "runs": count}


class RunListViewer:
    """What one client was sent."""

    poll_s, has_more = None, False

    def __init__(self, feed: RunList) -> None:
        self._feed = feed
        self._items: dict[str, Item] | None = None
        self._sources: object = None

    def changes(self) -> list[tuple[str, object]]:
        with self._feed.lock:
            items, sources = self._feed.items, self._feed.sources
        before, self._items = self._items, items
        is_new, self._sources = sources is not self._sources, sources
        if before is None:
            return [("runs", {"schema_version": 1, "runs": list(items.values()), "sources": sources})]
        change: dict[str, Any] = {
            "runs": [item for key, item in items.items() if before.get(key) is not item],
            "gone": [key for key in before if key not in items],
        }
        if is_new:
            change["sources"] = sources
        return [("change", change)] if is_new or change["runs"] or change["gone"] else []


def describe(
    run: Run, report: Mapping[str, Any], info: Mapping[str, Any], alive: bool, state: run_state.State | None = None
) -> Item:
    """An item of the list. `report`: the fields of the run's report; `state`: of a run that is alive."""
    restarts, metrics = report.get("restarts") or [], _metrics(report, state)
    return {
        "key": run.name, "run": run.name, "job": info.get("job") or run.name.rpartition("-")[0],
        "framework": info.get("framework"), **_outcome(report, alive),
        "steps": report.get("steps"), "total_steps": run_state.total_steps(metrics),
        "steps_per_s": report.get("steps_per_s"),
        "progress_at": state.progress_at or None if state is not None else None,
        "restarts": len(restarts), "causes": dict(Counter(str(each.get("cause")) for each in restarts)),
        "last_restart": restarts[-1] if restarts else None, "generations": report.get("generations"),
        "goodput": (report.get("goodput") or {}).get("share"), "metrics": metrics,
        "best": report.get("best"), **place(run, info), "tasks": _task_count(run, state),
        "problems": list(report.get("problems") or ()),
    }  # fmt: skip


def _task_count(run: Run, state: run_state.State | None) -> int | None:
    """Without the tasks that `scale` could add, or could have added; None: its events are not known."""
    plan = run_folders.plan(run.folder)
    tasks = plan.get("tasks", ())
    if not plan.get("elastic"):
        return len(tasks)
    state = state or status_reader.read(run).state
    return sum(state.is_wanted(str(task["name"])) for task in tasks) if state.tasks else None


def place(run: Run, info: Mapping[str, Any]) -> dict[str, Any]:
    """Whose run it is, and where."""
    on, context, namespace = info.get("on") or "local", info.get("context"), info.get("namespace")
    where = "/".join(filter(None, (context, namespace))) if on == "kubernetes" else socket.gethostname()
    return {
        "who": owner(run.folder) if run_folders.is_own(run.folder) else None, "where": where, "on": on,
        "context": context, "namespace": namespace,
    }  # fmt: skip


def owner(folder: Path) -> str | None:
    try:
        return pwd.getpwuid(folder.stat().st_uid).pw_name
    except (OSError, KeyError):
        return None


def _outcome(report: Mapping[str, Any], alive: bool) -> dict[str, Any]:
    status = str(report.get("status"))
    return {
        "status": status, "reason": report.get("reason") or "", "cause": report.get("cause"),
        "is_live": alive or status in _LIVE, "started": report.get("started"), "ended": report.get("ended"),
    }  # fmt: skip


def _metrics(report: Mapping[str, Any], state: run_state.State | None) -> dict[str, Any]:
    """The last ones of the run: of a run that has ended, those of its first task that reported any."""
    if state is not None and state.last_metrics:
        return dict(state.last_metrics)
    by_task = report.get("metrics") or {}
    return dict(next((values for values in by_task.values() if values), {}))


def _of_cluster(cluster: Cluster, known: Mapping[str, Item]) -> list[Item]:
    """The runs that this machine does not know."""
    items = []
    for report in cluster.reports:
        run = str(report.get("run"))
        same = known.get(run)
        if same is not None and (same["context"], same["namespace"]) == (cluster.context, cluster.namespace):
            continue
        restarts = report.get("restarts")
        where = "/".join(filter(None, (cluster.context, cluster.namespace)))
        items.append(
            {
                "key": f"{run}@{cluster.code}", "run": run, "job": run.rpartition("-")[0] or run, "framework": None,
                **_outcome(report, False), "steps": report.get("steps"), "total_steps": None,
                "steps_per_s": report.get("steps_per_s"), "progress_at": None,
                "restarts": None if restarts is None else len(restarts),
                "causes": dict(Counter(str(each.get("cause")) for each in restarts or ())),
                "last_restart": restarts[-1] if restarts else None, "generations": report.get("generations"),
                "goodput": (report.get("goodput") or {}).get("share"), "metrics": {}, "best": report.get("best"),
                "who": None, "where": where, "on": "kubernetes", "context": cluster.context,
                "namespace": cluster.namespace, "tasks": None, "problems": [],
            }
        )  # fmt: skip
    return items


def _signature(folder: Path) -> object:
    """Changes when an ended run is started or damaged, or its outcome becomes known."""
    return tuple(_stat(folder / name) for name in ("run.json", "report.json", "plan.json", "events.jsonl"))


def _stat(path: Path) -> object:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
