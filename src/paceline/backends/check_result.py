"""The result of one check of `paceline doctor`: what was found, and the remedy if there is a problem."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Check:
    name: str
    result: str
    found: str
    remedy: str = ""
