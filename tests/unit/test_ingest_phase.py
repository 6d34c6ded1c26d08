"""Data that is created once: its fingerprint, the lease for creating it, and when the captain continues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline import plan as plans
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.job import JobError, load_text, planning
from paceline.plan import INGEST
from paceline.storage.ingested.dataset import MANIFEST, DatasetManifest, DatasetStore
from paceline.storage.ingested.fingerprint import MissingInput, fingerprint, named
from paceline.storage.ingested.lease import GONE_S, Lease, LeaseLost, this_process
from paceline.storage.snapshots.manifest import Damaged
from paceline.storage.snapshots.repository import Unfit
from paceline.storage.stores.folder import FolderStore
from support.worlds import LEASE, Memory, World, make_plan, up

# ---- the fingerprint of data


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "raw").mkdir(parents=True)
    (folder / "pkg").mkdir()
    for name in ("ingest.py", "raw/a.txt", "raw/b.txt", "other.txt", "pkg/make.py"):
        (folder / name).write_text(name)
    return folder


def fingerprint_of(code: Path, *command: str, inputs: list[str] | None = None, **variables: str) -> str:
    return fingerprint(
        command or ("python", "ingest.py", "raw"), inputs, str(code), variables, lambda _: [("", 1, "a")]
    )


def test_the_fingerprint_does_not_depend_on_the_location_of_the_code(code: Path, tmp_path: Path) -> None:
    before = fingerprint_of(code)
    (code / "raw" / "__pycache__").mkdir()
    (code / "raw" / "__pycache__" / "a.pyc").write_text("left by a run")
    (code / "other.txt").write_text("nothing that the command names")
    code.rename(tmp_path / "elsewhere")
    assert fingerprint_of(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("path", ["ingest.py", "raw/a.txt", "raw/new.txt"])
def test_a_file_that_the_command_names_changes_the_fingerprint(code: Path, path: str) -> None:
    before = fingerprint_of(code)
    (code / path).write_text("changed")
    assert fingerprint_of(code) != before


def test_the_command_variables_and_buckets_change_the_fingerprint(code: Path) -> None:
    assert fingerprint_of(code, "python", "ingest.py", "--large") != fingerprint_of(code, "python", "ingest.py")
    assert fingerprint_of(code, inputs=["$LANGUAGES"], LANGUAGES="pt") != fingerprint_of(
        code, inputs=["$LANGUAGES"], LANGUAGES="en"
    )
    one = fingerprint(["a"], ["s3://raw/a"], str(code), {}, lambda _: [("", 1, "tag-1")])
    two = fingerprint(["a"], ["s3://raw/a"], str(code), {}, lambda _: [("", 1, "tag-2")])
    assert one != two
    with pytest.raises(MissingInput, match="nothing exists at s3://raw/a"):
        fingerprint(["a"], ["s3://raw/a"], str(code), {}, lambda _: [])


def test_with_inputs_only_these_change_the_fingerprint(code: Path) -> None:
    before = fingerprint_of(code, inputs=["raw/*.txt"])
    (code / "ingest.py").write_text("a comment")
    assert fingerprint_of(code, inputs=["raw/*.txt"]) == before
    with pytest.raises(MissingInput, match=r"nothing matches raw/\*\.csv in "):
        fingerprint_of(code, inputs=["raw/*.csv"])


def test_inputs_that_a_command_names(code: Path) -> None:
    assert named(["python", "-m", "pkg.make", "raw", ".", "/etc/passwd", "../code"], str(code)) == [
        "pkg/make.py",
        "raw",
    ]
    assert named(["cp", "s3://raw/pt-en.tsv", "s3://made/data/1"], str(code), "s3://made/data") == [
        "s3://raw/pt-en.tsv"
    ]


def test_an_object_that_a_command_names_changes_the_fingerprint_if_it_exists(code: Path) -> None:
    marks = [
        fingerprint(["cp", "s3://raw/a"], None, str(code), {}, lambda _, tags=tags: [("", 1, tag) for tag in tags])  # type: ignore[misc]
        for tags in ((), ("tag-1",), ("tag-2",))
    ]
    assert len(set(marks)) == 3


def test_the_location_for_the_data_is_not_an_input(code: Path) -> None:
    arguments = ["python", "raw"], None, str(code), {}, list
    before = fingerprint(*arguments, without=str(code / "raw" / "made"))  # type: ignore[arg-type]
    (code / "raw" / "made").mkdir()
    (code / "raw" / "made" / "data").write_text("data")
    assert fingerprint(*arguments, without=str(code / "raw" / "made")) == before  # type: ignore[arg-type]


# ---- the lease


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_lease(store: Memory, run: str, clock: Clock, process: str = "elsewhere") -> Lease:
    return Lease(store, ".turns/mark", run, clock, process)


def test_one_run_at_a_time_has_the_lease() -> None:
    store, clock = Memory(), Clock()
    first, second = make_lease(store, "first", clock), make_lease(store, "second", clock)
    assert first.acquire() is None
    assert second.acquire() == "first"
    for _ in range(20):
        clock.now += GONE_S / 2
        first.renew()
        assert second.acquire() == "first"
    first.release()
    assert second.acquire() is None
    assert len(store.names("")) == 1


def test_a_run_that_does_not_renew_its_lease_loses_it_to_one_that_waits() -> None:
    store, clock = Memory(), Clock()
    first, second, third = (make_lease(store, run, clock) for run in ("first", "second", "third"))
    assert first.acquire() is None
    assert second.acquire() == third.acquire() == "first"
    clock.now += GONE_S - 1
    assert second.acquire() == "first"
    clock.now += 2
    assert second.acquire() is None
    assert third.acquire() == "second"
    with pytest.raises(LeaseLost):
        first.renew()
    first.release()
    assert third.acquire() == "second"


def test_the_lease_of_a_dead_process_of_this_machine_is_free() -> None:
    store, clock = Memory(), Clock()
    unused_pid = Path("/proc/sys/kernel/pid_max").read_text().strip()  # every process has a lower number
    dead_process = this_process().replace(f" {os.getpid()} ", f" {unused_pid} ")
    assert make_lease(store, "gone", clock, dead_process).acquire() is None
    assert make_lease(store, "lives", clock, this_process()).acquire() is None
    assert make_lease(store, "next", clock, this_process()).acquire() == "lives"


# ---- the stored data


def test_data_exists_once_it_has_a_manifest_and_is_never_overwritten(tmp_path: Path) -> None:
    to = tmp_path / "data"
    data = DatasetStore(FolderStore(str(to)), str(to), "mark")
    assert (data.newest(), data.next_name()) == (None, "mark")
    scratch = Path(data.scratch(""))
    (scratch / "a").mkdir()
    (scratch / "a" / "b.txt").write_text("b")
    manifest = DatasetManifest("mark", "run", "now", data.put(str(scratch), "mark", {}))
    assert (data.newest(), data.next_name(), scratch.exists()) == (None, "mark-2", False)
    data.complete(manifest, lambda: None)
    assert data.newest() == manifest
    (to / "mark-2").mkdir()
    assert (data.newest(), data.next_name()) == (manifest, "mark-3")
    (to / f"mark{MANIFEST}").write_text("{}")
    with pytest.raises(Damaged):
        data.newest()


def test_the_scratch_folder_of_a_killed_ingest_is_removed_before_the_next(tmp_path: Path) -> None:
    data, other = (DatasetStore(FolderStore(str(tmp_path)), str(tmp_path), name) for name in ("mark", "other"))
    stale, unrelated = data.scratch(""), other.scratch("")
    scratch = data.scratch("")
    assert (Path(stale).exists(), Path(unrelated).exists(), list(Path(scratch).iterdir())) == (False, True, [])


def test_invalid_data_is_refused(tmp_path: Path) -> None:
    data = DatasetStore(FolderStore(str(tmp_path)), str(tmp_path), "mark")
    scratch = Path(data.scratch(""))
    with pytest.raises(Unfit, match="PACELINE_INGEST_DIR is empty"):
        data.put(str(scratch), "mark", {})
    (scratch / "link").symlink_to("/etc/passwd")
    with pytest.raises(Unfit, match="'link' is not a regular file: data can contain only files and folders"):
        data.put(str(scratch), "mark", {})


# ---- the captain


def test_no_generation_starts_before_the_data_exists() -> None:
    world = World(make_plan(2, ingest=True))
    world.join("worker-host-0")  # the others may still be in a queue
    world.deliver_all()
    assert [name for name, _ in world.running()] == [INGEST]
    world.join_all()
    world.pass_time(1000)
    assert [name for name, _ in world.running()] == [INGEST]
    world.exit(INGEST, "")
    world.deliver_all()
    assert sorted(name for name, _ in world.running()) == ["worker-0", "worker-1"]
    assert world.last("ingest-done")["data"] == "/data/fingerprint"


def test_the_start_limit_counts_from_when_the_data_exists() -> None:
    world = World(make_plan(2, ingest=True, start=300.0))
    world.join("worker-host-0")
    world.deliver_all()
    world.pass_time(1000)
    world.exit(INGEST, "")
    world.pass_time(200)
    assert "run-ended" not in world.kinds() and "waiting" in world.kinds()
    world.pass_time(200)
    assert world.over is None or world.over.cause == "start-timeout"
    world.deliver_all()
    assert world.over is not None and world.over.cause == "start-timeout"


def test_a_program_error_of_an_ingest_ends_the_run() -> None:
    world = up_to_ingest()
    world.exit(INGEST, "program-error", "ingest.py:3")
    world.deliver_all()
    assert world.over is not None
    assert (world.over.status, world.over.reason) == ("failed", "ingest failed: program-error of ingest-0")
    assert "restart" not in world.kinds()


def up_to_ingest(**more: object) -> World:
    world = World(make_plan(2, ingest=True, **more))  # type: ignore[arg-type]
    world.join_all()
    world.deliver_all()
    return world


def test_an_ingest_killed_by_a_signal_is_retried_up_to_the_limit() -> None:
    world = up_to_ingest(limit=2)
    for _ in range(3):
        assert world.over is None
        world.exit(INGEST, "signal")
        world.pass_time(10)
        world.deliver_all()
    assert world.over is not None and world.over.cause == "signal"
    assert world.kinds().count("ingest-failed") == 3


def test_the_ingest_limit_covers_all_attempts() -> None:
    world = up_to_ingest(ingest_limit=100.0)
    world.pass_time(60)
    world.exit(INGEST, "signal")
    world.deliver_all()
    world.pass_time(50)
    world.deliver_all()
    world.pass_time(1)
    assert world.over is not None
    assert world.over.reason == "the data was not ready within 100 s (ingest.limit)"


def test_an_ingest_of_a_lost_host_restarts_once_its_lease_has_ended() -> None:
    world = up_to_ingest()
    world.host_is_replaced("worker-host-0", dead=False)
    world.join_all()
    world.deliver_all()
    assert [name for name, _ in world.running()] == [INGEST]  # the old one
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert [process.attempt for _, process in world.running()] == [2]
    world.exit(INGEST, "")
    world.deliver_all()
    assert "generation-formed" in world.kinds()


@pytest.mark.parametrize("notes", [True, False])
def test_a_returning_captain_continues_with_a_running_ingest(notes: bool) -> None:
    world = up_to_ingest()
    world.restart_captain(with_notes=notes)
    world.join_all()
    world.deliver_all()
    assert [process.attempt for _, process in world.running()] == [1]
    world.exit(INGEST, "")
    world.pass_time(LEASE + 1)
    world.deliver_all()
    assert sorted(name for name, _ in world.running()) == ["worker-0", "worker-1"]


@pytest.mark.parametrize("notes", [True, False])
def test_a_returning_captain_knows_the_location_of_the_data(notes: bool) -> None:
    world = up(make_plan(2, ingest=True))
    world.restart_captain(with_notes=notes)
    world.join_all()
    world.exit("worker-0", "signal")
    world.pass_time(LEASE + 1)
    world.deliver_all()
    world.pass_time(LEASE + 1)
    world.deliver_all()
    assert {(name, process.generation) for name, process in world.running()} == {("worker-0", 2), ("worker-1", 2)}
    assert [name for name, _ in world.started].count(INGEST) == 1


def test_the_location_of_the_data_is_found_again_if_it_was_lost() -> None:
    """All hosts and the captain were lost at once: a new ingest finds the existing data."""
    world = up(make_plan(2, ingest=True))
    world.step(1)
    for host in list(world.machines):
        generation = world.machines[host].generation
        world.host_is_replaced(host, dead=True)
        world.machines[host].generation = generation
    world.restart_captain(with_notes=False)
    world.join_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert [name for name, _ in world.running()] == [INGEST]
    world.exit(INGEST, "")
    world.deliver_all()
    assert sorted(name for name, _ in world.running()) == ["worker-0", "worker-1"]
    assert world.kinds()[-3:].count("ingest-skipped") <= 1 and "ingest-skipped" in world.kinds()


def test_a_stop_ends_an_ingest_with_grace() -> None:
    world = up_to_ingest()
    world.tell(ev.StopRequested("stopped by a user"))
    ends = [each for each in world.machines["worker-host-0"].inbox if isinstance(each, ins.EndTasks)]
    assert [(end.tasks, end.how) for end in ends] == [({INGEST: 1}, "term")]
    world.deliver_all()
    assert world.over is not None and world.over.status == "stopped"


# ---- locations on a cluster


@pytest.mark.parametrize(
    ("to", "volume", "message"),
    [
        ("data", "claim: data", "is a folder, but pods do not share a file system; use a bucket, a volume claim "),
        (
            "/elsewhere/d",
            "claim: data",
            "is a folder, but pods do not share a file system; use a bucket, a volume claim ",
        ),
        (
            "/data/d",
            "empty: 1Gi",
            "is below /data, which is not a volume claim and is lost with its pod; use a volume claim",
        ),
        ("/data/d", "claim: data, read_only: true", "is below /data, which is mounted read-only; remove read_only "),
        ("/data/d", "claim: data", ""),
        ("claim://data/d", "empty: 1Gi", ""),
        ("s3://data/d", "empty: 1Gi", ""),
    ],
)
def test_locations_for_data_on_a_cluster(code: Path, to: str, volume: str, message: str) -> None:
    text = (
        "name: digits\nframework: none\ncommand: [python, ingest.py]\n"
        f"ingest: {{command: [python, ingest.py], to: '{to}'}}\n"
        f"kubernetes: {{image: a, volumes: [{{mount: /data, {volume}}}]}}\n"
    )
    plan = planning.make_plan(load_text(text, "job.yaml", code).job)
    assert plan.ingest is not None and plans.from_data(plans.to_data(plan)) == plan
    assert plan.ingest.to == (str(code / "data") if to == "data" else to)
    if message:
        with pytest.raises(JobError) as caught:
            load_text(text, "job.yaml", code, cluster=True)
        assert f"job.yaml:4: ingest.to: {message}" in str(caught.value)
    else:
        load_text(text, "job.yaml", code, cluster=True)
