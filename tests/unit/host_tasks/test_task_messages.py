"""Messages from and to the tasks of a host, and hostile ones."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.net import messages
from paceline.agent.spares import spare
from paceline.agent.tasks import exit_causes
from paceline.plan import INGEST
from support.task_hosts import ABORT, TWO, Host
from support.worlds import make_plan

# ---- messages from and to tasks


def test_reports_of_tasks_are_in_the_heartbeat(host: Host) -> None:
    process = host.start_one()
    process.reports(step=7, loss=0.5)
    host.clock.run_ready()
    assert host.connection.beats == 1  # the first step is reported immediately
    host.clock.pass_time(2.0)
    process.reports(step=8)
    host.clock.run_ready()
    assert host.connection.beats == 1
    host.clock.pass_time(1.0)
    step, step_age, output_age, metrics = host.tasks.heartbeat(1).tasks["worker-0"].to_wire()
    assert (step, step_age, output_age, metrics) == (8, 1.0, 3.0, {"loss": 0.5})
    assert host.tasks.heartbeat(1).memory == 0.25 and host.tasks.heartbeat(1).asking == ()


def test_a_metric_that_is_not_finite_is_reported_once_in_an_attempt(host: Host) -> None:
    process = host.start_one()
    process.reports(step=7, loss=float("nan"), norm=float("-inf"), size=10**400)
    process.reports(step=8, loss=float("nan"))
    host.clock.run_ready()
    fields = {"type": "not-finite", "task": "worker-0", "step": 7}
    first = {**fields, "attempt": 1, "metric": "loss", "value": "NaN"}
    assert host.connection.take("not-finite") == [first, {**first, "metric": "norm", "value": "-Infinity"}]
    assert host.tasks.heartbeat(1).tasks["worker-0"].metrics == {}
    host.exits(process, 0)
    assert [each.metric for each in host.tasks.not_finite.all()] == ["loss", "norm"], "for the next captain"
    host.start_one(attempt=2).reports(loss=float("inf"))
    host.clock.run_ready()
    assert host.connection.take("not-finite") == [{**first, "attempt": 2, "value": "Infinity", "step": None}]
    assert len(host.tasks.not_finite.all()) == 1


def test_a_metric_of_an_evaluation_that_is_not_finite_is_reported_with_its_step(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    host.start_one("evaluator-0").reports(_="not-finite", metric="accuracy", value=float("nan"), step=20)
    host.clock.run_ready()
    [report] = host.connection.take("not-finite")
    assert (report["task"], report["metric"], report["step"]) == ("evaluator-0", "accuracy", 20)


def test_only_numbers_that_are_not_finite_are_reported_and_only_so_many(host: Host) -> None:
    process = host.start_one()
    odd = {"metric": "", "value": "NaN", "step": True}
    for fields in (odd, {**odd, "metric": [], "value": float("nan")}, {**odd, "metric": "a"}, {"metric": "a"}):
        process.reports(_="not-finite", **fields)
    host.clock.run_ready()
    assert host.connection.take("not-finite") == []
    process.reports(_="not-finite", metric="x" * 300, value=float("nan"), step=2**60)
    for number in range(150):
        process.reports(**{f"metric {number}": float("nan")})
    host.clock.run_ready()
    reports = host.connection.take("not-finite")
    assert len(reports) == 100 and (reports[0]["metric"], reports[0]["step"]) == ("x" * 100, None)


def test_a_task_that_asks_for_snapshots_is_named_in_the_heartbeat(host: Host) -> None:
    host.start_one("worker-0").reports(_="asks")
    host.start_one("worker-1")
    host.clock.run_ready()
    assert host.tasks.heartbeat(1).asking == ("worker-0",) and host.connection.beats == 1


def test_a_saved_snapshot_is_reported_immediately(host: Host) -> None:
    process = host.start_one()
    (host.folder / "staging/worker-0/g1/step-10").mkdir()
    process.reports(_="saved")
    host.clock.run_ready()
    [saved] = host.connection.take("saved")
    assert (saved["task"], saved["snapshot"]) == ("worker-0", [10, 1])


def test_the_agent_looks_for_snapshots_once_however_many_are_reported(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking through a folder with many files takes a while, in which it sends no heartbeat."""
    process = host.start_one()
    for step in (10, 20, 30):
        (host.folder / f"staging/worker-0/g1/step-{step}").mkdir()
        process.reports(_="saved")
    looks = []
    collect = host.staging.collect
    monkeypatch.setattr(host.staging, "collect", lambda: (looks.append(1), collect()))
    host.clock.run_ready()
    assert len(looks) == 1
    assert [saved["snapshot"] for saved in host.connection.take("saved")] == [[10, 1], [20, 1], [30, 1]]
    host.clock.run_ready()
    assert len(looks) == 1


