"""Data that is made once: what it is known by, whose turn it is to make it, and when the captain goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline import plan as plans
from paceline.agent import events as ev
from paceline.job import JobError, load_text
from paceline.plan import INGEST
from paceline.storage.data import MANIFEST, Data, Made
from paceline.storage.folder import Folder
from paceline.storage.inputs import Missing, fingerprint, named
from paceline.storage.manifest import Damaged
from paceline.storage.snapshots import Unfit
from paceline.storage.turns import GONE_S, Lost, Turns, this_process
from support.worlds import LEASE, Memory, World, make_plan, up

# ---- what data is known by


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "raw").mkdir(parents=True)
    (folder / "pkg").mkdir()
    for name in ("ingest.py", "raw/a.txt", "raw/b.txt", "other.txt", "pkg/make.py"):
        (folder / name).write_text(name)
    return folder


def mark(code: Path, *command: str, inputs: list[str] | None = None, **variables: str) -> str:
    return fingerprint(
        command or ("python", "ingest.py", "raw"), inputs, str(code), variables, lambda _: [("", 1, "a")]
    )


def test_the_same_gives_the_same_wherever_it_is(code: Path, tmp_path: Path) -> None:
    before = mark(code)
    (code / "raw" / "__pycache__").mkdir()
    (code / "raw" / "__pycache__" / "a.pyc").write_text("left by a run")
    (code / "other.txt").write_text("nothing that the command names")
    code.rename(tmp_path / "elsewhere")
    assert mark(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("path", ["ingest.py", "raw/a.txt", "raw/new.txt"])
def test_a_file_that_the_command_names_counts(code: Path, path: str) -> None:
    before = mark(code)
    (code / path).write_text("changed")
    assert mark(code) != before


def test_the_command_and_variables_and_buckets_count(code: Path) -> None:
    assert mark(code, "python", "ingest.py", "--large") != mark(code, "python", "ingest.py")
    assert mark(code, inputs=["$LANGUAGES"], LANGUAGES="pt") != mark(code, inputs=["$LANGUAGES"], LANGUAGES="en")
    one = fingerprint(["a"], ["s3://raw/a"], str(code), {}, lambda _: [("", 1, "tag-1")])
    two = fingerprint(["a"], ["s3://raw/a"], str(code), {}, lambda _: [("", 1, "tag-2")])
    assert one != two
    with pytest.raises(Missing, match="there is nothing at s3://raw/a"):
        fingerprint(["a"], ["s3://raw/a"], str(code), {}, lambda _: [])


def test_with_inputs_only_these_count(code: Path) -> None:
    before = mark(code, inputs=["raw/*.txt"])
    (code / "ingest.py").write_text("a comment")
    assert mark(code, inputs=["raw/*.txt"]) == before
    with pytest.raises(Missing, match=r"nothing is called raw/\*\.csv in "):
        mark(code, inputs=["raw/*.csv"])


def test_what_a_command_names(code: Path) -> None:
    assert named(["python", "-m", "pkg.make", "raw", ".", "/etc/passwd", "../code"], str(code)) == [
        "pkg/make.py",
        "raw",
    ]
    assert named(["cp", "s3://raw/pt-en.tsv", "s3://made/data/1"], str(code), "s3://made/data") == [
        "s3://raw/pt-en.tsv"
    ]


def test_what_a_command_names_in_a_bucket_counts_where_it_is_there(code: Path) -> None:
    marks = [
        fingerprint(["cp", "s3://raw/a"], None, str(code), {}, lambda _, tags=tags: [("", 1, tag) for tag in tags])  # type: ignore[misc]
        for tags in ((), ("tag-1",), ("tag-2",))
    ]
    assert len(set(marks)) == 3


def test_where_the_data_goes_is_no_input(code: Path) -> None:
    words = ["python", "raw"], None, str(code), {}, list
    before = fingerprint(*words, without=str(code / "raw" / "made"))  # type: ignore[arg-type]
    (code / "raw" / "made").mkdir()
    (code / "raw" / "made" / "data").write_text("data")
    assert fingerprint(*words, without=str(code / "raw" / "made")) == before  # type: ignore[arg-type]


# ---- whose turn it is


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def turns(store: Memory, run: str, clock: Clock, process: str = "elsewhere") -> Turns:
    return Turns(store, ".turns/mark", run, clock, process)


def test_one_after_the_other() -> None:
    store, clock = Memory(), Clock()
    first, second = turns(store, "first", clock), turns(store, "second", clock)
    assert first.take() is None
    assert second.take() == "first"
    for _ in range(20):
        clock.now += GONE_S / 2
        first.renew()
        assert second.take() == "first"
    first.leave()
    assert second.take() is None
    assert len(store.names("")) == 1


def test_one_that_is_not_heard_of_loses_its_turn_to_one_of_those_who_wait() -> None:
    store, clock = Memory(), Clock()
    first, second, third = (turns(store, run, clock) for run in ("first", "second", "third"))
    assert first.take() is None
    assert second.take() == third.take() == "first"
    clock.now += GONE_S - 1
    assert second.take() == "first"
    clock.now += 2
    assert second.take() is None
    assert third.take() == "second"
    with pytest.raises(Lost):
        first.renew()
    first.leave()
    assert third.take() == "second"


def test_a_process_of_this_machine_that_is_gone_need_not_be_waited_for() -> None:
    store, clock = Memory(), Clock()
    nobody = Path("/proc/sys/kernel/pid_max").read_text().strip()  # every process has a lower number
    gone = this_process().replace(f" {os.getpid()} ", f" {nobody} ")
    assert turns(store, "gone", clock, gone).take() is None
    assert turns(store, "lives", clock, this_process()).take() is None
    assert turns(store, "next", clock, this_process()).take() == "lives"


# ---- at its place


def test_data_is_there_with_its_manifest_and_never_written_over(tmp_path: Path) -> None:
    to = tmp_path / "data"
    data = Data(Folder(str(to)), str(to), "mark")
    assert (data.newest(), data.next_name()) == (None, "mark")
    scratch = Path(data.scratch(""))
    (scratch / "a").mkdir()
    (scratch / "a" / "b.txt").write_text("b")
    made = Made("mark", "run", "now", data.put(str(scratch), "mark", {}))
    assert (data.newest(), data.next_name(), scratch.exists()) == (None, "mark-2", False)
    data.complete(made, lambda: None)
    assert data.newest() == made
    (to / "mark-2").mkdir()
    assert (data.newest(), data.next_name()) == (made, "mark-3")
    (to / f"mark{MANIFEST}").write_text("{}")
    with pytest.raises(Damaged):
        data.newest()


def test_what_a_killed_one_has_left_goes_before_the_next(tmp_path: Path) -> None:
    data, other = (Data(Folder(str(tmp_path)), str(tmp_path), mark) for mark in ("mark", "other"))
    left, beside = data.scratch(""), other.scratch("")
    again = data.scratch("")
    assert (Path(left).exists(), Path(beside).exists(), list(Path(again).iterdir())) == (False, True, [])


def test_what_cannot_be_data(tmp_path: Path) -> None:
    data = Data(Folder(str(tmp_path)), str(tmp_path), "mark")
    scratch = Path(data.scratch(""))
    with pytest.raises(Unfit, match="PACELINE_INGEST_DIR is empty"):
        data.put(str(scratch), "mark", {})
    (scratch / "link").symlink_to("/etc/passwd")
    with pytest.raises(Unfit, match="'link' is no file: data holds files and folders"):
        data.put(str(scratch), "mark", {})


# ---- the captain


def test_no_generation_begins_before_the_data_is_there() -> None:
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


def test_hosts_have_their_time_from_the_data_on() -> None:
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


def test_an_error_of_the_program_ends_the_run() -> None:
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


def test_a_signal_is_tried_again_as_often_as_it_may() -> None:
    world = up_to_ingest(limit=2)
    for _ in range(3):
        assert world.over is None
        world.exit(INGEST, "signal")
        world.pass_time(10)
        world.deliver_all()
    assert world.over is not None and world.over.cause == "signal"
    assert world.kinds().count("ingest-failed") == 3


def test_it_has_its_limit_with_all_tries() -> None:
    world = up_to_ingest(ingest_limit=100.0)
    world.pass_time(60)
    world.exit(INGEST, "signal")
    world.deliver_all()
    world.pass_time(50)
    world.deliver_all()
    world.pass_time(1)
    assert world.over is not None
    assert world.over.reason == "the data was not there within 100 s, which is ingest.limit"


def test_a_lost_host_makes_it_again_once_its_lease_is_over() -> None:
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
def test_a_captain_that_returns_goes_on_with_what_is_being_made(notes: bool) -> None:
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
def test_a_captain_that_returns_knows_where_the_data_is(notes: bool) -> None:
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


def test_where_it_is_may_have_to_be_found_again() -> None:
    """All hosts and the captain were lost at once: what is at its place is found there."""
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


def test_a_stop_ends_it_with_grace() -> None:
    world = up_to_ingest()
    world.tell(ev.Stop("stopped by a person"))
    ends = [each for each in world.machines["worker-host-0"].inbox if isinstance(each, ev.End)]
    assert [(end.tasks, end.how) for end in ends] == [({INGEST: 1}, "term")]
    world.deliver_all()
    assert world.over is not None and world.over.status == "stopped"


# ---- where it may go on a cluster


@pytest.mark.parametrize(
    ("to", "volume", "message"),
    [
        ("data", "claim: data", "is a folder, and pods have none in common; name a bucket, a volume claim "),
        ("/elsewhere/d", "claim: data", "is a folder, and pods have none in common; name a bucket, a volume claim "),
        ("/data/d", "empty: 1Gi", "is below /data, which is no claim and goes with its pod; name a claim there"),
        ("/data/d", "claim: data, read_only: true", "is below /data, which is mounted read-only; remove read_only "),
        ("/data/d", "claim: data", ""),
        ("claim://data/d", "empty: 1Gi", ""),
        ("s3://data/d", "empty: 1Gi", ""),
    ],
)
def test_where_data_may_go_on_a_cluster(code: Path, to: str, volume: str, message: str) -> None:
    text = (
        "name: digits\nframework: none\ncommand: [python, ingest.py]\n"
        f"ingest: {{command: [python, ingest.py], to: '{to}'}}\n"
        f"kubernetes: {{image: a, volumes: [{{mount: /data, {volume}}}]}}\n"
    )
    plan = plans.make(load_text(text, "job.yaml", code).job)
    assert plan.ingest is not None and plans.from_data(plans.to_data(plan)) == plan
    assert plan.ingest.to == (str(code / "data") if to == "data" else to)
    if message:
        with pytest.raises(JobError) as wrong:
            load_text(text, "job.yaml", code, cluster=True)
        assert f"job.yaml:4: ingest.to: {message}" in str(wrong.value)
    else:
        load_text(text, "job.yaml", code, cluster=True)
