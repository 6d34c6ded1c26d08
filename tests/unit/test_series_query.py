"""Series for charts: as many points as can be shown, with the extremes; files are parsed once."""

from __future__ import annotations

import json
import math
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.view.series import series_file_parsing, series_parts, series_query
from paceline.view.series.point_reduction import Row, flat_of, joined, reduced, rows_of
from paceline.view.series.series_parts import KEPT, Part, PartCache


def write(folder: Path, tier: int, first: int, lines: list[dict[str, Any]]) -> Path:
    path = folder / "series" / str(tier) / f"{first}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"version": 1}, *lines]))
    return path


def report(at: float, step: Any, loss: Any, task: str = "worker-0", generation: int = 1) -> dict[str, Any]:
    return {
        "at": at,
        "task": task,
        "generation": generation,
        "step": step,
        "steps_per_s": 2.0,
        "metrics": {"loss": loss},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 10, 1000, [report(1000, [1, 5, 9], [0.5, 0.7, 0.9]), report(1010, 10, 0.4)])
    new = [report(1020 + number, 11 + number, 1 / (1 + number), f"worker-{number % 2}") for number in range(100)]
    host = {"at": 1025, "task": "host-0", "generation": 1, "resources": {"memory": 100, "sent_bytes_per_s": 5}}
    used = {"at": 1025, "task": "worker-0", "generation": 1, "resources": {"memory": 10, "cpu": 1.5}}
    write(tmp_path, 1, 1020, [*new, host, used])
    return tmp_path


def test_lines_of_each_task_with_steps_and_extremes(folder: Path) -> None:
    result = series_query.read(PartCache(), folder, "loss")
    assert [line["task"] for line in result["lines"]] == ["worker-0", "worker-1"] and result["total_tasks"] == 2
    assert result["lines"][0]["points"][:3] == [
        [1000, 9, 1, 0.7, 0.5, 0.9], [1010, 10, 1, 0.4, 0.4, 0.4], [1020, 11, 1, 1.0, 1.0, 1.0],
    ]  # fmt: skip


def test_some_tasks_some_time_or_all_in_one(folder: Path) -> None:
    cache = PartCache()
    [line] = series_query.read(cache, folder, "loss", ["worker-1"], 1030, 1040)["lines"]
    assert line["task"] == "worker-1" and [point[0] for point in line["points"]] == [1031, 1033, 1035, 1037, 1039]
    [line] = series_query.read(cache, folder, "loss", ["*"], end=1130, points=10)["lines"]
    assert line["task"] == "*" and 8 <= len(line["points"]) <= 11 and line["points"][0][3:] == [0.55, 0.4, 0.9]
    [line] = series_query.read(cache, folder, "memory")["lines"]
    assert line == {"task": "worker-0", "points": [[1025, None, 1, 10, 10, 10]]}
    [line] = series_query.read(cache, folder, "host_memory")["lines"]
    assert line == {"task": "host-0", "points": [[1025, None, 1, 100, 100, 100]]}
    assert series_query.read(cache, folder, "nothing")["lines"] == []


def test_names_with_their_kind(folder: Path) -> None:
    names = series_query.names(PartCache(), folder, {"accuracy": ["evaluator-0"], "loss": ["evaluator-0"]})
    assert [(each.name, each.kind) for each in names] == [
        ("loss", "metric"), ("loss", "evaluation"), ("accuracy", "evaluation"), ("step", "progress"),
        ("steps_per_s", "progress"), ("cpu", "resource"), ("host_memory", "resource"),
        ("host_sent_bytes_per_s", "resource"), ("memory", "resource"),
    ]  # fmt: skip
    assert [each.tasks for each in names[:2]] == [("worker-0", "worker-1"), ("evaluator-0",)]


def test_one_line_over_tasks_that_report_at_different_times(tmp_path: Path) -> None:
    """Worker-0 always reports 1, worker-1 reports 3, a second later: their mean is 2, not a zigzag."""
    pairs = [(number, task) for number in range(20) for task in (0, 1)]
    lines = [report(1000 + 10 * number + task, number, 1 + 2 * task, f"worker-{task}") for number, task in pairs]
    again = [report(1300 + task, 5, 7, f"worker-{task}", 2) for task in (0, 1)]
    write(tmp_path, 1, 1000, [*lines, report(1150, 7, 100, "evaluator-0"), *again])
    [line] = series_query.read(PartCache(), tmp_path, "loss", ["*"], end=1400, points=5000)["lines"]
    assert line["points"][0][2:] == [1, 1, 1, 1] and line["points"][-1] == [1301, 5, 2, 7, 7, 7]
    assert {tuple(point[2:]) for point in line["points"][1:-2]} == {(1, 2, 1, 3)}


