"""What an agent takes of what tasks have saved, and tells of what it holds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import machine
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.staging import Staging
from paceline.storage.manifest import Id
from support.worlds import make_plan


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = Loop()
        self.told: list[dict[str, Any]] = []
        self.warned: list[str] = []
        self.start()

    def start(self) -> None:
        """The agent, or another one after it."""
        options = Options("run", "worker-host-0", "", str(self.folder), "", "")
        self.staging = Staging(
            make_plan(1), options, self.loop, self.told.append, lambda text, _: self.warned.append(text)
        )

    def save(self, step: int, **files: str) -> None:
        written = self.folder / "staging" / "worker-0" / "g1" / f"step-{step}"
        written.mkdir(parents=True)
        for name, text in files.items():
            (written / name.replace("_json", ".json")).write_text(text)
        self.staging.look()

    def held(self) -> list[Id]:
        return [saved.id for saved in self.staging.held()]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.staging.close()
    signal.set_wakeup_fd(-1)  # the loop's


def test_what_is_saved_is_taken_and_told(host: Host) -> None:
    host.save(10, state="x", paceline_json='{"parts": 2, "metrics": {"loss": 0.5}}')
    [told] = host.told
    assert (told["type"], told["snapshot"], told["parts"], told["metrics"]) == ("saved", [10, 1], 2, {"loss": 0.5})
    assert host.held() == [Id(10, 1)] and host.warned == []


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ("", "cannot be read"),
        ('{"parts": 2', "cannot be read"),
        ("[]", "is not an object"),
        ('{"parts": "2"}', "has parts '2', which should be a number from 1 on"),
        ('{"parts": 0}', "has parts 0"),
        ('{"parts": true}', "has parts True"),
    ],
)
def test_a_part_that_does_not_say_of_how_many_is_not_taken_for_the_whole(host: Host, about: str, why: str) -> None:
    host.save(10, state="x", paceline_json=about)
    assert host.told == [] and host.held() == []
    [warning] = host.warned
    assert warning.startswith("worker-0: the snapshot of step 10 is not taken: its paceline.json") and why in warning


def test_an_agent_after_another_one_holds_what_that_held(host: Host) -> None:
    host.save(10, state="x")
    host.staging.close()
    host.start()
    assert host.held() == [Id(10, 1)] and host.warned == []


def test_but_not_once_the_machine_has_started_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it need be on the disk. No machine can be switched off here: what tells one start from another is
    changed instead."""
    host.save(10, state="x")
    monkeypatch.setattr(machine, "boot", lambda: "another")
    host.staging.close()
    host.start()
    assert host.held() == []
    assert host.warned == ["worker-0: step-10-g1 was saved before this machine started again: it is not used"]
    host.save(20, state="x")
    host.staging.close()
    host.start()
    assert host.held() == [Id(20, 1)]
