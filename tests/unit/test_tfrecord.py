"""TensorBoard reads the event files that Paceline writes, and Paceline reads those of TensorFlow."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from paceline.storage import tfrecord


def test_the_checksum_matches_its_example() -> None:
    assert doctest.testmod(tfrecord).failed == 0


def test_tensorboard_reads_files_of_paceline(tmp_path: Path) -> None:
    with (tmp_path / "events.out.tfevents.1").open("wb") as file:
        file.write(tfrecord.first(1000.0))
        for step in (1, 200, 300_000):
            file.write(tfrecord.scalars(step, 1000.0 + step, {"accuracy": step / 4, "loss": -1.5}))
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert set(accumulator.Tags()["tensors"]) == {"accuracy", "loss"}
    events = accumulator.Tensors("accuracy")
    assert [(event.step, event.wall_time) for event in events] == [(1, 1001.0), (200, 1200.0), (300_000, 301_000.0)]
    assert [event.tensor_proto.float_val[0] for event in events] == [0.25, 50.0, 75_000.0]
    assert accumulator.SummaryMetadata("loss").plugin_data.plugin_name == "scalars"


def test_steps_of_foreign_files_are_read_and_a_truncated_end_is_reported(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for step in (7, 1 << 40):
        event = Event(wall_time=1.0, step=step)
        event.summary.value.add(tag="a", simple_value=1.0)
        writer.add_event(event)
    writer.close()
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        steps = [tfrecord.step_of(record) for _, record in tfrecord.records(file)]
    assert steps == [None, 7, 1 << 40]
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb") as file, pytest.raises(tfrecord.Torn):
        assert [tfrecord.step_of(record) for _, record in tfrecord.records(file)]


@pytest.mark.timeout(20)
def test_a_number_without_an_end_is_read_in_no_time() -> None:
    """A task may write anything to its event files."""
    assert tfrecord.summary_of(b"\x80" * 5_000_000) is None
    assert tfrecord.summary_of(b"\x10" + b"\xff" * 5_000_000 + b"\x01") is None
