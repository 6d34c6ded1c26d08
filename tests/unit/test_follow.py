"""The snapshots that the program of an evaluator receives, and what it reports to its agent."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.runtime import report, snapshot_feed
from paceline.storage import tfrecord


class Agent:
    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._ours.send(json.dumps(message).encode())

    def received(self) -> list[dict[str, Any]]:
        messages = []
        self._ours.setblocking(False)
        while True:
            try:
                messages.append(json.loads(self._ours.recv(65536)))
            except BlockingIOError:
                return messages


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Agent]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        theirs.setblocking(False)
        monkeypatch.setattr(report, "_descriptor", theirs.fileno())
        monkeypatch.setattr(snapshot_feed, "_curve", snapshot_feed._Curve())
        variables = {"RUN": "run", "ROLE": "evaluator", "TASK": "evaluator-0", "TENSORBOARD_DIR": str(tmp_path)}
        for name, value in {**variables, "RESTORE": ""}.items():
            monkeypatch.setenv(f"PACELINE_{name}", value)
        yield Agent(ours)


def snapshot_message(step: int) -> dict[str, Any]:
    return {"snapshot": f"step-{step}-g1", "path": f"/copies/step-{step}-g1"}


def drawn_steps(folder: Path) -> list[int]:
    steps = []
    for path in sorted((folder / "evaluator-0").iterdir()):
        with path.open("rb") as file:
            steps += [tfrecord.step_of(record) for _, record in tfrecord.records(file)]
    return [step for step in steps if step is not None]


def test_each_snapshot_is_done_when_the_loop_continues(agent: Agent, tmp_path: Path) -> None:
    agent.send(snapshot_message(10), snapshot_message(20), {"over": True})
    for snapshot in paceline.snapshots.follow():
        assert (snapshot.path, snapshot.id) == (Path(f"/copies/{snapshot.id}"), f"step-{snapshot.step}-g1")
        assert os.environ["PACELINE_RESTORE"] == str(snapshot.path)
        snapshot.report(accuracy=snapshot.step, word="no number")
        snapshot.report(loss=float("nan"))
    received = agent.received()
    assert [each for each in received if each["_"] == "follow"] == [
        {"_": "follow", "wants": True},
        {"_": "follow", "done": "step-10-g1", "metrics": {"accuracy": 10.0}, "wants": True},
        {"_": "follow", "done": "step-20-g1", "metrics": {"accuracy": 20.0}, "wants": True},
    ]
    not_finite = [each for each in received if each["_"] == "not-finite"]
    assert [(each["metric"], each["step"]) for each in not_finite] == [("loss", 10), ("loss", 20)]
    assert drawn_steps(tmp_path) == [10, 20] and os.environ["PACELINE_RESTORE"] == ""


def test_a_snapshot_with_reported_metrics_is_done_when_the_loop_is_left(agent: Agent) -> None:
    agent.send(snapshot_message(10))
    for snapshot in paceline.snapshots.follow():
        snapshot.report(accuracy=1)
        break
    assert agent.received()[1:] == [{"_": "follow", "done": "step-10-g1", "metrics": {"accuracy": 1.0}, "wants": False}]
    agent.send(snapshot_message(20))
    with pytest.raises(ZeroDivisionError):
        for _ in paceline.snapshots.follow():
            raise ZeroDivisionError
    assert agent.received() == [{"_": "follow", "wants": True}], "it failed: the snapshot has to be evaluated again"


def test_a_step_is_drawn_once_even_by_the_next_process(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        agent.send(snapshot_message(10), snapshot_message(20), {"over": True})
        for snapshot in paceline.snapshots.follow():
            snapshot.report(accuracy=1e300 if snapshot.step == 10 else 1)
            snapshot.report(loss=2)
        with next((tmp_path / "evaluator-0").iterdir()).open("ab") as file:
            file.write(b"torn")  # by a process that was killed
        monkeypatch.setattr(snapshot_feed, "_curve", snapshot_feed._Curve())
    files = sorted((tmp_path / "evaluator-0").iterdir(), key=lambda path: path.stat().st_size)
    sizes = [path.stat().st_size for path in files]
    assert len(files) == 2 and sizes[0] < 60 < sizes[1], "the second has nothing but its header"


def test_outside_a_run_there_are_no_snapshots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PACELINE_RUN", raising=False)
    monkeypatch.setattr(snapshot_feed, "_has_warned", False)
    assert list(paceline.snapshots.follow()) == list(paceline.snapshots.follow()) == []
    assert capsys.readouterr().err == "paceline: paceline.snapshots.follow() yields no snapshots outside a run\n"


def test_only_evaluators_can_follow_snapshots(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ROLE", "worker")
    monkeypatch.setenv("PACELINE_TASK", "worker-0")
    with pytest.raises(RuntimeError, match="worker-0 is not an evaluator"):
        next(paceline.snapshots.follow())
    monkeypatch.setenv("PACELINE_ROLE", "evaluator")
    monkeypatch.setattr(report, "_descriptor", -1)
    with pytest.raises(RuntimeError, match="a parent process has closed PACELINE_REPORT_FD"):
        next(paceline.snapshots.follow())
