"""A whole member and its connection to the captain."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import member
from paceline.agent.member import Member
from paceline.agent.options import LEAVING, Options
from paceline.agent.spares import spare
from paceline.agent.tasks import gpus
from paceline.frameworks import amx_probe
from paceline.plan import to_json
from support.captain_connections import LEASE, NAME, ROSTER, WELCOME, Captain, Clock, Names, Peer
from support.nvml import GIB, FakeNvml
from support.runs import eventually
from support.worlds import make_plan

pytestmark = pytest.mark.timeout(60)


# ---- a whole member


@pytest.fixture
def make_member(
    tmp_path: Path, folder: str, clock: Clock, captain: Captain, names: Names, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Member]]:
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)}
    monkeypatch.setattr(member, "Loop", lambda: clock)
    monkeypatch.setenv(amx_probe.OVERRIDE, amx_probe.ABSENT)  # the probe would start a process
    members: list[Member] = []

    def make(devices: tuple[str, ...] = (), **limits: float) -> Member:
        (tmp_path / "plan.json").write_text(to_json(make_plan(1, **limits)))  # type: ignore[arg-type]
        names.port = captain.port
        options = Options(
            "run", "worker-host-0", str(tmp_path / "plan.json"), str(tmp_path), folder, f"{NAME}:{captain.port}",
            lease=LEASE, last_words=str(tmp_path / "last-words"), devices=devices,
        )  # fmt: skip
        members.append(Member(options, "a", 1))
        return members[-1]

    yield make
    for each in members:
        each._connection.hang_up()
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)


def welcome(agent: Member, captain: Captain) -> Peer:
    agent.loop.until(lambda: captain.peers and captain.peers[0].received)  # type: ignore[attr-defined]
    captain.peers[0].send(WELCOME)
    agent.loop.until(lambda: agent._connection.joined)  # type: ignore[attr-defined]
    return captain.peers[0]


def last_words(tmp_path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "last-words").read_text())
    return record


def test_a_replaced_member_leaves_and_records_the_reason(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "staging" / "worker-0").mkdir(parents=True)
    agent = make_member()
    peer = welcome(agent, captain)
    peer.send({"type": "finish", "status": "replaced", "reason": "another instance took this host's place"})
    clock.until(lambda: "left" in peer.kinds())
    assert agent.run() == LEAVING
    assert (tmp_path / "staging").exists()
    assert last_words(tmp_path) == {"status": "replaced", "reason": "another instance took this host's place"}


def test_a_member_whose_run_is_over_exits_successfully(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "staging" / "worker-0").mkdir(parents=True)
    agent = make_member()
    peer = welcome(agent, captain)
    peer.send({"type": "finish", "status": "succeeded", "reason": ""})
    clock.until(lambda: "left" in peer.kinds())
    assert agent.run() == 0
    assert not (tmp_path / "staging").exists()
    assert last_words(tmp_path)["status"] == "succeeded"


def test_a_member_without_a_captain_records_why_it_left(
    make_member: Callable[..., Member], names: Names, captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    names.block(NAME)
    agent = make_member(start=8.0)
    clock.until(lambda: names.queries)
    clock.pass_time(9.0)
    clock.until(lambda: not clock._running)
    assert agent.run() == 0
    reason = f"could not reach the captain for 8 s (limits.start): the name lookup of {NAME} has not finished"
    assert last_words(tmp_path) == {"status": "left", "reason": reason}


def test_a_member_that_leaves_during_a_lookup_does_not_rejoin(
    make_member: Callable[..., Member], names: Names, captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    gate = names.block(NAME)
    agent = make_member(start=8.0)
    clock.until(lambda: names.queries)
    close_callbacks: list[Callable[[], None]] = []
    agent._upload.close = close_callbacks.append  # type: ignore[method-assign]  # its upload takes a while
    agent._on_sigterm()
    clock.until(lambda: close_callbacks)
    clock.pass_time(1.0)
    gate.set()
    clock.until(lambda: agent._connection._lookup.waiting() == 0.0)
    clock.settle()
    clock.pass_time(20.0)
    clock.settle()
    assert captain.peers == [] and len(close_callbacks) == 1
    close_callbacks[0]()
    assert agent.run() == LEAVING
    assert not (tmp_path / "last-words").exists()


def test_a_member_that_receives_nothing_for_a_lease_kills_its_tasks(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(spare, "start_cold", lambda *_: 5001)
    monkeypatch.setattr(os, "killpg", lambda *args: killed.append(args))
    agent = make_member()
    peer = welcome(agent, captain)
    start = {"type": "start", "generation": 1, "restarts": 0, "data": "", "restore": None, "tasks": {"worker-0": 1}}
    peer.send({**ROSTER, "roster": {"worker-0": "127.0.0.1:2000"}}, start)
    clock.until(lambda: "started" in peer.kinds())
    clock.pass_time(0.9 * LEASE - 0.1)
    assert killed == []
    clock.pass_time(0.6)
    assert killed == [(5001, signal.SIGKILL)]
    clock.until(lambda: "said" in peer.kinds())
    notice = next(message for message in peer.received if message["type"] == "said")
    assert notice["text"] == "worker-host-0 received no message from the captain for 10 s and ended its tasks"
    agent._tasks.child_ended(5001, signal.SIGKILL)
    clock.until(lambda: "ended" in peer.kinds())


def test_a_member_measures_only_the_gpus_of_its_host(
    make_member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two GPUs, whose models differ."""
    monkeypatch.setattr(gpus, "DEVICES", ("/dev/null",))
    nvml = gpus.Nvml
    monkeypatch.setattr(gpus, "Nvml", lambda host: nvml(host, FakeNvml(models=("T400", "H200"))))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monitors = [make_member(devices=devices)._gpus for devices in (("0",), ("1",), ())]
    for monitor in monitors[:2]:
        eventually("its GPU is measured", monitor.last)
        monitor.close()
    assert [[gpu.memory for gpu in monitor.last()] for monitor in monitors] == [[GIB], [2 * GIB], []]
