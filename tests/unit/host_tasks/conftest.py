"""Hosts whose tasks are no processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.plan import Plan
from support.task_hosts import TWO, Host


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make_host(plan: Plan = TWO, name: str = "worker-host-0") -> Host:
        hosts.append(Host(tmp_path, monkeypatch, plan, name))
        return hosts[-1]

    yield make_host
    for host in hosts:
        for process in host.machine.alive.values():
            process.close()
    signal.set_wakeup_fd(-1)  # set by the loop


@pytest.fixture
def host(make: Callable[..., Host]) -> Host:
    return make()
