"""The verbs that read runs, called as a user calls them, on run folders written by hand."""

import ast
import json
import re
from pathlib import Path

import pytest

from paceline.storage.stores.folder import FolderStore
from paceline.view.files import run_folders
from support import committed, recorded
from support.recorded import REPORT, at, call

LOGS = {
    "worker-0": f"{at(1)} g1 | hello\n{at(3)} g2 | again\n{at(4)} g2 ~ 10%\n{at(5)} g2 ~ 90%\n",
    "worker-1": f"{at(2)} g1 | \x1b[31mred\x1b[0m\n",
}

GIB = 2**30


@pytest.fixture
def home(tmp_path: Path) -> Path:
    recorded.write(tmp_path, "digits-3f9a", report=REPORT, logs=LOGS)
    failed = {**REPORT, "status": "failed", "reason": "ValueError: no", "cause": "program-error"}
    recorded.write(tmp_path, "translate-0001", report=failed, started=at(-1 + 30))
    return tmp_path


def test_ls(home: Path) -> None:
    result = call(home, "ls")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert (result.returncode, result.stderr) == (0, "")
    assert lines[0] == ["RUN", "STATUS", "STEP", "RESTARTS", "AGE", "DURATION", "REASON"]
    assert [line[:4] for line in lines[1:]] == [
        ["translate-0001", "failed", "161", "1"],
        ["digits-3f9a", "succeeded", "161", "1"],
    ]
    assert call(home, "ls", "-o", "name").stdout == "translate-0001\ndigits-3f9a\n"
    assert str(home) in call(home, "ls", "-o", "wide").stdout


def test_ls_and_status_give_the_fields_of_the_report(home: Path) -> None:
    listed = json.loads(call(home, "ls", "-o", "json").stdout)
    status = json.loads(call(home, "status", "digits", "-o", "json").stdout)
    unknown = {"goodput": None, "resources": None}  # this report is of a version that did not measure them
    report = {**REPORT, "run": "digits-3f9a", "folder": str(home / "runs" / "digits-3f9a"), **unknown}
    assert listed[1] == {"schema_version": 1, **report}
    assert {key: status[key] for key in listed[1]} == {**listed[1], **{key: status[key] for key in unknown}}
    assert [task["task"] for task in status["tasks"]] == recorded.TASKS
    assert status["waiting"] is None
    assert status["saved"] == {"step": 100, "snapshot": "step-100-g1", "at": at(5.5)}
    assert status["committed"] == status["saved"]
    assert "  best         step-100-g1: accuracy 0.9\n" in call(home, "status", "digits").stdout


def test_status_distinguishes_saved_from_committed_snapshots(tmp_path: Path) -> None:
    saved = recorded.event(6, "saved", step=120, snapshot="step-120-g1")
    folder = recorded.write(tmp_path, events=[*recorded.LIFE[:10], saved])
    with recorded.supervised(folder):
        [line] = [line for line in call(tmp_path, "status").stdout.splitlines() if line.startswith("  snapshots")]
        text = re.sub(r"(\d+ (d|h|min|s) ?)+ago", "... ago", line)
        location = f"{folder}/snapshots/digits-3f9a/step-100-g1"
        assert text == f"  snapshots    step 120 saved ... ago, step 100 committed ... ago: {location}"
        status = json.loads(call(tmp_path, "status", "-o", "json").stdout)
        assert (status["saved"]["step"], status["committed"]["step"]) == (120, 100)


def test_status_without_snapshots_does_not_mention_them(tmp_path: Path) -> None:
    recorded.write(tmp_path, events=recorded.LIFE[:8])
    assert "snapshots" not in call(tmp_path, "status").stdout
    status = json.loads(call(tmp_path, "status", "-o", "json").stdout)
    assert (status["saved"], status["committed"]) == (None, None)