def test_what_only_evaluators_report_has_a_mean_of_these(folder: Path) -> None:
    evaluated = {f"evaluator-{number}": [(1050.0, 40.0, 1.0, *(0.5 + number,) * 3)] for number in (0, 1)}
    result = series_query.read(PartCache(), folder, "accuracy", ["*"], extra=evaluated)
    assert result["lines"] == [{"task": "*", "points": [[1050, 40, 1, 1.0, 0.5, 1.5]]}]
    assert result["total_tasks"] == 2
    both = series_query.read(PartCache(), folder, "loss", ["*"], extra=evaluated)
    assert both["total_tasks"] == 2 and both == series_query.read(PartCache(), folder, "loss", ["*"])


def test_a_task_that_reports_nothing_more_leaves_the_mean(tmp_path: Path) -> None:
    both = [report(1000 + task, 1, 1 + 2 * task, f"worker-{task}") for task in (0, 1)]
    write(tmp_path, 1, 1000, [*both, *(report(1000 + 10 * number, number, 1) for number in range(1, 20))])
    [line] = series_query.read(PartCache(), tmp_path, "loss", ["*"], end=1200, points=5000)["lines"]
    assert line["points"][2][3] == 2 and line["points"][-1][3:] == [1, 1, 1]


def test_the_first_tasks_by_name_are_shown_whatever_their_order(tmp_path: Path) -> None:
    tasks = [f"worker-{number}" for number in range(200)]
    write(tmp_path, 10, 1000, [report(1000, 1, 0.5, task) for task in reversed(tasks)])
    write(tmp_path, 1, 2000, [report(2000, 2, 0.25, task) for task in tasks])
    result = series_query.read(PartCache(), tmp_path, "loss")
    assert [line["task"] for line in result["lines"]] == tasks[: series_query.MOST_LINES]
    assert all(len(line["points"]) == 2 for line in result["lines"]) and result["total_tasks"] == 200


def test_reduced_points_keep_extremes_and_generations() -> None:
    rows: list[Row] = [(float(at), float(at), 1.0 if at < 500 else 2.0, *(float(at % 7),) * 3) for at in range(1000)]
    points = reduced(rows, 50)
    assert 50 <= len(points) <= 52
    assert min(point[4] for point in points) == 0 and max(point[5] for point in points) == 6
    assert [point[2] for point in points] == sorted(point[2] for point in points)
    assert reduced(rows[:30], 50) == rows[:30]
    assert math.isclose(points[0][3], sum(at % 7 for at in range(20)) / 20, rel_tol=0.05)


def test_a_file_is_parsed_once_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    real = series_file_parsing.open_regular
    monkeypatch.setattr(
        series_file_parsing, "open_regular", lambda path, **how: parsed.append(path) or real(path, **how)
    )
    cache = PartCache()
    for _ in range(3):
        series_query.read(cache, folder, "loss")
        series_query.read(cache, folder, "step")
    assert len(parsed) == 2
    with (folder / "series" / "1" / "1020.jsonl").open("a") as file:
        file.write(json.dumps(report(2000, 200, 0.1)) + "\n")
    assert series_query.read(cache, folder, "loss")["lines"][0]["points"][-1][0] == 2000
    assert len(parsed) == 3


def test_a_file_that_grows_is_read_on_from_its_last_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    real = series_parts.parsed
    monkeypatch.setattr(series_parts, "parsed", lambda lines: parsed.append(len(each := list(lines))) or real(each))
    path, cache = folder / "series" / "1" / "1020.jsonl", PartCache()

    def last() -> list[float]:
        lines = series_query.read(cache, folder, "loss", ["*", "worker-1"])["lines"]
        return [line["points"][-1][3] for line in lines]

    before = last()
    text = json.dumps(report(1130, 200, 4.0, "worker-1")) + "\n"
    for piece, expected in ((text[:20], before[1]), (text[20:], 4.0)):
        with path.open("a") as file:
            file.write(piece)
        assert last()[1] == expected
    assert sorted(parsed[:2]) == [2, 102] and parsed[2:] == [0, 1]
    path.unlink()
    write(folder, 1, 1020, [report(1020, 1, 9.0, "worker-1")])  # another file
    assert last()[1] == 9.0


