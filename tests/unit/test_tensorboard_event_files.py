"""Event files of restarted runs: TensorBoard's own reader finds each step once, in one curve."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.agent.tensorboard.generation_notes import GenerationNotes
from paceline.storage import tfrecord
from paceline.storage.stores.folder import FolderStore
from paceline.storage.tensorboard_event_files import EventFiles, find, last_cut


def write(path: Path, values: dict[str, Iterable[int]], torn: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not path.stat().st_size:
            file.write(tfrecord.first(1000.0))
        for tag, steps in values.items():
            for step in steps:
                file.write(tfrecord.scalars(step, 1000.0 + step, {tag: float(step)}))
        file.write(torn)


def steps(folder: Path, tag: str) -> list[int]:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=False)
    accumulator.Reload()
    return [event.step for event in accumulator.Tensors(tag)] if tag in accumulator.Tags()["tensors"] else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tensorboard"
    path.mkdir()
    return path


def event_files_of(folder: Path) -> EventFiles:
    return EventFiles(str(folder), str(folder.parent / ".scratch"))


FIRST, SECOND, THIRD = (f"train/events.out.tfevents.{number}.machine.{number}.0" for number in (1, 2, 3))


def test_steps_after_the_snapshot_and_a_torn_end_are_removed_immediately(folder: Path) -> None:
    write(folder / FIRST, {"loss": range(1, 101), "rare": [10, 90]}, torn=b"half a rec")
    assert event_files_of(folder).trim({FIRST: 1}, {2: (50, 98)}) == [FIRST]
    assert steps(folder / "train", "loss") == list(range(1, 51))
    assert steps(folder / "train", "rare") == [10]
    write(folder / SECOND, {"loss": range(51, 61)})
    assert event_files_of(folder).trim({FIRST: 1}, {2: (50, 98)}) == []
    assert steps(folder / "train", "loss") == list(range(1, 61))


def test_a_program_that_starts_over_replaces_the_steps_that_it_writes_again(folder: Path) -> None:
    """Paceline knows of no restored snapshot: only the new events show where the program resumes."""
    write(folder / FIRST, {"loss": range(1, 101), "accuracy": [50, 100]})
    event_files = event_files_of(folder)
    assert event_files.trim({FIRST: 1}, {}) == [] and last_cut(str(folder)) == 0
    write(folder / SECOND, {"loss": range(1, 31)})
    assert event_files.trim({FIRST: 1}, {}) == [FIRST] and last_cut(str(folder))
    assert steps(folder / "train", "loss") == list(range(1, 31))
    assert steps(folder / "train", "accuracy") == [50, 100]
    write(folder / SECOND, {"accuracy": [50]})
    assert event_files.trim({FIRST: 1}, {}) == [FIRST]
    assert steps(folder / "train", "accuracy") == [50]


def test_steps_that_are_epochs_form_one_curve_too(folder: Path) -> None:
    """As Keras counts them: far below the step that was restored."""
    write(folder / FIRST, {"epoch_loss": range(5), "batch_loss": range(0, 500, 10)})
    write(folder / SECOND, {"epoch_loss": range(3, 6), "batch_loss": range(310, 600, 10)})
    write(folder / THIRD, {"epoch_loss": range(5, 9), "batch_loss": range(510, 900, 10)})
    assert set(event_files_of(folder).trim({FIRST: 1, SECOND: 2}, {2: (300, 490), 3: (500, 590)})) == {FIRST, SECOND}
    assert steps(folder / "train", "epoch_loss") == list(range(9))
    assert steps(folder / "train", "batch_loss") == list(range(0, 900, 10))


def test_a_tag_that_counts_examples_loses_only_steps_that_are_written_again(folder: Path) -> None:
    """Its steps are far beyond that of the snapshot, from the start."""
    write(folder / FIRST, {"loss": range(1, 101), "by_examples": range(64, 6401, 64)})
    event_files = event_files_of(folder)
    assert event_files.trim({FIRST: 1}, {2: (50, 100)}) == [FIRST]
    assert steps(folder / "train", "loss") == list(range(1, 51))
    assert steps(folder / "train", "by_examples") == list(range(64, 6401, 64))
    write(folder / SECOND, {"by_examples": range(51 * 64, 60 * 64 + 1, 64)})
    assert event_files.trim({FIRST: 1}, {2: (50, 100)}) == [FIRST]
    assert steps(folder / "train", "by_examples") == list(range(64, 60 * 64 + 1, 64))


def test_files_that_others_write_at_the_same_time_stay(folder: Path) -> None:
    """Several tasks of one generation, separate folders, and files whose writers are alive."""
    same = "train/events.out.tfevents.1.machine.9.0"
    write(folder / FIRST, {"loss": range(1, 11)})
    write(folder / same, {"loss": range(1, 11)})
    write(folder / "eval" / "events.out.tfevents.1.machine.5.0", {"loss": range(1, 900)})
    write(folder / "other" / "events.out.tfevents.1.machine.7.0", {"loss": range(1, 11)})
    (folder / "train" / "checkpoint").write_bytes(b"no event file")
    before = find(str(folder))
    assert (
        event_files_of(folder).trim({FIRST: 1, same: 1, "other/events.out.tfevents.1.machine.7.0": 1}, {2: (10, 10)})
        == []
    )
    assert find(str(folder)) == before


def test_files_of_another_machine_are_fetched_and_trimmed_files_are_sent_again(folder: Path) -> None:
    write(folder / FIRST, {"loss": range(1, 101)})
    location = folder.parent / "place"
    location.mkdir()
    store = FolderStore(str(location))
    event_files = event_files_of(folder)
    event_files.keep(store, "r/tensorboard/h", lambda _: True, last=False)
    write(folder / FIRST, {"loss": [101]})
    event_files.keep(store, "r/tensorboard/h", lambda _: True, last=False)
    stored = location / "r" / "tensorboard" / "h"
    assert steps(stored / "train", "loss") == list(range(1, 101)), "too little is new"
    event_files.keep(store, "r/tensorboard/h", lambda _: True, last=True)
    assert steps(stored / "train", "loss") == list(range(1, 102))
    other = folder.parent / "other"
    other.mkdir()
    other_event_files = event_files_of(other)
    assert other_event_files.bring(store, "r/tensorboard/h", lambda _: True) == [FIRST]
    assert other_event_files.trim({FIRST: 0}, {2: (50, 101)}) == [FIRST]
    write(other / SECOND, {"loss": range(51, 61)})
    other_event_files.keep(store, "r/tensorboard/h", lambda _: True, last=False)
    assert steps(stored / "train", "loss") == list(range(1, 61))


def test_the_first_host_records_the_files_that_existed_when_a_generation_started(tmp_path: Path) -> None:
    notes = GenerationNotes(str(tmp_path / "notes.json"))
    assert notes.begin(1, None, list) and not notes.begin(1, None, lambda: ["late"])
    assert notes.begin(2, (50, 60), lambda: ["a"])
    assert not notes.begin(2, (50, 60), lambda: ["b"]), "another host, when tasks of the first host already write"
    assert GenerationNotes(str(tmp_path / "notes.json")).begin(4, None, lambda: ["a", "b"])
    record = notes.read()
    assert (record.generation, record.old, record.after) == (4, {"a": 1, "b": 3}, {2: (50, 60)})
    (tmp_path / "notes.json").write_text(json.dumps({"generation": "odd"}))
    assert notes.read().generation == 0
