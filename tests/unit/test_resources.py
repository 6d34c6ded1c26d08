"""What tasks and hosts use: how it is measured, how it travels, and what is kept of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent import memory_limits, os_processes
from paceline.agent.captain import events as ev
from paceline.agent.captain_process.event_log import UPLOADED, EventLog
from paceline.agent.event_file import NAME, OLD, EventFile
from paceline.agent.net import messages
from paceline.agent.resource_usage import Resources, event_fields
from paceline.agent.run_files import Echo, stamp
from paceline.agent.series_files import Series, parts, read_part, summed_up
from paceline.agent.tasks import resource_sampler
from paceline.agent.tasks.resource_sampler import SEND_EVERY, ResourceSampler, network_totals, totals_of
from paceline.view.series import points as reader
from paceline.view.state import events, run_state
from support import recorded
from support.recorded import RESOURCES, event
from support.worlds import make_plan, up

GIB = 2**30
USED = ev.HostResources(
    3 * GIB, 8 * GIB, 100, 50, {"worker-0": ev.TaskResources(1.5, 2 * GIB, 2.5 * GIB, 10, 20)},
    (ev.GpuResources(0.5, GIB, 2 * GIB),),
)  # fmt: skip


def measured(cpu: float, memory: float, peak: float = 0.0) -> dict[str, Any]:
    used = {"cpu": cpu, "memory": memory, "memory_peak": peak, "read_bytes_per_s": 0, "written_bytes_per_s": 0}
    return {**RESOURCES, "tasks": {"worker-1": used}}


# ---- the host


class FakeMemory(memory_limits.Memory):
    def __init__(self, used: int, limit: int, limited: bool = False) -> None:
        self.used, self.limit, self.limited = used, limit, limited

    def used_and_limit(self) -> tuple[int, int]:
        return self.used, self.limit

    def is_limited(self) -> bool:
        return self.limited


@pytest.fixture(autouse=True)
def this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and without the processes that other tests in this process may have started."""
    monkeypatch.setattr(resource_sampler, "FIRST_AFTER", 0.0)
    monkeypatch.setattr(os_processes, "descendants", lambda *_: [])


def test_a_task_that_has_just_started_is_not_measured_yet(
    sampler: ResourceSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_sampler, "FIRST_AFTER", 1.0)
    own = {("worker-0", 1): (os.getpid(), 100.0)}
    sampler.sample(own, 100.0)
    assert sampler.take(100.0) is None
    sampler.sample(own, 101.0)
    assert sampler.take(101.0) is not None


@pytest.fixture
def sampler() -> ResourceSampler:
    return ResourceSampler(FakeMemory(3 * GIB, 8 * GIB), lambda: USED.gpus, 100.0, lambda: 0.0)


def test_this_process_is_measured(sampler: ResourceSampler) -> None:
    own = {("worker-0", 1): (os.getpid(), 100.0)}
    sampler.sample(own, 100.0)
    taken = sampler.take(110.0)
    assert taken is not None
    assert (taken.memory, taken.memory_limit, taken.gpus) == (3 * GIB, 8 * GIB, USED.gpus)
    used = taken.tasks["worker-0"]
    assert used.memory == pytest.approx(os_processes.resident(os.getpid()), rel=0.2)
    assert used.memory_peak >= used.memory
    assert used.cpu > 0
    assert messages.read_member(messages.member_message(ev.Heartbeat("h", 1, {}, resources=taken)), "h")


