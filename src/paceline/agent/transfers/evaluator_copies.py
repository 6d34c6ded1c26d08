"""Snapshots for the evaluators of a host: each is fetched on request and kept until the evaluator requests the next.

<folder>/evaluating/<task>/step-<n>-g<generation>      a verified copy of the snapshot that the task evaluates
<folder>/evaluated/<host>/step-<n>-g<generation>.json  the result, until the captain has acknowledged it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.run_files import replace
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter_client import PorterClient
from paceline.plan import Plan
from paceline.storage.json_values import read_json
from paceline.storage.local_files import remove_tree
from paceline.storage.snapshots.manifest import INVALID_FIELDS, SnapshotId, pair, parse_id

RETRY_S = 2.0  # seconds until a failed fetch is retried
MAX_METRICS = 100


class Evaluator:
    """One attempt of an evaluator task that requests snapshots."""

    def __init__(self) -> None:
        self.is_waiting = False  # for the next snapshot
        self.snapshot: SnapshotId | None = None  # being evaluated, or evaluated and not yet acknowledged by the captain
        self.fetch_request = 0  # number of the request to the porter


class EvaluatorCopies:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        porter: PorterClient,
        loop: Loop,
        send: Callable[[ev.MemberEvent], None],
        notify: Callable[..., None],
        remove: Callable[[Iterable[str]], None],
        reply: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """`send`: to the captain. `reply`: sends a message to a task. `remove`: deletes folders on this machine."""
        self._host = options.host
        self._parents = [f"{options.folder}/evaluating", f"{options.folder}/evaluated"]
        self._copies, self._results = self._parents[0], f"{self._parents[1]}/{options.host}"
        self._task_folders = [f"{self._copies}/{task}" for task in plan.host(options.host).tasks]
        self._porter, self._loop = porter, loop
        self._send, self._notify, self._remove, self._reply = send, notify, remove, reply
        self._tasks: dict[str, Evaluator] = {}
        self._unacknowledged: dict[SnapshotId, ev.SnapshotEvaluated] = self._read_results()
        for task in plan.host(options.host).tasks:
            self._clear(task)  # copies of an earlier agent

    def __bool__(self) -> bool:
        """Whether a task on this host requests snapshots."""
        return bool(self._tasks)

    # ---- tasks

    def handle_message(self, task: str, message: dict[str, Any]) -> None:
        """The task has evaluated a snapshot, or requests one, or both."""
        evaluator = self._tasks.setdefault(task, Evaluator())
        evaluator.is_waiting = bool(message.get("wants"))
        done = message.get("done")
        evaluated = parse_id(done) if isinstance(done, str) else None
        if evaluated is not None and evaluated == evaluator.snapshot:
            self._finish(ev.SnapshotEvaluated(self._host, task, evaluated, _numbers(message.get("metrics"))))
        elif evaluator.snapshot is None and evaluator.is_waiting:
            self._send(ev.EvaluatorWaiting(self._host, task))

    def attempt_ended(self, task: str) -> None:
        evaluator = self._tasks.pop(task, None)
        if evaluator is not None:
            self._porter.cancel(evaluator.fetch_request)
            self._clear(task)

    def _clear(self, task: str) -> None:
        """Removes the contents of the task's folder. `tidy` removes the folder, with everything not yet removed."""
        folder = f"{self._copies}/{task}"
        with contextlib.suppress(FileNotFoundError):
            self._remove([f"{folder}/{name}" for name in os.listdir(folder)])

    def _finish(self, result: ev.SnapshotEvaluated) -> None:
        """Writes the result to disk first: the snapshot is not evaluated again even if a process dies now."""
        self._unacknowledged[result.snapshot] = result
        with contextlib.suppress(OSError):  # a full disk: this agent still has the result in memory
            os.makedirs(self._results, exist_ok=True)
            replace(f"{self._results}/{result.snapshot}.json", _to_json(result))
        self._send(result)
        self._remove([f"{self._copies}/{result.task}/{result.snapshot}"])

    # ---- the captain

    def follows(self) -> dict[str, SnapshotId | None]:
        """The snapshot of each task that has one; None for tasks that wait for one."""
        snapshots = {task: evaluator.snapshot for task, evaluator in self._tasks.items()}
        return {task: id for task, id in snapshots.items() if id is not None or self._tasks[task].is_waiting}

    def unacknowledged(self) -> tuple[ev.SnapshotEvaluated, ...]:
        """Results that the captain has not acknowledged."""
        return tuple(self._unacknowledged.values())

    def evaluate(self, message: ins.EvaluateSnapshot) -> None:
        evaluator = self._tasks.get(message.task)
        if evaluator is None or not evaluator.is_waiting or evaluator.snapshot is not None:
            return  # the task has died, or already has this snapshot
        if message.snapshot is None:
            evaluator.is_waiting = False
            self._reply(message.task, {"over": True})
            return
        evaluator.snapshot = message.snapshot
        self._fetch(message.task, evaluator, evaluator.snapshot)

    def acknowledge(self, id: SnapshotId) -> None:
        """The captain has recorded the evaluation of this snapshot."""
        self._unacknowledged.pop(id, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._results}/{id}.json")
        for task, evaluator in self._tasks.items():
            if evaluator.snapshot == id:
                evaluator.snapshot = None
                if evaluator.is_waiting:
                    self._send(ev.EvaluatorWaiting(self._host, task))

    def _fetch(self, task: str, evaluator: Evaluator, id: SnapshotId, is_retry: bool = False) -> None:
        if self._tasks.get(task) is not evaluator:
            return
        folder = f"{self._copies}/{task}/{id}"

        def fetched(answer: req.Answer) -> None:
            if self._tasks.get(task) is not evaluator:
                return
            if not isinstance(answer, req.Failure):
                evaluator.is_waiting = False
                self._reply(task, {"snapshot": str(id), "path": folder})
            elif answer.kind in (req.DAMAGED, req.NEWER):
                self._unacknowledged[id] = ev.SnapshotEvaluated(self._host, task, id, error=answer.text)
                self._send(self._unacknowledged[id])
            else:
                if not is_retry:
                    text = f"cannot fetch the snapshot of step {id.step} for {task}: {answer.text}; retrying"
                    self._notify(text, True)
                self._loop.after(RETRY_S, lambda: self._fetch(task, evaluator, id, is_retry=True))

        self._remove([folder])
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        evaluator.fetch_request = self._porter.ask(req.FetchSnapshot(id, folder), fetched)

    # ---- on disk

    def _read_results(self) -> dict[SnapshotId, ev.SnapshotEvaluated]:
        results = {}
        for name in os.listdir(self._results) if os.path.isdir(self._results) else ():
            id = parse_id(name[: -len(".json")])
            with contextlib.suppress(OSError, *INVALID_FIELDS):
                data = read_json(f"{self._results}/{name}")
                if id is not None:
                    results[id] = ev.SnapshotEvaluated(self._host, str(data["task"]), id, _numbers(data["metrics"]))
        return results

    def tidy(self) -> None:
        """Removes all files, after the end of the run."""
        for folder in (*self._task_folders, self._results):
            remove_tree(folder, ignore_errors=True)
        for parent in self._parents:
            with contextlib.suppress(OSError):  # it contains files of other hosts
                os.rmdir(parent)


def _numbers(metrics: Any) -> dict[str, float]:
    items = list(metrics.items())[:MAX_METRICS] if isinstance(metrics, dict) else ()
    return {str(k)[:100]: float(v) for k, v in items if isinstance(v, (int, float)) and abs(v) < 1e300}


def _to_json(result: ev.SnapshotEvaluated) -> dict[str, Any]:
    return {
        "task": result.task, "snapshot": pair(result.snapshot), "metrics": dict(result.metrics), "error": result.error,
    }  # fmt: skip