def test_the_last_snapshot_of_a_task_is_reported_before_its_end(host: Host) -> None:
    process = host.start_one()
    (host.folder / "staging/worker-0/g1/step-10").mkdir()
    host.connection.sent.clear()
    host.exits(process, 0)
    assert [message["type"] for message in host.connection.sent] == ["saved", "exited", "ended"]


def test_warnings_are_passed_on_and_truncated(host: Host) -> None:
    host.start_one().reports(_="warning", text="x" * 3000)
    host.clock.run_ready()
    assert host.connection.texts == ["worker-0: " + "x" * 2000]


def test_a_task_may_request_a_snapshot(host: Host) -> None:
    host.start_one().reports(_="save")
    host.clock.run_ready()
    assert host.connection.take("save") == [{"type": "save", "task": "worker-0"}]


@pytest.mark.parametrize(("fields", "step"), [({}, 6), ({"step": 9}, 9), ({"step": 0}, 0)])
def test_a_task_may_agree_on_a_step(host: Host, fields: dict[str, int], step: int) -> None:
    process = host.start_one()
    process.reports(step=6)
    process.reports(_="agree", say="here", which=1, count=2, **fields)
    host.clock.run_ready()
    reply = {"task": "worker-0", "say": "here", "which": 1, "count": 2, "step": step}
    assert host.connection.take("agree") == [{"type": "agree", **reply}]


