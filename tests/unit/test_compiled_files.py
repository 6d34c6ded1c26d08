"""What frameworks have compiled: kept within limits, never half a file, and from the store only what the run signed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.agent.options import Options
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.compiled_upload import CompiledUpload
from paceline.agent.transfers.porter import Porter
from paceline.job import load_text, planning
from paceline.storage import boots, compiled_files
from paceline.storage.compiled_files import StoredCompiled, drop_unsynced, sync_new, trim
from paceline.storage.snapshots.repository import SnapshotRepository, always
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import TransferCanceled

RUN, HOST, OBJECT = "digits-3f9a", "worker-host-0", "digits-3f9a/compiled/worker-host-0"


def write(folder: Path, ages: dict[str, float]) -> None:
    for name, age in ages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (time.time() - age, time.time() - age))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_files_that_were_used_the_longest_ago_are_deleted_first(tmp_path: Path) -> None:
    ages = {"a/jax/one": 5000, "a/jax/two": 4000, "b/jax/three": 3000, "b/jax/four": 1}
    write(tmp_path, ages)
    assert trim(str(tmp_path), most_files=3) == 1
    assert names(tmp_path) == {"a/jax/two", "b/jax/three", "b/jax/four"}
    assert trim(str(tmp_path), most_bytes=250) == 1
    assert names(tmp_path) == {"b/jax/three", "b/jax/four"}
    assert trim(str(tmp_path)) == 0


def test_new_files_are_not_deleted_while_a_task_may_need_them(tmp_path: Path) -> None:
    write(tmp_path, {"new": 1, "newer": 0, ".new.partial": 1, ".old.partial": 5000})
    assert trim(str(tmp_path), most_files=0) == 1
    assert names(tmp_path) == {"new", "newer", ".new.partial"}


def test_after_a_crash_of_the_machine_only_synced_files_remain(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert drop_unsynced(folder) == 0
    write(tmp_path, {"old": 100})
    sync_new(folder)
    write(tmp_path, {"new": -100})
    assert drop_unsynced(folder) == 0  # it has not crashed
    [boot] = tmp_path.glob(".boot-*")
    boot.write_text("an earlier one")
    assert drop_unsynced(folder) == 1
    assert {"old"} == names(tmp_path) - {boot.name, ".synced"}
    assert drop_unsynced(folder) == 0
    assert trim(folder, most_files=0) == 0 and boot.exists()


# ---- the copy in the store


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    folder = tmp_path / "host" / "x86_64-1"
    write(folder, {"jax/jit_f-cache": 10, "jax/.half.partial": 10, "jax/jit_new-cache": 0})
    return folder


def stored(tmp_path: Path, key: bytes = b"key") -> StoredCompiled:
    return StoredCompiled(FolderStore(str(tmp_path / "store")), RUN, key)


def fetched(tmp_path: Path, folder: Path, key: bytes = b"key") -> int:
    return stored(tmp_path, key).fetch(HOST, str(folder), str(tmp_path / "scratch"), always)


def send(tmp_path: Path, folder: Path) -> None:
    assert stored(tmp_path).send(HOST, str(folder), str(tmp_path / "scratch"), always)


def test_a_replaced_host_finds_what_was_compiled(tmp_path: Path, machine: Path) -> None:
    new = tmp_path / "new" / "x86_64-1"
    assert fetched(tmp_path, new) == 0  # nothing is there yet
    send(tmp_path, machine)
    assert fetched(tmp_path, new) == 1
    assert names(new) == {"jax/jit_f-cache"} and (new / "jax/jit_f-cache").read_bytes() == b"x" * 100
    assert fetched(tmp_path, new) == 0
    assert not (tmp_path / "scratch").exists()


def test_only_new_files_are_sent(tmp_path: Path, machine: Path) -> None:
    store = stored(tmp_path)
    assert [store.send(HOST, str(machine), str(tmp_path / "scratch"), always) for _ in range(2)] == [True, False]
    write(machine, {"jax/jit_g-cache": 10})
    assert store.send(HOST, str(machine), str(tmp_path / "scratch"), always)
    assert fetched(tmp_path, tmp_path / "new" / "x86_64-1") == 2


def test_what_is_stored_is_limited(tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, {f"jax/{number}": 20 * number for number in range(1, 10)})
    monkeypatch.setattr(compiled_files, "MOST_STORED", 350)
    send(tmp_path, machine)
    fetched(tmp_path, tmp_path / "new" / "x86_64-1")
    assert names(tmp_path / "new") == {f"x86_64-1/jax/{name}" for name in ("jit_f-cache", "1", "2")}


def test_an_object_that_this_run_did_not_sign_is_ignored(tmp_path: Path, machine: Path) -> None:
    send(tmp_path, machine)
    assert fetched(tmp_path, tmp_path / "new" / "x86_64-1", b"another key") == 0
    assert not (tmp_path / "new").exists()


def test_no_byte_of_an_object_can_be_changed(tmp_path: Path, machine: Path) -> None:
    send(tmp_path, machine)
    path = tmp_path / "store" / OBJECT
    original = path.read_bytes()
    for at in range(len(original)):
        path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        assert fetched(tmp_path, tmp_path / "new" / "x86_64-1") == 0
    for size in (0, 10, 100, len(original) - 1):
        path.write_bytes(original[:size])
        assert fetched(tmp_path, tmp_path / "new" / "x86_64-1") == 0
    path.write_bytes(original)
    assert fetched(tmp_path, tmp_path / "new" / "x86_64-1") == 1


def test_an_object_that_is_too_large_is_not_fetched(
    tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(tmp_path, machine)
    monkeypatch.setattr(compiled_files, "_HEAD", 10)
    monkeypatch.setattr(compiled_files, "MOST_STORED", 10)
    with pytest.raises(TransferCanceled):
        fetched(tmp_path, tmp_path / "new" / "x86_64-1")
    assert not (tmp_path / "scratch").exists()


def test_code_for_another_kind_of_machine_is_ignored(tmp_path: Path, machine: Path) -> None:
    send(tmp_path, machine)
    assert fetched(tmp_path, tmp_path / "new" / "x86_64-2") == 0


def test_the_object_of_another_host_is_ignored(tmp_path: Path, machine: Path) -> None:
    send(tmp_path, machine)
    (tmp_path / "store" / OBJECT).rename(tmp_path / "store" / OBJECT.replace("host-0", "host-1"))
    store = stored(tmp_path)
    assert store.fetch("worker-host-1", str(tmp_path / "new" / "x86_64-1"), str(tmp_path / "scratch"), always) == 0


# ---- what an agent requests


class Agent:
    """Its event loop, without a clock, and its porter, in this process."""

    def __init__(self, tmp_path: Path, folder: Path, to: str = "", in_pod: bool = True) -> None:
        (tmp_path / "train.py").write_text("")
        section = f"snapshots: {{to: '{to}'}}" if to else ""
        text = f"name: a\nframework: jax\ncommand: [python, train.py]\n{section}"
        plan = planning.make_plan(load_text(text, "job.yaml", tmp_path).job)
        own = folder.parent.parent
        options = Options(RUN, HOST, "", str(own), "", "", compiled=str(folder.parent), echo=in_pod)
        store = FolderStore(str(tmp_path / "store"))
        snapshots = SnapshotRepository(store, RUN)
        self._porter = Porter(
            snapshots, snapshots, lambda *_: None, lanes=(), compiled=StoredCompiled(store, RUN, b"key")
        )
        self._timers: list[Callable[[], None]] = []
        self.requested: list[str] = []
        CompiledUpload(plan, options, str(folder), self, self)  # type: ignore[arg-type]

    def ask(self, request: req.Request, answered: Callable[[req.Answer], None]) -> int:
        self.requested.append(type(request).__name__)
        answer = self._porter.execute(request)
        assert answer == req.Done()
        self._timers.append(lambda: answered(answer))
        return 0

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timers.append(callback)

    def turn(self) -> None:
        due, self._timers = self._timers, []
        for callback in due:
            callback()


@pytest.mark.parametrize("to", ["s3://bucket/runs", "claim://runs"])
def test_a_pod_fetches_what_its_predecessor_has_compiled_and_stores_its_own(to: str, tmp_path: Path) -> None:
    old, new = (tmp_path / name / "compiled" / "x86_64-1" for name in ("old", "new"))
    write(old, {"jax/jit_f-cache": 10})
    agent = Agent(tmp_path, old, to)
    for _ in range(2):
        agent.turn()
    assert agent.requested == ["FetchCompiled", "KeepCompiled"]
    new.mkdir(parents=True)
    Agent(tmp_path, new, to)
    assert names(new) == {"jax/jit_f-cache"}


@pytest.mark.parametrize(("to", "in_pod"), [("", True), ("", False), ("s3://bucket/runs", False)])
def test_on_one_machine_and_without_a_store_nothing_is_stored(to: str, in_pod: bool, tmp_path: Path) -> None:
    folder = tmp_path / "host" / "compiled" / "x86_64-1"
    write(folder, {"jax/jit_f-cache": 10})
    agent = Agent(tmp_path, folder, to, in_pod)
    for _ in range(3):
        agent.turn()
    assert set(agent.requested) == {"KeepCompiled"} and not (tmp_path / "store").exists()


def test_an_agent_without_a_folder_requests_nothing(tmp_path: Path) -> None:
    agent = Agent(tmp_path, tmp_path / "host" / "compiled" / "missing", "s3://bucket/runs")
    agent.turn()
    assert agent.requested == []


def test_processes_that_start_at_the_same_time_do_not_take_each_other_s_mark_for_that_of_another_boot(
    tmp_path: Path,
) -> None:
    """The agents of several hosts share the folder on one machine."""
    path, results = str(tmp_path / "mark"), set()
    boots.write_mark(path)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(lambda: [boots.write_mark(path) for _ in range(300)])
        while not writer.done():
            results.add(boots.read_mark(path))
    assert results == {boots.boot_id()} and [each.name for each in tmp_path.iterdir()] == ["mark"]
