"""The metrics of a run: their text, what a captain and the files of a run say, and how many there may be."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.goodput import KINDS, Goodput
from paceline.agent.metrics import families as fam
from paceline.agent.metrics.captain_samples import CaptainSamples
from paceline.agent.metrics.openmetrics_text import MOST_IN_FAMILY, Samples, render
from paceline.agent.metrics.run_samples import MOST_NAMES, add_resources
from paceline.agent.resource_usage import Resources
from support import recorded
from support.committing import AWAY, a_plan, committed
from support.metrics_text import Samples as Parsed
from support.metrics_text import parse, value
from support.worlds import LEASE, World, make_plan, up


class Scraped:
    """A captain with its metrics."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._read = len(world.events)
        self.goodput = Goodput()
        self.resources = Resources()
        self.samples = CaptainSamples(world.captain, self.goodput, self.resources, "/", 1_000_000.0, "1.2", world.now)

    def scrape(self) -> Parsed:
        for kind, _, fields in self.world.events[self._read :]:
            self.samples.on_event(kind, fields, self.world.now)
        self._read = len(self.world.events)
        texts = [self.samples.text(openmetrics, self.world.now).decode() for openmetrics in (True, False)]
        parsed, older = map(parse, texts)
        assert parsed.keys() == older.keys() and texts[0].endswith("# EOF\n")
        return parsed


def step(world: World, task: str, number: int, age: float = 0.0, **metrics: float) -> None:
    host = world.plan.tasks[[each.name for each in world.plan.tasks].index(task)].host
    world.tell(ev.Heartbeat(host, 1, {task: ev.TaskProgress(number, age, age, metrics)}, 0.25))


def test_a_run_its_progress_and_its_hosts() -> None:
    world = World(make_plan(2))
    scraped = Scraped(world)
    before = scraped.scrape()
    assert value(before, "paceline_run_status", status="starting") == 1
    assert value(before, "paceline_host_up", host="worker-host-0") == 0
    assert value(before, "paceline_host_lease_age_seconds", host="worker-host-0") is None
    assert value(before, "paceline_step") is None and value(before, "paceline_progress_age_seconds") is None
    world.join_all()
    world.deliver_all()
    step(world, "worker-0", 10)
    scraped.scrape()
    world.now += 2
    step(world, "worker-0", 30, loss=0.5)
    scraped.scrape()
    world.now += 3
    after = scraped.scrape()
    labels = {"name": "job", "framework": "tensorflow", "strategy": "multi-worker", "version": "1.2"}
    assert value(after, "paceline_run_info", run="run", **labels) == 1
    assert value(after, "paceline_run_status", status="running") == 1
    assert value(after, "paceline_run_start_time_seconds") == 1_000_000
    assert value(after, "paceline_generation") == 1
    assert value(after, "paceline_step") == value(after, "paceline_task_step", task="worker-0") == 30
    assert value(after, "paceline_task_step", task="worker-1") is None
    assert value(after, "paceline_steps_per_second") == 10
    assert value(after, "paceline_progress_age_seconds") == 3
    assert value(after, "paceline_reported", task="worker-0", name="loss") == 0.5
    assert value(after, "paceline_task_up", task="worker-1") == value(after, "paceline_host_up", host="worker-host-1")
    assert value(after, "paceline_host_lease_age_seconds", host="worker-host-0") == 3
    assert value(after, "paceline_host_lease_age_seconds", host="worker-host-1") == 5
    assert value(after, "paceline_lease_seconds") == LEASE


def test_repeated_steps_are_not_progress() -> None:
    world = up(make_plan(1))
    scraped = Scraped(world)
    step(world, "worker-0", 10)
    scraped.scrape()
    world.exit("worker-0", "signal")
    world.deliver_all()
    world.pass_time(5)
    world.deliver_all()
    step(world, "worker-0", 9)
    assert value(scraped.scrape(), "paceline_progress_age_seconds") == 5