def test_a_loss_of_nan_is_still_json(tmp_path: Path) -> None:
    recorded.write(tmp_path, report={**REPORT, "metrics": {"worker-0": {"loss": float("nan")}}})
    status = json.loads(call(tmp_path, "status", "-o", "json").stdout, parse_constant=lambda word: pytest.fail(word))
    assert status["metrics"] == {"worker-0": {"loss": None}}


def test_status_as_text(home: Path) -> None:
    lines = call(home, "status", "digits").stdout.splitlines()
    assert lines[0] == "digits-3f9a succeeded after 12 s"
    assert lines[2].split() == ["TASK", "STATE", "HOST", "PID", "GENERATION", "STEP", "EXIT"]
    assert lines[3].split() == ["worker-0", "succeeded", "worker-host-0", "-", "2", "161", "exit", "0"]
    assert "04:30:07 worker-1 signal: killed by SIGKILL; next step after 1.3 s" in "\n".join(lines)


def test_status_shows_what_was_used_and_how_the_time_was_spent(home: Path) -> None:
    output = call(home, "status", "digits").stdout
    assert "  memory       worker-1 peaked at 7 of 8 GiB\n" in output
    table = [line.split() for line in output[output.index("  goodput") :].splitlines()]
    assert table[:3] == [
        ["goodput", "30.3%", "of", "12", "s"], ["training", "3.7", "s", "30.3%"],
        ["waiting", "for", "hosts", "2.6", "s", "21.4%"],
    ]  # fmt: skip
    assert ["lost", "and", "redone", "2", "s", "16.4%"] in table
    status = json.loads(call(home, "status", "digits", "-o", "json").stdout)
    assert sum(status["goodput"]["seconds"].values()) == pytest.approx(status["goodput"]["wall_s"])
    assert status["resources"]["tasks"]["worker-1"]["memory"] == {"last": 6 * GIB, "mean": 6 * GIB, "peak": 7 * GIB}
    assert status["resources"]["hosts"]["worker-host-1"]["gpus"]["0"]["utilization"]["peak"] == 0.85
    wide = [" ".join(line.split()) for line in call(home, "status", "digits", "-o", "wide").stdout.splitlines()]
    assert "worker-1 1.90 1.90 6.0 GiB 7.0 GiB 8.0 GiB 0 B 512 B" in wide
    assert "worker-host-1 0 85% 1.0 GiB 1.0 GiB 16.0 GiB - -" in wide


@pytest.mark.parametrize(
    "damaged", ["x", [], {"tasks": 1}, {"tasks": {"a": 1, "b": {"memory": {"peak": "x"}}}, "hosts": {}}]
)
def test_damaged_resources_in_a_report_do_no_harm(tmp_path: Path, damaged: object) -> None:
    recorded.write(tmp_path, events=[recorded.STARTED], report={**REPORT, "resources": damaged, "goodput": damaged})
    for output in ((), ("-o", "wide"), ("-o", "json")):
        result = call(tmp_path, "status", *output)
        assert (result.returncode, "Traceback" in result.stderr) == (0, False)


def test_status_of_a_running_run_shows_the_memory_of_its_tasks(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=recorded.LIFE[: recorded.LIFE.index(recorded.RESOURCES) + 1])
    with recorded.supervised(folder):
        lines = [line.split() for line in call(tmp_path, "status").stdout.splitlines()]
    assert lines[2][5:7] == ["STEP", "MEMORY"] and lines[4][-3:] == ["6.0", "GiB", "-"]


def test_status_shows_where_the_time_of_the_newest_start_went(tmp_path: Path) -> None:
    cold = recorded.event(4, "start-times", task="worker-1", imports_s=0.9, joined_s=1.25, first_step_s=64.0)
    recorded.write(tmp_path, events=[*recorded.LIFE[:8], cold, *recorded.LIFE[8:]])
    spent = "imports 0.1 s, before joining 0.1 s, joining 0.1 s, before restoring 1.5 s, restoring 0.1 s"
    text = f"""\
  start        first step of worker-0 after 2.4 s: {spent}, first step 0.5 s
               1.5 s of 2.4 s in worker-0 before it restored its state: prepare data in `ingest`
"""
    assert text in call(tmp_path, "status").stdout
    lines = [line.split() for line in call(tmp_path, "status", "-o", "wide").stdout.splitlines()]
    heading = lines.index(["GENERATION", "TASK", "FROM", "IMPORTS", "JOINED", "RESTORED", "FIRST", "STEP"])
    assert [" ".join(line) for line in lines[heading + 1 : heading + 6]] == [
        "1 worker-0 cold - - - -",
        "1 worker-1 cold 0.9 s 1.2 s - 1 min 4 s",
        "2 worker-0 spare 0.1 s 0.3 s 1.9 s 2.4 s",
        "2 worker-1 spare - - - -",
        "",
    ]


