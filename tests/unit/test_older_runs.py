"""Runs that older versions of Paceline have started: this one reads them with every verb, and understands their agents.

The folders in tests/recorded_runs were recorded with `python -m support.record_runs`, one per version; if several have
the same number, the commit is added.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as plans
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.state_machine import Captain
from paceline.agent.captain_process.saved_notes import CaptainNotes
from paceline.agent.net import messages
from paceline.agent.net.frames import Decoder, encode
from paceline.storage.snapshots import chain, manifest
from paceline.view.files import plan_files
from support.record_runs import PROGRAMS, RECORDED
from support.recorded import call, supervised

VERSIONS = sorted(path.name for path in RECORDED.iterdir())
DONE, LOST = "recorded-done", "recorded-lost"


@pytest.fixture(params=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> Path:
    return RECORDED / str(request.param)


@pytest.fixture
def home(tmp_path: Path, recorded: Path) -> Path:
    for run in (DONE, LOST):
        shutil.copytree(recorded / run, tmp_path / "runs" / run)
        (tmp_path / "runs" / run / "lock").touch()
    return tmp_path


def test_ls_and_status_show_the_runs(home: Path) -> None:
    listed = {each["run"]: each for each in json.loads(call(home, "ls", "-o", "json").stdout)}
    assert {run: each["status"] for run, each in listed.items()} == {DONE: "succeeded", LOST: "failed"}
    assert all("problems" not in each for each in listed.values())
    status = json.loads(call(home, "status", DONE, "-o", "json").stdout)
    assert (status["steps"], status["generations"], status["committed"]["snapshot"]) == (4, 2, "step-4-g1")
    assert [restart["cause"] for restart in status["restarts"]] == ["program-error"]
    assert status["best"] == {"snapshot": "step-4-g1", "metric": "accuracy", "value": 0.4}
    assert {task["task"]: task["state"] for task in status["tasks"]}["worker-1"] == "succeeded"
    assert "1 restart" in call(home, "status", DONE).stdout
    assert "the supervisor ended without a report" in call(home, "status", LOST).stdout


def test_logs_and_events_are_shown(home: Path) -> None:
    assert "worker-1    | step 2" in call(home, "logs", DONE).stdout
    assert call(home, "logs", DONE, "-g", "2", "--task", "worker-0").stdout == "worker-0 | from 4\n"
    events = call(home, "events", DONE)
    assert "restarting after a failure of worker-1" in events.stdout and not events.stderr
    printed = call(home, "events", DONE, "-o", "json").stdout.replace('{"schema_version": 1, ', "{")
    assert printed == (home / "runs" / DONE / "events.jsonl").read_text()


def test_snapshots_are_listed_verified_and_copied(home: Path) -> None:
    listed = json.loads(call(home, "snapshots", "ls", DONE, "-o", "json").stdout)
    ids = [each["snapshot"] for each in (listed["snapshots"] if isinstance(listed, dict) else listed)]
    assert ids[0] == "step-4-g1"
    assert call(home, "snapshots", "verify", DONE).returncode == 0
    assert call(home, "snapshots", "get", DONE, "best", "--to", str(home / "copy")).returncode == 0
    assert (home / "copy/step").read_text() == "4"


def test_its_programs_are_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = home / "code"
    code.mkdir()
    for name, text in PROGRAMS.items():
        (code / name).write_text(text)
    started: list[Any] = []

    class Started(BaseException):
        """Raised in place of starting a program."""

    def execve(*arguments: Any) -> None:
        started.append(arguments)
        raise Started

    monkeypatch.setattr("os.execve", execve)
    with pytest.raises(Started):
        call(home, "try", DONE, "--code", str(code))
    _, argv, env = started[0]
    assert argv[-1] == "try.py" and Path(env["PACELINE_RESTORE"], "step").read_text() == "4"

    def export(program: Any) -> None:
        folder = Path(program.env["PACELINE_EXPORT_DIR"])
        (folder / "model.pt2").write_text(Path(program.env["PACELINE_RESTORE"], "step").read_text())

    monkeypatch.setattr("paceline.client.models.model_export._run", export)
    done = call(home, "export", DONE, "--to", str(home / "model"), "--code", str(code))
    assert done.returncode == 0 and (home / "model/model.pt2").read_text() == "4", done


def test_ended_runs_are_not_stopped_and_can_be_deleted(home: Path) -> None:
    assert "not running" in call(home, "stop", DONE).stderr
    snapshots = home / "runs" / LOST / "snapshots"
    kept = sorted(snapshots.rglob("manifest.json"))
    assert call(home, "delete", "-y", LOST).returncode == 0
    assert kept and sorted(snapshots.rglob("manifest.json")) == kept
    assert call(home, "delete", "-y", "--snapshots", LOST, DONE).returncode == 0
    assert list((home / "runs").iterdir()) == []


def test_a_live_run_is_asked_to_stop_as_its_captain_understands_it(
    home: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[Any, ...]] = []

    def ask(*arguments: Any) -> bool:
        requests.append(arguments)
        return True

    monkeypatch.setattr("paceline.agent.net.stop_request.ask_to_stop", ask)
    from paceline.backends.local.stop_request import ask_to_stop

    folder = home / "runs" / LOST
    with supervised(folder):
        assert ask_to_stop(folder, "stopped by `paceline stop`")
    address = json.loads((folder / "run.json").read_text())["captain"]
    reason = json.loads((recorded / "wire.json").read_text())["stop"]["reason"]
    assert requests[0][:4] == (address, str(folder / "tls"), "member", reason)


def test_a_captain_continues_from_the_notes_of_an_older_one(home: Path) -> None:
    folder = home / "runs" / DONE
    plan = plan_files.read_plan(folder)
    notes = CaptainNotes(str(folder), 100.0)
    assert not notes.is_new
    captain = notes.restored(lambda saved: Captain(plan, DONE, 10.0, 100.0, 0.0, saved, notes.clock_offset))
    assert not notes.is_new and not notes.problem
    assert (captain.generation, captain.watch.steps, len(captain.failures.restarts)) == (2, 4, 1)


def test_a_captain_accepts_the_messages_of_older_members(recorded: Path) -> None:
    wire = json.loads((recorded / "wire.json").read_text())
    [hello] = Decoder().feed(encode(wire["join"]))
    joined = messages.read_join(hello, DONE)
    assert (joined.host, joined.generation, joined.running) == ("host", 3, {"worker-0": 1})
    kinds = [type(messages.read_member(message, "host")) for message in wire["members"]]
    assert ev.Heartbeat in kinds and type(None) not in kinds
    replies = [type(messages.read_captain(message, "host")) for message in wire["captain"]]
    assert messages.Welcome in replies and ins.DismissMember in replies and type(None) not in replies


def test_a_captain_starts_an_older_member(home: Path, recorded: Path) -> None:
    """A join and a heartbeat as an older agent sends them, up to the start of its tasks."""
    wire = json.loads((recorded / "wire.json").read_text())
    plan = plan_files.read_plan(home / "runs" / DONE)
    captain = Captain(plan, DONE, 10.0, 0.0, 0.0)
    empty: dict[str, Any] = {"running": {}, "exits": [], "held": [], "follows": {}, "evaluated": [], "generation": 0}
    requests = []
    for host in plan.hosts:
        offers = {task: f"127.0.0.1:{number}" for number, task in enumerate(host.tasks, 1000)}
        hello = {**wire["join"], **empty, "host": host.name, "instance": host.name, "offers": offers}
        requests += captain.handle(messages.read_join(hello, DONE), 1.0)
        beat = messages.read_member({**wire["members"][0], "tasks": {}}, host.name)
        assert isinstance(beat, ev.Heartbeat)
        requests += captain.handle(beat, 1.0)
    events = [each.kind for each in requests if isinstance(each, ins.EmitEvent)]
    assert events.count("member-joined") == len(plan.hosts)
    assert any(isinstance(each, ins.AskStore) for each in requests)  # all have joined: it looks for a snapshot


# ---- newer versions


def test_fields_of_a_newer_version_are_ignored(home: Path) -> None:
    folder = home / "runs" / DONE
    for name in ("run.json", "report.json", "plan.json"):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**data, "added_later": {"x": 1}}))
    events = (folder / "events.jsonl").read_text().splitlines()
    later = json.dumps({"at": "2026-11-17T12:00:00.000Z", "event": "added-later", "generation": 1, "x": [1]})
    (folder / "events.jsonl").write_text("\n".join([*events, later]) + "\n")
    status = json.loads(call(home, "status", DONE, "-o", "json").stdout)
    assert status["status"] == "succeeded" and "problems" not in status
    assert "added-later x=[1]" in call(home, "events", DONE).stdout
    plan = json.loads((folder / "plan.json").read_text())
    plan["limits"]["added_later"] = 1
    assert plan_files.plan_of(plan).limits.grace == 30


def test_messages_of_newer_versions_are_understood_or_ignored(recorded: Path) -> None:
    wire = json.loads((recorded / "wire.json").read_text())
    assert messages.read_join({**wire["join"], "added_later": 1}, DONE).host == "host"
    beat = messages.read_member({**wire["members"][0], "added_later": {"x": 1}}, "host")
    assert isinstance(beat, ev.Heartbeat)
    assert messages.read_member({"type": "added-later"}, "host") is None


def test_a_newer_plan_and_newer_snapshots_are_named(home: Path) -> None:
    folder = home / "runs" / DONE
    data = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**data, "version": 2}))
    message = "plan.json: this run was started by a newer Paceline (plan version 2); upgrade Paceline to read it"
    assert "succeeded" in call(home, "ls").stdout
    assert message in call(home, "status", DONE).stdout
    for verb in (("try", DONE), ("export", DONE, "--to", "model"), ("snapshots", "ls", DONE)):
        done = call(home, *verb)
        assert done.returncode and message in done.stderr, done
    with pytest.raises(ValueError, match=r"started by a newer Paceline \(plan version 2\); upgrade"):
        plans.from_data({**data, "version": 2})


@pytest.mark.parametrize("kind", ["manifest.json", "generation"])
def test_a_newer_format_of_snapshots_is_named(home: Path, kind: str) -> None:
    store = home / "runs" / DONE / "snapshots" / DONE
    path = store / "step-4-g1/manifest.json" if kind == "manifest.json" else store / "generations/00000002.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    done = call(home, "snapshots", "ls", DONE)
    text = done.stdout + done.stderr
    assert "format version 2, but this Paceline supports only version 1" in text, done


def test_each_kind_of_file_has_a_version_or_ignores_unknown_fields(home: Path) -> None:
    """A list of all kinds; a new one has to be added here, with its reader."""
    store = home / "runs" / DONE / "snapshots" / DONE
    versioned = [home / "runs" / DONE / "plan.json", *store.rglob("manifest.json"), *store.rglob("evaluation.json")]
    versioned += store.glob("generations/*.json")
    assert all(json.loads(path.read_text())["version"] == 1 for path in versioned)
    record = chain.parse((store / "generations/00000002.json").read_bytes()[:-1] + b', "added_later": 1}', "record")
    assert record.generation == 2
    data = json.loads((store / "step-4-g1/manifest.json").read_text())
    parsed = manifest.parse(json.dumps({**data, "added_later": 1}).encode(), "manifest")
    assert {each.name for each in fields(parsed)} >= {"run", "id", "parts"}