def test_restarts_are_counted_by_cause_and_by_the_next_captain_too() -> None:
    world = up(make_plan(2))
    scraped = Scraped(world)
    causes = {dict(labels)["cause"] for name, labels in scraped.scrape() if name == "paceline_restarts_total"}
    assert causes == set(fam.CAUSES), "an increase from 0 can be seen"
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert value(scraped.scrape(), "paceline_restarts_total", cause="signal") == 1
    world.restart_captain()
    again = Scraped(world).scrape()
    assert value(again, "paceline_restarts_total", cause="signal") == 1
    assert value(again, "paceline_restarts_total", cause="hang") == 0


def test_an_unknown_cause_of_a_newer_member_is_counted_as_other() -> None:
    world = up(make_plan(1))
    scraped = Scraped(world)
    world.exit("worker-0", "cosmic-rays")
    world.deliver_all()
    assert value(scraped.scrape(), "paceline_restarts_total", cause="other") == 1


def test_snapshots_held_owed_and_committed() -> None:
    world = up(a_plan(1))
    scraped = Scraped(world)
    committed(world, 10)
    first = scraped.scrape()
    assert value(first, "paceline_snapshot_step", state="saved") == 10
    assert value(first, "paceline_snapshot_step", state="committed") == 10
    assert value(first, "paceline_snapshot_age_seconds", state="committed") == 0
    size = value(first, "paceline_snapshot_size_bytes")
    assert size and size > 0 and value(first, "paceline_snapshot_commit_seconds") == 0
    assert value(first, "paceline_snapshots_held") == 1 and value(first, "paceline_generation_records_owed") == 0
    world.place.fails = AWAY
    world.exit("worker-0", "signal")
    world.deliver_all()
    world.pass_time(5)
    world.deliver_all()
    committed(world, 20)
    world.pass_time(2)
    later = scraped.scrape()
    assert value(later, "paceline_generation_records_owed") == 1
    assert value(later, "paceline_snapshots_held") == 2
    assert value(later, "paceline_snapshot_step", state="committed") == 10
    assert value(later, "paceline_snapshot_age_seconds", state="committed") == 7


def test_a_captain_that_was_restarted_knows_that_there_is_a_snapshot() -> None:
    world = committed(up(a_plan(1)), 10)
    world.restart_captain()
    scraped = Scraped(world)
    world.join_all()
    world.deliver_all()
    world.pass_time(4)
    assert value(scraped.scrape(), "paceline_snapshot_age_seconds", state="committed") == 4


def test_goodput_stall_disk_and_resources() -> None:
    world = up(a_plan(1))
    scraped = Scraped(world)
    assert value(scraped.scrape(), "paceline_time_seconds", kind="training") is None, "nothing has happened"
    for each in recorded.LIFE[:11]:
        scraped.goodput.add(each)
    used = {"cpu": 1.5, "memory": 100, "read_bytes_per_s": 0, "written_bytes_per_s": 0}
    for task in ("worker-0", "worker-7"):
        event = {"event": "resources", "host": "worker-host-0", "tasks": {task: used}, "machine": {"memory": 200}}
        scraped.resources.add(event)
    world.events.append(("saved", 1, {"step": 5, "snapshot": "step-5-g1", "stall_s": 0.25}))
    parsed = scraped.scrape()
    times = {dict(labels)["kind"]: each for (name, labels), each in parsed.items() if name == "paceline_time_seconds"}
    assert tuple(times) == KINDS and times["starting"] == 2
    assert value(parsed, "paceline_goodput_ratio") == pytest.approx(times["training"] / sum(times.values()), abs=1e-3)
    assert value(parsed, "paceline_snapshot_stall_seconds") == 0.25
    assert value(parsed, "paceline_task_cpu_cores") == 1.5, "only of the task that runs"
    assert value(parsed, "paceline_host_memory_bytes", host="worker-host-0") == 200
    assert 0 < (value(parsed, "paceline_disk_free_bytes") or 0) < (value(parsed, "paceline_disk_size_bytes") or 0)


