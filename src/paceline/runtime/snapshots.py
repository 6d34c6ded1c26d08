"""For evaluators: each committed snapshot of the run, once.

    for snapshot in paceline.snapshots.follow():
        model.load(snapshot.path / "weights")
        snapshot.report(accuracy=test(model))

A snapshot is evaluated once the loop goes on. Then, and not before, what was reported goes to the captain, which keeps
it beside the snapshot: whoever is killed before evaluates it again, whoever comes later does not.
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

_LARGEST = 3e38  # that a float of TensorBoard can hold
_said = False


class Snapshot:
    """One to evaluate. Its folder is there until the loop goes on."""

    def __init__(self, id: str, path: Path) -> None:
        self.id = id  # step-<n>-g<generation>
        self.step = int(id.split("-")[1])
        self.path = path
        self._metrics: dict[str, float] = {}

    def report(self, **metrics: Any) -> None:
        """Numbers that this snapshot is judged by; more than one call adds to them."""
        for name, value in metrics.items():
            number = report.number(value)
            if number is not None:
                self._metrics[name] = number

    def __repr__(self) -> str:
        return f"<snapshot {self.id} in {self.path}>"


def follow() -> Iterator[Snapshot]:
    """Each committed snapshot once, the oldest first; ends after the last one of a run that trains no more.

    Several evaluators share them. Outside a run there are none.
    """
    if not os.environ.get("PACELINE_RUN"):
        _say_once("paceline.snapshots.follow() has no snapshots to give outside a run")
        return
    if os.environ.get("PACELINE_ROLE") != "evaluator":
        raise RuntimeError(f"{os.environ.get('PACELINE_TASK')} is no evaluator: snapshots are given to evaluators")
    if report.descriptor() < 0:
        raise RuntimeError("the agent cannot be reached: a process in between has closed PACELINE_REPORT_FD")
    words = _ask({"wants": True})
    while "snapshot" in words:
        snapshot = Snapshot(str(words["snapshot"]), Path(words["path"]))
        os.environ["PACELINE_RESTORE"] = str(snapshot.path)  # Snapshots.restore() of the helpers restores this one
        finished = False
        try:
            yield snapshot
            finished = True
        finally:
            os.environ["PACELINE_RESTORE"] = ""
            if not finished and snapshot._metrics:  # the loop was left, with a result
                _send({**_done(snapshot), "wants": False})
        words = _ask({**_done(snapshot), "wants": True})


def _done(snapshot: Snapshot) -> dict[str, Any]:
    metrics = snapshot._metrics
    try:
        _curve.add(snapshot.step, metrics)
    except OSError as error:
        report.say(f"what was reported of step {snapshot.step} is not written for TensorBoard: {error}")
    return {"done": snapshot.id, "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}}


def _ask(words: dict[str, Any]) -> dict[str, Any]:
    """Waits for the answer, for as long as it takes: the agent ends this process when the run is over."""
    _send(words)
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
            raise RuntimeError("the agent is gone")
        answer = json.loads(data)
        if isinstance(answer, dict) and ("snapshot" in answer or "over" in answer):
            return answer


def _send(words: dict[str, Any]) -> None:
    """Must not be lost: where the agent has no room for it yet, this waits."""
    data = json.dumps({"_": "follow", **words}).encode()
    while True:
        try:
            os.write(report.descriptor(), data)
            return
        except BlockingIOError:
            select.select([], [report.descriptor()], [], 1.0)
        except OSError:
            raise RuntimeError("the agent is gone") from None


def _say_once(text: str) -> None:
    global _said
    if not _said:
        _said = True
        print(f"paceline: {text}", file=sys.stderr, flush=True)


# ---- TensorBoard


class _Curve:
    """The metrics of this task, in a file of this process; each step once, also where the task died after it had
    written one and before that counted."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._file: BinaryIO | None = None

    def add(self, step: int, values: dict[str, float]) -> None:
        above = os.environ.get("PACELINE_TENSORBOARD_DIR")
        values = {name: value for name, value in values.items() if abs(value) < _LARGEST or math.isnan(value)}
        if not above or not values:
            return
        from paceline.runtime import tfrecord

        if self._file is None:
            folder = Path(above) / os.environ["PACELINE_TASK"]
            folder.mkdir(parents=True, exist_ok=True)
            self._steps = {found for path in folder.glob("*tfevents*") for found in _steps(path)}
            # As TensorFlow names them: whose a file is can be told by it.
            writer = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
            self._file = (folder / f"events.out.tfevents.{writer}").open("xb", buffering=0)
            self._file.write(tfrecord.first(time.time()))
        if step not in self._steps:
            self._file.write(tfrecord.scalars(step, time.time(), values))
            self._steps.add(step)


def _steps(path: Path) -> Iterator[int]:
    from paceline.runtime import tfrecord

    with path.open("rb") as file:
        try:
            for _, record in tfrecord.records(file):
                step = tfrecord.step_of(record)
                if step is not None:
                    yield step
        except tfrecord.Torn:
            return  # of one that was killed while it wrote


_curve = _Curve()