def test_values_that_are_missing_or_no_numbers_leave_the_others_in_order() -> None:
    losses: list[Any] = [0.5, None, math.nan, [1, 2, 3], "x", True, [1, 2], [1, math.inf, 3], 10**400, 4]
    lines = [report(1000 + number, number, loss, f"worker-{number % 2}") for number, loss in enumerate(losses)]
    del lines[1]["metrics"]["loss"]
    lines += [{"at": 1020, "task": "worker-0", "generation": None, "metrics": {"loss": 5}}]
    values, resources = series_file_parsing.parsed(lines)
    nan = pytest.approx(math.nan, nan_ok=True)
    assert {task: rows_of(flat) for task, flat in values["loss"].items()} == {
        "worker-0": [(1000, 0, 1, 0.5, 0.5, 0.5), (1020, nan, 0, 5, 5, 5)],
        "worker-1": [(1003, 3, 1, 2, 1, 3), (1009, 9, 1, 4, 4, 4)],
    }
    assert rows_of(values["step"]["worker-1"])[0] == (1001, 1, 1, 1, 1, 1) and not resources


def test_a_metric_with_the_name_of_a_resource() -> None:
    both = {**report(1000, 1, 0.5), "resources": {"memory": 7}}
    both["metrics"]["memory"] = 3
    later = {**report(1010, 2, 0.5), "metrics": {"memory": 4}}
    values, resources = series_file_parsing.parsed([both, later])
    assert rows_of(values["memory"]["worker-0"]) == [(1000, 1, 1, 7, 7, 7), (1010, 2, 1, 4, 4, 4)]
    assert resources == {"memory"} and rows_of(values["loss"]["worker-0"]) == [(1000, 1, 1, 0.5, 0.5, 0.5)]


