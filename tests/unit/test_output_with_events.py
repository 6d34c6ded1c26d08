"""Output and events shown together: in the order of generations, and progress bars that stay in their place."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from pathlib import Path

import pytest

from paceline.agent.run_files import stamp
from paceline.cli import follow
from paceline.view.output import merged_logs
from paceline.view.output.merged_logs import Line
from paceline.view.output.output_with_events import in_order
from paceline.view.output.progress_bar_display import LINE_EVERY_S, ProgressBars
from paceline.view.state.events import Event
from paceline.view.text.terminal import Screen


def at(second: float) -> str:
    return f"2026-11-15T04:30:{second:06.3f}Z"


def line(second: float, text: str, generation: int = 1, task: str = "worker-0", progress: bool = False) -> Line:
    return Line(at(second), task, generation, text, progress)


def event(second: float, kind: str, generation: int = 1, **fields: object) -> Event:
    return Event(at(second), kind, generation, fields)


def formed(second: float, generation: int, *tasks: str) -> Event:
    return event(second, "generation-formed", generation, tasks=list(tasks or ("worker-0",)), restore=None)


def names(entries: list[Event | Line]) -> list[str]:
    return [entry.text if isinstance(entry, Line) else f"{entry.kind} {entry.generation}" for entry in entries]


def test_output_and_events_are_merged_by_time() -> None:
    events = [formed(1, 1), event(3, "task-exited"), formed(4, 2)]
    lines = [line(2, "one"), line(2.5, "traceback"), line(5, "again", 2)]
    expected = ["generation-formed 1", "one", "traceback", "task-exited 1", "generation-formed 2", "again"]
    assert names(in_order(events, lines)) == expected


def test_the_last_output_of_a_task_is_shown_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although lines wait for a moment, for older ones of other tasks."""
    monkeypatch.setattr(merged_logs, "_SETTLE", timedelta(seconds=60))
    line, event = "{at} g1 | ValueError: no\n", {"event": "task-exited", "generation": 1, "task": "worker-0", "code": 1}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text(line.format(at=stamp()))
    (tmp_path / "events.jsonl").write_text(json.dumps({"at": stamp(), **event}) + "\n")
    out = io.StringIO()
    follow.View("run", tmp_path, ["worker-0"], Screen(out)).update()
    assert out.getvalue().splitlines() == ["worker-0 | ValueError: no", "* worker-0 failed with exit code 1"]


def test_generations_are_in_order_even_if_clocks_differ() -> None:
    events = [formed(1, 1), event(3, "task-exited"), formed(4, 2), event(5, "note", 2)]
    lines = [line(0, "one"), line(9, "traceback"), line(3.5, "again", 2), line(3.6, "more", 2)]
    expected = [
        "generation-formed 1", "one", "task-exited 1", "traceback", "generation-formed 2", "again", "more", "note 2",
    ]  # fmt: skip
    assert names(in_order(events, lines)) == expected


def test_tasks_that_do_not_restart_are_not_affected() -> None:
    lines = [line(5, "evaluated", 1, "evaluator-0")]
    assert names(in_order([formed(4, 2)], lines)) == ["generation-formed 2", "evaluated"]


# ---- progress bars


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def test_bars_of_several_tasks_keep_their_order() -> None:
    bars = ProgressBars(live=True)
    for number, task in enumerate(["worker-10", "worker-2", "worker-10", "worker-0", "worker-2"]):
        bars.add(line(number, f"{task} {number}", task=task, progress=True))
        assert bars.due() == []
    assert texts(bars.states()) == ["worker-0 3", "worker-2 4", "worker-10 2"]


def test_redirected_output_shows_the_state_of_a_bar_now_and_then() -> None:
    clock = Clock()
    bars = ProgressBars(live=False, now=clock)
    printed: list[str] = []
    for percent in range(0, 100, 10):
        printed += texts(bars.add(line(percent / 10, f"{percent}%", progress=True))) + texts(bars.due())
        clock.time += LINE_EVERY_S / 4
    assert printed == ["40%", "80%"]
    assert texts(bars.add(line(11, "100%"))) == ["100%"]
    clock.time += LINE_EVERY_S
    assert bars.due() == [] and bars.finish() == []


def test_a_state_is_printed_once() -> None:
    clock = Clock()
    bars = ProgressBars(live=False, now=clock)
    bars.add(line(1, "50%", progress=True))
    clock.time += LINE_EVERY_S
    assert texts(bars.due()) == ["50%"]
    clock.time += LINE_EVERY_S
    assert bars.due() == [] and bars.finish() == []


# ---- a run that is followed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def append(folder: Path, name: str, *lines: str) -> None:
    with (folder / name).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def formed_line(second: float, generation: int) -> str:
    fields = f'"generation": {generation}, "tasks": ["worker-0"], "restore": null'
    return f'{{"at": "{at(second)}", "event": "generation-formed", {fields}}}'


def test_the_output_of_a_generation_is_shown_before_the_next_one_starts(folder: Path) -> None:
    stream = io.StringIO()
    view = follow.View("run", folder, ["worker-0"], Screen(stream))
    append(folder, "events.jsonl", formed_line(1, 1))
    view.update()
    append(folder, "logs/worker-0.log", f"{at(2)} g1 ~ 30%", f"{at(3)} g1 | ValueError: no", f"{at(4)} g1 ~ 40%")
    append(folder, "events.jsonl", formed_line(5, 2))
    append(folder, "logs/worker-0.log", f"{at(6)} g2 | again")
    view.update()
    view.finish()
    assert stream.getvalue().splitlines() == [
        "* starting worker-0 (generation 1)",
        "worker-0 | ValueError: no",
        "worker-0 | 40%",
        "* starting worker-0 (generation 2)",
        "worker-0 | again",
    ]
