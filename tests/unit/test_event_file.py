"""events.jsonl stays small however long a run lasts, and nothing that a user is shown is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent import event_file, state_events
from paceline.agent.captain_process.event_log import UPLOADED, EventLog
from paceline.agent.event_file import NAME, OLD, EventFile
from paceline.agent.run_files import Echo
from paceline.view.state import events, run_state
from support import recorded
from support.recorded import event

TASKS = ("worker-0", "worker-1")


def fold(lines: list[dict[str, Any]]) -> run_state.State:
    return run_state.fold(filter(None, (events.parse(json.dumps(line)) for line in lines)))


def shown(state: run_state.State) -> dict[str, Any]:
    """What `status` shows of it."""
    data = {
        name: value
        for name, value in vars(state).items()
        if name not in ("pace", "waiting", "speed", "goodput", "resources", "start_count")
    }
    return {**data, "waiting": state.waiting and state.waiting.data, "steps_per_s": state.steps_per_s}


def write(file: EventFile, line: dict[str, Any]) -> None:
    assert file.write(json.dumps(line).encode() + b"\n", line)


def written(folder: Path, name: str = NAME) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path) -> EventFile:
    return EventFile(str(tmp_path), pytest.fail, limit=20_000)


# ---- what determines the state


@given(st.lists(st.sampled_from(recorded.LIFE), max_size=60))
def test_the_state_follows_from_the_events_that_are_kept(life: list[dict[str, Any]]) -> None:
    """In any order, and any number of times. Each moment is later than the one before."""
    stream = [{**each, "at": recorded.at(number)} for number, each in enumerate(life)]
    kept = state_events.needed(stream)
    state, expected = shown(fold(kept)), shown(fold(stream))
    # Start times and speed: of the newest generations only. The generation is in the mark.
    for name in ("starts", "steps_per_s", "generation", "last_metrics"):
        state.pop(name), expected.pop(name)
    state["saved"], expected["saved"] = bool(state["saved"]), bool(expected["saved"])
    assert state == expected
    assert state_events.needed(kept) == kept


def test_the_whole_life_is_kept() -> None:
    assert shown(fold(state_events.needed(recorded.LIFE))) == shown(fold(recorded.LIFE))


def test_few_events_of_a_long_run_are_needed() -> None:
    life = list(recorded.LIFE)
    for number in range(20_000):
        life.append(event(number % 60, "step", 1 + number // 20, task=TASKS[number % 2], step=number, metrics={"n": 1}))
        if number % 20 == 0:
            life += [{**recorded.RESTART, "generation": 1 + number // 20}, event(1, "note", text="x")]
    assert len(state_events.needed(life)) < 1000
    assert fold(state_events.needed(life)).steps == 19_999


@pytest.mark.parametrize("kind", ["step", "evaluated"])
def test_names_of_metrics_that_change_all_the_time_do_not_grow_without_bound(kind: str) -> None:
    """The values that were reported last are kept, also of a name that the task has used from the beginning."""
    kept = list(recorded.LIFE[:6])
    for first in range(0, 200, 50):
        for number in range(first, first + 50):
            metrics = {"loss": number, **{f"accuracy_{index}/step_{number}": 0.5 for index in range(100)}}
            kept.append(event(13, kind, task="worker-0", step=number, metrics=metrics))
        kept = state_events.needed(kept)
    metrics = kept[-1]["metrics"]
    assert len(metrics) == state_events.METRICS_KEPT and metrics["loss"] == 199
    assert {f"accuracy_{index}/step_{number}" for index in range(99) for number in range(191, 200)} <= set(metrics)


def test_all_metrics_of_one_report_are_kept() -> None:
    metrics = {f"name_{index}": 1.0 for index in range(2 * state_events.METRICS_KEPT)}
    earlier = event(1, "step", task="worker-0", step=1, metrics={"loss": 1.0})
    assert (
        state_events.needed([earlier, event(2, "step", task="worker-0", step=2, metrics=metrics)])[-1]["metrics"]
        == metrics
    )


# ---- the file


def test_an_event_that_is_too_large_displaces_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of some tasks may have millions of names: those of others, and what the run has done, stay."""
    monkeypatch.setattr(event_file, "KEPT_LIMIT", 100_000)
    file = EventFile(str(tmp_path), pytest.fail, limit=20_000)
    for line in recorded.LIFE[:-1]:
        write(file, line)
    for number, size in enumerate((9_000, 1_000, 5_000, 50_000)):
        metrics = {f"name_{index}": 1.0 for index in range(size)}
        write(file, event(13, "step", 2, task=f"evaluator-{number}", step=number, metrics=metrics))
    write(file, event(13, "note", 2, text="x" * 200_000))
    assert (tmp_path / NAME).stat().st_size < 120_000
    state, expected = fold(written(tmp_path)), fold(recorded.LIFE[:-1])
    assert (state.started, state.committed, state.restarts) == (expected.started, expected.committed, expected.restarts)


