"""Logs of several tasks: merged by time, read incrementally, progress bars folded."""

import tracemalloc
from pathlib import Path

import pytest

from paceline.view.output.merged_logs import Line, Logs, Prefixer, settle
from paceline.view.output.tail import Tail
from support import recorded


def line(seconds: float, text: str, generation: int = 1, mark: str = "|") -> str:
    return f"{recorded.at(seconds)} g{generation} {mark} {text}\n"


def task_texts(lines: list[Line]) -> list[str]:
    return [f"{one.task} {one.text}" for one in lines]


def test_lines_of_all_tasks_come_in_time_order(tmp_path: Path) -> None:
    folder = recorded.write(
        tmp_path, logs={"worker-0": line(1, "a") + line(3, "c") + line(5, "e"), "worker-1": line(2, "b") + line(4, "d")}
    )
    assert task_texts(list(Logs(folder).backlog())) == [
        "worker-0 a",
        "worker-1 b",
        "worker-0 c",
        "worker-1 d",
        "worker-0 e",
    ]


def test_only_one_task(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={"worker-0": line(1, "a"), "worker-1": line(2, "b")})
    assert task_texts(list(Logs(folder, lambda task: task == "worker-1").backlog())) == ["worker-1 b"]


@pytest.mark.parametrize("first", [0, 1, 2, 500, 998, 999, 1000])
def test_since_finds_its_line_by_bisection(tmp_path: Path, first: int) -> None:
    text = "".join(line(i * 0.05, f"{i} {'x' * (i % 37)}") for i in range(1000))
    folder = recorded.write(tmp_path, logs={"worker-0": text})
    lines = list(Logs(folder, since=recorded.at(first * 0.05)).backlog())
    assert len(lines) == 1000 - first
    assert all(one.text.split()[0] == str(first + i) for i, one in enumerate(lines))


def test_since_needs_little_memory_whatever_a_file_contains(tmp_path: Path) -> None:
    """A sparse file, as after a crash of the machine, or a line of gigabytes."""
    path = tmp_path / "worker-0.log"
    path.write_text(line(1, "a"))
    with path.open("ab") as file:
        file.truncate(1 << 30)
    tail = Tail(path)
    tracemalloc.start()
    tail.seek(recorded.at(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tail.close()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    "raw",
    ["", "a | b ~ c", "  indented", "ünï ☃", "\t", "| |", "~", "\x1b[31mred\x1b[0m", "2026-11-15T04:30:00.000Z g1 | x"],
)
def test_text_is_not_changed(tmp_path: Path, raw: str) -> None:
    folder = recorded.write(tmp_path, logs={"worker-0": line(1, raw)})
    assert [one.text for one in Logs(folder).backlog()] == [raw]


def test_damaged_lines_get_the_time_of_the_previous_line(tmp_path: Path) -> None:
    folder = recorded.write(
        tmp_path, logs={"worker-0": line(3, "a") + "torn\n", "worker-1": line(2, "b") + line(4, "c")}
    )
    (folder / "logs" / "worker-1.log").open("ab").write(b"\xff\xfe\n")
    lines = list(Logs(folder).backlog())
    assert task_texts(lines) == ["worker-1 b", "worker-0 a", "worker-0 torn", "worker-1 c", "worker-1 \ufffd\ufffd"]


def test_a_number_that_no_generation_can_have_is_output(tmp_path: Path) -> None:
    odd = line(2, "b").replace("g1", f"g{'9' * 5000}")
    folder = recorded.write(tmp_path, logs={"worker-0": line(1, "a") + odd})
    assert [(one.generation, one.text) for one in Logs(folder).backlog()] == [(1, "a"), (1, odd.rstrip("\n"))]


def test_following_gives_each_line_once_and_only_complete_lines(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={"worker-0": line(1, "a")})
    logs = Logs(folder)
    assert task_texts(list(logs.backlog())) == ["worker-0 a"]
    assert logs.more() == []
    with open(folder / "logs" / "worker-0.log", "a") as file:
        file.write(line(2, "b") + line(3, "half")[:-3])
        file.flush()
        assert task_texts(logs.more()) == ["worker-0 b"]
        file.write(line(3, "half")[-3:])
        file.flush()
        assert task_texts(logs.more()) == ["worker-0 half"]
    (folder / "logs" / "worker-1.log").write_text(line(4, "a task that came later") + "never finished")
    assert task_texts(logs.more()) == ["worker-1 a task that came later"]
    assert task_texts(logs.rest()) == ["worker-1 never finished"]
    assert logs.rest() == []
    logs.close()


def test_recent_lines_are_held_back_once_so_that_order_is_kept(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={})
    later = "2999-01-01T00:00:00.000Z g1 | from the future\n"
    (folder / "logs" / "worker-0.log").write_text(later)
    logs = Logs(folder)
    assert logs.more() == []
    assert task_texts(logs.more()) == ["worker-0 from the future"]
    logs.close()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (line(1, "10%", mark="~") + line(2, "20%", mark="~") + line(3, "done"), ["done"]),
        (line(1, "10%", mark="~") + line(2, "20%", mark="~"), ["20%"]),
        (line(1, "45%", mark="~") + line(2, "again", generation=2), ["45%", "again"]),
        (line(1, "45%", mark="~") + line(2, "10%", generation=2, mark="~"), ["45%", "10%"]),
    ],
)
def test_the_last_state_of_a_progress_bar_is_kept(tmp_path: Path, log: str, expected: list[str]) -> None:
    folder = recorded.write(tmp_path, logs={"worker-0": log})
    assert [one.text for one in settle(Logs(folder).backlog())] == expected


def test_a_bar_of_one_task_is_not_ended_by_another(tmp_path: Path) -> None:
    folder = recorded.write(
        tmp_path, logs={"worker-0": line(1, "10%", mark="~") + line(3, "20%", mark="~"), "worker-1": line(2, "x")}
    )
    assert task_texts(list(settle(Logs(folder).backlog()))) == ["worker-1 x", "worker-0 20%"]


def test_prefixes_are_equally_wide_and_colored_by_task() -> None:
    plain = Prefixer(["worker-0", "evaluator-0"], colors=False)
    assert plain(Line("", "worker-0", 1, "x")) == "worker-0    | x"
    colored = Prefixer(["worker-0", "worker-1"], colors=True)
    first, second = colored(Line("", "worker-0", 1, "x")), colored(Line("", "worker-1", 1, "x"))
    assert first == "\x1b[36mworker-0 |\x1b[0m x" and second == "\x1b[32mworker-1 |\x1b[0m x"


def test_many_tasks_are_sorted_by_number(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={f"worker-{i}": line(1, "x") for i in (10, 2, 1)})
    assert task_texts(list(Logs(folder).backlog())) == ["worker-1 x", "worker-2 x", "worker-10 x"]