def test_status_without_measured_starts_does_not_mention_them(tmp_path: Path) -> None:
    recorded.write(tmp_path, events=recorded.LIFE[:8])
    assert "start  " not in (output := call(tmp_path, "status", "-o", "wide").stdout) and "IMPORTS" not in output
    assert json.loads(call(tmp_path, "status", "-o", "json").stdout)["starts"] == []


def test_status_of_a_running_run_says_what_it_waits_for(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=[recorded.STARTED, recorded.WAITING])
    with recorded.supervised(folder):
        assert "starting" in (output := call(tmp_path, "status").stdout)
        assert "waiting for worker-host-1 (12 s so far, limit 30 min)" in output


def test_no_runs_yet(tmp_path: Path) -> None:
    listing = call(tmp_path, "ls")
    assert (listing.returncode, listing.stdout) == (0, "")
    assert listing.stderr == "no runs yet; start one with: paceline run job.yaml\n"
    assert call(tmp_path, "ls", "-o", "json").stdout == "[]\n"
    for verb in ("status", "logs", "events", "wait", "stop"):
        result = call(tmp_path, verb)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == "error: there are no runs yet; start one with: paceline run job.yaml\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status", "digit-3f9a"], 2, "error: no run 'digit-3f9a'; did you mean 'digits-3f9a'?"),
        (["statsu"], 2, "error: unknown command 'statsu'; did you mean 'status'?"),
        (["scale"], 2, "error: scale requires one role and its number of hosts, and at most one run; for example: "),
        (["xyzzy"], 2, "error: unknown command 'xyzzy'; the commands are: init, validate, plan"),
        (["ls", "--wide"], 2, "Error: No such option: --wide"),
        (["ls", "-o", "xml"], 2, "error: -o 'xml': invalid value; use one of json, wide, name"),
        (["status", "-o", "yaml"], 2, "error: -o 'yaml': invalid value; use one of json, wide"),
        (["logs", "digits", "--task", "worker-7"], 2, "digits-3f9a has no task 'worker-7'; did you mean 'worker-"),
        (["logs", "digits", "--since", "ten"], 2, "--since 'ten': invalid time; use an age (90s, 10m, 1h30m, 1d) or"),
        (["logs", "digits", "-g", "two"], 2, "'two' is not an integer"),
        (["logs", "digits", "--tail", "all"], 2, "'all' is not an integer"),
        (["logs", "digits", "--tail", "-1"], 2, "error: --tail -1: must not be negative"),
        (["logs", "digits", "--grep", "a(b"], 2, "error: --grep 'a(b': invalid regular expression: missing ), un"),
        (["logs", "digits", "--grep", "*"], 2, "'*': invalid regular expression: nothing to repeat at position 0"),
        (["logs", "digits", "--grep", "a{9999999999}"], 2, "invalid regular expression: the repetition number is too"),
        (["delete"], 2, "error: name the runs to delete, or use --finished"),
        (["delete", "digits"], 2, "is not a terminal; use --yes to delete digits-3f9a"),
        (["delete", "../../etc", "--yes"], 2, "error: ../../etc is a location, not a run id"),
        (["delete", "/usr/lib", "--yes", "--snapshots"], 2, "error: no snapshots of a run 'lib' at /usr"),
        (["plan", "none.yaml"], 2, "error: none.yaml: the file does not exist"),
        (["validate", "none.yaml"], 2, "error: none.yaml: the file does not exist"),
        (["run", "none.yaml"], 2, "error: none.yaml: the file does not exist"),
        (["run"], 2, "error: no job.yaml in this folder; `paceline init` writes one, or name a job file"),
        (["run", "--"], 2, "error: no command given after --"),
        (["run", "job.yaml", "--", "python"], 2, "error: job.yaml: give a job file or a command after --, not both"),
        (["run", "--framework", "torch", "python", "train.py"], 2, "a command must come after --; use: paceline"),
        (["run", "job.yaml", "--workers", "3"], 2, "error: --workers requires a command after --; to change"),
        (["run", "--workers", "many", "--", "true"], 2, "'many' is not an integer"),
        (["run", "-o", "yaml", "--", "true"], 2, "error: -o 'yaml': invalid value; use json"),
        (["run", "--framework", "tensorflw", "--", "true"], 2, 'did you mean "tensorflow"?'),
        (["init"], 2, "error: no Python script in"),
        (["init", "none.py"], 2, "error: none.py does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_are_reported_without_a_traceback(home: Path, arguments: list[str], code: int, message: str) -> None:
    result = call(home, *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr and "Traceback" not in result.stderr


def test_logs_are_merged_and_bars_folded(home: Path) -> None:
    result = call(home, "logs", "digits")
    assert result.stdout.splitlines() == [
        "worker-0    | hello", "worker-1    | \x1b[31mred\x1b[0m", "worker-0    | again", "worker-0    | 90%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--task", "worker-1"], ["\x1b[31mred\x1b[0m"]),
        (["-t", "worker-1", "-t", "worker-0", "-g", "1"], ["hello", "\x1b[31mred\x1b[0m"]),
        (["--task", "worker"], ["hello", "\x1b[31mred\x1b[0m", "again", "90%"]),
        (["--generation", "2"], ["again", "90%"]),
        (["--since", at(3)], ["again", "90%"]),
        (["--since", "2026-11-15T05:30:03.000+01:00"], ["again", "90%"]),
        (["--since", "36500d"], ["hello", "\x1b[31mred\x1b[0m", "again", "90%"]),
        (["--since", "2999-01-01"], []),
        (["--task", "evaluator-0"], []),
        (["-f"], ["hello", "\x1b[31mred\x1b[0m", "again", "90%"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_parts_of_logs(home: Path, arguments: list[str], texts: list[str]) -> None:
    result = call(home, "logs", "digits", *arguments)
    assert [line.partition("| ")[2] for line in result.stdout.splitlines()] == texts
    as_json = call(home, "logs", "digits", *arguments, "-o", "json")
    assert [json.loads(line)["text"] for line in as_json.stdout.splitlines()] == texts


def test_times(home: Path) -> None:
    assert call(home, "logs", "digits", "--times", "-g", "1").stdout.startswith(f"{at(1)} worker-0    | hello\n")


def test_events_as_they_were_written(home: Path) -> None:
    result = call(home, "events", "digits", "-o", "json")
    expected = [{"schema_version": 1, **event} for event in recorded.LIFE]
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected


def test_stopping_a_finished_run_is_reported_and_succeeds(home: Path) -> None:
    result = call(home, "stop", "digits")
    assert (result.returncode, result.stderr) == (0, "digits-3f9a is not running: it succeeded\n")


def test_delete_removes_the_folder_and_nothing_else(home: Path) -> None:
    outside = home / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (home / "runs" / "digits-3f9a" / "snapshots").symlink_to(outside)
    result = call(home, "delete", "digits", "--yes")
    assert (result.returncode, result.stderr) == (0, "deleted digits-3f9a\n")
    assert [path.name for path in (home / "runs").iterdir()] == ["translate-0001"]
    assert (outside / "kept").exists()


@pytest.fixture
def snapshots(home: Path) -> Path:
    """The snapshots of digits-3f9a, in its own folder."""
    folder = home / "runs" / "digits-3f9a" / "snapshots"
    committed.life(FolderStore(str(folder)), home / "scratch")
    return folder


def committed_elsewhere(home: Path, tmp_path: Path) -> Path:
    """The snapshots of translate-0001, next to those of another run."""
    location, folder = tmp_path / "elsewhere", home / "runs" / "translate-0001"
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "snapshots": {"to": str(location)}}))
    for run in ("translate-0001", "translate-0002"):
        committed.life(FolderStore(str(location)), tmp_path / run, run)
    return location


