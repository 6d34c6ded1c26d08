"""For evaluators: each committed snapshot of the run, once.

    for snapshot in paceline.snapshots.follow():
        model.load(snapshot.path / "weights")
        snapshot.report(accuracy=test(model))

A snapshot counts as evaluated when the loop continues. Only then are the reported metrics sent to the captain, which
stores them with the snapshot. An evaluator that is killed before that evaluates the snapshot again.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from paceline.runtime import report

__all__ = ["Snapshot", "follow"]

_LARGEST = 3e38  # a float in TensorBoard's files
_has_warned = False
_AGENT_ENDED = "the agent of this host has ended"


class Snapshot:
    """A snapshot to evaluate. Its folder exists until the loop continues."""

    def __init__(self, id: str, path: Path) -> None:
        self.id = id  # step-<n>-g<generation>
        self.step = int(id.split("-")[1])
        self.path = path
        self._metrics: dict[str, float] = {}

    def report(self, **metrics: Any) -> None:
        """Report metrics of this snapshot; further calls add to them."""
        for name, value in metrics.items():
            number = report.number(value)
            if number is not None:
                self._metrics[name] = number

    def __repr__(self) -> str:
        return f"<snapshot {self.id} in {self.path}>"


def follow() -> Iterator[Snapshot]:
    """Yields each committed snapshot once, the oldest first; ends after the last snapshot once training has ended.

    Several evaluators share the snapshots. Outside a run, yields none.
    """
    if not os.environ.get("PACELINE_RUN"):
        _warn_once("paceline.snapshots.follow() yields no snapshots outside a run")
        return
    if os.environ.get("PACELINE_ROLE") != "evaluator":
        task = os.environ.get("PACELINE_TASK")
        raise RuntimeError(f"{task} is not an evaluator: only evaluators may call paceline.snapshots.follow()")
    if report.descriptor() < 0:
        raise RuntimeError("cannot reach the agent: a parent process has closed PACELINE_REPORT_FD")
    reply = _request({"wants": True})
    while "snapshot" in reply:
        snapshot = Snapshot(str(reply["snapshot"]), Path(reply["path"]))
        os.environ["PACELINE_RESTORE"] = str(snapshot.path)  # what Snapshots.restore() restores
        has_continued = False
        try:
            yield snapshot
            has_continued = True
        finally:
            os.environ["PACELINE_RESTORE"] = ""
            if not has_continued and snapshot._metrics:  # the loop was left, with a result
                _send({**_result(snapshot), "wants": False})
        reply = _request({**_result(snapshot), "wants": True})


def _result(snapshot: Snapshot) -> dict[str, Any]:
    metrics = snapshot._metrics
    try:
        _curve.add(snapshot.step, metrics)
    except OSError as error:
        report.warn(f"cannot write the metrics of step {snapshot.step} for TensorBoard: {error}")
    for name in (name for name, value in metrics.items() if not math.isfinite(value)):
        report.send_to_agent({"_": "not-finite", "metric": name, "value": metrics[name], "step": snapshot.step})
    return {"done": snapshot.id, "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}}


def _request(message: dict[str, Any]) -> dict[str, Any]:
    """Waits for the reply without a time limit: the agent ends this process at the end of the run."""
    _send(message)
    descriptor = report.descriptor()
    while True:
        select.select([descriptor], [], [])
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            continue
        except OSError:
            data = b""
        if not data:
            raise RuntimeError(_AGENT_ENDED)
        reply = json.loads(data)
        if isinstance(reply, dict) and ("snapshot" in reply or "over" in reply):
            return reply


def _send(message: dict[str, Any]) -> None:
    """The message must not be lost: waits while the socket is full."""
    data = json.dumps({"_": "follow", **message}).encode()
    while True:
        try:
            os.write(report.descriptor(), data)
            return
        except BlockingIOError:
            select.select([], [report.descriptor()], [], 1.0)
        except OSError:
            raise RuntimeError(_AGENT_ENDED) from None


def _warn_once(text: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        print(f"paceline: {text}", file=sys.stderr, flush=True)


# ---- TensorBoard


class _Curve:
    """Writes the metrics of this task to a file of this process. Each step is written once, even if an earlier attempt
    died after writing it."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._file: BinaryIO | None = None

    def add(self, step: int, values: dict[str, float]) -> None:
        parent = os.environ.get("PACELINE_TENSORBOARD_DIR")
        values = {name: value for name, value in values.items() if abs(value) < _LARGEST or math.isnan(value)}
        if not parent or not values:
            return
        from paceline.storage import tfrecord

        if self._file is None:
            folder = Path(parent) / os.environ["PACELINE_TASK"]
            folder.mkdir(parents=True, exist_ok=True)
            self._steps = {each for path in folder.glob("*tfevents*") for each in _steps(path)}
            # Named as by TensorFlow, so that the agent can tell which process wrote it.
            writer = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
            self._file = (folder / f"events.out.tfevents.{writer}").open("xb", buffering=0)
            self._file.write(tfrecord.first(time.time()))
        if step not in self._steps:
            self._file.write(tfrecord.scalars(step, time.time(), values))
            self._steps.add(step)


def _steps(path: Path) -> Iterator[int]:
    from paceline.storage import tfrecord

    with path.open("rb") as file:
        try:
            for _, record in tfrecord.records(file):
                step = tfrecord.step_of(record)
                if step is not None:
                    yield step
        except tfrecord.Torn:
            return  # its writer was killed while writing


_curve = _Curve()
