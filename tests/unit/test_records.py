"""A record behaves like a frozen dataclass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from typing import Any

import pytest

from paceline.agent.fast_dataclass import record


@record
class Point:
    """In a plane."""

    x: int
    y: int = 2
    labels: Mapping[str, str] = field(default_factory=dict)


@record
class Pair:
    x: int
    y: int

    def __repr__(self) -> str:
        return f"<{self.x}, {self.y}>"


def test_a_record_is_created_by_position_by_name_and_with_defaults() -> None:
    assert (Point(1).x, Point(1).y, Point(1).labels) == (1, 2, {})
    assert Point(1, 3, {"a": "b"}) == Point(labels={"a": "b"}, y=3, x=1)


def test_each_record_gets_its_own_default() -> None:
    assert Point(1).labels is not Point(1).labels


@pytest.mark.parametrize("arguments", [{}, {"x": 1, "z": 2}])
def test_a_missing_or_unknown_field_is_rejected(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Point(**arguments)


def test_records_are_equal_only_if_type_and_fields_are_equal() -> None:
    assert Point(1) == Point(1) != Point(2)
    assert Pair(1, 2) != Point(1, 2)
    assert Pair(1, 2) != (1, 2)
    assert len({Pair(1, 2), Pair(1, 2), Pair(2, 2)}) == 2


def test_a_record_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError):
        point.x = 2
    with pytest.raises(FrozenInstanceError):
        del point.x
    assert point.x == 1


def test_a_record_works_with_the_dataclasses_module() -> None:
    assert is_dataclass(Point)
    assert [each.name for each in fields(Point)] == ["x", "y", "labels"]
    assert replace(Point(1), y=5) == Point(1, 5)
    assert asdict(Point(1)) == {"x": 1, "y": 2, "labels": {}}


def test_a_record_can_be_copied_and_pickled() -> None:
    assert pickle.loads(pickle.dumps(Point(1))) == copy.deepcopy(Point(1)) == copy.copy(Point(1)) == Point(1)


def test_a_record_prints_its_fields_unless_the_class_has_its_own_repr() -> None:
    assert repr(Point(1)) == "Point(x=1, y=2, labels={})"
    assert repr(Pair(1, 2)) == "<1, 2>"