def test_delete_keeps_the_snapshots_and_says_how_to_delete_them(home: Path, snapshots: Path) -> None:
    before = recorded.contents(snapshots)
    result = call(home, "delete", "digits", "--yes")
    assert (result.returncode, result.stderr) == (
        0,
        f"deleted digits-3f9a; its snapshots are kept in {snapshots}: "
        "`paceline delete --snapshots digits-3f9a` deletes them\n",
    )
    assert recorded.contents(snapshots) == before
    assert sorted(path.name for path in snapshots.parent.iterdir()) == ["deleted", "snapshots"]
    assert call(home, "ls", "-o", "name").stdout == "translate-0001\n"
    assert call(home, "status", "digits").returncode == 2
    assert call(home, "snapshots", "ls", "digits", "-o", "name").stdout.split() == committed.NAMES
    repeated = call(home, "delete", "digits", "--yes")
    assert (repeated.returncode, repeated.stderr) == (
        2,
        "error: digits-3f9a is already deleted, except for its snapshots; "
        "`paceline delete --snapshots digits-3f9a` deletes them\n",
    )
    refused = call(home, "run", "--run", "digits-3f9a", "--", "true")
    assert refused.returncode == 2
    assert "snapshots of an earlier run digits-3f9a exist; delete them with `paceline de" in refused.stderr
    last = call(home, "delete", "--snapshots", "digits", "--yes")
    assert (last.returncode, last.stderr) == (0, "deleted the snapshots of digits-3f9a\n")
    assert [path.name for path in (home / "runs").iterdir()] == ["translate-0001"]


