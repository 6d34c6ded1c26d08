"""Nodes and this machine with different clocks: all output and all events of a run arrive, each once and in order."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightkube.resources.core_v1 import Pod

from paceline.agent.run_files import replace, stamp
from paceline.backends.kubernetes.api import pod_output
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs.mirror import Mirror
from paceline.backends.kubernetes.runs.running import Running
from paceline.job import load_text, planning
from paceline.view.output.merged_logs import Logs

RUN = "digits-3f9a"
JOB = "name: digits\nframework: none\ncommand: [python, -V]\nkubernetes: {image: any}\n"
START = datetime(2026, 11, 15, 10, tzinfo=UTC).timestamp()


@dataclass
class Container:
    """A container's output as its node stores it."""

    uid: str
    role: str
    created: float
    clock: float = 0.0  # how much the node's clock is ahead
    lines: list[tuple[float, str]] = field(default_factory=list)  # time by the node's clock, and text
    restarts: int = 0

    def pod(self) -> Any:
        job = RUN if self.role == "captain" else f"{RUN}-{self.role}"
        labels = {names.RUN_LABEL: RUN, names.ROLE_LABEL: self.role, "batch.kubernetes.io/job-name": job}
        state = {"name": self.role, "image": "any", "imageID": "any", "ready": True, "state": {"running": {}}}
        created = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Pod.from_dict(
            {
                "metadata": {"name": self.uid, "uid": self.uid, "labels": labels, "creationTimestamp": created},
                "status": {"phase": "Running", "containerStatuses": [{**state, "restartCount": self.restarts}]},
            }
        )


class World:
    """The cluster, and this machine, whose clock is `clock` seconds ahead of the real time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, clock: float = 0.0) -> None:
        replace(str(folder / "run.json"), {"run": RUN, "on": "kubernetes"})
        (folder / "logs").mkdir()
        self.folder, self.now = folder, START
        self.containers: list[Container] = []
        self.lines_read = self.started = 0
        monkeypatch.setattr(pod_output, "read_lines", self._read_lines)
        monkeypatch.setattr("time.time", lambda: self.now + clock)
        self.plan = planning.make_plan(load_text(JOB, "job.yaml", folder, cluster=True).job)

    def start(self, role: str, clock: float = 0.0) -> Container:
        self.started += 1
        container = Container(f"{role}-{self.started}", role, self.now, clock)
        self.containers.append(container)
        return container

    def output(self, container: Container, count: int, every: float = 1.0) -> None:
        for _ in range(count):
            self.now += every
            at = self.now + container.clock
            number = sum(len(each.lines) for each in self.containers if each.role == container.role)
            event = {"at": stamp(at), "event": "note", "generation": 1, "text": f"line {number}"}
            text = json.dumps(event) if container.role == "captain" else f"worker-0 {stamp(at)} g1 | line {number}"
            container.lines.append((at, text))

    def _read_lines(
        self, cluster: Any, pod: str, container: str, since: Any = None, follow: bool = False
    ) -> Iterator[str]:
        """As a kubelet does: it compares the times of all lines with its own clock."""
        [source] = [each for each in self.containers if each.uid == pod]
        first = -1.0
        if isinstance(since, str):
            first = datetime.fromisoformat(since).timestamp()
        elif since is not None:
            first = self.now + source.clock - since
        for at, text in source.lines:
            if at >= first:
                self.lines_read += 1
                yield text

    def refresh(self) -> None:
        """As `paceline status` and `paceline logs` do, each in a process of its own."""
        mirror = Mirror(cast(Cluster, None), RUN, self.folder, self.plan)
        mirror.update_pods([each.pod() for each in self.containers])
        assert mirror.fetch({"captain", "worker-host-0"})
        mirror.save_pods()
        mirror.inbox.close()

    def output_numbers(self) -> list[int]:
        return [int(each.split()[-1]) for each in (self.folder / "logs" / "worker-0.log").read_text().splitlines()]

    def event_numbers(self) -> list[int]:
        events = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [int(event["text"].split()[-1]) for event in events]


@pytest.mark.parametrize("skew", [-3600.0, -60.0, -1.0, 0.0, 60.0])
def test_a_pod_that_is_replaced_on_a_node_with_another_clock_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    world = World(tmp_path, monkeypatch)
    first = world.start("worker")
    world.output(first, 50)
    world.refresh()
    second = world.start("worker", skew)
    world.output(second, 50)
    world.refresh()
    world.output(second, 50)
    for _ in range(3):
        world.refresh()
        assert world.output_numbers() == list(range(150))


@pytest.mark.parametrize("machine", [-86400.0, -300.0, -61.0, 0.0, 61.0, 86400.0])
@pytest.mark.parametrize("skew", [-300.0, 0.0, 300.0])
def test_events_arrive_whatever_the_clock_of_this_machine_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: float, skew: float
) -> None:
    """Also after the captain was replaced on a node with another clock."""
    world = World(tmp_path, monkeypatch, machine)
    captain = world.start("captain")
    for _ in range(3):
        world.output(captain, 10, every=20.0)
        world.refresh()
    assert world.event_numbers() == list(range(30))
    captain = world.start("captain", skew)
    for number in range(3):
        world.output(captain, 10, every=20.0)
        world.refresh()
        assert world.event_numbers() == list(range(40 + 10 * number))


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    captain = world.start("captain")
    world.output(captain, 1000, every=10.0)
    world.refresh()
    world.lines_read = 0
    world.output(captain, 1)
    world.refresh()
    assert world.event_numbers() == list(range(1001)) and world.lines_read < 10


def test_a_clock_that_is_set_back_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    worker = world.start("worker")
    world.output(worker, 100)
    world.refresh()
    worker.clock = -40.0
    for number in range(4):
        world.output(worker, 10)
        world.refresh()
        assert world.output_numbers() == list(range(110 + 10 * number))


@pytest.mark.parametrize("saved", ["", "{}", '{"positions": {"worker-1/0": ["soon", 1]}}', '{"positions": 7}'])
def test_a_process_that_was_killed_before_it_saved_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str
) -> None:
    """Or of a version that saves none: what is in the files already is not written again."""
    world = World(tmp_path, monkeypatch)
    worker, captain = world.start("worker"), world.start("captain")
    world.output(worker, 30, every=0.0001)
    world.output(captain, 30, every=0.0001)
    world.refresh()
    before = (tmp_path / "positions.json").read_text()
    world.output(worker, 5, every=0.0001)
    world.output(captain, 5, every=0.0001)
    world.refresh()
    (tmp_path / "positions.json").write_text(saved or before)
    world.output(worker, 5, every=0.0001)
    world.output(captain, 5, every=0.0001)
    world.refresh()
    assert world.output_numbers() == world.event_numbers() == list(range(40))


def test_equal_lines_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    worker = world.start("worker")
    text = f"worker-0 {stamp(START)} g1 | the same 0"
    for count in (3, 5, 5, 6):
        worker.lines = [(START, text)] * count
        world.refresh()
        assert len(world.output_numbers()) == count


def test_the_copy_of_a_log_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    world.plan = dataclasses.replace(world.plan, limits=dataclasses.replace(world.plan.limits, log=4000))
    worker = world.start("worker")
    for _ in range(20):
        world.output(worker, 20)
        world.refresh()
    files = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert 3000 < sum(path.stat().st_size for path in files) <= 4000
    numbers = [int(line.text.split()[-1]) for line in Logs(tmp_path).backlog()]
    assert numbers == list(range(numbers[0], 400)) and numbers[0] > 200


def test_a_process_that_begins_to_follow_knows_that_training_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago that was: a run that has started is never ended because a pod cannot be replaced."""
    world = World(tmp_path, monkeypatch)
    captain = world.start("captain")
    event = {"at": stamp(START), "event": "generation-formed", "generation": 1, "text": "line 0"}
    captain.lines.append((START, json.dumps(event)))
    world.output(captain, 50, every=60.0)
    world.refresh()
    mirror = Mirror(cast(Cluster, None), RUN, tmp_path, world.plan)
    mirror.update_pods([captain.pod()])
    mirror._end(deleted=False)  # it ends after one connection
    mirror._follow_all()
    for thread in mirror._streams.values():
        thread.join(30)
        assert not thread.is_alive()
    assert mirror.inbox.formed and mirror.fatal_reason is None
    assert world.event_numbers() == list(range(51))
    mirror.inbox.close()


