"""What the terminal view shows, as data: tables, curves, generations, snapshots, numbers of a run."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.run import Run
from paceline.client.snapshots.run_snapshots import Snapshot
from paceline.errors import PacelineError
from paceline.view.files import run_folders
from paceline.view.output.merged_logs import Logs
from paceline.view.series import points as series
from paceline.view.state import status_reader
from paceline.view.state.events import Event
from paceline.watch import run_screen_model, run_screen_reader, tables
from paceline.watch.curves import MOST_POINTS, Curve, Period, buckets, chart, timeline
from paceline.watch.history import History, SnapshotRecord
from paceline.watch.run_data import run_data, with_stored
from paceline.watch.run_screen_model import RunData, TaskData
from paceline.watch.run_screen_reader import OutputReader, RunReader
from paceline.watch.runs_model import runs_table, summary_of
from paceline.watch.tables import LONGEST, Column, Heights, Row, Span, Table, arrange, heights, width_of
from paceline.watch.widgets import strip
from support import recorded
from support.person import eventually
from support.recorded import LIFE, REPORT, supervised


def text(line: Any) -> str:
    return "".join(span.text for span in line)


def rendered(table: Table, width: int) -> list[str]:
    layout = arrange(table, width)
    return [tables.heading(table, layout), *(text(tables.line_of(table, row, layout)).rstrip() for row in table.rows)]


def events(records: list[dict[str, Any]]) -> list[Event]:
    return [Event(each["at"], each["event"], each["generation"], each) for each in records]


def data_of(folder: Path) -> RunData:
    history = History()
    reader = status_reader.StatusReader(run_folders.Run(folder.name, folder), history.add)
    try:
        return run_data(reader.read(), history)
    finally:
        reader.close()


# ---- tables


TABLE = Table(
    (Column("NAME"), Column("TEXT", shrinks_to=8), Column("STEP", is_number=True, rank=1)),
    (Row("a", (Span("worker-0"), Span("a long text that shrinks"), Span("12"))),),
)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["NAME      TEXT                      STEP", "worker-0  a long text that shrinks    12"]),
        (28, ["NAME      TEXT          STEP", "worker-0  a long tex..    12"]),
        (20, ["NAME      TEXT", "worker-0  a long t.."]),
        (6, ["NAME", "work.."]),
    ],
)
def test_a_table_shrinks_and_leaves_out_columns(width: int, lines: list[str]) -> None:
    assert rendered(TABLE, width) == lines


@given(st.text(), st.integers(0, 30))
def test_text_from_programs_is_cut_to_its_width_and_printable(raw: str, width: int) -> None:
    shown = tables.padded(tables.plain(raw), width)
    assert width_of(shown) == width
    assert not [letter for letter in shown if ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0]


def test_the_panels_share_80x24() -> None:
    assert heights(18, tasks=3, generations=2, snapshots=3) == Heights(4, 3, 3, 8)
    assert heights(18, tasks=1000, generations=50, snapshots=50) == Heights(6, 3, 3, 6)


@given(st.integers(1, 100), st.integers(0, 2000), st.integers(1, 500), st.integers(1, 200))
def test_the_panels_use_exactly_the_screen(available: int, tasks: int, generations: int, snapshots: int) -> None:
    shared = heights(available, tasks, generations, snapshots)
    assert sum(vars(shared).values()) == available
    assert all(lines >= 0 for lines in vars(shared).values()) and shared.tasks > 0


# ---- curves


def test_a_curve_has_a_limited_number_of_points_and_keeps_its_ends() -> None:
    curve = Curve()
    for second in range(5 * MOST_POINTS):
        curve.add(second, float(second))
    assert len(curve.points) <= MOST_POINTS
    assert curve.points[-1] == (5 * MOST_POINTS - 1, 5 * MOST_POINTS - 1)
    assert curve.points[0][0] < 64 and curve.points == sorted(curve.points)
    assert max(b - a for (a, _), (b, _) in pairwise(curve.points)) < 64
    curve.add_earlier([(-1.0, 7.0), (5 * MOST_POINTS - 1.0, 5 * MOST_POINTS - 1.0)])
    assert curve.points[0] == (-1.0, 7.0)


def test_a_column_without_a_report_is_a_gap_unless_reports_are_rare() -> None:
    often = [(float(second), 1.0) for second in range(100) if not 40 <= second < 60]
    values = buckets(often, 0, 100, 10)
    assert [value is None for value in values] == [False] * 4 + [False, True] + [False] * 4
    rare = [(0.0, 1.0), (50.0, 2.0), (99.0, 3.0)]
    assert None not in buckets(rare, 0, 100, 10)[:4]


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), min_size=1), st.integers(1, 3))
def test_a_chart_has_one_character_for_each_value(values: list[float | None], rows: int) -> None:
    lines = chart(values, rows)
    assert len(lines) == rows and {len(line) for line in lines} == {len(values)}
    for value, bar in zip(values, lines[-1], strict=True):
        assert (bar == " ") == (value is None)
    assert "".join(chart(values, rows, ascii_only=True)).isascii()


def test_the_timeline_shows_failures_and_gaps() -> None:
    periods = [Period(1, 0, 40, True), Period(2, 45, 60, True), Period(3, 80, None, False)]
    assert text(timeline(periods, 0, 100, 20)) == "1━━━━━━━x2━━x   3━━━"
    assert text(timeline(periods, 50, 100, 10)) == "2━x   3━━━"
    assert text(timeline([Period(n, n, n + 1, True) for n in range(100)], 0, 100, 10, ascii_only=True)) == "x" * 10


def test_the_timeline_shows_what_users_have_done() -> None:
    periods = [Period(1, 0, 40, False), Period(2, 60, None, False)]
    marks = [(0.0, "s"), (20.0, "s"), (40.0, "p"), (55.0, "r"), (60.0, "s"), (100.0, "p")]
    assert text(timeline(periods, 0, 100, 20, marks=marks)) == "1━━━s━━━p  r2━━━━━━━"
    assert text(timeline(periods, 30, 80, 10, marks=marks)) == "1━p  r2━━━"


# ---- history


def test_generations_and_snapshots_follow_from_events_in_any_order() -> None:
    expected = History()
    for event in events(LIFE):
        expected.add(event)
    for seed in range(5):
        history, shuffled = History(), events(LIFE) * 2  # a file that was replaced repeats events
        random.Random(seed).shuffle(shuffled)
        for event in shuffled:
            history.add(event)
        assert history.generations() == expected.generations()
        assert history.snapshots() == expected.snapshots() and history.best == expected.best == "step-100-g1"
        assert history.marks() == expected.marks()
    first, second = expected.generations()[-2:]
    assert (first.cause, first.task, first.step, first.origin) == ("signal", "worker-1", 120, "the start")
    assert (second.origin, second.step, second.failed_at) == ("step 100", 161, None)
    assert [kind for _, kind in expected.marks()] == ["scaled", "paused", "resumed"]


def test_a_history_does_not_grow_without_limit() -> None:
    history = History()
    for number in range(1, 5000):
        history.add(Event(f"{2000 + number}-01-01T00:00:00.000Z", "scaled", number, {}))
        formed = {"at": recorded.at(1), "event": "generation-formed", "generation": number, "tasks": []}
        committed = {"at": recorded.at(2), "event": "committed", "generation": number, "snapshot": f"step-{number}-g1"}
        for event in events([formed, {**committed, "step": number}]):
            history.add(event)
    assert len(history.generations()) == 1000 and history.generations()[-1].number == 4999
    assert len(history.snapshots()) == 200 and history.snapshots()[0].name == "step-4999-g1"
    assert len(history._generations) <= 2001 and len(history._snapshots) <= 801
    assert len(history.marks()) == 1000 and len(history._marks) <= 2000


def test_a_pause_ends_a_generation(tmp_path: Path) -> None:
    paused = recorded.event(7, "paused", step=120, snapshot="step-100-g1")
    life = [recorded.STARTED, recorded.FORMED, recorded.STEP, paused]
    data = data_of(recorded.write(tmp_path, "paused-1", events=life))
    assert [row.cells[-1].text for row in run_screen_model.generation_table(data, time.time()).rows] == ["paused"]
    (period,) = run_screen_model.periods(data)
    assert period.end is not None and (period.end, "paused") in data.marks
    resumed = recorded.event(30, "resumed", paused_s=23.0)
    formed = recorded.event(31, "generation-formed", 2, tasks=["worker-0"], restore="step-100-g1")
    data = data_of(recorded.write(tmp_path, "resumed-1", events=[*life, resumed, formed]))
    first, second = run_screen_model.periods(data)
    assert first.end is not None and second.begin - first.end == 24
    assert [kind for _, kind in data.marks] == ["paused", "resumed"]


# ---- the numbers of a run


def test_the_data_of_a_run(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=[each for each in LIFE if each["event"] != "run-ended"])
    with supervised(folder):
        data = data_of(folder)
    assert (data.run, data.status, data.step, data.restarts, data.is_alive) == ("digits-3f9a", "running", 161, 1, True)
    assert data.metrics == (("loss", 0.2), ("accuracy", 0.91))
    evaluator, _, worker = data.tasks
    assert (evaluator.name, evaluator.step) == ("evaluator-0", 100)
    assert (worker.name, worker.host, worker.cpu, worker.memory) == ("worker-1", "worker-host-1", 1.9, 6 * 2**30)
    assert (worker.memory_limit, worker.gpu, worker.gpu_memory) == (2**33, 0.85, 2**30)


def test_a_run_that_has_ended_uses_nothing(tmp_path: Path) -> None:
    data = data_of(recorded.write(tmp_path, report=REPORT))
    assert (data.status, data.is_alive) == ("succeeded", False)
    assert [(task.state, task.cpu, task.memory) for task in data.tasks][2] == ("ended", None, None)
    assert text([run_screen_model.reason(data)]) == ""


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"step": 400, "total_steps": 1000, "steps_per_s": 2.0}, 300.0),
        ({"step": 1000, "total_steps": 1000, "steps_per_s": 2.0}, 0.0),
        ({"step": 1001, "total_steps": 1000, "steps_per_s": 2.0}, None),
        ({"step": 400, "total_steps": None, "steps_per_s": 2.0}, None),
        ({"step": 400, "total_steps": 1000, "steps_per_s": None}, None),
        ({"step": 400, "total_steps": 1000, "steps_per_s": 1e-9}, None),
        ({"step": 400, "total_steps": 1000, "steps_per_s": 2.0, "is_alive": False}, None),
    ],
)
def test_time_left(fields: dict[str, Any], left: float | None) -> None:
    assert run_screen_model.time_left(replace(RunData("run", "running", is_alive=True), **fields)) == left


def test_the_total_is_a_metric_that_the_program_reports(tmp_path: Path) -> None:
    step = {**recorded.STEP, "metrics": {"loss": 0.5, "total_steps": 240}, "steps_per_s": 2.0}
    folder = recorded.write(tmp_path, events=[recorded.STARTED, recorded.FORMED, step])
    with supervised(folder):
        data = data_of(folder)
    shown = [span.text for span in run_screen_model.progress(data)]
    assert shown == ["step 120 of 240", "2 steps/s", "1 min left", "loss 0.5"]


def test_gpus_of_a_host_are_shared_by_its_tasks(tmp_path: Path) -> None:
    gpus = [{"utilization": number / 10, "memory": 2**30, "memory_limit": 2**34} for number in range(4)]
    used = {"worker-0": recorded.RESOURCES["tasks"]["worker-1"], "worker-1": recorded.RESOURCES["tasks"]["worker-1"]}
    started = [
        recorded.event(3, "task-started", task=task, pid=1, warm=False, host="worker-host-1") for task in sorted(used)
    ]
    life = [recorded.STARTED, recorded.FORMED, *started, {**recorded.RESOURCES, "gpus": gpus, "tasks": used}]
    folder = recorded.write(tmp_path, events=life)
    with supervised(folder):
        data = data_of(folder)
    assert [task.gpu for task in data.tasks[1:]] == pytest.approx([0.05, 0.25])


def test_tasks_in_trouble_come_first_if_ordered_by_state() -> None:
    states = ("running", "failed", "waiting", "running")
    tasks = tuple(TaskData(f"worker-{number}", state, step=10 - number) for number, state in enumerate(states))
    data = RunData("run", "running", tasks=tasks)
    names = {
        order: [row.key for row in run_screen_model.task_table(data, order).rows] for order in run_screen_model.ORDERS
    }
    assert names["state"] == ["worker-1", "worker-2", "worker-0", "worker-3"]
    assert names["step"] == ["worker-3", "worker-2", "worker-1", "worker-0"]
    assert names["name"] == names["cpu"] == ["worker-0", "worker-1", "worker-2", "worker-3"]


def test_snapshots_are_those_of_the_store_and_newer_ones() -> None:
    known = [SnapshotRecord(f"step-{step}-g1", step, committed=float(step)) for step in (40, 30, 20)]
    assert with_stored(known, None) == known
    stored = [Snapshot("step-30-g1", 30, 1, True, "/s/step-30-g1", 9, {"loss": 0.5}, {})]
    shown = with_stored(known, stored, gone={"step-20-g1"})
    assert [(each.name, each.size, each.evaluation) for each in shown] == [
        ("step-40-g1", None, ()),
        ("step-30-g1", 9, (("loss", 0.5),)),
    ]
    assert with_stored(known, None, gone={"step-20-g1"}) == known[:2]


def test_the_list_of_runs() -> None:
    report = {"run": "digits-3f9a", **REPORT, "status": "failed", "reason": "out of\nmemory"}
    table = runs_table([summary_of(report), summary_of({"run": "new-1", "status": "starting"})], time.time())
    cells = [[cell.text for cell in row.cells] for row in table.rows]
    assert cells[0][:5] == ["digits-3f9a", "failed", "161", "0.2", "1"] and cells[0][8] == "out of memory"
    assert cells[1] == ["new-1", "starting", "-", "-", "0", "-", "-", "-", ""]


# ---- reading


@pytest.mark.parametrize("limit", [0, 4 << 20, 1 << 30])
def test_only_a_part_of_a_long_series_is_read(tmp_path: Path, limit: int) -> None:
    folder = tmp_path / "series" / "300"
    folder.mkdir(parents=True)
    for number in range(40):
        lines = [f'{{"at":{number},"task":"worker-{task}","metrics":{{"loss":{number}.5}}}}' for task in (0, 1)]
        (folder / f"{number}.jsonl").write_text("\n".join(['{"version":1}', *lines]))
    points = [each for part in series.read_some(tmp_path, ["loss"], "worker-1", limit) for each in part["loss"]]
    assert {point.task for point in points} == {"worker-1"}
    times = [point.at for point in points]
    assert times[0] == 39 and times[-1] == 0  # the newest and the oldest
    assert len(times) == 40 if limit == 1 << 30 else len(times) <= 4


class Unreachable(Run):
    """A run whose store does not respond."""

    def snapshots(self, include_superseded: bool = False) -> list[Snapshot]:
        raise PacelineError("the store does not respond")


def test_a_store_that_is_away_leaves_what_events_tell(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path)
    reader = RunReader(Unreachable(folder.name, folder=folder), lambda: None)
    reader.start()
    try:
        eventually(lambda: reader.data is not None and reader.data.notes, "a note")
        assert reader.data is not None
        assert reader.data.notes == ("snapshots are shown from events only: the store does not respond",)
        assert [snapshot.name for snapshot in reader.data.snapshots] == ["step-100-g1"]
    finally:
        reader.close()


def test_a_cluster_that_is_unreachable_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[bool] = []
    is_noted = threading.Event()

    @contextmanager
    def followed(folder: Path, follow: bool, hosts: Any = (), notify: Any = None) -> Iterator[Any]:
        attempts.append(follow)
        if len(attempts) == 1:
            raise PacelineError("the cluster does not respond")
        assert is_noted.wait(60)
        yield lambda: False

    monkeypatch.setattr(run_screen_reader, "followed", followed)
    monkeypatch.setattr(run_screen_reader, "RETRY_S", 0.01)
    folder = recorded.write(tmp_path, events=[recorded.STARTED, recorded.FORMED, recorded.STEP])
    info = {
        **json.loads((folder / "run.json").read_text()),
        "on": "kubernetes",
        "context": "lab",
        "namespace": "team-a",
    }
    (folder / "run.json").write_text(json.dumps(info))
    reader = RunReader(Unreachable(folder.name, folder=folder), lambda: None)
    reader.start()

    def notes() -> tuple[str, ...]:
        return reader.data.notes if reader.data is not None else ()

    try:
        eventually(lambda: "the cluster does not respond" in notes(), "a note")
        assert reader.data is not None and (reader.data.step, reader.data.where) == (120, "on lab team-a")
        is_noted.set()
        eventually(lambda: notes() and "the cluster does not respond" not in notes(), "no note")
        assert attempts == [True, True]
    finally:
        is_noted.set()
        reader.close()


def test_a_reader_follows_a_run_and_reads_its_past(tmp_path: Path) -> None:
    alive = [each for each in LIFE if each["event"] != "run-ended"]
    folder = recorded.write(tmp_path, events=alive[:-2], logs={"worker-0": f"{recorded.at(3)} g1 | hello\n"})
    older = recorded.event(1, "restart", 0, cause="preempted", task="worker-0", detail="")
    (folder / "events.old.jsonl").write_text(f"{json.dumps(older)}\n")
    with supervised(folder):
        reader = RunReader(Run(folder.name, folder=folder), lambda: None)
        reader.start()
        try:
            eventually(lambda: reader.data is not None and reader.data.curves and reader.data.curves[0].points, "curve")
            eventually(lambda: reader.output.lines, "output")
            assert [line.text for line in reader.output.lines] == ["hello"]
            data = reader.data
            assert data is not None
            assert [generation.cause for generation in data.generations] == ["preempted", "signal", ""]
            assert [value for _, value in data.curves[0].points] == [0.8, 0.3123, 0.3, 0.2]
            step = recorded.event(13, "step", 2, task="worker-0", step=170, metrics={"loss": 0.1}, steps_per_s=3.0)
            with (folder / "events.jsonl").open("a") as file:
                file.write(f"{json.dumps(step)}\n")
            eventually(lambda: reader.data is not None and reader.data.step == 170, "the new step")
            assert reader.data is not None and reader.data.curves[0].points[-1][1] == 0.1
        finally:
            reader.close()


@pytest.mark.parametrize("arguments", [("watch",), ("watch", "digits")])
def test_without_a_terminal_the_error_names_another_command(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    recorded.write(tmp_path)
    result = recorded.call(tmp_path, *arguments)
    instead = "use `paceline status digits`" if arguments[1:] else "use `paceline ls` or `paceline status`"
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: standard input is not a terminal; {instead}\n"


def test_whatever_a_line_contains_is_drawn_as_plain_text() -> None:
    drawn = strip((Span("failed\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e\n"),), 80)
    assert drawn.text.rstrip() == r"failed\x1b]52;c;ZXZpbA==\x07\u009b2J\u202e\n" and drawn.cell_length == 80


@pytest.mark.parametrize("letter", ["x", "\u65e5", "\x1b"])
def test_texts_of_any_length_take_little_memory_and_time(letter: str, tmp_path: Path) -> None:
    """A run of another user may have very long lines, and a long reason; the screen draws them again and
    again."""
    at, long = recorded.at(1), letter * 300_000
    folder = recorded.write(tmp_path, logs={"worker-0": f"{at} g1 | {long}\n{at} g1 ~ {long}\n"})
    reader = OutputReader(Logs(folder), 5)
    try:
        lines = reader.output().lines
    finally:
        reader.close()
    assert [len(line.text) for line in lines] == [LONGEST, LONGEST]
    data = RunData("digits", "failed", long, notes=(long,))
    assert len(run_screen_model.reason(data).text) <= 2 * 6 * LONGEST + 2