def test_resources_of_what_is_up() -> None:
    def used(last: float, peak: float) -> dict[str, float]:
        return {"last": last, "mean": last, "peak": peak}

    task = {"cpu": used(0.5, 1), "memory": used(100, 200), "read_bytes_per_s": used(3, 4), "memory_limit": 1000}
    gpus = {"0": {"utilization": used(0.9, 1), "memory": used(7, 8), "memory_limit": 80}, "1": {}}
    host = {"memory": used(300, 400), "sent_bytes_per_s": used(5, 6), "memory_limit": 1000, "gpus": gpus}
    report: Any = {"tasks": {"worker-0": task, "worker-1": task}, "hosts": {"a": host, "b": host, "c": "damaged"}}
    samples = Samples("run")
    add_resources(samples, report, {"worker-0"}, {"a", "c"})
    lines = render([samples.end()], fam.FAMILIES, True).decode().splitlines()
    assert [line.replace('run="run",', "") for line in lines if not line.startswith("#")] == [
        'paceline_task_cpu_cores{task="worker-0"} 0.5',
        'paceline_task_memory_bytes{task="worker-0"} 100',
        'paceline_task_memory_peak_bytes{task="worker-0"} 200',
        'paceline_task_read_bytes_per_second{task="worker-0"} 3',
        'paceline_host_memory_bytes{host="a"} 300',
        'paceline_host_memory_limit_bytes{host="a"} 1000',
        'paceline_host_sent_bytes_per_second{host="a"} 5',
        'paceline_gpu_utilization_ratio{host="a",gpu="0"} 0.9',
        'paceline_gpu_memory_bytes{host="a",gpu="0"} 7',
        'paceline_gpu_memory_limit_bytes{host="a",gpu="0"} 80',
        'paceline_series_left_out{run="run"} 0',
    ]
    for damaged in (None, [], {"tasks": 1}, {"tasks": {"worker-0": {"cpu": 1}}}, {"hosts": {"a": {"gpus": []}}}):
        add_resources(Samples("run"), damaged, {"worker-0"}, {"a"})


def test_the_lag_of_an_evaluator() -> None:
    world = up(a_plan(1, evaluator=1))
    scraped = Scraped(world)
    world.follow("evaluator-0")
    world.deliver_all()
    committed(world, 10, 20, 30)
    before = scraped.scrape()
    assert (value(before, "paceline_evaluator_lag_steps"), value(before, "paceline_snapshots_unevaluated")) == (30, 3)
    world.evaluate("evaluator-0", accuracy=0.5)
    world.deliver_all()
    after = scraped.scrape()
    assert (value(after, "paceline_evaluator_lag_steps"), value(after, "paceline_snapshots_unevaluated")) == (20, 2)
    assert value(Scraped(up(a_plan(1))).scrape(), "paceline_evaluator_lag_steps") is None


def test_names_that_a_program_reports_are_escaped_and_bounded() -> None:
    world = up(make_plan(2))
    scraped = Scraped(world)
    step(world, "worker-0", 1, **{'a"b\\c\nd\0\x1b': 1.0, "x" * 5000: 2.0, "x" * 5001: 3.0, "\ud800": 4.0, "": 5.0})
    parsed = scraped.scrape()
    names = {dict(labels)["name"]: each for (name, labels), each in parsed.items() if name == "paceline_reported"}
    assert names == {r"a\"b\\c\nd??": 1, "x" * 128: 2, "?": 4, "": 5}
    step(world, "worker-1", 1, **{f"name-{number}": 1.0 for number in range(10_000)})
    parsed = scraped.scrape()
    assert sum(name == "paceline_reported" for name, _ in parsed) == 4 + MOST_NAMES
    assert value(parsed, "paceline_series_left_out") == 10_000 - MOST_NAMES + 1
    assert value(parsed, "paceline_reported", task="worker-1", name="name-0") == 1, "always the same ones"


def test_a_run_with_thousands_of_tasks_has_a_bounded_text() -> None:
    plan = make_plan(5000)
    samples = CaptainSamples(World(plan).captain, Goodput(), Resources(), "/nowhere", None, "1", 0.0)
    parsed = parse(samples.text(True, 1.0).decode())
    assert sum(name == "paceline_task_up" for name, _ in parsed) == MOST_IN_FAMILY
    assert len(parsed) < 2100 and value(parsed, "paceline_series_left_out") == 8000


