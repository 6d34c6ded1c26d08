"""Copies of snapshots for the evaluators of a host, and what is left of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.agent.following import Following
from paceline.agent.options import Options
from paceline.agent.staging import Staging
from support.worlds import make_plan

HOST, TASK = "worker-host-0", "worker-0"


class Porting:
    """Does nothing of what it is asked for, as a porter that was ended at once."""

    def ask(self, request: dict[str, Any], answer: Any) -> int:
        return 0

    def forget(self, request: int) -> None:
        pass


def made(folder: Path) -> Following:
    porting: Any = Porting()
    staging: Any = SimpleNamespace(porting=porting)
    options = Options("run", HOST, "", str(folder), "", "")
    return Following(
        make_plan(1), options, porting, porting, lambda _: None, lambda *_: None,
        lambda folders: Staging.remove(staging, folders), lambda *_: None,
    )  # fmt: skip


def test_nothing_is_left_though_the_porter_ends_before_it_has_removed_a_copy(tmp_path: Path) -> None:
    following = made(tmp_path)
    following.told(TASK, {"wants": True})
    following.receive({"type": "follow", "task": TASK, "snapshot": [10, 1]})
    copy = tmp_path / "evaluating" / TASK / "step-10-g1"
    copy.mkdir()
    (copy / "state").touch()
    following.gone(TASK)
    assert not copy.exists()
    following.tidy()
    assert list(tmp_path.iterdir()) == []


def test_nor_of_what_an_agent_before_this_one_had(tmp_path: Path) -> None:
    (tmp_path / "evaluating" / TASK / "step-10-g1").mkdir(parents=True)
    following = made(tmp_path)
    assert not (tmp_path / "evaluating" / TASK / "step-10-g1").exists()
    following.tidy()
    assert list(tmp_path.iterdir()) == []
