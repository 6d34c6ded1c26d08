"""What `paceline.report` sends, and when it reads the numbers passed to it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from paceline.runtime import report as reports


class Tensor:
    """A number on a device: reading one from a GPU takes time."""

    def __init__(self, value: float, device: str = "cuda:0") -> None:
        self.value, self.device, self.reads = value, device, 0

    def item(self) -> float:
        self.reads += 1
        return self.value


class BackgroundArray(Tensor):
    """As JAX has them: computed in the background, on a CPU, too."""

    def __init__(self, value: float, ready: bool) -> None:
        super().__init__(value, "cpu:0")
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of the socket."""
    agent_end, task_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    agent_end.setblocking(False)
    monkeypatch.setattr(reports, "_descriptor", task_end.fileno())
    monkeypatch.setattr(reports, "_pending", {})
    monkeypatch.setattr(reports, "_unread", {})
    monkeypatch.setattr(reports, "_not_finite", set())
    monkeypatch.setattr(reports, "_due", 0.0)
    monkeypatch.setattr(reports, "_sent", 0)
    os.set_blocking(task_end.fileno(), False)
    yield agent_end
    agent_end.close()
    task_end.close()


def received(agent: socket.socket) -> list[dict[str, float]]:
    messages = []
    while True:
        try:
            messages.append(json.loads(agent.recv(65536)))
        except BlockingIOError:
            return messages


def test_numbers_are_read_when_they_are_reported(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs change their arrays in place, and JAX deletes donated ones."""
    monkeypatch.setattr(reports, "_due", float("inf"))
    loss = Tensor(0.5)
    reports.report(step=1, loss=loss)
    loss.value = 0.0
    monkeypatch.setattr(reports, "_due", 0.0)
    reports.report(step=2)
    assert received(agent) == [{"step": 2, "loss": 0.5}]


def test_the_first_nan_is_sent_immediately(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next value would replace it, or it would have the step of that value."""
    monkeypatch.setattr(reports, "_due", float("inf"))
    monkeypatch.setattr(reports, "_sent", reports._UNTHROTTLED)
    reports.report(step=1, loss=0.5)
    assert received(agent) == []
    reports.report(step=2, loss=float("nan"))
    reports.report(step=3, loss=0.25)
    reports.report(step=4, loss=float("nan"))
    reports.report_step(5, {"norm": float("inf")})
    [first, second] = received(agent)
    assert (first["step"], second["step"], second["norm"]) == (2, 5, float("inf")) and first["loss"] != first["loss"]


def test_a_nan_that_could_not_be_sent_is_sent_with_the_next_value(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reports, "_descriptor", 2**20)
        reports.report(step=1, loss=float("nan"))
    monkeypatch.setattr(reports, "_due", float("inf"))
    reports.report(step=2, loss=float("nan"))
    assert [message["step"] for message in received(agent)] == [2]


def test_helpers_read_numbers_from_a_gpu_only_when_a_message_is_due(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_due", float("inf"))
    early, unfinished = Tensor(0.5), BackgroundArray(1.0, ready=False)
    reports.report_step(1, {"loss": early, "rate": Tensor(0.1, "cpu"), "norm": unfinished, "size": 3})
    reports.report_step(2, {"norm": BackgroundArray(2.0, ready=True)})
    assert received(agent) == [] and (early.reads, unfinished.reads) == (0, 0)
    monkeypatch.setattr(reports, "_due", 0.0)
    reports.report_step(3, {"loss": Tensor(0.25)})
    assert received(agent) == [{"step": 3, "rate": 0.1, "norm": 2.0, "size": 3.0, "loss": 0.25}]


def test_the_numbers_of_the_last_step_are_sent_at_the_end(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_due", float("inf"))
    reports.report_step(1, {"loss": Tensor(0.5), "norm": BackgroundArray(1.0, ready=False)})
    reports.report_step(2, {"loss": Tensor(0.25), "norm": BackgroundArray(2.0, ready=True)})
    monkeypatch.setattr(reports, "_due", 0.0)
    reports.report_last_step()
    assert received(agent) == [{"step": 2, "norm": 2.0, "loss": 0.25}]
    reports.report_last_step()
    assert received(agent) == []


def test_a_donated_array_is_not_read_at_the_end(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    class Donated(BackgroundArray):
        def item(self) -> float:
            raise RuntimeError("Array has been deleted.")

    monkeypatch.setattr(reports, "_due", float("inf"))
    reports.report_step(1, {"loss": Donated(0.5, ready=False), "norm": Tensor(2.0)})
    monkeypatch.setattr(reports, "_due", 0.0)
    reports.report_last_step()
    assert received(agent) == [{"step": 1, "norm": 2.0}]


def test_values_that_are_not_numbers_are_omitted(agent: socket.socket) -> None:
    reports.report(step=1, loss=1, name="worker", shape=(1, 2))
    assert received(agent) == [{"step": 1, "loss": 1.0}]


def test_a_step_that_is_reported_twice_is_one_step(agent: socket.socket) -> None:
    """Once by a helper's `step`, once by the program itself."""
    reports.report(step=7, loss=0.5)
    reports.report(step=7, accuracy=0.9)
    assert received(agent) == [{"step": 7, "loss": 0.5}, {"step": 7, "accuracy": 0.9}]


def test_the_first_report_of_a_task_with_a_gpu_tells_what_cuda_and_nccl_read(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("CUDA_", "NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as a program sets it
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    reports.report(step=1)
    reports.report(step=2)
    variables = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "WARN"}
    assert received(agent) == [{"_": "gpu", "environment": variables}, {"step": 1}, {"step": 2}]