@pytest.mark.parametrize(
    ("number", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (10**400, "+Inf"), (1e300, "1e+300")]
)
def test_numbers_that_are_not_finite(number: float, text: str) -> None:
    samples = Samples("run")
    samples.add(fam.STEP, number)
    assert render([samples.end()], [fam.STEP], True).decode().splitlines()[2] == f'paceline_step{{run="run"}} {text}'


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len(set(fam.FAMILIES)) == len({family.name for family in fam.FAMILIES}) == len(fam.FAMILIES)
    constants = [each for name, each in vars(fam).items() if name.isupper() and hasattr(each, "sample")]
    assert set(constants) == set(fam.FAMILIES), "each is in the list"
    for family in fam.FAMILIES:
        assert family.name.startswith("paceline_") and family.help.endswith(".")
        assert not {"job", "instance", "run"} & set(family.labels), "Prometheus sets these"


# ---- from files


def lines_of(home: Path, *arguments: str) -> Parsed:
    result = recorded.call(home, "metrics", *arguments)
    assert result.returncode == 0, result.stderr
    return parse(result.stdout)


def test_the_verb_prints_running_runs_and_those_that_ended_recently(tmp_path: Path) -> None:
    running = recorded.write(tmp_path, "digits-3f9a", events=recorded.LIFE[:-3])
    recorded.write(tmp_path, "digits-0001", report=recorded.REPORT)
    old = recorded.write(tmp_path, "digits-0002", report=recorded.REPORT)
    for path in (old / "report.json", old / "events.jsonl"):
        os.utime(path, (time.time() - 7200,) * 2)
    with recorded.supervised(running):
        parsed = lines_of(tmp_path)
        assert parsed.keys() == lines_of(tmp_path, "-o", "openmetrics").keys()
    statuses = {dict(labels)["run"]: dict(labels)["status"] for name, labels in parsed if name == "paceline_run_status"}
    assert statuses == {"digits-3f9a": "running", "digits-0001": "succeeded"}
    own: dict[str, Any] = {"run": "digits-3f9a"}
    assert value(parsed, "paceline_step", **own) == 161 and value(parsed, "paceline_generation", **own) == 2
    assert value(parsed, "paceline_restarts_total", **own, cause="signal") == 1
    assert value(parsed, "paceline_reported", **own, task="worker-0", name="loss") == 0.2
    assert value(parsed, "paceline_snapshot_size_bytes", **own) == 1000
    assert value(parsed, "paceline_snapshot_commit_seconds", **own) == 0.5
    assert value(parsed, "paceline_evaluator_lag_steps", **own) == 0
    assert value(parsed, "paceline_time_seconds", **own, kind="starting") == 2
    assert value(parsed, "paceline_gpu_utilization_ratio", **own) == 0.85
    ages = [value(parsed, "paceline_snapshot_age_seconds", **own, state=state) for state in ("saved", "committed")]
    assert ages[0] is not None and ages[0] == ages[1], "both since it was saved"
    assert value(parsed, "paceline_snapshot_age_seconds", run="digits-0001", state="saved") is None
    assert value(parsed, "paceline_progress_age_seconds", run="digits-0001") is None
    assert value(lines_of(tmp_path, "digits-0002"), "paceline_run_status", status="succeeded") == 1


def test_the_verb_without_runs_prints_nothing(tmp_path: Path) -> None:
    assert recorded.call(tmp_path, "metrics").stdout == ""
    assert recorded.call(tmp_path, "metrics", "-o", "openmetrics").stdout == "# EOF\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "text"], "-o 'text': invalid value; use one of prometheus, openmetrics"),
        (["--listen", "here"], "--listen 'here': invalid address; use 9464 or 127.0.0.1:9464"),
        (["--listen", "70000"], "--listen '70000': invalid address; use 9464 or 127.0.0.1:9464"),
        (["--listen", "1", "-o", "openmetrics"], "-o cannot be used with --listen: the client chooses the format"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = recorded.call(tmp_path, "metrics", *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {message}\n")
