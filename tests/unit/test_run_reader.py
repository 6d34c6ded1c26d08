"""A run that is read while it is written: its state is that of a fresh reader, and its history is complete."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.event_file import EventFile
from paceline.view.files.run_folders import Run
from paceline.view.output.tail import CHUNK
from paceline.view.state import event_limits, restarts, run_reader, run_state, status_reader
from paceline.view.state.event_limits import MOST_NAMES
from paceline.view.state.events import Event
from paceline.view.state.run_reader import RunReader, StateReader
from support import recorded
from support.recorded import LIFE, event


def append(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in events))


def test_the_state_equals_that_of_a_fresh_reader_at_any_time(tmp_path: Path) -> None:
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[]))
    reader = StateReader(run)
    for each in LIFE:
        append(run.folder, each)
        reader.update()
        assert (
            reader.standing(False).report == status_reader.read(run, over=True).report or each["event"] == "run-started"
        )
    assert reader.state.status == "succeeded"
    reader.close()


def test_a_run_that_lost_its_supervisor_does_not_stay_failed(tmp_path: Path) -> None:
    """The state is only assessed: events that follow are still folded into it."""
    run = Run("digits-3f9a", recorded.write(tmp_path, events=LIFE[:8]))
    reader = StateReader(run)
    reader.update()
    assert reader.standing(False).report["status"] == "failed"
    assert reader.standing(True).report["status"] == "running"
    reader.close()


@pytest.mark.parametrize("kind", ["scaled", "scaled-roles", "member-joined"])
def test_an_event_takes_as_long_as_it_is(kind: str, tmp_path: Path) -> None:
    """CPU time: it would be minutes if all tasks were looked at for each of these events."""
    names = [f"worker-{number}" for number in range(MOST_NAMES)]
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[event(1, "run-started", 0, tasks=names, hosts=["host"])]))
    tasks = [{"name": name, "host": "host"} for name in names]
    (run.folder / "plan.json").write_text(json.dumps({"version": 1, "tasks": tasks}))
    append(run.folder, event(2, "scaled", 0, role="worker", count=1, was=MOST_NAMES, tasks=names))
    for number in range(10_000):
        role = f"role-{number}" if kind == "scaled-roles" else "none" if number % 2 else "worker"
        few = {"role": role, "count": 1, "was": 1, "tasks": []} if kind != "member-joined" else {"host": "host"}
        append(run.folder, event(3, kind.partition("-roles")[0], 0, **few))
    reader = RunReader(run)
    begin = time.process_time()
    reader.update()
    reader.close()
    assert time.process_time() - begin < 6.0


def test_of_a_plan_only_some_tasks_are_kept(tmp_path: Path) -> None:
    """That of another user's run may have hundreds of thousands."""
    run = Run("digits-3f9a", recorded.write(tmp_path, events=LIFE[:8]))
    tasks = [{"name": f"worker-{number}", "host": f"worker-host-{number}"} for number in range(2 * MOST_NAMES)]
    (run.folder / "plan.json").write_text(json.dumps({"version": 1, "tasks": tasks}))
    reader = RunReader(run)
    assert list(reader.hosts)[-2:] == [f"worker-{MOST_NAMES - 2}", f"worker-{MOST_NAMES - 1}"]
    reader.close()


def test_the_history_has_no_steps_and_is_numbered(tmp_path: Path) -> None:
    run = Run("digits-3f9a", recorded.write(tmp_path, events=LIFE[:12]))
    reader = RunReader(run)
    assert reader.update() == 12
    kinds = [each["event"] for each in LIFE[:12] if each["event"] not in ("step", "resources")]
    assert [each.kind for each in reader.history] == kinds and reader.count == len(kinds)
    append(run.folder, *LIFE[12:14])
    reader.update()
    assert [each.kind for each in reader.selected(after=len(kinds))] == ["not-finite", "spike"]
    assert [each.number for each in reader.selected(limit=2, newest=True)] == [reader.count - 1, reader.count]
    assert [each.kind for each in reader.selected(kinds=["task-started"], task="worker-1")] == ["task-started"]
    assert reader.history[0].to_json()["text"].startswith("digits-3f9a started")
    reader.close()