def test_cores_are_those_since_the_last_time(sampler: ResourceSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter([(3.0, 0, 1000), (9.0, 500, 1000), (8.0, 600, 0)])
    monkeypatch.setattr(resource_sampler, "totals_of", lambda _: resource_sampler.Totals(*next(totals)))
    own, rates = {("worker-0", 1): (os.getpid(), 98.0)}, []
    for now in (100.0, 110.0, 120.0):
        sampler.sample(own, now)
        taken = sampler.take(now)
        assert taken is not None
        used = taken.tasks["worker-0"]
        rates.append((used.cpu, used.read_bytes_per_s, used.written_bytes_per_s))
    assert rates == [(1.5, 0, 500), (0.6, 50, 0), (0, 10, 0)]  # the last: a child ended, and was not waited for


def test_nothing_is_sent_twice_or_too_often(sampler: ResourceSampler) -> None:
    own = {("worker-0", 1): (os.getpid(), 100.0)}
    assert sampler.take(100.0) is None
    sampler.sample(own, 100.0)
    assert sampler.take(100.0) is not None
    assert sampler.take(100.0 + SEND_EVERY) is None  # nothing was measured since
    sampler.sample(own, 105.0)
    assert sampler.take(106.0) is None
    assert sampler.take(110.0) is not None


def test_the_peak_between_two_messages_is_sent(sampler: ResourceSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([GIB, 5 * GIB, 2 * GIB])
    monkeypatch.setattr(os_processes, "resident", lambda _: next(resident))
    monkeypatch.setattr(os_processes, "peak_resident", lambda _: 0)
    own = {("worker-0", 1): (os.getpid(), 100.0)}
    sampler.sample(own, 100.0)
    sampler.take(100.0)
    sampler.sample(own, 105.0)
    sampler.sample(own, 110.0)
    taken = sampler.take(110.0)
    assert taken is not None and (taken.tasks["worker-0"].memory, taken.tasks["worker-0"].memory_peak) == (
        2 * GIB,
        5 * GIB,
    )


def test_measuring_takes_at_most_a_thousandth_of_a_core() -> None:
    clock = iter(range(1000))  # a second for each sample
    sampler = ResourceSampler(FakeMemory(0, GIB), lambda: (), 0.0, lambda: float(next(clock)))
    own = {("worker-0", 1): (os.getpid(), 0.0)}
    sampler.sample(own, 0.0)
    sampler.sample(own, 999.0)
    assert next(clock) == 2
    sampler.sample(own, 1000.0)
    assert next(clock) == 5


def test_a_task_that_has_a_cgroup_to_itself_uses_what_the_cgroup_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_processes, "resident", lambda _: GIB)
    memory = FakeMemory(6 * GIB, 8 * GIB, limited=True)
    sampler = ResourceSampler(memory, lambda: (), 0.0, lambda: 0.0)
    first, second = (("worker-0", 1), (os.getpid(), 0.0)), (("worker-1", 1), (os.getpid(), 0.0))
    sampler.sample(dict([first]), 0.0)
    alone = sampler.take(0.0)
    sampler.sample(dict([first, second]), 10.0)
    both = sampler.take(10.0)
    assert alone is not None and both is not None
    assert alone.tasks["worker-0"].memory == 6 * GIB
    assert both.tasks["worker-0"].memory == GIB


def test_a_task_that_ends_is_forgotten(sampler: ResourceSampler) -> None:
    sampler.sample({("worker-0", 1): (os.getpid(), 100.0)}, 100.0)
    sampler.sample({("worker-0", 2): (0, 104.0)}, 104.0)  # the next attempt has no process yet
    taken = sampler.take(104.0)
    assert taken is not None and taken.tasks == {}


def test_a_process_that_does_not_exist_uses_nothing() -> None:
    assert totals_of(2**22 + 1) == resource_sampler.Totals()
    assert os_processes.peak_resident(2**22 + 1) == 0


def test_the_loopback_is_not_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["Inter-|   Receive  |  Transmit", " face |bytes packets|bytes", "    lo: 9 " + "9 " * 15]
    lines += ["  eth0: 100 1 0 0 0 0 0 0 50 1 0 0 0 0 0 0", "  eth1:11 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0", "  bad: x"]
    (tmp_path / "dev").write_text("\n".join(lines))
    monkeypatch.setattr(resource_sampler, "NETWORK", str(tmp_path / "dev"))
    assert network_totals() == (111, 55)
    monkeypatch.setattr(resource_sampler, "NETWORK", str(tmp_path / "none"))
    assert network_totals() == (0, 0)


# ---- messages


def beat(resources: Any) -> dict[str, Any]:
    return {"type": "beat", "n": 1, "tasks": {}, "memory": 0.5, "resources": resources}


DAMAGED = [
    None, 7, [], "x", {}, {"memory": 1}, {"memory": -1, "memory_limit": 1}, {"memory": 10**400, "memory_limit": 1},
    {"memory": float("nan"), "memory_limit": 1}, {"memory": True, "memory_limit": 1},
    {"memory": 1, "memory_limit": 1, "tasks": [1]}, {"memory": 1, "memory_limit": 1, "tasks": {"worker-0": {}}},
    {"memory": 1, "memory_limit": 1, "tasks": {"worker-0": {"cpu": float("inf"), "memory": 1, "memory_peak": 1}}},
    {"memory": 1, "memory_limit": 1, "gpus": [{"utilization": 0, "memory": 0, "memory_limit": 0}] * 65},
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda value: str(value)[:60])
def test_damaged_resources_are_ignored_and_the_heartbeat_counts(damaged: Any) -> None:
    read = messages.read_member(json.loads(json.dumps(beat(damaged))), "worker-host-0")
    assert read == ev.Heartbeat("worker-host-0", 1, {}, 0.5)


def test_what_a_newer_agent_adds_is_ignored() -> None:
    sent = messages.member_message(ev.Heartbeat("worker-host-0", 1, {}, 0.5, resources=USED))
    sent["resources"]["power"] = 300
    read = messages.read_member(json.loads(json.dumps(sent)), "worker-host-0")
    assert read == ev.Heartbeat("worker-host-0", 1, {}, 0.5, resources=USED)


# ---- the captain


def test_the_captain_reports_the_tasks_of_the_host_only_and_not_too_often() -> None:
    world = up(make_plan(2))
    foreign = ev.HostResources(1, 2, tasks=dict.fromkeys(("worker-0", "worker-1", "x"), USED.tasks["worker-0"]))
    for _ in range(3):
        world.tell(ev.Heartbeat("worker-host-0", 1, {}, resources=foreign))
    emitted = [fields for kind, _, fields in world.events if kind == "resources"]
    assert [(fields["host"], list(fields["tasks"])) for fields in emitted] == [("worker-host-0", ["worker-0"])]
    world.now += 10
    world.tell(ev.Heartbeat("worker-host-0", 1, {}, resources=foreign))
    assert [kind for kind, *_ in world.events].count("resources") == 2


# ---- sums


def test_the_last_value_the_mean_and_the_peak() -> None:
    lines = [measured(1.0, GIB, 2 * GIB), measured(2.0, 3 * GIB), measured(0.0, 2 * GIB, 2 * GIB)]
    report = Resources().add_all(lines).to_report()
    assert report is not None
    task = report["tasks"]["worker-1"]
    assert task["cpu"] == {"last": 0, "mean": 1, "peak": 2}
    assert task["memory"] == {"last": 2 * GIB, "mean": 2 * GIB, "peak": 3 * GIB}
    assert task["memory_limit"] == 8 * GIB
    host = report["hosts"]["worker-host-1"]
    assert host["received_bytes_per_s"]["mean"] == 2048
    assert host["gpus"] == {
        "0": {
            "utilization": {"last": 0.85, "mean": 0.85, "peak": 0.85},
            "memory": {"last": GIB, "mean": GIB, "peak": GIB}, "memory_limit": 16 * GIB,
        }
    }  # fmt: skip


def test_nothing_was_measured() -> None:
    assert Resources().add_all([recorded.STARTED, recorded.STEP]).to_report() is None


def test_the_fields_of_the_event_are_those_that_are_read() -> None:
    line = event(1, "resources", host="worker-host-0", **event_fields(USED, ["worker-0"]))
    report = Resources().add_all([json.loads(json.dumps(line))]).to_report()
    assert report is not None
    assert report["tasks"]["worker-0"]["memory"] == {"last": 2 * GIB, "mean": 2 * GIB, "peak": 2.5 * GIB}


JUNK = st.recursive(
    st.sampled_from([None, True, -1, 0, 1.5, 10**30, "x"]),
    lambda each: (
        st.lists(each, max_size=2) | st.dictionaries(st.sampled_from(["cpu", "memory", "w"]), each, max_size=2)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["machine", "gpus", "tasks", "host", "resources"]), JUNK))
