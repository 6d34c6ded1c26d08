"""A captain exits once its name has resolved to another captain for longer than DNS can be out of date."""

from __future__ import annotations

import pytest

from paceline.agent.captain_process import successor_check
from paceline.agent.captain_process.successor_check import EVERY_S, SuccessorCheck

OWN, OTHER = "10.0.0.7", "10.0.0.9"


class Names:
    """A loop whose time is set by the test, and lookups with the given answers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.time = 0.0
        self.addresses: frozenset[str] = frozenset()
        self.reasons: list[str] = []
        patch.setattr(successor_check, "NameLookup", self._lookup)
        SuccessorCheck(self, "captain.run:7000", OWN, self.reasons.append)  # type: ignore[arg-type]

    def _lookup(self, _: object, on_result: object) -> Names:
        self._on_result = on_result
        return self

    def begin(self, host: str, port: int) -> None:
        assert (host, port) == ("captain.run", 7000)

    def now(self) -> float:
        return self.time

    def after(self, delay: float, again: object) -> None:
        assert delay == EVERY_S
        self._again = again

    def resolve(self, *addresses: str) -> list[str]:
        self.time += EVERY_S
        self._again()  # type: ignore[operator]
        self.addresses = frozenset(addresses)
        self._on_result(None)  # type: ignore[operator]
        return self.reasons


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def test_a_replaced_captain_exits_with_the_reason(names: Names) -> None:
    names.resolve(OWN)
    assert names.resolve(OTHER) == names.resolve(OTHER) == []  # DNS may be out of date
    assert names.resolve(OTHER) == [f"captain.run:7000 now resolves to another captain ({OTHER})"]


def test_a_name_that_resolves_to_both_is_its_own(names: Names) -> None:
    for _ in range(10):
        assert names.resolve(OWN, OTHER) == []


def test_a_captain_whose_name_has_never_resolved_to_it_stays(names: Names) -> None:
    for _ in range(10):
        assert names.resolve(OTHER) == []


def test_a_name_server_that_does_not_answer_is_no_reason(names: Names) -> None:
    names.resolve(OWN)
    for _ in range(10):
        assert names.resolve() == []
