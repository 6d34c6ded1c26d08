"""JSON that others have written cannot block its reader."""

from __future__ import annotations

import pytest

from paceline.storage import json_values
from paceline.storage.json_values import parse_json


@pytest.mark.parametrize("parser", [None, json_values._parse_int], ids=["Python's limit", "own limit"])
def test_an_integer_of_a_million_digits_is_not_parsed(parser: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_INT_PARSER", parser)
    assert parse_json('{"step": -12, "n": [1.5, 9007199254740993]}') == {"step": -12, "n": [1.5, 9007199254740993]}
    with pytest.raises(ValueError, match="4300"):
        parse_json(b'{"n": ' + b"9" * 1_000_000 + b"}")


def test_a_value_that_is_nested_too_deeply_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)