def test_damaged_events_do_no_harm(fields: dict[str, Any]) -> None:
    for kind in ("resources", "rotated"):
        resources = Resources().add_all([RESOURCES, {**event(1, kind), **fields}, RESOURCES])
        assert json.dumps(resources.to_report()) and json.dumps(resources.to_json())


@given(st.lists(st.tuples(st.floats(0, 64), st.integers(0, 2**40)), max_size=20), st.integers(0, 20))
def test_a_reader_continues_where_another_one_stopped(values: list[tuple[float, int]], number: int) -> None:
    lines = [measured(cpu, memory) for cpu, memory in values]
    before = Resources().add_all(lines[:number])
    mark = json.loads(json.dumps({**event(0, "rotated"), "resources": before.to_json()}))
    one, other = Resources().add_all([mark, *lines[number:]]).to_report(), Resources().add_all(lines).to_report()
    if one is None or other is None:
        assert one == other
    else:
        for name, used in other["tasks"]["worker-1"].items():
            assert one["tasks"]["worker-1"][name] == pytest.approx(used, rel=1e-6, abs=0.002)


# ---- files


def test_months_of_resources_stay_small(tmp_path: Path) -> None:
    file = EventFile(str(tmp_path), pytest.fail, limit=30_000)
    for number in range(2000):
        line = {**measured(1.0, GIB, number * 1024), "at": stamp(1_800_000_000 + 10 * number)}
        assert file.write(json.dumps(line).encode() + b"\n", line)
    file.close()
    assert (tmp_path / NAME).stat().st_size < 35_000
    assert not (tmp_path / OLD).exists() or b"resources" not in (tmp_path / OLD).read_bytes()
    state = run_state.fold(events.read(tmp_path, pytest.fail))
    report = state.resources.to_report()
    assert report is not None
    assert report["tasks"]["worker-1"]["memory"]["peak"] == max(GIB, 1999 * 1024)
    assert state.tasks["worker-1"].memory == GIB