def test_delete_with_snapshots_removes_everything(home: Path, snapshots: Path) -> None:
    refused = call(home, "delete", "--snapshots", "digits")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: cannot ask for confirmation: standard input is not a terminal; "
        "use --yes to delete digits-3f9a with all snapshots\n",
    )
    result = call(home, "delete", "--snapshots", "digits", "--yes")
    assert (result.returncode, result.stderr) == (0, "deleted digits-3f9a\n")
    assert not snapshots.parent.exists()


def test_snapshots_elsewhere_are_kept_and_named(home: Path, tmp_path: Path) -> None:
    location = committed_elsewhere(home, tmp_path) / "translate-0001"
    result = call(home, "delete", "translate", "--yes")
    assert (result.returncode, result.stderr) == (
        0,
        f"deleted translate-0001; its snapshots are kept at {location}: "
        f"`paceline delete --snapshots {location}` deletes them\n",
    )
    assert not (home / "runs" / "translate-0001").exists()
    assert call(home, "delete", str(location), "--yes").stderr == (
        f"error: {location} is a location, not a run id; use --snapshots to delete the run's snapshots there\n"
    )
    refused = call(home, "delete", "--snapshots", str(location), "--yes")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"error: nothing at {location} reports the end of translate-0001: it may still be training on another machine; "
        "--force deletes its snapshots anyway\n",
    )
    assert (location / "step-40-g2" / "manifest.json").exists()
    last = call(home, "delete", "--snapshots", str(location), "--yes", "--force")
    assert (last.returncode, last.stderr) == (0, f"deleted the snapshots of translate-0001 at {location}\n")
    assert [path.name for path in location.parent.iterdir()] == ["translate-0002"]


