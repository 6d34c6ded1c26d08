"""`paceline snapshots`, called as a user calls it, on snapshots in a folder."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.storage.snapshots.evaluation import Evaluation
from paceline.storage.snapshots.manifest import File, Gone, Manifest, SnapshotId
from paceline.storage.snapshots.repository import Inventory, SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import ContinueCheck
from paceline.view.snapshots import snapshot_listing
from paceline.view.snapshots.snapshot_locations import Reader
from support import committed, recorded
from support.committed import DEAD, NAMES, RUN
from support.recorded import REPORT, call


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Contains a run that has ended, with its snapshots in its own folder."""
    folder = recorded.write(tmp_path / "home", RUN, report=REPORT)
    committed.life(FolderStore(str(folder / "snapshots")), tmp_path / "scratch")
    return tmp_path / "home"


def snapshots_folder(home: Path, name: str = RUN) -> Path:
    """The folder with the snapshots of a run."""
    return home / "runs" / name / "snapshots" / name


# ---- ls


def test_current_snapshots_are_listed_newest_first(home: Path) -> None:
    result = call(home, "snapshots", "ls")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert (result.returncode, result.stderr) == (0, "")
    assert lines[0] == ["SNAPSHOT", "STEP", "GENERATION", "AGE", "SIZE", "FILES", "METRICS"]
    assert [line[:3] for line in lines[1:]] == [
        ["step-40-g2", "40", "2"], ["step-20-g2", "20", "2"], ["step-10-g1", "10", "1"],
    ]  # fmt: skip
    assert lines[1][-5:] == ["19", "KiB", "2", "loss", "0.025"]


def test_superseded_snapshots_are_listed_with_all_and_marked(home: Path) -> None:
    head, *lines = [line.split() for line in call(home, "snapshots", "ls", RUN, "--all").stdout.splitlines()]
    assert "CURRENT" in head
    assert [line[0] for line in lines] == ["step-40-g2", "step-20-g2", *DEAD, "step-10-g1"]
    assert [line[0] for line in lines if "no" in line] == DEAD
    assert call(home, "snapshots", "ls", "--all", "-o", "name").stdout.split() == [line[0] for line in lines]