def test_the_series_have_tasks_and_hosts(tmp_path: Path) -> None:
    writer = Series(str(tmp_path))
    for second, cores in enumerate((1.0, 3.0)):
        writer.add({**measured(cores, GIB), "at": stamp(1_800_000_000 + second)})
    writer.add({**recorded.STEP, "task": "worker-1", "at": stamp(1_800_000_000)})
    assert [point.mean for point in reader.read(tmp_path, "cpu", "worker-1")] == [1, 3]
    assert [point.mean for point in reader.read(tmp_path, "gpu_0_utilization", "worker-host-1")] == [0.85, 0.85]
    summary = {line["task"]: line for line in summed_up(read_part(parts(f"{tmp_path}/series", 1)[0]), 300)}
    assert summary["worker-1"]["resources"]["cpu"] == [1, 2, 3] and summary["worker-1"]["step"] == 120
    assert "step" not in summary["worker-host-1"]
    assert summed_up([summary["worker-1"]], 300)[0]["resources"]["cpu"] == [1, 2, 3]


def test_resources_are_not_uploaded_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.agent.captain_process.event_log.Echo.write", lambda *_: None)
    log = EventLog(str(tmp_path), Echo.__new__(Echo), pytest.fail)
    log.write("resources", 1, {key: RESOURCES[key] for key in ("host", "machine", "gpus", "tasks")})
    log.write("note", 1, {"text": "x"})
    assert [json.loads(line)["event"] for line in (tmp_path / UPLOADED).read_text().splitlines()] == ["note"]
    again = EventLog(str(tmp_path), None, pytest.fail)
    assert again.resources == log.resources
    assert again.resources.to_report() is not None
