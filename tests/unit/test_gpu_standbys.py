"""Which tasks get a standby with a CUDA context, and which standby becomes which task."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.agent.spares import spare_process
from paceline.agent.spares.spare import ContextOrder
from paceline.agent.tasks.gpu_standbys import HOST_MEMORY, GpuStandbys, device_of
from paceline.agent.tasks.tracebacks import Raised

PLENTY: Any = SimpleNamespace(free=lambda: 10 * HOST_MEMORY)
SCARCE: Any = SimpleNamespace(free=lambda: HOST_MEMORY - 1)


class RecordingSpare:
    def __init__(self) -> None:
        self.orders: dict[str, ContextOrder] = {}

    def prepare(self, standby: str, order: ContextOrder) -> None:
        assert standby not in self.orders
        self.orders[standby] = order


def environ(rank: int, **more: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": "4,5", "LOCAL_RANK": str(rank), "PATH": "/bin", **more}


def attempt(rank: int, **changes: Any) -> Any:
    task = SimpleNamespace(name=f"worker-{rank}")
    fields = {"task": task, "pid": 100 + rank, "step": 1, "gpu_variables": {"CUDA_VISIBLE_DEVICES": "4,5"}}
    return SimpleNamespace(**{**fields, **changes})


def started(*ranks: int) -> tuple[GpuStandbys, Any]:
    standbys = GpuStandbys()
    for rank in ranks:
        assert standbys.take(f"worker-{rank}", environ(rank)) == ""
    return standbys, RecordingSpare()


def test_each_task_gets_its_own_standby_once() -> None:
    standbys, spare = started(0, 1)
    for _ in range(3):
        standbys.prepare(spare, [attempt(0), attempt(1)], PLENTY)
    assert {(order.device, order.pid) for order in spare.orders.values()} == {(0, 100), (1, 101)}
    names = [standbys.take(f"worker-{rank}", environ(rank)) for rank in (1, 0)]
    assert [spare.orders[name].device for name in names] == [1, 0]
    assert standbys.take("worker-0", environ(0)) == "", "it has become a task"


@pytest.mark.parametrize(
    ("reported", "nccl"),
    [
        ({"NCCL_ALGO": "Ring"}, True),
        ({"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth1"}, False),
        ({"NCCL_ALGO": "Ring", "FI_PROVIDER": "efa"}, False),
        ({}, False),
    ],
    ids=["as it was started", "a variable is new", "a variable of the network is new", "a variable was removed"],
)
def test_nccl_is_loaded_only_with_the_variables_that_the_program_uses(reported: dict[str, str], nccl: bool) -> None:
    """It reads them once."""
    standbys, spare = GpuStandbys(), RecordingSpare()
    standbys.take("worker-0", environ(0, NCCL_ALGO="Ring"))
    variables = {"CUDA_VISIBLE_DEVICES": "4,5", **reported}
    standbys.prepare(cast(Any, spare), [attempt(0, gpu_variables=variables)], PLENTY)
    (order,) = spare.orders.values()
    assert order.nccl == nccl
    assert order.environment == {"CUDA_VISIBLE_DEVICES": "4,5", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_COMM_ID", "NCCL_TOPO_DUMP_FILE"])
def test_nccl_is_not_loaded_if_it_would_write_to_the_files_of_the_running_task(name: str) -> None:
    standbys, spare = GpuStandbys(), RecordingSpare()
    standbys.take("worker-0", environ(0, **{name: "x"}))
    variables = {"CUDA_VISIBLE_DEVICES": "4,5", name: "x"}
    standbys.prepare(cast(Any, spare), [attempt(0, gpu_variables=variables)], PLENTY)
    assert [order.nccl for order in spare.orders.values()] == [False]


@pytest.mark.parametrize(
    "changes",
    [{"step": None}, {"pid": 0}, {"gpu_variables": None}, {"gpu_variables": {"CUDA_VISIBLE_DEVICES": "5"}}],
    ids=["no step yet", "no process yet", "the program reports no GPU", "the program has changed a variable"],
)
def test_a_task_that_must_create_its_own_context(changes: dict[str, Any]) -> None:
    standbys, spare = started(0)
    standbys.prepare(spare, [attempt(0, **changes)], PLENTY)
    assert spare.orders == {}
    assert standbys.take("worker-0", environ(0)) == ""


def test_contexts_are_not_created_while_another_task_starts() -> None:
    standbys, spare = started(0, 1)
    standbys.prepare(spare, [attempt(0), attempt(1, step=None)], PLENTY)
    assert spare.orders == {}


def test_a_host_without_memory_gets_none() -> None:
    standbys, spare = started(0)
    standbys.prepare(spare, [attempt(0)], SCARCE)
    assert spare.orders == {}


@pytest.mark.parametrize(
    "error", [Raised("torch.OutOfMemoryError", "", "train.py:3"), Raised("RuntimeError", "CUDA out of memory.", "")]
)
def test_a_program_that_needs_all_memory_of_its_gpu_gets_none(error: Raised) -> None:
    standbys, spare = started(0)
    standbys.on_error(Raised("ValueError", "other", "train.py:1"))
    standbys.on_error(error)
    standbys.prepare(spare, [attempt(0)], PLENTY)
    assert spare.orders == {}


def test_a_task_with_other_variables_does_not_get_the_standby() -> None:
    standbys, spare = started(0)
    standbys.prepare(spare, [attempt(0)], PLENTY)
    assert standbys.take("worker-0", environ(0, CUDA_LAUNCH_BLOCKING="1")) == ""


def test_standbys_end_with_their_spare() -> None:
    standbys, spare = started(0)
    standbys.prepare(spare, [attempt(0)], PLENTY)
    standbys.clear()
    assert standbys.take("worker-0", environ(0)) == ""


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "3,4"}, None),
        ({"CUDA_VISIBLE_DEVICES": "3,4", "LOCAL_RANK": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "3,4", "LOCAL_RANK": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "3,4", "LOCAL_RANK": "x"}, None),
    ],
)
def test_the_device_of_a_task(variables: dict[str, str], device: int | None) -> None:
    assert device_of(variables) == device


def test_once_a_standby_has_not_answered_others_get_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent gives up a spare that takes too long to start all tasks."""
    monkeypatch.setattr(spare_process._Fork, "answers_within", 0.2)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    dead, silent, ready = (spare_process._Fork(1, 1, -1, ours) for ours, _ in pairs)
    pairs[0][1].close()
    pairs[2][1].send(b"here")
    assert not dead.becomes_task([0]) and spare_process._Fork.answers_within == 0.2
    assert not silent.becomes_task([0]) and spare_process._Fork.answers_within == 0.1
    assert ready.becomes_task([0]) and ready.link.gettimeout() == 0.1
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
