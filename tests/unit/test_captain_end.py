"""After the end of a run, its captain waits for deliveries: what is uploaded meanwhile, and what ends the wait."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.captain.ledger import LIVE, OVER
from paceline.agent.captain_process import process
from paceline.agent.captain_process.process import CaptainProcess
from paceline.agent.deliveries.client import Deliveries
from paceline.agent.options import LEAVING, Options
from support.worlds import make_plan


class Loop:
    """Timers fire at once."""

    def __init__(self) -> None:
        self.has_stopped = False

    def now(self) -> float:
        return 1000.0

    def after(self, _: float, callback: Any) -> None:
        callback()

    def stop(self) -> None:
        self.has_stopped = True


class Captain(CaptainProcess):
    """Without connections and processes."""

    def __init__(self, folder: Path, phase: str) -> None:
        loop: Any = Loop()
        captain: Any = SimpleNamespace(phase=phase, leaving=False, is_stopping=False, generation=1)
        self.loop, self._captain, self._plan, self._exit_code = loop, captain, make_plan(1), 0
        self._options = Options("digits-3f9a", "captain", "", str(folder), "", "")
        self._redact: Any = str
        self.warnings: list[str] = []
        self._log: Any = SimpleNamespace(write=lambda _, __, fields: self.warnings.append(fields["text"]))
        self._upload: Any = SimpleNamespace(close=lambda then: then())
        self._uploaded_report = process.UPLOADED_REPORT
        self._deliveries = Deliveries(self._options, {}, loop, pytest.fail)


def test_sigterm_after_the_end_of_the_run_changes_neither_the_report_nor_the_exit_code(tmp_path: Path) -> None:
    captain = Captain(tmp_path, OVER)
    captain._deliveries._then = lambda undelivered: captain._finish({"status": "succeeded"}, undelivered)
    captain._on_sigterm()
    assert captain.loop.has_stopped and captain._exit_code == 0  # type: ignore[attr-defined]
    text = "the captain had to shut down before everything was delivered"
    assert captain.warnings == [text]
    assert json.loads((tmp_path / "report.json").read_text()) == {"status": "succeeded", "undelivered": [text]}


def test_sigterm_during_the_run_makes_room_for_another_captain(tmp_path: Path) -> None:
    captain = Captain(tmp_path, LIVE)
    captain._on_sigterm()
    assert captain.loop.has_stopped and captain._exit_code == LEAVING  # type: ignore[attr-defined]


def test_the_report_is_uploaded_from_a_file_that_is_written_once(tmp_path: Path) -> None:
    """What is uploaded may only be appended to."""
    captain = Captain(tmp_path, OVER)
    captain._write_report(process.REPORT, {"status": "succeeded"})
    assert not (tmp_path / process.UPLOADED_REPORT).exists()
    captain._finish({"status": "succeeded"}, ["a"])
    expected = {"status": "succeeded", "undelivered": ["a"]}
    for name in (process.REPORT, process.UPLOADED_REPORT):
        assert json.loads((tmp_path / name).read_text()) == expected