def test_the_history_is_complete_after_the_file_was_replaced(tmp_path: Path) -> None:
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[]))
    (run.folder / "events.jsonl").unlink()
    writer = EventFile(str(run.folder), pytest.fail, limit=20_000)
    early: RunReader | None = None
    events = [LIFE[0], *(event(number / 100, "note", text=f"note {number}") for number in range(1, 1000))]
    for number, each in enumerate(events):
        writer.write(json.dumps(each).encode() + b"\n", each)
        if number % 50 == 0:
            early = early or RunReader(run)
            early.update()
    writer.close()
    assert early is not None and (run.folder / "events.old.jsonl").exists()
    early.update()
    late = RunReader(run)
    late.update()
    for reader in (early, late):
        notes = [each.event().text("text") for each in reader.history if each.kind == "note"]
        assert notes == [f"note {number}" for number in range(1, 1000)]
        reader.close()


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "_HISTORY", 5000)
    notes = [event(1, "note", text="x" * 100) for _ in range(200)]
    run = Run("digits-3f9a", recorded.write(tmp_path, events=notes))
    reader = RunReader(run)
    reader.update()
    assert reader.count == 200 and 20 < len(reader.history) < 40 and reader.history[-1].number == 200
    reader.close()


def test_restarts_have_their_traceback_their_stacks_and_the_place_in_the_output(tmp_path: Path) -> None:
    lines = [
        "step 1",
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "ValueError: <b>",
    ]
    text = "".join(f"{recorded.at(6 + number / 100)} g1 | {line}\n" for number, line in enumerate(lines))
    later = f"{recorded.at(9)} g2 | Traceback (most recent call last):\n"
    folder = recorded.write(tmp_path, logs={"worker-1": text + later})
    stacks = event(7.06, "stacks", task="worker-0", text="File train.py")
    events = sorted([*LIFE, stacks], key=lambda each: each["at"])
    parsed = [Event(each["at"], each["event"], each["generation"], each) for each in events]
    [restart] = restarts.details(parsed, folder / "logs", is_over=True)
    assert restart["traceback"] == "\n".join(lines[1:])
    assert restart["log"] == {"task": "worker-1", "position": len(text)}
    assert (restart["cause"], restart["exit"], restart["restore"]) == ("signal", "SIGKILL", "step-100")
    assert restart["first_step_after_s"] == 1.3 and restart["stacks"] == [{"task": "worker-0", "text": "File train.py"}]


def test_a_restart_that_no_generation_has_followed_is_shown_only_while_the_run_goes_on(tmp_path: Path) -> None:
    parsed = [
        Event(each["at"], each["event"], each["generation"], each) for each in (recorded.KILLED, recorded.RESTART)
    ]
    assert len(restarts.details(parsed, tmp_path)) == 1
    assert restarts.details(parsed, tmp_path, is_over=True) == []


# ---- events of another user, which may be invented


def names(number: int, count: int = 1000) -> list[str]:
    return [f"{number:x}-{each:x}" for each in range(count)]


INVENTED: dict[str, Callable[[int], dict[str, Any]]] = {
    "tasks": lambda number: event(1, "generation-formed", number, tasks=names(number), restore=None),
    "hosts": lambda number: event(1, "run-started", number, tasks=[], hosts=names(number)),
    "metrics": lambda number: event(
        1, "step", task=f"worker-{number}", step=1, metrics=dict.fromkeys(names(number), 1)
    ),
    "resources": lambda number: event(1, "resources", host="a", tasks={each: {"cpu": 1} for each in names(number)}),
    "gpus": lambda number: event(1, "resources", host=f"host-{number}", gpus=[{"memory": 1}] * 1000),
}