def test_snapshots_elsewhere_are_deleted_with_the_run_and_nothing_next_to_them(home: Path, tmp_path: Path) -> None:
    location = committed_elsewhere(home, tmp_path) / "translate-0001"
    (location / ".step-9-g1.partial").touch()  # belongs to no snapshot
    (location / "step-10-g1" / "worker-0" / ".left.0123.partial").touch()  # left by a crash
    other = recorded.contents(location.parent / "translate-0002")
    result = call(home, "delete", "--snapshots", "translate", "--yes")
    assert (result.returncode, result.stderr) == (
        0, f"deleted the snapshots of translate-0001 at {location}\ndeleted translate-0001\n",
    )  # fmt: skip
    assert recorded.contents(location) == {".step-9-g1.partial": b""}
    assert recorded.contents(location.parent / "translate-0002") == other


def test_a_run_is_kept_if_its_snapshots_cannot_be_deleted(home: Path, tmp_path: Path) -> None:
    location = committed_elsewhere(home, tmp_path)
    (location / "translate-0001").rename(tmp_path / "real")
    (location / "translate-0001").symlink_to(tmp_path / "real")
    before = recorded.contents(tmp_path / "real")
    result = call(home, "delete", "--snapshots", "translate", "--yes")
    assert (result.returncode, result.stderr) == (
        1,
        f"error: translate-0001 was not deleted: {location}/translate-0001 is a symbolic link: "
        "its target is not deleted\n",
    )
    assert recorded.contents(tmp_path / "real") == before
    assert (home / "runs" / "translate-0001" / "plan.json").exists()


def test_snapshots_of_a_running_run_are_not_deleted(home: Path, tmp_path: Path) -> None:
    location = committed_elsewhere(home, tmp_path) / "translate-0001"
    with recorded.supervised(home / "runs" / "translate-0001"):
        result = call(home, "delete", "--snapshots", str(location), "--yes", "--force")
        assert (result.returncode, result.stderr) == (
            1, "error: translate-0001 is still running; run `paceline stop translate-0001` first\n",
        )  # fmt: skip
    assert (location / "step-40-g2" / "manifest.json").exists()


def test_an_interrupted_deletion_is_completed_and_never_removes_snapshots(home: Path, snapshots: Path) -> None:
    (snapshots.parent / "deleted").touch()
    assert call(home, "ls", "-o", "name").stdout == "translate-0001\n"
    before = recorded.contents(snapshots)
    assert call(home, "delete", "translate", "--yes").returncode == 0
    assert sorted(path.name for path in snapshots.parent.iterdir()) == ["deleted", "snapshots"]
    assert recorded.contents(snapshots) == before


def test_an_unreadable_folder_is_not_treated_as_empty(home: Path, snapshots: Path) -> None:
    (snapshots / "digits-3f9a").rename(snapshots / "aside")
    (snapshots / "digits-3f9a").symlink_to("digits-3f9a")
    result = call(home, "delete", "digits", "--yes")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.endswith(": cannot delete digits-3f9a: Too many levels of symbolic links\n")
    assert (snapshots.parent / "plan.json").exists() and (snapshots / "aside" / "step-40-g2").exists()


@pytest.fixture
def in_claim(home: Path) -> Path:
    """The folder of a run whose snapshots are in a volume claim, of a cluster that does not answer."""
    folder = home / "runs" / "translate-0001"
    run_fields = {"on": "kubernetes", "context": "lab", "namespace": "team-a", "submitted": True}
    for name, more in (("run.json", run_fields), ("plan.json", {"snapshots": {"to": "claim://kept/x"}})):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **more}))
    return folder


def test_a_run_on_an_unreachable_cluster_is_kept_unless_forced(home: Path, in_claim: Path) -> None:
    no_cluster = {"KUBECONFIG": "/nowhere/config"}
    result = call(home, "delete", "--snapshots", "translate", "--yes", env=no_cluster)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.endswith("; --force removes it from this machine anyway\n") and in_claim.exists()
    result = call(home, "delete", "--snapshots", "translate", "--yes", "--force", env=no_cluster)
    assert (
        "its snapshots at claim://kept/x/translate-0001 were not deleted: the run may still be running" in result.stderr
    )
    assert result.returncode == 1 and not in_claim.exists()


