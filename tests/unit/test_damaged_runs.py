"""Damaged files of runs: every verb names the damaged run and goes on with the others; readers raise clear errors."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.captain_process.saved_notes import CaptainNotes
from paceline.agent.deliveries.event_reader import EventReader
from paceline.agent.deliveries.saved_state import saved_mlflow_run
from paceline.agent.deliveries.series_reader import SeriesReader
from paceline.agent.tasks.host_notes import HostNotes
from paceline.backends.local.lost_captain_report import write_report
from paceline.cli import app
from paceline.client.control.wait import EndedBefore
from paceline.errors import PacelineError
from paceline.storage.snapshots.manifest import Damaged
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import plan_files, run_files, run_folders
from paceline.view.state import status_reader
from support import mutations, recorded, viewers, wire_examples
from support.record_runs import RECORDED
from support.recorded import Done, call
from support.users import somebody
from support.worlds import make_plan, up

SOURCE = RECORDED / "0.1.0"
VERSIONS = sorted(path.name for path in RECORDED.iterdir())
VERBS = (
    ("ls",), ("ls", "-o", "json"), ("ls", "-o", "wide"), ("status", "{run}"), ("status", "{run}", "-o", "json"),
    ("logs", "{run}"), ("logs", "{run}", "-o", "json", "--since", "1h"), ("logs", "-f", "{run}"), ("events", "{run}"),
    ("logs", "{run}", "--tail", "3"), ("wait", "{run}", "-o", "json"), ("wait", "{run}", "--for", "step=1000"),
    ("events", "{run}", "-o", "json"), ("snapshots", "ls", "{run}"), ("snapshots", "ls", "{run}", "-o", "json"),
    ("snapshots", "ls", "{run}", "--all"), ("snapshots", "show", "{run}"), ("snapshots", "verify", "{run}"),
    ("snapshots", "show", "{run}", "best"), ("profile", "{run}"),
    ("stacks", "{run}"), ("metrics", "{run}"), ("metrics",), ("scale", "{run}", "worker=1"), ("pause", "{run}"),
    ("resume", "{run}"), ("serve", "{run}", "--port", "0"),
    ("stop", "{run}"), ("tensorboard", "{run}"), ("try", "{run}"), ("export", "{run}", "--to", "{run}-model"),
    ("delete", "-y", "{run}"),
)  # fmt: skip
VIEWERS = ("watch", "page")  # they show runs until they are closed: see support/viewers.py
NO_READERS = ("init", "validate", "plan", "render", "schema", "run", "doctor")  # verbs that read no files of runs
RUNS = ("recorded-done", "recorded-lost")
HOST = "worker-host-0"


class Started(BaseException):
    """Raised in place of starting a program, as a test here starts no process."""


@pytest.fixture(autouse=True)
def no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise Started

    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr("os.execv", started)
    monkeypatch.setattr("os.execve", started)
    monkeypatch.setattr("paceline.client.models.model_export._run", started)
    for module in ("tensorboard", "serve"):
        monkeypatch.setattr(f"paceline.cli.{module}._python", lambda: "python")


def copy(home: Path, run: str, version: str = SOURCE.name) -> Path:
    folder = home / "runs" / run
    shutil.copytree(RECORDED / version / run, folder)
    (folder / "lock").touch()
    return folder


def healthy(home: Path) -> None:
    recorded.write(home, report=recorded.REPORT, logs={"worker-0": "2026-11-15T04:30:02.000Z g1 | hello\n"})


def use(home: Path, *arguments: str) -> Done:
    try:
        return call(home, *arguments)
    except Started:
        return Done(0, "", "")


def assert_clear(done: Done, context: object) -> None:
    assert done.returncode in (0, 1, 2, EndedBefore.exit_code), (context, done)
    for text in ("bug in Paceline", "Traceback"):
        assert text not in done.stderr + done.stdout, (context, done)
    if done.returncode:  # `snapshots verify` prints what is damaged to stdout
        assert done.stdout or done.stderr.startswith(("error: ", "note: ")), (context, done)


def test_every_verb_is_tested_or_reads_no_run() -> None:
    assert sorted({*(verb[0] for verb in VERBS), *VIEWERS, *NO_READERS}) == sorted(app.VERBS)


# ---- what users see


def step_with(**fields: Any) -> Callable[[Path], None]:
    """Changes the first event that reports a step."""

    def damage(folder: Path) -> None:
        lines = (folder / "events.jsonl").read_text().splitlines()
        at = next(number for number, line in enumerate(lines) if '"event": "step"' in line)
        lines[at] = json.dumps({**json.loads(lines[at]), **fields})
        (folder / "events.jsonl").write_text("\n".join(lines) + "\n")

    return damage


infinite_step = step_with(step=float("inf"))


def events_with(data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "events.jsonl").write_bytes(data + b"\n" + (folder / "events.jsonl").read_bytes())

    return damage


def file_with(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def a_folder(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


DAMAGES = {
    "infinite step": (infinite_step, "is damaged: `step` is not a number"),
    "time 1e400": (step_with(at=float("inf")), "is damaged: `at` is not a time"),
    "time in words": (step_with(at="yesterday"), "is damaged: `at` is not a time"),
    "binary events": (events_with(b"\0\xff" * 50), "events.jsonl: line 1 is damaged: it is not complete JSON"),
    "huge line": (events_with(b"x" * 3_000_000), "events.jsonl: line 1 is damaged: it is not complete JSON"),
    "deep event": (events_with(b"[" * 900 + b"]" * 900), "line 1 is damaged: it is nested deeper than 50 levels"),
    "event without keys": (events_with(b"{}"), "events.jsonl: line 1 is damaged: `event` is not a string"),
    "events are a folder": (a_folder("events.jsonl"), "events.jsonl: cannot be read: Is a directory"),
    "run.json is a list": (file_with("run.json", "[1, 2]"), "run.json: is damaged: it is not a JSON object"),
    "half of run.json": (file_with("run.json", '{"run": "rec'), "run.json: is damaged: it is not complete JSON"),
    "wrong start": (file_with("run.json", '{"started": 1e400}'), "run.json: is damaged: `started` cannot be Infinity"),
    "report of wrong types": (
        file_with("report.json", '{"status": "failed", "restarts": 5, "ended": [], "metrics": "x", "started": {}}'),
        "report.json: is damaged: `started` cannot be {}",
    ),
    "report without status": (file_with("report.json", "{}"), "report.json: is damaged: `status` is missing"),
    "deep report": (file_with("report.json", "[" * 100_000), "report.json: is damaged: it is nested deeper than 50"),
    "report is a folder": (a_folder("report.json"), "report.json: cannot be read: Is a directory"),
    "newer plan": (
        file_with("plan.json", '{"version": 2, "phases": []}'),
        "plan.json: this run was started by a newer Paceline (plan version 2); upgrade Paceline to read it",
    ),
    "wrong plan": (file_with("plan.json", '{"tasks": 1, "limits": []}'), "plan.json: is damaged: `tasks` cannot be 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_named_and_the_others_are_listed(tmp_path: Path, name: str) -> None:
    damage, problem = DAMAGES[name]
    healthy(tmp_path)
    damaged = copy(tmp_path, "recorded-lost")
    damage(damaged)
    done = call(tmp_path, "ls", "-o", "wide")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 0 and "succeeded" in rows["digits-3f9a"], done
    assert problem in rows["recorded-lost"], done
    listed = {each["run"]: each for each in json.loads(call(tmp_path, "ls", "-o", "json").stdout)}
    assert problem in "; ".join(listed["recorded-lost"]["problems"]) and "problems" not in listed["digits-3f9a"]
    watched, shown = viewers.watch_all(), viewers.page("recorded-lost")
    assert problem in watched["recorded-lost"].reason and watched["digits-3f9a"].status == "succeeded"
    assert "problem" not in watched["digits-3f9a"].reason and viewers.watch("recorded-lost", damaged)
    listed = viewers.page_runs(shown)
    assert problem in "; ".join(listed["recorded-lost"]["problems"]) and not listed["digits-3f9a"]["problems"]
    assert problem in "; ".join(json.loads(shown["api/runs/{key}"])["problems"])
    for verb in VERBS:
        arguments = [word.format(run="recorded-lost") for word in verb]
        assert_clear(use(tmp_path, *arguments), (name, verb))
    status = call(tmp_path, "status", "digits")
    assert status.returncode == 0 and "digits-3f9a succeeded" in status.stdout


@pytest.mark.parametrize("name", ["infinite step", "run.json is a list", "report of wrong types"])
def test_a_run_without_a_known_end_is_damaged(tmp_path: Path, name: str) -> None:
    damage, problem = DAMAGES[name]
    damage(copy(tmp_path, "recorded-lost"))
    report = json.loads(call(tmp_path, "status", "-o", "json").stdout)
    assert report["status"] == ("failed" if name == "report of wrong types" else "damaged")
    assert problem in call(tmp_path, "status").stdout


def test_the_outcome_of_a_run_is_shown_even_if_its_events_are_damaged(tmp_path: Path) -> None:
    infinite_step(copy(tmp_path, "recorded-done"))
    assert "succeeded" in call(tmp_path, "ls").stdout
    lines = call(tmp_path, "status").stdout.splitlines()
    assert lines[0].startswith("recorded-done succeeded")
    assert any(line.startswith("  damaged ") and "`step` is not a number" in line for line in lines)
    events = call(tmp_path, "events")
    assert events.returncode == 0 and "`step` is not a number" in events.stderr and "ending" in events.stdout


def test_the_list_of_watch_names_what_is_damaged_of_a_run_that_has_succeeded(tmp_path: Path) -> None:
    folder = copy(tmp_path, "recorded-done")
    assert viewers.watch_all()["recorded-done"].reason == ""
    (folder / "plan.json").write_text("[]")
    run = viewers.watch_all()["recorded-done"]
    assert run.status == "succeeded" and "plan.json: is damaged" in run.reason


def test_a_run_of_another_user_is_named_and_the_others_are_listed(open_folder: Path) -> None:
    home = open_folder
    healthy(home)
    for run in RUNS:
        copy(home, run)
    unreadable = [home / "runs/recorded-done"]
    unreadable += [home / "runs/recorded-lost" / name for name in ("run.json", "events.jsonl", "logs/worker-0.log")]
    for path in home.rglob("*"):
        path.chmod(0o755)
    home.chmod(0o755)
    for path in unreadable:
        path.chmod(0)
    with somebody():
        assert "recorded-done" in call(home, "ls", "-o", "name").stdout
        done = call(home, "ls", "-o", "wide")
        rows = {line.split()[0]: line for line in done.stdout.splitlines()}
        assert done.returncode == 0 and "succeeded" in rows["digits-3f9a"], done
        for run in RUNS:
            assert "damaged" in rows[run] and "run.json: cannot be read: Permission denied" in rows[run]
            for verb in VERBS:
                assert_clear(use(home, *(word.format(run=run) for word in verb)), (run, verb))
        assert "logs/worker-0.log: cannot be read: Permission denied" in call(home, "logs", RUNS[1]).stderr
    unreadable[0].chmod(0o700)


def test_stop_names_the_file_that_hides_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(tmp_path, "recorded-lost")
    (folder / "run.json").write_text("[]")
    with recorded.supervised(folder):
        done = call(tmp_path, "stop", "--now", "recorded-lost")
    assert done.returncode == 1 and "recorded-lost cannot be stopped: run.json: is damaged" in done.stderr


def test_snapshots_are_not_deleted_if_the_plan_does_not_tell_where_they_are(tmp_path: Path) -> None:
    folder = copy(tmp_path, "recorded-done")
    (folder / "plan.json").write_text("nonsense")
    done = call(tmp_path, "delete", "-y", "--snapshots", "recorded-done")
    assert done.returncode == 1 and "plan.json: is damaged" in done.stderr and folder.exists()
    done = call(tmp_path, "delete", "-y", "recorded-done")
    assert done.returncode == 0 and (folder / "snapshots/recorded-done/step-4-g1/manifest.json").exists(), done


def test_a_supervisor_reports_the_end_even_if_the_notes_of_its_captain_are_damaged(tmp_path: Path) -> None:
    for number, text in enumerate(("[]", '{"captain": []}', '{"captain": {"restarts": 5}, "started": 7}', "{")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "captain.json").write_text(text)
        write_report(folder, "recorded-lost", "failed", "the captain is lost")
        assert run_files.report(folder).fields is not None and not run_files.report(folder).problem


def test_a_supervisor_counts_no_restart_that_its_captain_had_only_announced(tmp_path: Path) -> None:
    world = up(make_plan(2, hang_after=None))
    for number in range(2):
        world.exit("worker-0", "signal")
        world.deliver_all()
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "captain.json").write_text(json.dumps({"captain": world.captain.to_notes()}))
        write_report(folder, "recorded-lost", "stopped", "killed")
        report = run_files.report(folder).fields
        assert report is not None and len(report["restarts"]) == 1, "the first one was followed by a generation"


@pytest.mark.parametrize("name", ["run.json", "plan.json", "report.json", "events.jsonl", "lock", "logs/worker-0.log"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "large"])
def test_a_file_that_is_none_blocks_no_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Nor is a file read that is too large for this machine."""
    healthy(tmp_path)
    monkeypatch.setattr(run_files, "LARGEST_FILE", 100_000)
    path = copy(tmp_path, "recorded-done") / name
    path.unlink()
    make = {
        "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "device": lambda: path.symlink_to("/dev/zero"),
        "large": lambda: path.write_bytes(b" " * 200_000),
    }  # fmt: skip
    make[kind]()
    for verb in (("ls",), ("status", "recorded-done"), ("logs", "recorded-done"), ("events", "recorded-done")):
        done = use(tmp_path, *verb)
        assert_clear(done, verb)
        assert verb[0] != "ls" or "digits-3f9a" in done.stdout, done
    if name in ("run.json", "plan.json", "report.json"):
        assert f"{name}: " in call(tmp_path, "status", "recorded-done").stdout


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_store_reads_only_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "manifest.json"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    store, name = FolderStore(str(tmp_path)), "manifest.json"
    reads: tuple[Callable[[], object], ...] = (
        lambda: store.read(name, 1000), lambda: store.digest(name, lambda _: True),
        lambda: store.give(name).__enter__(), lambda: store.fetch(name, str(tmp_path / "copy"), lambda _: True),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(StoreError, match="not a regular file"):
            read()


@pytest.mark.parametrize("now", ["1" + "0" * 400, "NaN", "Infinity", "true"], ids=["large", "nan", "infinite", "bool"])
def test_a_captain_starts_anew_if_the_time_in_its_notes_is_impossible(tmp_path: Path, now: str) -> None:
    (tmp_path / "captain.json").write_text(f'{{"started": "x", "boot": "another", "now": {now}, "captain": {{}}}}')
    notes = CaptainNotes(str(tmp_path), 100.0)
    assert (notes.is_new, notes.clock_offset, notes.captain) == (True, 0.0, None)
    assert notes.problem.startswith("captain.json is damaged")


LARGE = f'{{"offset": {10**30}, "at": 1, "path": "x", "before": "", "last": ""}}'
INFINITE = '{"offset": 1e400, "at": 1, "path": "x", "before": "", "last": ""}'


@pytest.mark.parametrize("value", ["[" * 100_000, INFINITE, LARGE], ids=["nested", "infinite", "large"])
def test_deliveries_begin_anew_if_their_notes_are_damaged(tmp_path: Path, value: str) -> None:
    (tmp_path / "state.json").write_text(value)
    (tmp_path / "deliveries").mkdir()
    (tmp_path / "deliveries/mlflow.json").write_text(value)
    assert EventReader(str(tmp_path), str(tmp_path / "state.json")).position.offset == 0
    assert SeriesReader(str(tmp_path), set(), str(tmp_path / "state.json")).position.offset == 0
    assert saved_mlflow_run(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation", "99999999999"), ("generation", "-1"), ("generation", "1" * 5000), ("data", "x" * 100_000),
        ("data", "\0" * 9), ("data", "/data/3f9a\0"), ("data", "/data/\ud800"),
        ("records", "[" * 100_000), ("records", '[{"generation": 0, "parent": null, "by": ""}]'),
        ("records", '[{"generation": 99999999999, "parent": null, "by": ""}]'),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_host_can_join_whatever_its_notes_contain(tmp_path: Path, name: str, text: str) -> None:
    """A captain rejects such values, and no task can be started with them: the host would try again and again."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f".worker-host-0.{name}").write_bytes(text.encode("utf-8", "surrogatepass"))
    notes = HostNotes(str(tmp_path), "worker-host-0")
    assert (notes.generation, notes.data, notes.records) == (0, "", ())


# ---- fuzzing


def files_of(folder: Path) -> list[Path]:
    small = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in small if path.suffix in (".json", ".jsonl", ".log", "") and path.name != "lock"]


def fuzz(limit: float, one: Callable[[random.Random], None]) -> None:
    deadline, seed = time.monotonic() + mutations.seconds(limit), mutations.first_seed()
    while time.monotonic() < deadline:
        try:
            one(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        seed += 1


def one_run(home: Path, rng: random.Random) -> None:
    run = rng.choice(RUNS)
    folder = copy(home, run, rng.choice(VERSIONS))
    try:
        changed = rng.sample(files_of(folder), rng.choice((1, 1, 2, 3)))
        done = [(str(path.relative_to(folder)), mutations.damage(path, rng)) for path in changed]
        for verb in (("ls", "-o", "wide"), *rng.sample(VERBS, 4)):
            result = use(home, *(word.format(run=run) for word in verb))
            assert_clear(result, (done, verb))
            assert verb[0] != "ls" or "digits-3f9a" in result.stdout, (done, verb, result)
        if rng.random() < 0.3:
            assert "digits-3f9a" in viewers.watch_all() and viewers.watch(run, folder)
        elif rng.random() < 0.1:
            assert "digits-3f9a" in viewers.page_runs(viewers.page(run))
    finally:
        for path in (home / "runs").iterdir():
            if path.name != "digits-3f9a":
                shutil.rmtree(path)
        shutil.rmtree(home / "restored", ignore_errors=True)


LIMITS = [2.0, pytest.param(6.0, marks=pytest.mark.long)]


@pytest.mark.timeout(0)  # PACELINE_FUZZ_SECONDS may be hours
@pytest.mark.parametrize("limit", LIMITS)
def test_verbs_survive_any_damage(tmp_path: Path, limit: float) -> None:
    healthy(tmp_path)
    fuzz(limit, lambda rng: one_run(tmp_path, rng))


def parsed_or_refused(read: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(PacelineError):
        read(data)


def readers(scratch: Path) -> Iterator[tuple[bytes, Callable[[bytes], object]]]:
    """Each kind of file, and its reader."""
    from paceline.agent import state_events
    from paceline.agent.net import messages
    from paceline.agent.net.frames import Decoder, WireError
    from paceline.agent.series_files import read_part, summed_up
    from paceline.agent.spares import spare
    from paceline.agent.tensorboard.generation_notes import GenerationNotes
    from paceline.agent.transfers.evaluator_copies import EvaluatorCopies
    from paceline.backends.kubernetes.runs import pod_records
    from paceline.storage.ingested import dataset, lease
    from paceline.storage.snapshots import chain, evaluation, manifest
    from paceline.storage.watched import restore
    from paceline.view.series import points as series

    done = SOURCE / "recorded-done"
    snapshot = done / "snapshots/recorded-done/step-4-g1"

    def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def read_file(data: bytes) -> object:
            (scratch / name).write_bytes(data)
            return read(scratch)

        return read_file

    yield (snapshot / "manifest.json").read_bytes(), lambda data: manifest.parse(data, "manifest")
    yield (snapshot / "evaluation.json").read_bytes(), lambda data: evaluation.parse(data, "evaluation")
    yield (
        (done / "snapshots/recorded-done/generations/00000002.json").read_bytes(),
        lambda data: chain.parse(data, "record"),
    )
    data = dataset.DatasetManifest("a", "run", "now", (manifest.File("a", 1, "0" * 64),))
    yield data.to_bytes(), lambda data: dataset.parse(data, "data")
    held = json.dumps({"version": 1, "number": 3, "run": "r", "by": "b", "process": "p"}).encode()
    yield held, lambda data: lease._parse(data, "lease")
    yield (done / "plan.json").read_bytes(), in_file("plan.json", plan_files.read_plan)
    yield (done / "plan.json").read_bytes(), in_file("plan.json", run_files.planned)
    notes = in_file(".curves.json", lambda folder: GenerationNotes(str(folder / ".curves.json")).read())
    yield (done / ".curves.json").read_bytes(), notes
    report = {"at": 1.5, "task": "worker-0", "generation": 1, "step": [1, 2, 3], "metrics": {"loss": [0.1, 0.2, 0.3]}}
    (scratch / "series/10").mkdir(parents=True)
    lines = f'{{"version": 1}}\n{json.dumps(report)}\n{json.dumps(report)}\n'.encode()
    yield lines, in_file("series/10/1.jsonl", lambda folder: series.read(folder, "loss"))
    yield lines, in_file("series/10/1.jsonl", lambda folder: summed_up(read_part(f"{folder}/series/10/1.jsonl"), 300))
    yield (done / "events.jsonl").read_bytes(), lambda data: state_events.needed(state_events.parse(data.splitlines()))
    pods = {"host": "worker-host-0", "pod": "p", "node": "n", "phase": "Running", "restarts": 0, "leaving": False}
    reasons = [{"what": "w", "cause": "c", "text": "t", "final": True}]
    pods_json = json.dumps({"at": "x", "pods": [pods], "reasons": reasons}).encode()
    yield (
        pods_json,
        in_file("pods.json", lambda folder: [*pod_records.load(folder), *map(str, pod_records.load_reasons(folder))]),
    )
    yield (SOURCE / "recorded-lost/captain.json").read_bytes(), in_file("captain.json", _captain)
    yield (
        (SOURCE / "recorded-lost/captain.json").read_bytes(),
        in_file("captain.json", lambda folder: write_report(folder, "r", "failed", "lost")),
    )
    begun = json.dumps({"this": [2, "step-4-g1"], "start": {"a/b": [1, 2, 3]}}).encode()
    yield begun, in_file("begun.json", lambda folder: restore._read_begun(str(folder / "begun.json")))
    result = SOURCE / "recorded-lost/evaluated/evaluator-host-0/step-4-g1.json"
    (scratch / "results").mkdir()
    copies: Any = SimpleNamespace(_results=str(scratch / "results"), _host="evaluator-host-0")
    read_results = in_file("results/step-4-g1.json", lambda _: EvaluatorCopies._read_results(copies))
    yield result.read_bytes(), read_results
    about = json.dumps(
        {"signatures": {"serving_default": {"inputs": {"x": {"dtype": "f", "shape": [-1]}}, "outputs": {}}}}
    )
    yield about.encode(), in_file("paceline.json", _signatures)
    (scratch / "logs").mkdir()
    records = [{"generation": 2, "parent": [4, 1], "by": "captain"}, {"generation": 1, "parent": None, "by": "captain"}]
    for name, text in (("generation", "7"), ("data", "/data/3f9a"), ("records", json.dumps(records))):
        yield (
            text.encode(),
            in_file(f"logs/.worker-host-0.{name}", lambda folder: _joined(HostNotes(str(folder), HOST))),
        )
    offset = json.dumps({"offset": 10, "before": "", "last": "", "path": "x", "at": 1.5}).encode()
    yield offset, in_file("state.json", lambda folder: EventReader(str(folder), str(folder / "state.json")).read())
    yield (
        offset,
        in_file("state.json", lambda folder: SeriesReader(str(folder), set(), str(folder / "state.json")).read()),
    )
    yield (SOURCE / "recorded-lost/captain.json").read_bytes(), in_file("captain.json", _hosts)
    state = {"environment": {"A": "b", "C": None}, "path": ["/x"], "late": True}
    imports = f'{json.dumps(state)}\n"torch"\n"numpy"\n'.encode()
    yield imports, in_file("imports", lambda folder: spare.read_record(folder / "imports"))
    signatures = json.dumps({"a/b": [1, 2, 3, 4]}).encode()
    yield signatures, in_file(".step-1-g1.shared", lambda folder: _signatures_of(folder / "step-1-g1"))
    for message in wire_examples.FROM_USERS:
        yield json.dumps(message).encode(), _request

    def receive(data: bytes) -> None:
        with contextlib.suppress(WireError):
            for message in Decoder().feed(struct.pack(">I", len(data)) + data):
                (messages.read_join(message, "recorded-done") if message["type"] == "join" else None)
                messages.read_member(message, "host")
                messages.read_captain(message, "host")

    yield json.dumps(messages.join_message("recorded-done", wire_examples.JOINED)).encode(), receive
    for event in wire_examples.FROM_MEMBERS:
        yield json.dumps(messages.member_message(event)).encode(), receive
    for instruction in wire_examples.FROM_CAPTAIN:
        yield json.dumps(messages.captain_message(instruction)).encode(), receive


def _joined(notes: HostNotes) -> object:
    """A captain accepts what a member with these notes sends."""
    from paceline.agent.captain.events import MemberJoined
    from paceline.agent.net import messages
    from paceline.agent.net.frames import Decoder, encode

    joined = MemberJoined(
        HOST, "a", 1, False, "place", notes.generation, {}, (), {}, (), {}, (), notes.data, records=notes.records
    )
    (message,) = Decoder().feed(encode(messages.join_message("run", joined)))
    return messages.read_join(message, "run")


def _hosts(folder: Path) -> object:
    from paceline.backends.local import supervisor

    return supervisor._requested_hosts(plan_files.read_plan(SOURCE / "recorded-lost"), folder)


def _signatures_of(part: Path) -> object:
    from paceline.storage.snapshots import shared_parts

    with contextlib.suppress(Damaged):
        return shared_parts._read_signatures(str(part))
    return None


def _request(data: bytes) -> None:
    """A request of a user, as the captain's process carries it out."""
    from paceline.agent.captain_process import pause_requests, scale_requests
    from paceline.agent.captain_process.task_requests import KINDS as TASK_KINDS
    from paceline.agent.captain_process.task_requests import TaskRequests
    from paceline.agent.net.frames import Decoder, WireError

    captain = up(make_plan(2)).captain
    loop: Any = SimpleNamespace(after=lambda seconds, call: None)
    with contextlib.suppress(WireError):
        for message in Decoder().feed(struct.pack(">I", len(data)) + data):
            if message["type"] in TASK_KINDS:
                TaskRequests(captain.plan, loop, lambda host, message: True).begin(message, lambda data: None)
            elif message["type"] == scale_requests.SCALE:
                scale_requests.reply_to(message, captain, lambda event: None)
            elif message["type"] in pause_requests.KINDS:
                pause_requests.reply_to(message, captain, lambda event: None)


def _signatures(folder: Path) -> object:
    from paceline.serve.model_loading import CannotLoad, _read_signatures

    with contextlib.suppress(CannotLoad):
        return _read_signatures(folder)
    return None


def _captain(folder: Path) -> object:
    from paceline.agent.captain import events as ev
    from paceline.agent.captain.state_machine import Captain

    plan = plan_files.read_plan(SOURCE / "recorded-lost")
    notes = CaptainNotes(str(folder), 100.0)
    captain = notes.restored(lambda saved: Captain(plan, "recorded-lost", 10.0, 100.0, 0.0, saved, notes.clock_offset))
    return captain.handle(ev.Tick(), 101.0)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("limit", LIMITS)
def test_readers_of_files_and_messages_survive_any_damage(tmp_path: Path, limit: float) -> None:
    every = list(readers(tmp_path))
    for data, read in every:
        read(data)  # undamaged

    def one(rng: random.Random) -> None:
        data, read = rng.choice(every)
        parsed_or_refused(read, mutations.mutated(data, rng))
        (tmp_path / "report.json").unlink(missing_ok=True)

    fuzz(limit / 2, one)


def test_state_and_summary_agree_on_damage(tmp_path: Path) -> None:
    folder = copy(tmp_path, "recorded-done")
    (folder / "run.json").write_text("[]")
    run = run_folders.Run("recorded-done", folder)
    assert status_reader.summary(run)["problems"] == status_reader.read(run).report["problems"]
