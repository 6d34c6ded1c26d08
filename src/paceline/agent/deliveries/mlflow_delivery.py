"""Keeps one MLflow run up to date with a run of Paceline: parameters, tags, reported metrics, and how it ended.

What is sent follows from the files of the run, and from what the server has: only steps above the highest one that it
has are sent. So a server that is down, or a restart, delays metrics, but neither loses nor repeats them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Callable

from paceline.agent.deliveries.addresses import host_of
from paceline.agent.deliveries.event_reader import Event, EventReader
from paceline.agent.deliveries.http_requests import DeliveryError
from paceline.agent.deliveries.leading_tasks import LeadingTasks
from paceline.agent.deliveries.mlflow_server import MOST_METRICS, Metric, MlflowServer, is_refusal, valid_name
from paceline.agent.deliveries.saved_state import FOLDER, mlflow_run_file, saved_mlflow_run
from paceline.agent.deliveries.schedule import Schedule
from paceline.agent.deliveries.series_reader import Line, SeriesReader
from paceline.agent.options import Options
from paceline.agent.run_files import replace
from paceline.agent.series_files import is_number, seconds
from paceline.plan import Plan, split_claim

SEND_EVERY = 10.0  # seconds
WARN_AFTER = 3  # attempts
TOKEN = "paceline.token"  # the tag by which the MLflow run is found again
EVALUATION = "evaluation/"  # begins the names of metrics that evaluators report
SPEED = "paceline/steps_per_s"
_STATUSES = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowDelivery:
    def __init__(
        self, plan: Plan, options: Options, server: MlflowServer, schedule: Schedule,
        warn: Callable[[str], None], announce: Callable[[str], None], user: str = "",
    ) -> None:  # fmt: skip
        """`announce`: called with the id of the MLflow run."""
        assert plan.track is not None
        self._plan, self._options, self._track = plan, options, plan.track
        self._server, self._schedule, self._warn, self._announce = server, schedule, warn, announce
        self._user = user
        self.name = f"MLflow ({host_of(plan.track.mlflow)})"
        state = f"{options.folder}/{FOLDER}/mlflow"
        self._events = EventReader(options.folder, f"{state}-events.json")
        self._leading = LeadingTasks(plan, options.folder)
        self._series = SeriesReader(options.folder, self._leading.names, f"{state}-series.json")
        self._run = saved_mlflow_run(options.folder)
        self._is_open = False  # its parameters are there
        self._is_complete = False  # everything was sent, after the end of the run
        self._problem = ""
        self._rejected = 0  # metric values
        self._rejected_tags: set[str] = set()

    def run(self) -> None:
        if self._run:
            self._announce(self._run)
        attempt = 0
        while True:
            is_last = self._schedule.is_ending
            try:
                self._open()
                self._send_series()
                self._send_events()
                attempt, self._problem = 0, ""
                if is_last:
                    self._is_complete = True
                    return
                self._schedule.wait(SEND_EVERY)
            except DeliveryError as error:
                attempt, self._problem = attempt + 1, str(error)
                if attempt == WARN_AFTER:
                    self._warn(f"cannot send to {self.name}: {error}; retrying, training continues")
                if not self._schedule.wait_to_retry(attempt, error.delay):
                    return

    def undelivered(self) -> str:
        if not self._is_complete:
            return f"the last metrics and the status were not delivered to {self.name}: {self._problem}".rstrip(": ")
        counts = {"metric value": self._rejected, "tag": len(self._rejected_tags)}
        rejected = " and ".join(f"{count} {what}{'s'[: count - 1]}" for what, count in counts.items() if count)
        return f"{self.name} rejected {rejected}" if rejected else ""

    # ---- the MLflow run

    def _open(self) -> None:
        if self._is_open:
            return
        if not self._run:
            experiment, token = self._server.experiment(self._track.experiment), self._options.token
            tag, value = (TOKEN, token) if token else ("paceline.run", self._options.run)
            run = self._server.find_run(experiment, tag, value)
            run = run or self._server.create_run(experiment, self._options.run, self._started(), self._first_tags())
            try:
                replace(mlflow_run_file(self._options.folder), {"run": run})
            except OSError:
                pass  # it is found by its tag
            self._run = run
            self._announce(run)
        self._log_parameters()
        self._is_open = True

    def _log_parameters(self) -> None:
        """Parameters that the server rejects must not block metrics."""
        try:
            self._server.log_parameters(self._run, self._track.parameters)
        except DeliveryError as error:
            if not is_refusal(error):
                raise
            self._warn(f"{self.name} rejected parameters: {error}")

    def _started(self) -> int:
        events = self._events.read()
        at = seconds(events[0][0].get("at")) if events else None
        return round(1000 * (time.time() if at is None else at))

    def _first_tags(self) -> dict[str, str]:
        tags = {
            "paceline.run": self._options.run,
            "paceline.job": self._plan.name,
            "paceline.framework": self._plan.framework,
            "mlflow.source.name": self._plan.name,
            "mlflow.source.type": "JOB",
        }
        tags.update({TOKEN: self._options.token} if self._options.token else {})
        tags.update({"mlflow.user": self._user} if self._user else {})
        return tags

    # ---- metrics

    def _send_series(self) -> None:
        highest: dict[str, int] | None = None
        while (unsent := self._series.read()) is not None:
            lines, position = self._leading.select(unsent[0]), unsent[1]
            if lines and highest is None:
                highest = self._server.highest_steps(self._run)
            self._log(new_metrics(lines, highest or {}))
            self._series.advance(position)
            self._series.save()

    def _log(self, metrics: list[Metric]) -> None:
        """Metrics that the server rejects are dropped: they must not block those that follow."""
        for begin in range(0, len(metrics), MOST_METRICS):
            batch = metrics[begin : begin + MOST_METRICS]
            try:
                self._server.log_metrics(self._run, batch)
            except DeliveryError as error:
                if not is_refusal(error):
                    raise
                if not self._rejected:
                    self._warn(f"{self.name} rejected metrics, which are dropped: {error}")
                self._rejected += len(batch)

    # ---- events

    def _send_events(self) -> None:
        while events := self._events.read():
            tags: dict[str, str] = {}
            for event, _ in events:
                tags.update(self._tags_of(event))
            self._log([metric for event, _ in events for metric in evaluation_metrics(event)])
            self._set_tags(tags)
            for event, _ in events:
                if event.get("event") == "run-ended" and event.get("status") in _STATUSES:
                    at = seconds(event.get("at"))
                    end_time = round(1000 * (time.time() if at is None else at))
                    self._end_run(_STATUSES[event["status"]], end_time)
            self._events.advance(events[-1][1])
            self._events.save()

    def _set_tags(self, tags: dict[str, str]) -> None:
        """If the server rejects one of them, the others are set."""
        try:
            if tags:
                self._server.set_tags(self._run, tags)
        except DeliveryError as error:
            if not is_refusal(error):
                raise
            if len(tags) > 1:
                for name, value in tags.items():
                    self._set_tags({name: value})
            elif not self._rejected_tags.issuperset(tags):
                self._rejected_tags.update(tags)
                self._warn(f"{self.name} rejected the tag {next(iter(tags))}: {error}")

    def _end_run(self, status: str, end_time: int) -> None:
        try:
            self._server.end_run(self._run, status, end_time)
        except DeliveryError as error:
            if not is_refusal(error):
                raise
            self._warn(f"{self.name} rejected the status {status}: {error}")

    def _tags_of(self, event: Event) -> dict[str, str]:
        kind, tags = event.get("event"), {}
        if kind == "generation-formed":
            tags["paceline.generation"] = str(event.get("generation"))
        elif kind == "committed":
            tags["paceline.snapshot"] = self._link(event.get("snapshot"))
        elif kind == "run-ended":
            tags["paceline.status"], tags["paceline.reason"] = str(event.get("status")), str(event.get("reason"))
        if isinstance(event.get("best"), dict):
            tags["paceline.best_snapshot"] = self._link(event["best"].get("snapshot"))
        return tags

    def _link(self, snapshot: Any) -> str:
        """Where the snapshot is."""
        to = self._plan.snapshots.to
        if split_claim(to)[0] and not self._options.echo:
            to = ""  # claims exist on a cluster only
        return f"{to or f'{self._options.folder}/snapshots'}/{self._options.run}/{snapshot}"


def new_metrics(lines: list[Line], highest: dict[str, int]) -> list[Metric]:
    """The numbers in lines of a series whose step is above the highest one so far, which is updated."""
    metrics = []
    for line in lines:
        step = _of_range(line.get("step"), 2)
        reported = line.get("metrics")
        values: Mapping[str, Any] = reported if isinstance(reported, dict) else {}
        for name, number in {**values, SPEED: line.get("steps_per_s")}.items():
            key, value = valid_name(str(name)), _of_range(number, 1)
            if step is not None and value is not None and int(step) > highest.get(key, -1):
                highest[key] = int(step)
                metrics.append(Metric(key, float(value), int(step), round(1000 * line["at"])))
    return metrics


def evaluation_metrics(event: Event) -> list[Metric]:
    at, step, metrics = seconds(event.get("at")), event.get("step"), event.get("metrics")
    if event.get("event") != "evaluated" or at is None or not is_number(step) or not isinstance(metrics, dict):
        return []
    return [
        Metric(valid_name(f"{EVALUATION}{name}"), float(value), int(step or 0), round(1000 * at))
        for name, value in metrics.items()
        if is_number(value)
    ]


def _of_range(value: Any, index: int) -> Any:
    """A number as it is; of a list [least, mean, largest], the one with this index. None: it is neither."""
    if isinstance(value, list) and len(value) == 3:
        value = value[index]
    return value if is_number(value) else None
