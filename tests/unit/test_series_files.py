"""Steps and numbers over time: exact for an hour, summed up for a day and for ever, in a bounded amount of files."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from paceline.agent import series_files
from paceline.agent.run_files import stamp
from paceline.agent.series_files import TIERS, Series
from paceline.view.series import points as reader

BEGIN = 1_700_000_000


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_files, "PART", 20_000)


def report(writer: Series, at: float, step: int, task: str = "worker-0", **metrics: float) -> None:
    fields = {"task": task, "generation": 1, "step": step, "steps_per_s": 2.0, "metrics": metrics}
    writer.add({"at": stamp(at), "event": "step", **fields})


def sizes(folder: Path) -> dict[int, int]:
    return {
        tier: sum(Path(path).stat().st_size for path in series_files.parts(f"{folder}/series", tier)) for tier in TIERS
    }


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report(Series(str(tmp_path)), BEGIN + 0.5, 7, loss=0.25)
    report(Series(str(tmp_path)), BEGIN + 1.5, 8, loss=0.125)
    assert [(point.at, point.mean) for point in reader.read(tmp_path, "loss")] == [
        (BEGIN + 0.5, 0.25),
        (BEGIN + 1.5, 0.125),
    ]
    assert [point.mean for point in reader.read(tmp_path, "step")] == [7, 8]
    assert reader.read(tmp_path, "accuracy") == [] == reader.read(tmp_path, "loss", "worker-1")


def test_days_are_summed_up(tmp_path: Path) -> None:
    writer, days = Series(str(tmp_path)), 2
    for second in range(0, days * 86_400, 5):
        report(writer, BEGIN + second, second, loss=float(second % 100))
    points = reader.read(tmp_path, "step")
    assert points[0].at <= BEGIN and points[-1].at == BEGIN + days * 86_400 - 5
    assert all(before.at <= after.at for before, after in itertools.pairwise(points))
    first = next(point for point in points if point.largest > point.least)
    assert first.least < first.mean < first.largest
    last_hour = [point for point in points if point.at >= BEGIN + days * 86_400 - 3600]
    assert len(last_hour) == 3600 / 5
    assert max(point.largest for point in reader.read(tmp_path, "loss")) == 95


def test_each_report_is_in_one_folder(tmp_path: Path) -> None:
    writer = Series(str(tmp_path))
    for second in range(40_000):
        report(writer, BEGIN + second / 2, second)
    exact = [line for path in series_files.parts(f"{tmp_path}/series", 1) for line in series_files.read_part(path)]
    summed = [line for path in series_files.parts(f"{tmp_path}/series", 10) for line in series_files.read_part(path)]
    assert max(summed[-1]["step"]) == exact[0]["step"] - 1
    assert min(summed[0]["step"]) == 0


def test_nothing_grows_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_files, "_KEPT_PARTS", {1: 3, 10: 3, 300: 3})
    writer = Series(str(tmp_path))
    for second in range(30_000):
        report(writer, BEGIN + 60 * second, second)
    assert max(sizes(tmp_path).values()) <= 4 * 1.3 * 20_000


def test_a_line_has_the_documented_form(tmp_path: Path) -> None:
    report(Series(str(tmp_path)), BEGIN, 1, loss=0.5)
    version, line = (json.loads(each) for each in (tmp_path / "series/1" / f"{BEGIN}.jsonl").read_text().splitlines())
    assert version == {"version": 1}
    fields = {"task": "worker-0", "generation": 1, "step": 1, "steps_per_s": 2.0, "metrics": {"loss": 0.5}}
    assert line == {"at": BEGIN, **fields}


def test_damaged_files_are_skipped(tmp_path: Path) -> None:
    report(Series(str(tmp_path)), BEGIN, 1)
    folder = tmp_path / "series" / "1"
    (folder / f"{BEGIN + 5}.jsonl").write_bytes(b'{"version": 1}\n{"at": NaN}\n\xff\n[]\n{"at": 1, "task": 2}\n')
    (folder / "x.jsonl").mkdir()
    report(Series(str(tmp_path)), BEGIN + 9, 2)
    assert [point.mean for point in reader.read(tmp_path, "step")] == [1, 2]


def test_a_disk_that_cannot_be_written_to_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "series").write_text("a file")
    begin = time.monotonic()
    report(Series(str(tmp_path)), BEGIN, 1)
    assert reader.read(tmp_path, "step") == [] and time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "at", ["", "2026-11-17T12:00:00nan", "2026-11-17T12:00:00inf", "0001-01-01T00:00:00.000Z", 7, {}]
)
def test_a_report_without_a_valid_time_is_dropped(tmp_path: Path, at: object) -> None:
    """The captain of another user may write anything."""
    writer = Series(str(tmp_path))
    writer.add({"at": at, "event": "step", "task": "worker-0", "step": 1})
    assert reader.read(tmp_path, "step") == [] and not (tmp_path / "series").exists()
    report(writer, BEGIN, 7)
    assert [point.mean for point in reader.read(tmp_path, "step")] == [7]


def test_a_report_with_thousands_of_metrics_is_kept_without_them(tmp_path: Path) -> None:
    writer = Series(str(tmp_path))
    report(writer, BEGIN, 7, **{f"metric {number}": 1.0 for number in range(10_000)})
    assert [point.mean for point in reader.read(tmp_path, "step")] == [7]
    assert reader.read(tmp_path, "metric 1") == [] and sizes(tmp_path)[1] < 1000
    writer.add({"at": stamp(BEGIN), "event": "step", "task": "x" * 1_000_000, "step": 8})
    assert sizes(tmp_path)[1] < 1000


def test_files_that_are_not_of_the_series_are_ignored(tmp_path: Path) -> None:
    writer = Series(str(tmp_path))
    report(writer, BEGIN, 7)
    folder = tmp_path / "series" / "1"
    for name in ("\u00b2.jsonl", "-7.jsonl", "07.jsonl", ".jsonl", f"{'9' * 5000}"[:200] + ".jsonl", "a.jsonl"):
        (folder / name).write_text("{}")
    os.mkfifo(folder / "5.jsonl")
    (folder / "6.jsonl").symlink_to("/dev/zero")
    with (folder / "9.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    assert [point.mean for point in reader.read(tmp_path, "step")] == [7]
    for second in range(500):
        report(writer, BEGIN + second, second)
    assert len(reader.read(tmp_path, "step")) == 501
