"""Tasks of TensorFlow and JAX connect to the first one of their group only once it listens."""

from __future__ import annotations

import importlib.util
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.frameworks import leader_wait
from support.ports import free_port


class State:
    """As in jax._src.distributed: the attempt to connect is noted."""

    attempts: list[tuple[Any, ...]] = []

    def initialize(self, coordinator_address: str | None = None, *more: Any) -> None:
        self.attempts.append((coordinator_address, *more))


class CollectiveAllReduceExtended:
    attempts: list[Any] = []

    def _initialize_multi_worker(self, cluster_resolver: Any) -> None:
        self.attempts.append(cluster_resolver)


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(State, "attempts", [])
    monkeypatch.setattr(CollectiveAllReduceExtended, "attempts", [])
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("PACELINE_LEADER", address)
    return address


def listens_at_the_third_attempt(monkeypatch: pytest.MonkeyPatch, address: str) -> list[socket.socket]:
    waits: list[float] = []
    listeners: list[socket.socket] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert not State.attempts and not CollectiveAllReduceExtended.attempts, "it connects too early"
        if len(waits) == 3:
            host, _, port = address.rpartition(":")
            listeners.append(socket.create_server((host, int(port))))

    monkeypatch.setattr(time, "sleep", sleep)
    return listeners


def registered(name: str, **contents: Any) -> Any:
    module = SimpleNamespace(__name__=name, **contents)
    leader_wait.register(module)
    return module


def test_jax_connects_once_the_first_task_listens(leader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type("State", (State,), {"initialize": State.initialize})
    module = registered("jax._src.distributed", State=kind)
    listeners = listens_at_the_third_attempt(monkeypatch, leader)
    module.State().initialize()
    assert len(listeners) == 1 and State.attempts == [(None,)]
    module.State().initialize(leader, 2, 1)
    assert State.attempts[1:] == [(leader, 2, 1)]
    listeners[0].close()


def test_tensorflow_connects_once_the_first_task_listens(leader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = CollectiveAllReduceExtended._initialize_multi_worker
    kind: Any = type("Extended", (CollectiveAllReduceExtended,), {"_initialize_multi_worker": original})
    name = "tensorflow.python.distribute.collective_all_reduce_strategy"
    module = registered(name, CollectiveAllReduceExtended=kind)
    listeners = listens_at_the_third_attempt(monkeypatch, leader)
    spec = SimpleNamespace(as_dict=lambda: {"worker": [leader, "127.0.0.1:1"]})
    resolver = SimpleNamespace(cluster_spec=lambda: spec)
    module.CollectiveAllReduceExtended()._initialize_multi_worker(resolver)
    assert len(listeners) == 1 and CollectiveAllReduceExtended.attempts == [resolver]
    listeners[0].close()


def test_a_program_with_its_own_group_does_not_wait(leader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits for a task to which it does not connect"))
    kind: Any = type("State", (State,), {"initialize": State.initialize})
    registered("jax._src.distributed", State=kind).State().initialize("10.0.0.1:80", 2, 1)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:80")
    kind().initialize()
    original = CollectiveAllReduceExtended._initialize_multi_worker
    extended: Any = type("Extended", (CollectiveAllReduceExtended,), {"_initialize_multi_worker": original})
    name = "tensorflow.python.distribute.collective_all_reduce_strategy"
    module = registered(name, CollectiveAllReduceExtended=extended)
    spec = SimpleNamespace(as_dict=lambda: {"worker": ["10.0.0.1:80"]})
    module.CollectiveAllReduceExtended()._initialize_multi_worker(SimpleNamespace(cluster_spec=lambda: spec))
    assert len(State.attempts) == 2 and len(CollectiveAllReduceExtended.attempts) == 1


def test_the_wait_has_a_limit(leader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda _: now.__setitem__(0, now[0] + 10))
    leader_wait.wait_for_listener(leader)
    assert now[0] == leader_wait.LIMIT_S
    leader_wait.wait_for_listener("not an address")
    leader_wait.wait_for_listener("")


@pytest.mark.parametrize("name", leader_wait.JOINS)
def test_an_unknown_version_of_a_framework_is_not_changed(name: str) -> None:
    module = SimpleNamespace(__name__=name)
    leader_wait.register(module)
    assert vars(module) == {"__name__": name}


@pytest.mark.parametrize(("name", "function"), leader_wait.JOINS.items())
def test_the_installed_frameworks_have_what_is_wrapped(name: str, function: str) -> None:
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    text = Path(spec.submodule_search_locations[0], *rest.split(".")).with_suffix(".py").read_text()
    holder, _, method = function.partition(".")
    assert re.search(rf"^class {holder}\b.*?^  def {method}\(self,", text, re.DOTALL | re.MULTILINE)