def test_snapshots_left_in_a_volume_claim_are_remembered(home: Path, in_claim: Path) -> None:
    for path in in_claim.iterdir():  # as `delete` leaves it
        if path.is_file() and path.name not in ("run.json", "plan.json"):
            path.unlink()
    (in_claim / "deleted").touch()
    assert call(home, "ls", "-o", "name").stdout == "digits-3f9a\n"
    assert call(home, "delete", "digits", "--yes").returncode == 0  # which also completes the interrupted deletion
    assert sorted(path.name for path in in_claim.iterdir()) == ["deleted", "plan.json", "run.json"]
    result = call(home, "snapshots", "ls", "translate", env={"KUBECONFIG": "/nowhere/config"})
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.startswith("error: no kubeconfig found")


def test_a_link_among_the_runs_is_not_a_run(tmp_path: Path) -> None:
    recorded.write(tmp_path / "other")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits-3f9a").symlink_to(tmp_path / "other" / "runs" / "digits-3f9a")
    assert call(tmp_path, "delete", "digits-3f9a", "--yes", "--force").returncode == 2
    assert (tmp_path / "other" / "runs" / "digits-3f9a" / "plan.json").exists()


def test_a_running_run_is_not_deleted(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=recorded.LIFE[:5])
    with recorded.supervised(folder):
        result = call(tmp_path, "delete", "digits-3f9a", "--yes")
        assert result.returncode == 1
        assert "is still running; run `paceline stop digits-3f9a` first, or use --force" in result.stderr
        assert call(tmp_path, "delete", "--finished", "--yes").stderr == "nothing to delete\n"
        assert folder.exists()


def test_delete_finished(home: Path) -> None:
    assert call(home, "delete", "--finished", "-y").returncode == 0
    assert list((home / "runs").iterdir()) == []


def test_delete_finished_removes_snapshots_of_earlier_runs_only_on_request(home: Path, snapshots: Path) -> None:
    assert call(home, "delete", "--finished", "-y").returncode == 0
    assert [path.name for path in (home / "runs").iterdir()] == ["digits-3f9a"]
    assert call(home, "delete", "--finished", "-y").stderr == "nothing to delete\n"
    assert call(home, "delete", "--finished", "--snapshots", "-y").returncode == 0
    assert list((home / "runs").iterdir()) == []


def test_an_internal_error_prints_one_line_and_writes_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_runs() -> None:
        raise KeyError("x")

    monkeypatch.setattr(run_folders, "all_runs", all_runs)
    result = call(home, "ls")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    first, second = result.stderr.splitlines()
    assert first == "error: this is a bug in Paceline: KeyError: 'x'"
    path = Path(second.removeprefix("note: the traceback is in "))
    assert "KeyError" in path.read_text()


@pytest.mark.parametrize("verb", ["ls", "status", "logs", "doctor"])
def test_an_unreadable_home_is_reported(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").touch()
    result = call(tmp_path, verb, env={"PACELINE_HOME": str(tmp_path / "file" / "deeper")})
    assert "Traceback" not in result.stderr and result.returncode in (0, 1, 2)


def test_nothing_here_needs_linux() -> None:
    """The command line also works on a Mac: it uses nothing that only Linux has, except by name or in the backend."""
    linux_only = {
        "epoll", "inotify", "memfd_create", "pidfd_open", "pidfd_send_signal", "prctl", "sched_getaffinity",
        "sched_setaffinity", "sendfile", "setns", "splice", "unshare", "eventfd", "signalfd", "PR_SET_PDEATHSIG",
        "POLLRDHUP", "AF_NETLINK", "SOCK_CLOEXEC", "waitid",
    }  # fmt: skip
    source = Path(recorded.environment(Path())["PYTHONPATH"]) / "paceline"
    files = [*(source / "cli").glob("*.py"), *(source / "view").rglob("*.py")]
    assert len(files) > 20
    for path in files:
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not used & linux_only, path
