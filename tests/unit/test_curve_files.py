"""Event files of runs that were restarted: TensorBoard's own reader finds each step once, in one line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.agent.written import Notes
from paceline.runtime import tfrecord
from paceline.storage.curves import Curves, find
from paceline.storage.folder import Folder


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
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=False)
    read.Reload()
    return [event.step for event in read.Tensors(tag)] if tag in read.Tags()["tensors"] else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tensorboard"
    made.mkdir()
    return made


def curves(folder: Path) -> Curves:
    return Curves(str(folder), str(folder.parent / ".scratch"))


FIRST, SECOND, THIRD = (f"train/events.out.tfevents.{number}.machine.{number}.0" for number in (1, 2, 3))


def test_steps_after_the_snapshot_go_at_once_and_so_does_a_torn_end(folder: Path) -> None:
    write(folder / FIRST, {"loss": range(1, 101), "rare": [10, 90]}, torn=b"half a rec")
    assert curves(folder).trim({FIRST: 1}, {2: (50, 98)}) == [FIRST]
    assert steps(folder / "train", "loss") == list(range(1, 51))
    assert steps(folder / "train", "rare") == [10]
    write(folder / SECOND, {"loss": range(51, 61)})
    assert curves(folder).trim({FIRST: 1}, {2: (50, 98)}) == []
    assert steps(folder / "train", "loss") == list(range(1, 61))


def test_a_program_that_begins_anew_takes_the_place_of_what_it_writes_again(folder: Path) -> None:
    """Nothing was restored that Paceline knows of: what the program goes on from is seen from what it writes."""
    write(folder / FIRST, {"loss": range(1, 101), "accuracy": [50, 100]})
    drawn = curves(folder)
    assert drawn.trim({FIRST: 1}, {}) == []
    write(folder / SECOND, {"loss": range(1, 31)})
    assert drawn.trim({FIRST: 1}, {}) == [FIRST]
    assert steps(folder / "train", "loss") == list(range(1, 31))
    assert steps(folder / "train", "accuracy") == [50, 100]
    write(folder / SECOND, {"accuracy": [50]})
    assert drawn.trim({FIRST: 1}, {}) == [FIRST]
    assert steps(folder / "train", "accuracy") == [50]


def test_steps_that_are_epochs_are_in_one_line_too(folder: Path) -> None:
    """As Keras counts them: far below the step that was restored."""
    write(folder / FIRST, {"epoch_loss": range(5), "batch_loss": range(0, 500, 10)})
    write(folder / SECOND, {"epoch_loss": range(3, 6), "batch_loss": range(310, 600, 10)})
    write(folder / THIRD, {"epoch_loss": range(5, 9), "batch_loss": range(510, 900, 10)})
    assert set(curves(folder).trim({FIRST: 1, SECOND: 2}, {2: (300, 490), 3: (500, 590)})) == {FIRST, SECOND}
    assert steps(folder / "train", "epoch_loss") == list(range(9))
    assert steps(folder / "train", "batch_loss") == list(range(0, 900, 10))


def test_a_tag_that_counts_examples_loses_only_what_is_written_again(folder: Path) -> None:
    """Its steps are far beyond that of the snapshot, from the beginning on."""
    write(folder / FIRST, {"loss": range(1, 101), "by_examples": range(64, 6401, 64)})
    drawn = curves(folder)
    assert drawn.trim({FIRST: 1}, {2: (50, 100)}) == [FIRST]
    assert steps(folder / "train", "loss") == list(range(1, 51))
    assert steps(folder / "train", "by_examples") == list(range(64, 6401, 64))
    write(folder / SECOND, {"by_examples": range(51 * 64, 60 * 64 + 1, 64)})
    assert drawn.trim({FIRST: 1}, {2: (50, 100)}) == [FIRST]
    assert steps(folder / "train", "by_examples") == list(range(64, 60 * 64 + 1, 64))


def test_what_others_write_at_the_same_time_stays(folder: Path) -> None:
    """Several tasks of one generation, folders of their own, and files whose writers live."""
    same = "train/events.out.tfevents.1.machine.9.0"
    write(folder / FIRST, {"loss": range(1, 11)})
    write(folder / same, {"loss": range(1, 11)})
    write(folder / "eval" / "events.out.tfevents.1.machine.5.0", {"loss": range(1, 900)})
    write(folder / "other" / "events.out.tfevents.1.machine.7.0", {"loss": range(1, 11)})
    (folder / "train" / "checkpoint").write_bytes(b"no event file")
    before = find(str(folder))
    assert curves(folder).trim({FIRST: 1, same: 1, "other/events.out.tfevents.1.machine.7.0": 1}, {2: (10, 10)}) == []
    assert find(str(folder)) == before


def test_files_of_another_machine_are_brought_back_and_what_is_trimmed_is_sent_again(folder: Path) -> None:
    write(folder / FIRST, {"loss": range(1, 101)})
    place = folder.parent / "place"
    place.mkdir()
    store = Folder(str(place))
    drawn = curves(folder)
    drawn.keep(store, "r/tensorboard/h", lambda _: True, last=False)
    write(folder / FIRST, {"loss": [101]})
    drawn.keep(store, "r/tensorboard/h", lambda _: True, last=False)
    kept = place / "r" / "tensorboard" / "h"
    assert steps(kept / "train", "loss") == list(range(1, 101)), "too little is new"
    drawn.keep(store, "r/tensorboard/h", lambda _: True, last=True)
    assert steps(kept / "train", "loss") == list(range(1, 102))
    other = folder.parent / "other"
    other.mkdir()
    again = curves(other)
    assert again.bring(store, "r/tensorboard/h", lambda _: True) == [FIRST]
    assert again.trim({FIRST: 0}, {2: (50, 101)}) == [FIRST]
    write(other / SECOND, {"loss": range(51, 61)})
    again.keep(store, "r/tensorboard/h", lambda _: True, last=False)
    assert steps(kept / "train", "loss") == list(range(1, 61))


def test_whoever_is_first_says_what_was_there_when_a_generation_began(tmp_path: Path) -> None:
    notes = Notes(str(tmp_path / "notes.json"))
    assert notes.begin(1, None, list) and not notes.begin(1, None, lambda: ["late"])
    assert notes.begin(2, (50, 60), lambda: ["a"])
    assert not notes.begin(2, (50, 60), lambda: ["b"]), "another host, when tasks of the first already write"
    assert Notes(str(tmp_path / "notes.json")).begin(4, None, lambda: ["a", "b"])
    told = notes.read()
    assert (told.generation, told.old, told.after) == (4, {"a": 1, "b": 3}, {2: (50, 60)})
    (tmp_path / "notes.json").write_text(json.dumps({"generation": "odd"}))
    assert notes.read().generation == 0
