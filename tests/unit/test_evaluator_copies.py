"""Copies of snapshots for the evaluators of a host, and their removal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.agent.captain.instructions import EvaluateSnapshot
from paceline.agent.options import Options
from paceline.agent.transfers.evaluator_copies import EvaluatorCopies
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.agent.transfers.requests import Request
from paceline.storage.snapshots.manifest import SnapshotId
from support.worlds import make_plan

HOST, TASK = "worker-host-0", "worker-0"


class Porting:
    """Ignores all requests, like a porter that was killed immediately."""

    def ask(self, request: Request, answer: Any) -> int:
        return 0

    def cancel(self, request: int) -> None:
        pass


def evaluator_copies(folder: Path) -> EvaluatorCopies:
    porting: Any = Porting()
    staging: Any = SimpleNamespace(porter=porting)
    options = Options("run", HOST, "", str(folder), "", "")
    return EvaluatorCopies(
        make_plan(1), options, porting, porting, lambda _: None, lambda *_: None,
        lambda folders: HostSnapshots.remove(staging, folders), lambda *_: None,
    )  # fmt: skip


def test_nothing_remains_even_if_the_porter_ends_before_it_has_removed_a_copy(tmp_path: Path) -> None:
    copies = evaluator_copies(tmp_path)
    copies.handle_message(TASK, {"wants": True})
    copies.evaluate(EvaluateSnapshot(HOST, TASK, SnapshotId(10, 1)))
    copy = tmp_path / "evaluating" / TASK / "step-10-g1"
    copy.mkdir()
    (copy / "state").touch()
    copies.attempt_ended(TASK)
    assert not copy.exists()
    copies.tidy()
    assert list(tmp_path.iterdir()) == []


def test_copies_of_an_earlier_agent_are_removed(tmp_path: Path) -> None:
    (tmp_path / "evaluating" / TASK / "step-10-g1").mkdir(parents=True)
    copies = evaluator_copies(tmp_path)
    assert not (tmp_path / "evaluating" / TASK / "step-10-g1").exists()
    copies.tidy()
    assert list(tmp_path.iterdir()) == []