@pytest.mark.parametrize("kind", INVENTED)
def test_invented_names_use_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for limit in ("MOST_NAMES", "MOST_METRICS"):
        monkeypatch.setattr(event_limits, limit, 2000)
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[*LIFE[:8], *map(INVENTED[kind], range(1, 41))]))
    reader = RunReader(run)
    tracemalloc.start()
    reader.update()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    standing = reader.standing(True)
    reader.close()
    assert kept < 4e6 and peak < 8e6
    assert len(standing.state.tasks) <= 2000 and len(standing.state.last_metrics) <= 2000
    assert {"worker-0", "worker-1"} <= standing.state.tasks.keys() and standing.state.steps == 60
    [problem] = standing.problems
    assert problem.startswith("events.jsonl: too many or too long ") and problem.endswith(": not all are shown")
    assert standing.report["status"] == "running" and standing.report["problems"] == [problem]


def test_long_texts_and_names_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_limits, "MOST_TEXT", 20_000)
    text = "x" * 8000
    invented = [
        event(8, "stacks", task="worker-0", text=text),
        event(8, "task-started", task="y" * 256, host="worker-host-0"),
        event(8, "task-started", task=["worker-0"], host="worker-host-0"),
        *(event(8 + number, "restart", cause="signal", task="worker-1", detail=text, scope=[]) for number in range(3)),
    ]
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[*LIFE[:8], *invented]))
    standing = status_reader.read(run, over=True)
    assert standing.state.tasks.keys() == set(recorded.TASKS) and standing.state.stacks["worker-0"] == text
    assert [len(restart["detail"]) for restart in standing.state.restarts] == [8000, 1000, 1000]
    assert standing.problems == (
        "events.jsonl: too many or too long names of tasks: not all are shown",
        "events.jsonl: too many or too long texts: not all are shown",
    )


def test_of_restarts_warnings_and_start_times_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MOST_RESTARTS", "MOST_WARNINGS", "MOST_STARTS"):
        monkeypatch.setattr(run_state, limit, 20)
    monkeypatch.setattr(restarts, "_MOST", 20)
    events = []
    for number in range(100):
        events += [
            event(1, "task-started", number, task="worker-0", host="a"),
            event(1, "start-times", number, task="worker-0", first_step_s=number),
            event(1, "warning", number, text=str(number)),
            event(1, "restart", number, cause="signal", task="worker-0", detail=str(number), scope=["worker-0"]),
            event(1, "recovered", number, task="worker-0", first_step_after_s=number),
            event(1, "generation-formed", number + 1, tasks=["worker-0"], restore=f"step-{number}"),
        ]
    run = Run("digits-3f9a", recorded.write(tmp_path, events=events))
    state = status_reader.read(run, over=True).state
    assert 20 <= len(state.restarts) <= 24 and state.restarts[-1]["first_step_after_s"] == 99
    assert 20 <= len(state.warnings) <= 24 and state.warnings[-1] == "99"
    assert 20 <= len(state.starts) <= 24 and max(state.starts) == 99
    details = restarts.details(
        [Event(each["at"], each["event"], each["generation"], each) for each in events], tmp_path
    )
    assert [each["number"] for each in details] == list(range(81, 101))
    assert (details[-1]["restore"], details[-1]["first_step_after_s"]) == ("step-99", 99)


def test_of_a_very_large_file_the_begin_and_the_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.view.state.events.READ_LIMIT", 2 * CHUNK)
    notes = [event(9, "note", text=f"note {number} " + "x" * 1000) for number in range(5000)]
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[*LIFE[:8], *notes, *LIFE[-2:]]))
    reader = RunReader(run)
    assert reader.update() < 2100 and reader.state.status == "succeeded" and reader.state.steps == 60
    assert reader.standing(False).problems == ("events.jsonl: 3 MiB in the middle of the file are not read",)
    append(run.folder, event(13, "note", text="later"))
    assert reader.update() == 1 and reader.history[-1].event().text("text") == "later"
    reader.close()


def test_the_number_of_events_in_the_history_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "_MOST_EVENTS", 50)
    run = Run("digits-3f9a", recorded.write(tmp_path, events=[event(1, "note", text="") for _ in range(200)]))
    reader = RunReader(run)
    reader.update()
    assert reader.count == 200 and len(reader.history) == 50 and reader.history[-1].number == 200
    reader.close()
