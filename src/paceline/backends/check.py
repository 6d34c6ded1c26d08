"""One thing that `paceline doctor` has looked at: how it stands, and what to do where it does not."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Check:
    name: str
    result: str
    found: str
    remedy: str = ""
