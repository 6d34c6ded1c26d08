"""How an agent collects the snapshot parts that tasks have saved, and reports them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.net import messages
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.storage import boots
from paceline.storage.snapshots.manifest import SnapshotId
from support.worlds import make_plan


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = Loop()
        self.events: list[ev.MemberEvent] = []
        self.warnings: list[str] = []
        self.start()

    def start(self) -> None:
        """Starts the agent, or its successor."""
        options = Options("run", "worker-host-0", "", str(self.folder), "", "")
        self.staging = HostSnapshots(
            make_plan(1), options, self.loop, self.events.append, lambda text, _: self.warnings.append(text)
        )

    def save(self, step: int, **files: str) -> None:
        folder = self.folder / "staging" / "worker-0" / "g1" / f"step-{step}"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name.replace("_json", ".json")).write_text(text)
        self.staging.collect()

    def snapshot_ids(self) -> list[SnapshotId]:
        return [saved.snapshot for saved in self.staging.held_parts()]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    new_host = Host(tmp_path)
    yield new_host
    new_host.staging.close()
    signal.set_wakeup_fd(-1)  # the loop's


def test_a_part_that_its_task_changes_while_it_is_collected_does_not_end_the_agent(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def rename_and_damage(source: str, target: str) -> None:
        rename(source, target)
        Path(target, "paceline.json").write_text("{")

    monkeypatch.setattr(os, "rename", rename_and_damage)
    host.save(10, paceline_json='{"parts": 2}')
    assert host.events == [ev.PartSaved("worker-host-0", "worker-0", SnapshotId(10, 1), 2)]
    assert host.snapshot_ids() == []  # if the agent restarts, the part is not usable


def test_metrics_of_a_part_that_are_not_finite_are_reported_separately(host: Host) -> None:
    host.save(10, state="x", paceline_json='{"metrics": {"loss": NaN, "norm": -Infinity, "rate": 0.5}}')
    [event] = host.events
    not_finite = {"loss": "NaN", "norm": "-Infinity"}
    assert event == ev.PartSaved(
        "worker-host-0", "worker-0", SnapshotId(10, 1), 1, {"rate": 0.5}, not_finite=not_finite
    )


def test_a_saved_part_is_collected_and_reported(host: Host) -> None:
    host.save(10, state="x", paceline_json='{"parts": 2, "metrics": {"loss": 0.5}}')
    [event] = host.events
    assert event == ev.PartSaved("worker-host-0", "worker-0", SnapshotId(10, 1), 2, {"loss": 0.5})
    assert host.snapshot_ids() == [SnapshotId(10, 1)] and host.warnings == []


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ("", "cannot read its paceline.json"),
        ('{"parts": 2', "cannot read its paceline.json"),
        ("[]", "is not a JSON object"),
        ('{"parts": "2"}', "parts is '2' in its paceline.json, but must be an integer from 1 to 100000"),
        ('{"parts": 0}', "parts is 0"),
        ('{"parts": true}', "parts is True"),
    ],
)
def test_a_part_without_a_valid_part_count_is_ignored(host: Host, metadata: str, reason: str) -> None:
    host.save(10, state="x", paceline_json=metadata)
    assert host.events == [] and host.snapshot_ids() == []
    [warning] = host.warnings
    assert warning.startswith("worker-0: the snapshot of step 10 is invalid and is ignored: ") and reason in warning


def test_an_agent_has_the_parts_that_its_predecessor_had(host: Host) -> None:
    host.save(10, state="x")
    host.staging.close()
    host.start()
    assert host.snapshot_ids() == [SnapshotId(10, 1)] and host.warnings == []


def test_parts_are_ignored_after_the_machine_has_restarted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files may not have reached the disk. A test cannot switch the machine off, so it changes the boot ID
    instead."""
    host.save(10, state="x")
    monkeypatch.setattr(boots, "boot_id", lambda: "another")
    host.staging.close()
    host.start()
    assert host.snapshot_ids() == []
    assert host.warnings == ["worker-0: step-10-g1 was saved before this machine restarted and is ignored"]
    host.save(20, state="x")
    host.staging.close()
    host.start()
    assert host.snapshot_ids() == [SnapshotId(20, 1)]


def test_any_folder_that_a_task_saves_is_collected_or_ignored(host: Host) -> None:
    """The agent neither fails nor waits, and the captain accepts what it reports."""
    staging = host.folder / "staging" / "worker-0" / "g1"
    for step in range(5):
        (staging / f"step-{step}").mkdir(parents=True)
    os.mkfifo(staging / "step-0" / "paceline.json")
    (staging / "step-1" / "paceline.json").symlink_to("/dev/zero")
    (staging / "step-2" / "paceline.json").mkdir()
    (staging / "step-3" / "paceline.json").write_text('{"metrics": ' + "[" * 100_000 + "]" * 100_000 + "}")
    odd = {"metrics": {"x" * 9_000: 1, "loss": 10**400, "y": 2}, "versions": {"x" * 9_000: [[[]]], "a": 1}}
    (staging / "step-4" / "paceline.json").write_text(json.dumps(odd))
    (staging / "step-5").write_text("a file")
    (staging / "step-6").symlink_to("/etc")
    (staging / f"step-{10**16 - 1}").mkdir()
    host.staging.collect()
    assert host.snapshot_ids() == [SnapshotId(4, 1)]
    [event] = host.events
    assert isinstance(event, ev.PartSaved) and dict(event.metrics) == {"x" * 100: 1, "y": 2}
    assert messages.read_member(messages.member_message(event), "worker-host-0") == event
    assert len(host.warnings) == 7 and not list(staging.glob("step-*"))
    (host.folder / "held" / "worker-0" / f"step-{2**53}-g1").mkdir()
    assert host.snapshot_ids() == [SnapshotId(4, 1)], "left by an older version"