def test_the_output_formats_of_a_list(home: Path) -> None:
    assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES
    newest = json.loads(call(home, "snapshots", "ls", "-o", "json").stdout)[0]
    assert newest == {
        "schema_version": 1, "snapshot": "step-40-g2", "step": 40, "generation": 2, "counts": True, "damaged": None,
        "at": committed.AT,
        "bytes": len(committed.weights(40)) + 2, "files": 2, "tasks": ["worker-0"], "world": 2,
        "metrics": {"loss": 0.025}, "evaluated": None, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    as_yaml = call(home, "snapshots", "ls", "-o", "yaml").stdout
    assert as_yaml.startswith("- schema_version: 1\n  snapshot: step-40-g2\n  step: 40\n")
    assert committed.AT in call(home, "snapshots", "ls", "-o", "wide").stdout


def test_an_evaluation_takes_precedence_over_the_metrics_of_the_snapshot(home: Path) -> None:
    evaluation = Evaluation("evaluator-0", {"loss": 0.5, "accuracy": 0.75}, committed.AT)
    repository = SnapshotRepository(FolderStore(str(snapshots_folder(home).parent)), RUN)
    assert repository.evaluate(SnapshotId(40, 2), evaluation) == evaluation
    assert repository.evaluate(SnapshotId(40, 2), Evaluation("evaluator-1", {"loss": 0.1})) == evaluation, (
        "the first evaluation wins"
    )
    assert "loss 0.5, accuracy 0.75" in call(home, "snapshots", "ls").stdout.splitlines()[1]
    output = call(home, "snapshots", "show").stdout
    assert "  metrics      loss 0.025\n" in output
    assert "  evaluated    loss 0.5, accuracy 0.75 (evaluator-0)\n" in output
    newest = json.loads(call(home, "snapshots", "ls", "-o", "json").stdout)[0]
    assert (newest["metrics"], newest["evaluated"]["task"]) == (evaluation.metrics, "evaluator-0")
    (snapshots_folder(home) / "step-40-g2" / "evaluation.json").write_text("{")
    assert "loss 0.025" in call(home, "snapshots", "ls").stdout.splitlines()[1]


def test_a_damaged_manifest_does_not_hide_the_others(home: Path) -> None:
    (snapshots_folder(home) / "step-40-g2" / "manifest.json").write_text("{")
    result = call(home, "snapshots", "ls")
    assert result.returncode == 0
    assert "damaged: digits-3f9a/step-40-g2/manifest.json is damaged: it is not JSON" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == NAMES


def test_a_size_that_no_file_can_have_is_damage(home: Path) -> None:
    path = snapshots_folder(home) / "step-40-g2" / "manifest.json"
    path.write_text(re.sub(r'"size": \d+', f'"size": {"9" * 400}', path.read_text()))
    result = call(home, "snapshots", "ls")
    assert result.returncode == 0 and "step-40-g2/manifest.json is not a valid manifest" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == NAMES


def test_a_run_without_snapshots(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, RUN, report=REPORT)
    result = call(tmp_path, "snapshots", "ls")
    location = folder / "snapshots" / RUN
    assert (result.returncode, result.stdout, result.stderr) == (0, "", f"{RUN} has no snapshot at {location}\n")
    assert call(tmp_path, "snapshots", "ls", "-o", "json").stdout == "[]\n"
    result = call(tmp_path, "snapshots", "show")
    assert (result.returncode, result.stderr) == (2, f"error: {RUN} has no snapshot at {location}\n")


def test_another_folder_that_the_plan_names_is_read(home: Path, tmp_path: Path) -> None:
    other = recorded.write(home, "translate-0001", report=REPORT)
    plan = json.loads((other / "plan.json").read_text())
    (other / "plan.json").write_text(json.dumps({**plan, "snapshots": {"to": str(tmp_path / "elsewhere")}}))
    committed.life(FolderStore(str(tmp_path / "elsewhere")), tmp_path / "more", "translate-0001")
    assert call(home, "snapshots", "ls", "translate", "-o", "name").stdout.split() == NAMES


def test_a_running_run_is_read_too(home: Path) -> None:
    (home / "runs" / RUN / "report.json").unlink()
    with recorded.supervised(home / "runs" / RUN):
        assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES
        assert call(home, "snapshots", "verify", RUN, "--all").returncode == 0


# ---- runs of other machines


def test_a_run_of_another_machine_is_read_by_its_folder(home: Path, tmp_path: Path) -> None:
    empty_home = tmp_path / "empty"
    empty_home.mkdir()
    for argument in (str(snapshots_folder(home)), f"{snapshots_folder(home)}/", f"./{RUN}"):
        result = call(empty_home, "snapshots", "ls", argument, "-o", "name", cwd=snapshots_folder(home).parent)
        assert result.stdout.split() == NAMES, result.stderr


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("{}/digits-3f9b", 2, "no snapshots of a run 'digits-3f9b' at {}; did you mean 'digits-3f9a'?"),
        ("{}/xyzzy", 2, "no snapshots of a run 'xyzzy' at {}\n"),
        ("{}", 2, "{} contains runs but is not one: digits-3f9a; write {}/digits-3f9a"),
        ("{}/digits-3f9a/step-40-g2", 2, "not a run; write the run, then the snapshot: {}/digits-3f9a step"),
        ("{}/Digits", 2, "{}/Digits does not name a run: 'Digits' is not a valid run id"),
        ("s3://digits-3f9a", 2, "s3://digits-3f9a does not name a run; write s3://bucket/path/RUN"),
        ("gcs://bucket/digits-3f9a", 1, "gcs://bucket is not a location for snapshots; use an absolute folder, s3"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_locations_without_snapshots_are_reported(home: Path, argument: str, code: int, message: str) -> None:
    location = str(snapshots_folder(home).parent)
    result = call(home, "snapshots", "ls", argument.replace("{}", location))
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (code, "", 1)
    assert message.replace("{}", location) in result.stderr


ON_A_CLUSTER = {"on": "kubernetes", "context": "lab", "namespace": "team-a"}
NO_CLUSTER = {"KUBECONFIG": "/nowhere/config"}


def on_a_cluster(home: Path, to: str) -> None:
    """Record a run that has ended on a cluster."""
    folder = recorded.write(home, "translate-0001", report=REPORT, started=recorded.at(30))
    for name, more in (("run.json", ON_A_CLUSTER), ("plan.json", {"snapshots": {"to": to}})):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, **more}))