def test_thousands_of_names_in_one_line_each_take_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is looked for only where it occurs: 20,000 names in 20,000 lines would take a minute."""
    lines = [{**report(1000, 1, 0.5), "metrics": {f"loss_{number}": number}} for number in range(2000)]
    lines += [report(1001, 2, [1, 2, 3]), {**report(1002, 3, "x"), "resources": {"cpu": 0.5}}]
    looked_at: list[str] = []
    add = series_file_parsing._add

    def recorded(values: series_file_parsing.Values, name: str, *arguments: Any) -> None:
        looked_at.append(name)
        add(values, name, *arguments)

    monkeypatch.setattr(series_file_parsing, "_add", recorded)
    values, resources = series_file_parsing.parsed(lines)
    assert sorted(looked_at) == ["cpu", "step", "steps_per_s"] and resources == {"cpu"}
    assert rows_of(values["loss_1999"]["worker-0"]) == [(1000, 1, 1, 1999, 1999, 1999)]
    assert rows_of(values["loss"]["worker-0"]) == [(1001, 2, 1, 2, 1, 3)]
    write(tmp_path, 1, 1000, lines)
    monkeypatch.setattr(series_query, "MOST_NAMES", 1000)
    names = series_query.names(PartCache(), tmp_path, {})
    assert [each.name for each in names[:2]] == ["loss", "loss_0"] and len(names) == 1000


VALUES = st.one_of(st.none(), st.integers(-5, 5), st.floats(), st.lists(st.integers(-5, 5), min_size=2, max_size=3))
FIELDS = st.dictionaries(st.sampled_from(["loss", "accuracy", "memory"]), VALUES)
LINES = st.builds(
    lambda at, task, fields: {"at": at, "task": task, **fields},
    st.integers(0, 5),
    st.sampled_from(["worker-0", "worker-1"]),
    st.fixed_dictionaries({}, optional={"step": st.integers(0, 9), "metrics": FIELDS, "resources": FIELDS}),
)


@given(st.lists(LINES, max_size=8))
def test_values_are_the_same_however_they_are_looked_for(lines: list[dict[str, Any]]) -> None:
    results = []
    for dense in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(series_file_parsing, "_DENSE", dense)
            values, resources = series_file_parsing.parsed(lines)
        by_name = {(name, task): flat.tobytes() for name, by_task in values.items() for task, flat in by_task.items()}
        results.append((by_name, resources))
    assert results[0] == results[1]


def test_time_grows_with_the_number_of_values_only() -> None:
    """CPU time: it would be 20 s if it grew with the square of the number of names, tasks or generations."""
    row = (1000.0, 1.0, 1.0, 0.5, 0.5, 0.5)
    values = {f"loss_{number}": {f"worker-{number}": array("d", row)} for number in range(20_000)}
    begin = time.process_time()
    assert series_parts._reduced(values) == values
    rows = [(1000.0, float(number), float(number), 0.5, 0.5, 0.5) for number in range(40_000)]  # each a generation
    assert len(joined({"worker-0": flat_of(rows)}, 1.0)) == len(rows)
    assert time.process_time() - begin < 4.0


def test_names_count_towards_the_limit_of_the_cache(tmp_path: Path) -> None:
    """Each takes more memory than its value."""
    for first in range(4):
        metrics = {f"loss_{first}_{number}": 1.0 for number in range(1000)}
        write(tmp_path, 300, first * 1000, [{**report(first * 1000, 1, 0.5), "metrics": metrics}])
    cache = PartCache(limit=300_000)
    for part in series_parts.parts_between(tmp_path):
        cache.values(part)
    assert len(cache._values) == 1 and cache._indexes._size > 4 * 1000 * 100


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    for first in range(10):
        write(tmp_path, 300, first * 1000, [report(first * 1000 + number, number, 0.5) for number in range(100)])
    cache = PartCache(limit=40_000)  # a file needs 100 reports * 3 series * 6 columns * 8 bytes
    assert len(series_query.read(cache, tmp_path, "loss", points=5000)["lines"][0]["points"]) == 1000
    assert 0 < len(cache._values) <= 2


def test_a_long_run_is_shown_from_overviews_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(40):
        losses = [100.0 if first == 7 and number == 50 else 0.5 for number in range(100)]
        lines = [report(first * 1000 + 10 * number, number, loss) for number, loss in enumerate(losses)]
        write(tmp_path, 300, first * 1000, lines)
    read: list[str] = []
    real = series_file_parsing.open_regular
    monkeypatch.setattr(series_file_parsing, "open_regular", lambda path, **how: read.append(path) or real(path, **how))
    cache = PartCache(limit=0)
    series_query.prepare(cache, tmp_path)
    assert len(read) == 40
    for name in ("loss", "step", "steps_per_s"):
        [line] = series_query.read(cache, tmp_path, name, points=1000)["lines"]
        assert 900 <= len(line["points"]) <= 1002 and line["points"][0][0] == 0
    assert len(read) == 40
    [line] = series_query.read(cache, tmp_path, "loss", points=1000)["lines"]
    assert max(point[5] for point in line["points"]) == 100, "extremes are kept"
    [line] = series_query.read(cache, tmp_path, "loss", begin=7000, end=7999, points=1000)["lines"]
    assert len(line["points"]) == 100 and KEPT < 100, "a part of the time is exact"


def test_what_was_read_in_time_covers_the_whole_run(tmp_path: Path) -> None:
    for first in range(64):
        write(tmp_path, 300, first * 1000, [report(first * 1000 + number, number, 0.5) for number in range(100)])
    cache = PartCache()
    for first in range(0, 64, 16):
        cache.overview(Part(str(tmp_path / "series" / "300" / f"{first * 1000}.jsonl"), first * 1000, 300))
    result = series_query.read(cache, tmp_path, "loss", points=1000, seconds=-1.0)
    starts = {point[0] // 1000 for point in result["lines"][0]["points"]}
    assert result["is_partial"] and starts == {0, 16, 32, 48}
    whole = series_query.read(cache, tmp_path, "loss", points=1000)
    assert not whole["is_partial"] and len({point[0] // 1000 for point in whole["lines"][0]["points"]}) == 64
    assert series_query.read(cache, tmp_path, "step", points=1000, seconds=-1.0)["is_partial"] is False


def test_a_table_is_no_formula(tmp_path: Path) -> None:
    lines = [{**report(1, 2, 0.5), "metrics": {"=cmd()": 0.5, 'a,"b': 1}}]
    write(tmp_path, 1, 1, lines)
    extra = [("accuracy", "evaluator-0", (3.0, 4.0, 1.0, 0.9, 0.9, 0.9))]
    text = "".join(series_query.table(PartCache(), tmp_path, ["=cmd()", 'a,"b'], [], extra))
    assert text.splitlines() == [
        "name,task,generation,at,step,value,least,largest",
        "accuracy,evaluator-0,1,3.0,4,0.9,0.9,0.9",
        "'=cmd(),worker-0,1,1.0,2,0.5,0.5,0.5",
        '"a,""b",worker-0,1,1.0,2,1.0,1.0,1.0',
    ]


def test_damaged_files_are_left_out(folder: Path) -> None:
    (folder / "series" / "1" / "5000.jsonl").mkdir()
    head = {"at": 1, "task": "t"}
    write(folder, 1, 6000, [{"at": "x"}, {**head, "metrics": [1]}, {**head, "metrics": {"loss": [1, 2]}}])
    assert len(series_query.read(PartCache(), folder, "loss")["lines"]) == 2