def test_positions_of_pods_that_are_gone_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    for _ in range(3):
        world.output(world.start("worker"), 5)
        world.refresh()
        world.containers[:] = world.containers[-1:]
    world.refresh()
    assert len(json.loads((tmp_path / "positions.json").read_text())["positions"]) == 1


def test_a_process_that_has_listed_no_pods_yet_keeps_the_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.output(world.start("worker"), 5)
    world.refresh()
    before = (tmp_path / "positions.json").read_bytes()
    mirror = Mirror(cast(Cluster, None), RUN, tmp_path, world.plan)
    mirror.save_pods()
    assert (tmp_path / "positions.json").read_bytes() == before and b"worker-1/0" in before


class Connections:
    def interrupt(self) -> None:
        pass

    close = interrupt


def test_the_last_positions_are_saved_when_following_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    worker = world.start("worker")
    mirror = Mirror(cast(Cluster, Connections()), RUN, tmp_path, world.plan)
    mirror.update_pods([worker.pod()])
    mirror._listed.set()
    mirror.save_pods()
    world.output(worker, 5)
    assert mirror.fetch({"worker-host-0"})
    mirror.save_pods()  # too early
    assert not (tmp_path / "positions.json").exists()
    mirror.stop()
    mirror.inbox.close()
    positions = json.loads((tmp_path / "positions.json").read_text())["positions"]
    assert positions == {"worker-1/0": [stamp(world.now), 1]}


def test_the_last_positions_are_saved_when_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    worker = world.start("worker")
    client = SimpleNamespace(list=lambda *_, **__: [])
    cluster = Cluster(cast(Any, client), "shared", "team", "https://127.0.0.1:1")
    mirror = Mirror(cluster, RUN, tmp_path, world.plan)
    mirror.update_pods([worker.pod()])
    mirror._listed.set()
    run = Running(cluster, RUN, tmp_path, mirror)
    assert not run.ended(0)
    world.output(worker, 5)
    assert mirror.fetch({"worker-host-0"})
    mirror._end(deleted=True)
    assert run.ended(0)
    mirror.inbox.close()
    assert "worker-1/0" in json.loads((tmp_path / "positions.json").read_text())["positions"]


def test_stopping_does_not_need_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    mirror = Mirror(cast(Cluster, Connections()), RUN, tmp_path, world.plan)
    mirror.update_pods([world.start("worker").pod()])
    mirror._listed.set()
    shutil.rmtree(tmp_path)
    mirror.stop()