@pytest.mark.parametrize(
    ("to", "argument", "code", "message"),
    [
        ("", "translate", 1, "the snapshots of translate-0001 were in its captain's pod, and were deleted with it"),
        ("claim://kept/x", "translate", 1, "no kubeconfig found at /nowhere/config"),
        (
            "claim://kept/x",
            "claim://kept/x/translate-0001",
            1,
            "no kubeconfig found at /nowhere/config",
        ),
        ("claim://kept/x", "claim://kept/y/translate-0001", 2, "claim://kept/y is a volume claim on a cluster, and "),
    ],
)
def test_snapshots_inside_a_cluster_that_cannot_be_reached(
    home: Path, to: str, argument: str, code: int, message: str
) -> None:
    on_a_cluster(home, to)
    result = call(home, "snapshots", "ls", argument, env=NO_CLUSTER)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (code, "", 1)
    assert result.stderr.startswith(f"error: {message}")


# ---- selecting a snapshot


@pytest.mark.parametrize("argument", ["step-40-g2", "step-40", "40"])
def test_a_snapshot_can_be_named_by_its_step_if_that_is_unique(home: Path, argument: str) -> None:
    assert call(home, "snapshots", "show", RUN, argument).stdout.startswith("step-40-g2 of digits-3f9a, committed ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", RUN, "20"], "'20' matches several snapshots: step-20-g2 and step-20-g1; use one"),
        (["show", RUN, "33"], "digits-3f9a has no snapshot '33'; the nearest: step-30-g1, step-40-g2, step-20-g2"),
        (["show", RUN, "step-40-g7"], "has no snapshot 'step-40-g7'; the nearest: step-40-g2, step-30-g1, step-20-g2"),
        (["show", RUN, "latest"], "'latest' is not the name of a snapshot; use step-40-g2, step-40 or 40"),
        (["show", "step-40-g2"], "step-40-g2 is a snapshot, not a run (no run "),
        (["ls", "digit-3f9a"], "no run 'digit-3f9a'; did you mean 'digits-3f9a'?"),
        (["get"], "--to DIR is required"),
        (["verify", RUN, "40", "--all"], "name snapshots or use --all, not both"),
        (["rm", RUN, "40"], "use --yes to delete step-40-g2 of digits-3f9a (19 KiB)"),
        (["ls", "-o", "xml"], "-o 'xml': invalid value; use one of json, yaml, wide, name"),
        (["lss"], "unknown command 'snapshots lss'; did you mean 'snapshots ls'?"),
        ([RUN], "unknown command 'snapshots digits-3f9a'; the commands are: snapshots ls, snapshots show"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_are_reported_in_one_line(home: Path, arguments: list[str], message: str) -> None:
    result = call(home, "snapshots", *arguments)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert result.stderr.startswith("error: ") and message in result.stderr


# ---- show


def test_show_describes_the_newest_snapshot(home: Path) -> None:
    lines = call(home, "snapshots", "show").stdout.splitlines()
    assert lines[0].startswith("step-40-g2 of digits-3f9a, committed ")
    assert lines[1:8] == [
        f"  location     {snapshots_folder(home)}/step-40-g2",
        "  current      yes, the newest",
        "  history      generation 2 (started from step-10-g1), generation 1 (started from scratch)",
        "  size         2 files, 19 KiB",
        "  written by   worker-0 (in a group of 2 tasks)",
        "  metrics      loss 0.025",
        "  versions     torch 2.13.0",
    ]
    digest = hashlib.sha256(committed.weights(40)).hexdigest()
    assert lines[9].split() == ["TASK", "FILE", "SIZE", "SHA256"]
    assert lines[11].split() == ["worker-0", "variables/weights", "19", "KiB", digest]


def test_show_says_why_a_snapshot_is_not_current(home: Path) -> None:
    assert (
        "\n  current      no: superseded by generation 2, which started from step-10-g1\n"
        in call(home, "snapshots", "show", RUN, "30").stdout
    )


def test_show_as_data(home: Path) -> None:
    data = json.loads(call(home, "snapshots", "show", RUN, "step-20-g2", "-o", "json").stdout)
    assert data["chain"] == [{"generation": 2, "from": "step-10-g1"}, {"generation": 1, "from": None}]
    assert data["parts"][0] == {
        "task": "worker-0", "path": "step", "size": 2, "sha256": hashlib.sha256(b"20").hexdigest(),
    }  # fmt: skip
    assert (data["run"], data["place"]) == (RUN, f"{snapshots_folder(home)}/step-20-g2")
    assert call(home, "snapshots", "show", "-o", "yaml").stdout.startswith("schema_version: 1\nrun: digits-3f9a\n")


def test_names_of_metrics_cannot_control_the_terminal(home: Path) -> None:
    path = snapshots_folder(home) / "step-40-g2" / "manifest.json"
    path.write_text(path.read_text().replace('"loss"', '"\\u001b[2Jloss"'))
    for verb in ("ls", "show"):
        result = call(home, "snapshots", verb)
        assert "\x1b" not in result.stdout and "loss 0.025" in result.stdout


# ---- get


def test_a_copy_is_identical_to_what_was_committed(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    result = call(home, "snapshots", "get", "--to", str(target))
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == f"copied step-40-g2 of digits-3f9a to {target}: 2 files, 19 KiB\n"
    assert recorded.contents(target) == {"variables/weights": committed.weights(40), "step": b"40"}
    (tmp_path / "empty").mkdir()
    assert call(home, "snapshots", "get", RUN, "step-10", "--to", "empty", cwd=tmp_path).returncode == 0
    assert (tmp_path / "empty" / "step").read_text() == "10"


def test_an_existing_target_is_not_changed(home: Path, tmp_path: Path) -> None:
    for name, make in (("folder", lambda path: (path / "kept").mkdir(parents=True)), ("file", Path.touch)):
        create: Callable[[Path], None] = make
        create(tmp_path / name)
        result = call(home, "snapshots", "get", "--to", str(tmp_path / name))
        assert (result.returncode, result.stderr) == (
            1, f"error: {tmp_path / name} already exists and is not an empty folder\n",
        )  # fmt: skip
    assert (tmp_path / "folder" / "kept").is_dir()


def test_a_damaged_snapshot_is_not_copied(home: Path, tmp_path: Path) -> None:
    (snapshots_folder(home) / "step-40-g2" / "worker-0" / "variables" / "weights").write_bytes(b"other")
    result = call(home, "snapshots", "get", "--to", str(tmp_path / "new" / "copy"))
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "step-40-g2/worker-0/variables/weights is damaged: it has 5 bytes instead of" in result.stderr
    assert not (tmp_path / "new").exists()


# ---- verify


def test_every_damaged_file_is_named(home: Path) -> None:
    assert call(home, "snapshots", "verify").stdout == "step-40-g2 is intact: 2 files, 19 KiB\n"
    part = snapshots_folder(home) / "step-40-g2" / "worker-0"
    (part / "variables" / "weights").write_bytes(bytes(len(committed.weights(40))))
    (part / "step").unlink()
    result = call(home, "snapshots", "verify", RUN, "--all")
    lines = result.stdout.splitlines()
    assert (result.returncode, len(lines)) == (1, 6)
    assert lines[:2] == [
        "step-40-g2: digits-3f9a/step-40-g2/worker-0/step is missing",
        "step-40-g2: digits-3f9a/step-40-g2/worker-0/variables/weights is damaged: its SHA-256 differs",
    ]
    assert call(home, "snapshots", "verify", RUN, "step-20-g2", "10").returncode == 0


def test_verify_reports_a_damaged_manifest(home: Path) -> None:
    (snapshots_folder(home) / "step-10-g1" / "manifest.json").write_text("{}")
    result = call(home, "snapshots", "verify", RUN, "10")
    assert (result.returncode, result.stdout.startswith("step-10-g1: digits-3f9a/step-10-g1/manifest.json is da")) == (
        1,
        True,
    )


# ---- rm


def test_only_the_named_snapshots_are_deleted(home: Path) -> None:
    dry = call(home, "snapshots", "rm", RUN, "10", "step-30-g1", "--dry-run")
    assert dry.stderr == f"would delete step-10-g1 and step-30-g1 of digits-3f9a (37 KiB) at {snapshots_folder(home)}\n"
    result = call(home, "snapshots", "rm", RUN, "10", "step-30-g1", "10", "--yes")
    assert (result.returncode, result.stderr) == (0, "deleted step-10-g1\ndeleted step-30-g1\n")
    remaining = sorted(path.name for path in snapshots_folder(home).iterdir())
    assert remaining == ["generations", "step-20-g1", "step-20-g2", "step-40-g2"]
    assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == ["step-40-g2", "step-20-g2"]


def test_nothing_is_deleted_if_one_name_is_wrong(home: Path) -> None:
    assert call(home, "snapshots", "rm", RUN, "10", "11", "--yes").returncode == 2
    assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES


@pytest.mark.parametrize("by", ["id", "location"])
def test_the_newest_snapshot_of_a_running_run_is_not_deleted(home: Path, by: str) -> None:
    run = RUN if by == "id" else str(snapshots_folder(home))
    with recorded.supervised(home / "runs" / RUN):
        result = call(home, "snapshots", "rm", run, "10", "40", "--yes")
        assert (result.returncode, result.stderr) == (
            1,
            "error: step-40-g2 is the newest snapshot of digits-3f9a, which is running and would resume from it\n",
        )
        assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES
        assert call(home, "snapshots", "rm", run, "10", "--yes").returncode == 0
    assert call(home, "snapshots", "rm", run, "40", "--yes").returncode == 0


# ---- file format


def test_the_command_reads_what_a_run_commits(home: Path) -> None:
    """The command has no format of its own."""
    inventory = SnapshotRepository(FolderStore(str(snapshots_folder(home).parent)), RUN).inventory()
    assert [str(id) for id in inventory.current()] == NAMES


# ---- other sources


class Vanishing:
    """A source of another kind; the run deletes one of its snapshots during the listing."""

    def __init__(self, home: Path, gone: str) -> None:
        self._snapshots = SnapshotRepository(FolderStore(str(snapshots_folder(home).parent)), RUN)
        self._gone = gone

    def inventory(self) -> Inventory:
        return self._snapshots.inventory()

    def manifest(self, id: SnapshotId) -> Manifest:
        if str(id) == self._gone:
            raise Gone(f"{id} is gone")
        return self._snapshots.manifest(id)

    def evaluation(self, id: SnapshotId) -> Evaluation | None:
        return None

    def check(self, id: SnapshotId, task: str, file: File, should_continue: ContinueCheck) -> None:
        raise Gone(f"{file.path} is gone")

    def fetch(self, manifest: Manifest, folder: str, should_continue: ContinueCheck) -> int:
        return 0

    def delete(self, id: SnapshotId) -> None: ...

    def delete_all(self) -> None: ...


def test_a_snapshot_deleted_during_a_listing_is_not_damaged(home: Path) -> None:
    manifest = SnapshotRepository(FolderStore(str(snapshots_folder(home).parent)), RUN).manifest(SnapshotId(10, 1))
    reader: Reader = Vanishing(home, "step-10-g1")
    inventory = reader.inventory()
    assert [str(listed.id) for listed in snapshot_listing.look_up(reader, inventory, inventory.current())] == NAMES[:2]
    with pytest.raises(Gone):
        snapshot_listing.damages(reader, manifest, lambda _: True)
    assert snapshot_listing.damages(Vanishing(home, "another"), manifest, lambda _: True) == [
        "step is gone", "variables/weights is gone",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "lowest", "expected"), [("loss", True, "step-20-g2"), ("accuracy", False, "step-10-g1")]
)
def test_best_uses_what_an_evaluator_reported(home: Path, metric: str, lowest: bool, expected: str) -> None:
    """As the captain does, which keeps that snapshot. By its own metrics, step 40 has the lowest loss."""
    repository = SnapshotRepository(FolderStore(str(snapshots_folder(home).parent)), RUN)
    repository.evaluate(SnapshotId(40, 2), Evaluation("evaluator-0", {"loss": 0.5, "accuracy": 0.75}, committed.AT))
    repository.evaluate(SnapshotId(10, 1), Evaluation("evaluator-0", {"accuracy": 0.8}, committed.AT))
    plan = home / "runs" / RUN / "plan.json"
    content = json.loads(plan.read_text())
    content["snapshots"] = {**(content.get("snapshots") or {}), "best": [metric, lowest]}
    plan.write_text(json.dumps(content))
    assert call(home, "snapshots", "show", RUN, "best").stdout.splitlines()[0].split()[0] == expected