def test_the_file_stays_small_and_its_state_is_right(file: EventFile, tmp_path: Path) -> None:
    for line in recorded.LIFE[:-1]:
        write(file, line)
    for number in range(2000):
        write(
            file, event(13, "step", 2, task=TASKS[number % 2], step=number, metrics={"loss": number}, steps_per_s=1.0)
        )
    size = (tmp_path / NAME).stat().st_size
    assert size < 25_000
    state = fold(written(tmp_path))
    assert (state.generation, state.steps, state.tasks["worker-1"].step) == (2, 1999, 1999)
    assert state.committed == fold(recorded.LIFE).committed


def test_what_happened_is_kept_once_in_order(file: EventFile, tmp_path: Path) -> None:
    for number in range(3000):
        write(file, event(1, "step", task="worker-0", step=number, metrics={}, steps_per_s=None))
        if number % 10 == 0:
            write(file, event(1, "note", text=str(number)))
    reader = events.EventFile(tmp_path, old=True)
    notes = []
    while lines := reader.read():
        notes += [each.text("text") for each, _ in lines if each.kind == "note"]
    reader.close()
    assert notes == [str(number) for number in range(0, 3000, 10)]
    assert "step" not in {each["event"] for each in written(tmp_path, OLD)}


def test_a_reader_that_follows_sees_each_event_once(file: EventFile, tmp_path: Path) -> None:
    tail, seen = events.follow(tmp_path), []
    for number in range(3000):
        write(file, event(1, "step", task="worker-0", step=number, metrics={}, steps_per_s=None))
        if number % 7 == 0:
            seen += [each.number("step") for each in filter(None, map(events.parse, tail.read()))]
    while lines := tail.read():
        seen += [each.number("step") for each in filter(None, map(events.parse, lines))]
    tail.close()
    assert seen == list(range(3000))


def test_old_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.agent.event_file.OLD_LIMIT", 50_000)
    file = EventFile(str(tmp_path), pytest.fail, limit=5_000)
    for number in range(3000):
        write(file, event(1, "note", text=str(number)))
    assert (tmp_path / OLD).stat().st_size <= 50_000 + 5_000
    assert written(tmp_path, OLD)[-1]["text"] > "2900"
    assert written(tmp_path)[-1]["text"] == "2999"


def test_a_file_of_an_earlier_process_is_continued(tmp_path: Path) -> None:
    for _ in range(10):
        file = EventFile(str(tmp_path), pytest.fail, limit=5_000)
        for number in range(100):
            write(file, event(1, "step", task="worker-0", step=number, metrics={}, steps_per_s=None))
        file.close()
    assert (tmp_path / NAME).stat().st_size < 6_000


def test_the_first_and_the_last_step_of_a_task_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.agent.captain_process.event_log.Echo.write", lambda *_: None)
    log = EventLog(str(tmp_path), Echo.__new__(Echo), pytest.fail)
    for number in range(5):
        for task in TASKS:
            log.write("step", 1, {"task": task, "step": number})
    log.write("task-exited", 1, {"task": "worker-1"})
    uploaded = [(each["event"], each.get("task"), each.get("step")) for each in written(tmp_path, UPLOADED)]
    assert uploaded == [
        ("step", "worker-0", 0), ("step", "worker-1", 0), ("step", "worker-1", 4), ("task-exited", "worker-1", None),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["step", "task-exited", "restart", "generation-formed"])
def test_events_of_thousands_of_tasks_do_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A captain of another user may write anything, and a viewer copies it."""
    monkeypatch.setattr(event_file, "KEPT_LIMIT", 40_000)
    monkeypatch.setattr(event_file, "OLD_LIMIT", 40_000)
    file = EventFile(str(tmp_path), pytest.fail, limit=20_000)
    for number in range(3000):
        names = [f"worker-{number}"] if kind == "generation-formed" else None
        write(file, event(number, kind, task=f"worker-{number}", step=number, tasks=names, reason="x" * 100))
    sizes = [(tmp_path / name).stat().st_size for name in (NAME, OLD)]
    assert max(sizes) < 100_000
    assert f'"worker-{2999}"' in (tmp_path / NAME).read_text()


def test_a_file_that_an_earlier_version_has_let_grow_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = event(0, "run-started", run="first"), event(9, "saved", step=7)
    path = tmp_path / NAME
    with path.open("wb") as file:
        file.write(json.dumps(first).encode() + b"\n")
        file.truncate(1 << 40)  # without blocks
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps(last).encode() + b"\n")
    monkeypatch.setattr(event_file, "READ_LIMIT", 100_000)
    write(EventFile(str(tmp_path), pytest.fail), event(10, "note", text="x"))
    assert [each["event"] for each in written(tmp_path)] == ["run-started", "saved", "rotated"]


@pytest.mark.parametrize("limit", [200, 1000, 1 << 20])
def test_each_line_is_read_once_however_much_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    (tmp_path / NAME).write_bytes(b"".join(b"%05d\n" % number for number in range(100)))
    monkeypatch.setattr(event_file, "READ_LIMIT", limit)
    numbers = [int(line) for line in event_file._read_lines(str(tmp_path / NAME)) if line]
    assert numbers == sorted(set(numbers)) and {0, 99} <= set(numbers)
    assert limit < 600 or numbers == list(range(100))
