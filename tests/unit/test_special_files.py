"""Tasks can write to the folder of their run: a pipe, a device or a folder in the place of a file delays nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.captain_process.saved_notes import DAMAGED, CaptainNotes
from paceline.agent.deliveries.event_reader import EventReader
from paceline.agent.deliveries.saved_state import saved_mlflow_run
from paceline.agent.deliveries.series_reader import SeriesReader
from paceline.agent.event_file import NAME, OLD, EventFile
from paceline.agent.run_files import replace_text
from paceline.agent.series_files import Series, parts
from paceline.agent.tasks.host_notes import HostNotes
from paceline.agent.tasks.launcher import TaskLauncher
from paceline.agent.tensorboard.generation_notes import GenerationNotes, Notes
from paceline.backends.local import lost_captain_report
from paceline.storage.regular_files import append_to_regular, open_regular
from paceline.storage.snapshots import shared_parts
from paceline.storage.snapshots.manifest import Damaged
from paceline.storage.stores.peer_client import PeerStore
from paceline.storage.tensorboard_event_files import EventFiles, find
from paceline.storage.watched import folder_contents, selection
from support.recorded import event

pytestmark = pytest.mark.timeout(120)  # waiting for a pipe has no end

KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    """Puts a special file in this place."""

    def create(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[request.param](path)
        return path

    return create


Place = Callable[[Path], Path]


def step(seconds: float, number: int) -> dict[str, object]:
    return event(seconds, "step", task="worker-0", step=number, metrics={"loss": 1.0}, steps_per_s=None)


@pytest.mark.parametrize("function", [open_regular, append_to_regular])
def test_only_regular_files_are_opened(place: Place, tmp_path: Path, function: Callable[[str], int]) -> None:
    path = place(tmp_path / "file")
    with pytest.raises(OSError):
        function(str(path))


def test_deliveries_wait_for_a_readable_file(place: Place, tmp_path: Path) -> None:
    for name in (NAME, OLD, "state.json", "deliveries/mlflow.json"):
        place(tmp_path / name)
    assert EventReader(str(tmp_path), str(tmp_path / "state.json")).read() == []
    assert saved_mlflow_run(str(tmp_path)) == ""


def test_deliveries_read_earlier_events_only_from_a_regular_file(place: Place, tmp_path: Path) -> None:
    place(tmp_path / OLD)
    (tmp_path / NAME).write_text('{"event": "note"}\n')
    assert [line for line, _ in EventReader(str(tmp_path), str(tmp_path / "state.json")).read()] == [{"event": "note"}]


def test_series_leave_out_what_is_not_a_file(place: Place, tmp_path: Path) -> None:
    """The newest part, too: new lines go to another one."""
    series = Series(str(tmp_path))
    series.add(step(1, 1))
    (first,) = parts(str(tmp_path / "series"), 1)
    number = int(Path(first).stem)
    for odd in (number - 1, number + 1):
        place(Path(first).with_name(f"{odd}.jsonl"))
    series.add(step(2, 2))
    assert parts(str(tmp_path / "series"), 1) == [first] and Path(first).read_text().count("loss") == 2
    place(tmp_path / "state.json")
    reader = SeriesReader(str(tmp_path), {"worker-0"}, str(tmp_path / "state.json"))
    lines_and_position = reader.read()
    assert lines_and_position is not None and [line["step"] for line in lines_and_position[0]] == [1, 2]


def test_old_events_that_cannot_be_kept_do_not_stop_the_captain(place: Place, tmp_path: Path) -> None:
    place(tmp_path / OLD)
    file = EventFile(str(tmp_path), pytest.fail, limit=200)
    for number in range(20):
        assert file.write(b'{"event": "note", "text": "0123456789"}\n', event(number, "note", text="0123456789"))
    file.close()
    assert (tmp_path / NAME).read_bytes().count(b"\n") == 20


def test_notes_that_are_not_a_file_are_damaged(place: Place, tmp_path: Path) -> None:
    place(tmp_path / "captain.json")
    place(tmp_path / "curves.json")
    assert CaptainNotes(str(tmp_path), 0.0).problem == DAMAGED
    assert GenerationNotes(str(tmp_path / "curves.json")).read() == Notes()


def test_notes_of_a_host_that_are_not_a_file_are_missing(place: Place, tmp_path: Path) -> None:
    for name in ("generation", "data", "records"):
        place(tmp_path / "logs" / f".worker-host-0.{name}")
    notes = HostNotes(str(tmp_path), "worker-host-0")
    assert (notes.generation, notes.data, notes.records) == (0, "", ())


def test_records_of_files_in_use_that_are_not_a_file_do_not_delay_a_capture(place: Place, tmp_path: Path) -> None:
    part = tmp_path / "step-1"
    place(tmp_path / ".step-1.shared")
    with pytest.raises(Damaged):
        shared_parts._read_signatures(str(part))
    place(part / "paceline.json")
    assert selection._read_about(str(part)) is None


def test_files_that_were_replaced_since_they_were_listed_are_not_copied(place: Place, tmp_path: Path) -> None:
    path = place(tmp_path / "checkpoint")
    store = PeerStore(lambda: pytest.fail("it was opened"), "elsewhere")
    for copy in (
        lambda: store.send(str(path), "run/step-1-g1/worker-0/checkpoint", lambda _: True),
        lambda: folder_contents.duplicate(str(path), str(tmp_path / "copy"), lambda _: True),
    ):
        with pytest.raises(OSError):
            copy()
    assert not (tmp_path / "copy").exists()


def test_an_import_record_that_is_not_a_file_is_neither_sent_nor_written(place: Place, tmp_path: Path) -> None:
    path = place(tmp_path / "imports")
    plan = SimpleNamespace(elastic=True, host=lambda name: SimpleNamespace(index=0))
    launcher: Any = SimpleNamespace(_plan=plan, _options=SimpleNamespace(host="worker-host-0"), _record_path=str(path))
    assert TaskLauncher._record_for_others(launcher) == ""
    with pytest.raises(OSError):
        TaskLauncher._new_record(launcher)


def test_a_file_is_not_written_through_a_pipe(place: Place, tmp_path: Path) -> None:
    place(tmp_path / f"report.json.{os.getpid()}.partial")
    try:
        replace_text(str(tmp_path / "report.json"), "text")
    except OSError:
        assert not (tmp_path / "report.json").exists()


def test_the_report_of_a_lost_captain_does_not_wait_for_its_events(place: Place, tmp_path: Path) -> None:
    place(tmp_path / NAME)
    lost_captain_report.write_report(tmp_path, "digits-3f9a", "failed", "its captain was lost")
    assert (tmp_path / "report.json").exists()


def test_an_event_file_that_is_replaced_by_a_pipe_is_not_read(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "events.out.tfevents.1"
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / name).write_bytes(b"data")
    stamps = find(str(tmp_path / "tensorboard"))
    (tmp_path / "tensorboard" / name).unlink()
    place(tmp_path / "tensorboard" / name)
    monkeypatch.setattr("paceline.storage.tensorboard_event_files.find", lambda _: stamps)  # listed just before
    files = EventFiles(str(tmp_path / "tensorboard"), str(tmp_path / "scratch"))
    files.keep(pytest.fail, "below", lambda _: True, last=True)  # type: ignore[arg-type]
    assert files.trim({name: 1}, {}) == []
