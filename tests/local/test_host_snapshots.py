"""How an agent collects the snapshot parts that tasks have saved, and reports them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.net import messages
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.backends import certificates
from paceline.storage import boots
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.storage.snapshots.shared_parts import SMALL
from support.ports import free_port
from support.runs import eventually
from support.worlds import make_plan


class Host:
    def __init__(self, folder: Path, memory: str = "", index: int = 0, serve: str = "", tls: str = "") -> None:
        self.folder, self.memory = folder, memory
        self.name, self.serve, self.tls = f"worker-host-{index}", serve, tls
        self.loop = Loop()
        self.events: list[ev.MemberEvent] = []
        self.warnings: list[str] = []
        self.start()

    def start(self) -> None:
        """Starts the agent, or its successor."""
        options = Options("run", self.name, "", str(self.folder), self.tls, "", memory=self.memory, serve=self.serve)
        self.staging = HostSnapshots(
            make_plan(2), options, self.loop, self.events.append, lambda text, _=False: self.warnings.append(text)
        )

    def save(self, step: int, to: Path | None = None, **files: str) -> None:
        folder = (to or self.folder) / "staging" / "worker-0" / "g1" / f"step-{step}"
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


@pytest.mark.parametrize(
    ("written", "stall"),
    [("1.5", 1.5), ("0", 0), ("NaN", 0), ("-1", 0), ("1e400", 0), ('"1"', 0), ("true", 0), ("[]", 0)],
)
def test_how_long_training_waited_is_reported_with_a_part(host: Host, written: str, stall: float) -> None:
    host.save(10, paceline_json=f'{{"stall_s": {written}}}')
    [event] = host.events
    assert event == ev.PartSaved("worker-host-0", "worker-0", SnapshotId(10, 1), stall=stall)


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


# ---- with `snapshots.memory`: an ordinary folder takes the place of the one in memory


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def host_with_memory(tmp_path: Path, memory: Path) -> Iterator[Host]:
    new_host = Host(tmp_path / "disk", str(memory))
    yield new_host
    new_host.staging.close()
    signal.set_wakeup_fd(-1)


def wait(host: Host, description: str, check: Callable[[], bool]) -> None:
    def has_happened() -> bool:
        host.loop.once(0.02)
        return check()

    eventually(description, has_happened)


def prepare(host: Host, step: int, generation: int, task: str = "worker-0") -> Path:
    """The folder that the next attempt of the task resumes from."""
    host.staging.attempt_ended(task)
    before = len(host.events)
    host.staging.prepare(ins.PrepareHost("worker-host-0", SnapshotId(step, 1), generation, {"worker-0": ""}))
    wait(host, "it is prepared", lambda: len(host.events) > before)
    assert host.events[-1] == ev.HostPrepared("worker-host-0", SnapshotId(step, 1), from_hosts=True)
    return Path(host.staging.environment(task, generation, f"step-{step}-g1")["PACELINE_RESTORE"])


def test_a_task_that_starts_again_in_its_generation_finds_nothing_that_it_has_not_completed(host: Host) -> None:
    first = Path(host.staging.environment("worker-0", 1, None)["PACELINE_SNAPSHOT_DIR"])
    (first / "partial").mkdir()
    host.save(10, state="x")
    second = Path(host.staging.environment("worker-0", 1, None)["PACELINE_SNAPSHOT_DIR"])
    assert second == first and list(second.iterdir()) == []
    assert host.snapshot_ids() == [SnapshotId(10, 1)]


def test_a_running_task_keeps_the_folder_that_it_resumes_from_if_another_of_its_host_starts(host: Host) -> None:
    for step in (10, 20, 30):
        host.save(step, state=str(step))
    first = prepare(host, 10, 1, "worker-0")
    assert prepare(host, 10, 1, "worker-1") == first, "the same folder for both"
    second = prepare(host, 20, 1, "worker-1")
    assert (first / "state").read_text() == "10" and (second / "state").read_text() == "20"
    third = prepare(host, 30, 1, "worker-0")
    assert not first.exists()
    assert (second / "state").read_text() == "20" and (third / "state").read_text() == "30"


def test_parts_stay_in_memory_or_on_disk_where_tasks_saved_them(host_with_memory: Host, memory: Path) -> None:
    host = host_with_memory
    variables = host.staging.environment("worker-0", 1, None)
    assert variables["PACELINE_SNAPSHOT_DIR"] == str(host.folder / "staging" / "worker-0" / "g1")
    assert variables["PACELINE_SNAPSHOT_MEMORY_DIR"] == str(memory / "staging" / "worker-0" / "g1")
    host.save(10, memory, state="x")
    host.save(20, state="x")
    assert (memory / "held" / "worker-0" / "step-10-g1" / "state").exists()
    assert (host.folder / "held" / "worker-0" / "step-20-g1" / "state").exists()
    assert host.snapshot_ids() == [SnapshotId(10, 1), SnapshotId(20, 1)]
    host.staging.close()
    host.start()
    assert host.snapshot_ids() == [SnapshotId(10, 1), SnapshotId(20, 1)], "after a restart of the container"
    for step in (10, 20):
        host.staging.drop(ins.DropPart("worker-host-0", "worker-0", SnapshotId(step, 1)))
    assert host.snapshot_ids() == []


def test_what_an_agent_was_removing_when_it_died_does_not_stay_in_memory(host_with_memory: Host, memory: Path) -> None:
    left = memory / "held" / "worker-0" / ".step-10-g1.0123abcd.gone"
    left.mkdir(parents=True)
    (left / "state").write_text("x")
    host_with_memory.save(20, memory, state="x")
    host_with_memory.start()
    wait(host_with_memory, "it is removed", lambda: not left.exists())
    assert host_with_memory.snapshot_ids() == [SnapshotId(20, 1)]


def test_what_is_saved_meanwhile_is_collected_in_order(host_with_memory: Host, memory: Path) -> None:
    for step, root in ((20, host_with_memory.folder), (30, memory), (10, memory)):
        (root / "staging" / "worker-0" / "g1" / f"step-{step}").mkdir(parents=True)
    host_with_memory.staging.collect()
    saved = [event.snapshot.step for event in host_with_memory.events if isinstance(event, ev.PartSaved)]
    assert saved == [10, 20, 30]


def test_the_same_step_again_is_ignored_wherever_it_is(host_with_memory: Host, memory: Path) -> None:
    host_with_memory.save(10, memory, state="first")
    host_with_memory.save(10, state="second")
    assert len(host_with_memory.events) == 1 and host_with_memory.snapshot_ids() == [SnapshotId(10, 1)]
    assert not (host_with_memory.folder / "held" / "worker-0" / "step-10-g1").exists()


def test_one_note_says_that_memory_is_full(host_with_memory: Host, memory: Path) -> None:
    host_with_memory.save(10, memory)
    host_with_memory.save(20)
    host_with_memory.save(30)
    assert host_with_memory.warnings == [
        "snapshots.memory: no room for the snapshot of step 20 of worker-0: written to disk"
    ]


def test_a_snapshot_that_never_fit_into_memory_is_noted_too(host_with_memory: Host) -> None:
    (host_with_memory.folder / "staging" / "worker-0" / "g1").mkdir(parents=True)
    (host_with_memory.folder / "staging" / "worker-0" / "g1" / "no-room").touch()
    host_with_memory.save(10)
    assert host_with_memory.warnings == [
        "snapshots.memory: no room for the snapshot of step 10 of worker-0: written to disk"
    ]


def test_a_program_that_does_not_use_memory_is_noted_once(host_with_memory: Host) -> None:
    host_with_memory.save(10)
    host_with_memory.save(20)
    assert host_with_memory.warnings == [
        "snapshots.memory: worker-0 has written the snapshot of step 10 to disk: only the helpers, and programs that "
        "use PACELINE_SNAPSHOT_MEMORY_DIR, save to memory"
    ]


def test_tasks_resume_from_memory_which_is_free_again_once_a_newer_snapshot_replaces_it(
    host_with_memory: Host, memory: Path
) -> None:
    """Tasks that still read the folder find it on disk."""
    host = host_with_memory
    host.save(10, memory, state="x" * 100_000, small="y")
    restored = prepare(host, 10, 2)
    assert (restored / "state").samefile(memory / "held" / "worker-0" / "step-10-g1" / "state")
    host.staging.drop(ins.DropPart("worker-host-0", "worker-0", SnapshotId(10, 1)))
    wait(host, "memory is free", lambda: not [path for path in memory.rglob("*") if path.is_file()])
    assert (restored / "state").read_text() == "x" * 100_000 and (restored / "small").read_text() == "y"


def test_a_generation_resumes_from_memory_or_disk_in_turn(host_with_memory: Host, memory: Path) -> None:
    host = host_with_memory
    host.save(10, memory, state="10")
    host.save(20, state="20")
    for generation, step in enumerate((10, 20, 10, 10, 20), start=2):
        restored = prepare(host, step, generation)
        assert (restored / "state").read_text() == str(step)
        assert [path.name for path in restored.parent.iterdir() if path.name.startswith("step-")] == [restored.name]
        assert restored.is_symlink() == (step == 10)


def test_after_the_run_only_parts_that_were_not_committed_remain(host_with_memory: Host, memory: Path) -> None:
    host = host_with_memory
    host.save(10, memory, state="x")
    prepare(host, 10, 2)
    host.staging.tidy()
    files = {str(path.relative_to(memory)) for path in memory.rglob("[!.]*") if path.is_file()}
    assert files == {"held/worker-0/step-10-g1/state"}


# ---- parts of other hosts


def test_what_was_fetched_in_advance_leaves_the_disk_before_a_restart_from_the_store(host: Host) -> None:
    """A disk may have no room for both: nothing else would delete it while the group resumes from the store."""
    folder = host.folder / "fetched-parts" / "worker-host-0"
    weights = folder / "worker-1" / "step-10-g1" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_text("x")
    host.save(10, state="x")
    prepare(host, 10, 2)
    assert weights.exists(), "a restart from parts of hosts may use it"
    host.staging.prepare(ins.PrepareHost("worker-host-0", SnapshotId(20, 1), 3, {}))
    assert not weights.exists()
    wait(host, "the files are deleted", lambda: not any(folder.rglob("weights")))


def test_a_restart_links_what_was_fetched_in_advance(tmp_path: Path) -> None:
    certificates.make(tmp_path / "tls")
    address = f"127.0.0.1:{free_port()}"
    first = Host(tmp_path / "first", serve=address, tls=str(tmp_path / "tls"))
    second = Host(tmp_path / "second", index=1, tls=str(tmp_path / "tls"))
    try:
        first.save(10, state="x" * SMALL * 2)
        sources = {"worker-0": address}
        prefetch = ins.PrefetchSnapshot("worker-host-1", SnapshotId(10, 1), sources)

        # The porter of the first host may still be starting.
        def is_fetched() -> bool:
            second.staging.prefetch(prefetch)
            before = len(second.events)
            wait(second, "an answer", lambda: len(second.events) > before)
            return second.events[-1] == ev.SnapshotPrefetched("worker-host-1", SnapshotId(10, 1))

        eventually("the part is fetched", is_fetched)
        first.staging.close()  # the host is lost
        second.staging.prepare(ins.PrepareHost("worker-host-1", SnapshotId(10, 1), 2, sources))
        before = len(second.events)
        wait(second, "it is prepared", lambda: len(second.events) > before)
        assert second.events[-1] == ev.HostPrepared("worker-host-1", SnapshotId(10, 1), from_hosts=True)
        fetched = second.folder / "fetched-parts" / "worker-host-1" / "worker-0" / "step-10-g1"
        restored = Path(second.staging.environment("worker-1", 2, "step-10-g1")["PACELINE_RESTORE"])
        assert (restored / "state").samefile(fetched / "state")
        second.staging.close()
        second.start()  # another agent: the machine may have restarted meanwhile
        assert not fetched.exists()
        second.staging.tidy()
        assert not (second.folder / "restored").exists() and not (second.folder / "fetched-parts").exists()
    finally:
        first.staging.close()
        second.staging.close()
        signal.set_wakeup_fd(-1)
