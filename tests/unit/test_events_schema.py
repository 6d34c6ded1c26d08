"""docs/events.schema.json defines the lines of events.jsonl: the reader and the schema know the same kinds."""

import json
from pathlib import Path

import jsonschema
import pytest

from paceline.agent.captain import start_times
from paceline.view.state import events
from support import recorded

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "events.schema.json").read_text())
CHECKER = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_schema_reader_and_recording_know_the_same_kinds() -> None:
    in_schema = {one["properties"]["event"]["const"] for one in SCHEMA["oneOf"]}
    assert in_schema == set(events.KINDS) == {one["event"] for one in recorded.LIFE}


@pytest.mark.parametrize("line", recorded.LIFE, ids=lambda line: line["event"])
def test_every_kind_of_event_is_valid(line: dict[str, object]) -> None:
    CHECKER.validate(line)


@pytest.mark.parametrize(
    "change",
    [
        {"event": "exploded"},
        {"at": "yesterday"},
        {"at": "2026-11-15T04:30:11Z"},
        {"generation": -1},
        {"generation": None},
        {"step": "12"},
        {"metrics": {"loss": "low"}},
        {"colour": "red"},
    ],
    ids=str,
)
def test_an_invalid_event_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        CHECKER.validate({**recorded.STEP, **change})


@pytest.mark.parametrize("line", recorded.LIFE, ids=lambda line: line["event"])
def test_a_missing_field_is_refused(line: dict[str, object]) -> None:
    # These exist only if the job sets snapshots.best, or if they were observed.
    for field in line.keys() - {"best", *start_times.FIELDS}:
        with pytest.raises(jsonschema.ValidationError):
            CHECKER.validate({key: value for key, value in line.items() if key != field})