def test_a_task_may_follow_snapshots(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    host.start_one("evaluator-0").reports(_="follow", wants=True)
    host.clock.run_ready()
    assert host.connection.take("follow") == [{"type": "follow", "task": "evaluator-0"}]


def test_a_task_that_has_ended_no_longer_follows(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    process = host.start_one("evaluator-0")
    process.reports(_="follow", wants=True)
    host.clock.run_ready()
    assert host.following.follows() == {"evaluator-0": None}
    host.exits(process, 1 << 8)
    assert host.following.follows() == {}


def test_the_data_location_of_an_ingest_is_reported_and_stored(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST)
    process.reports(_="ingest", stage="making")
    host.clock.run_ready()
    nothing = {"data": "", "run": "", "made": False, "files": 0, "size": 0}
    assert host.connection.take("ingest") == [{"type": "ingest", **nothing, "stage": "making"}]
    assert host.tasks.notes.data == ""
    fields = {"stage": "there", "data": "/data/3f9a", "run": "run", "made": True, "files": 2, "size": 10}
    process.reports(_="ingest", **fields, more="is left out")
    host.clock.run_ready()
    assert host.connection.take("ingest") == [{"type": "ingest", **fields}]
    host.begin_agent()
    assert host.tasks.notes.data == "/data/3f9a"


@pytest.mark.parametrize("data", ["/data/\0", "/data/\ud800"])
def test_data_whose_location_cannot_be_a_variable_of_tasks_counts_as_missing(
    make: Callable[..., Host], data: str
) -> None:
    host = make(make_plan(1, ingest=True))
    host.start_one(INGEST).reports(_="ingest", stage="there", data=data)
    host.clock.run_ready()
    assert host.connection.take("ingest") == [] and host.tasks.notes.data == ""
    report = {"type": "ingest", "stage": "there", "data": data}
    assert messages.read_member(report, host.name) == ev.IngestProgress(host.name, "there")


@pytest.mark.parametrize("datagram", [b"nonsense", b"[]", b'{"_": "novel"}', b'{"step": true}', b'{"step": 1e400}'])
def test_an_invalid_report_is_ignored(host: Host, datagram: bytes) -> None:
    process = host.start_one()
    host.connection.sent.clear()
    process._reports.send(datagram)
    host.clock.run_ready()
    assert host.tasks.attempts["worker-0"].step is None and host.connection.sent == [] and host.connection.beats == 0


def test_messages_of_the_captain_reach_the_tasks_that_run(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.tasks.tell(["worker-1", "worker-7"], {"agreed": 12})
    assert (first.received(), second.received()) == ([], [{"agreed": 12}])


def test_a_task_that_does_not_listen_blocks_nothing(host: Host) -> None:
    process = host.start_one()
    host.tasks.attempts["worker-0"]._reports.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for number in range(10_000):
        host.tasks.tell(["worker-0"], {"agreed": number})
    assert 0 < len(process.received()) < 10_000


# ---- secrets


def secretive(make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose tasks have a token from a Secret and one from the job file."""
    monkeypatch.setenv("STORE_TOKEN", "from-a-secret-" + "x" * 20)
    roles = tuple(replace(role, env={**role.env, "API_KEY": "from-the-job-file"}) for role in TWO.roles)
    return make(replace(TWO, roles=roles))


@pytest.mark.parametrize("how", ["raised", "traceback", "last line"])
def test_why_a_task_ended_is_reported_without_its_secrets(
    how: str, make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the text is cut within a secret."""
    host = secretive(make, monkeypatch)
    process = host.start_one()
    text = f"{'no ' * 92}{os.environ['STORE_TOKEN']} nor from-the-job-file"
    if how == "raised":
        process.raises(text=f"from-the-job-file {text}")
    elif how == "traceback":
        process.prints(f'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: {text}\n')
    else:
        process.prints(f"{text}\n")
    host.clock.run_ready()
    host.exits(process, 1 << 8)
    detail = host.exit()["detail"]
    assert "***" in detail and "from-" not in detail
    assert how == "raised" or "from-the-job-file" in host.log()[-1], "the log is what the program wrote"


def test_warnings_and_stacks_are_reported_without_secrets(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = secretive(make, monkeypatch)
    process = host.start_one()
    process.reports(_="warning", text=f"slow: {os.environ['STORE_TOKEN']} https://me:pw@host/x")
    host.clock.run_ready()
    assert host.connection.texts[-1] == "worker-0: slow: *** https://***@host/x"
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    process.prints("Fatal Python error: Aborted\n  from-the-job-file\n")
    host.exits(process, ABORT)
    (ended,) = host.connection.take("ended")
    assert ended["stacks"]["worker-0"].splitlines()[1] == "  ***"


# ---- what a task may write


DEEP = b"[" * 900 + b"]" * 900
DEEPER = b"[" * 30_000 + b"]" * 30_000
ODD_VALUES = (
    b"1" * 4000, b"-1", b"1e999", b"NaN", b"-Infinity", b"true", b"null", b'""', b'"' + b"\x7f" * 60_000 + b'"',
    rb'"\ud800"', b'"\xc2\x80"', b"[]", b"{}", DEEP, DEEPER, b"9007199254740992",
)  # fmt: skip
KINDS = (b"saved", b"warning", b"asks", b"save", b"agree", b"follow", b"ingest", b"cold", b"raised", b"x")
FIELDS = (
    b"step", b"text", b"say", b"which", b"count", b"stage", b"data", b"run", b"made", b"files", b"size", b"why",
    b"type", b"place", b"done", b"wants", b"metrics", b"loss", b"cause", b"detail",
)  # fmt: skip


@pytest.mark.parametrize("name", ["worker-0", INGEST])
def test_nothing_that_a_task_reports_harms_its_agent(make: Callable[..., Host], name: str) -> None:
    """The captain accepts every message that follows: `Connection.send` checks that."""
    host = make(make_plan(1, ingest=True))
    process = host.start_one(name)
    datagrams = [b"", b"\xff\xfe", b"nonsense", b"{", b"[1]", b"1", DEEP, DEEPER, b"\0" * 60_000]
    for kind in KINDS:
        head = b'{"_":"' + kind + b'",'
        agree = b'"say":"yes","which":1,"count":1,' if kind == b"agree" else b""
        datagrams += [head + agree + b'"' + field + b'":' + value + b"}" for field in FIELDS for value in ODD_VALUES]
    datagrams += [b'{"' + field + b'":' + value + b"}" for field in FIELDS for value in ODD_VALUES]
    for datagram in datagrams:
        process.sends(datagram)
        host.clock.run_ready()
        host.connection.send(host.tasks.heartbeat(1))
        host.connection.sent.clear()
    process.reports(step=7, loss=0.5)
    host.clock.run_ready()
    assert host.tasks.attempts[name].step == 7
    host.exits(process, 1 << 8)
    assert host.exit()["task"] == name


def test_a_training_task_cannot_report_data_as_ingested(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    host.start_one().reports(_="ingest", stage="there", data="/elsewhere")
    host.clock.run_ready()
    assert host.connection.take("ingest") == [] and host.tasks.notes.data == ""


HOSTILE_OUTPUT = {
    "an endless name of an exception": 'Traceback (most recent call last):\n  File "x", line 1\n' + 65_000 * "A" + " !",
    "many such names": ('Traceback (most recent call last):\n  File "x", line 1\n' + 999 * "A" + "!\n") * 133,
    "many possible survivors": "task " * 13_000 + "\n",
    "400 long lines": ("gloo" * 16_000 + "\n") * 400,
    "null characters and escapes": "\0\x1b[2J\r" * 10_000 + "\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", HOSTILE_OUTPUT)
def test_the_cause_is_found_quickly_in_any_output(case: str) -> None:
    """An agent that is busy for seconds is killed."""
    lines = [line[:65536] for line in HOSTILE_OUTPUT[case].splitlines()[-400:]]
    began = time.process_time()
    assert exit_causes.classify(1 << 8, lines).kind
    exit_causes.own_error(lines)
    assert time.process_time() - began < 4


INVALID_SPARE_MESSAGES = (
    b"\xff", b"{", b"1", b'"ready"', b"[]", b"{}", b'{"ready":1}', b'{"ready":{"rss":1,"modules":1,"seconds":"x"}}',
    b'{"ready":{"rss":1,"modules":1,"seconds":1e999}}', b'{"started":"x"}', b'{"started":true}', b'{"started":1}',
    b'{"started":-1}', b'{"unfit":[1]}', b'{"unfit":' + DEEPER + b"}", DEEPER, str({"started": os.getpid()}).encode(),
    json.dumps({"started": os.getpid()}).encode(), json.dumps({"started": 10**30}).encode(),
)  # fmt: skip


@pytest.mark.parametrize("data", INVALID_SPARE_MESSAGES, ids=range(len(INVALID_SPARE_MESSAGES)))  # some contain a pid
def test_a_spare_that_sends_an_invalid_message_is_not_used(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.setblocking(False)
        agent_side = spare.Spare(12345, ours, {})
        theirs.send(data)
        assert [type(message) for message in agent_side.receive()] == [spare.Unfit]
        agent_side.close()


def test_any_record_of_imports_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    state = b'{"environment":{},"path":["/x"],"late":false}'
    lines = [
        b'{"environment":1,"path":[],"late":false}', b'{"environment":{"a":1},"path":[],"late":false}',
        b'{"environment":{},"path":5,"late":false}', b'{"environment":{},"path":[1],"late":false}',
        b'{"environment":{},"path":[],"late":"x"}', b'"json"', DEEPER, b"\xff", b"{", state, b'"numpy"', b"5", DEEP,
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert spare.read_record(path) == (spare.State({}, ("/x",), False, ("numpy",)),)
    path.unlink()
    os.mkfifo(path)
    assert spare.read_record(path) == (), "a pipe without a writer"
