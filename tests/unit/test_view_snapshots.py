"""`paceline snapshots`, called as a person calls it, on snapshots in a folder."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.storage.evaluation import Evaluation
from paceline.storage.folder import Folder
from paceline.storage.manifest import File, Gone, Id, Manifest
from paceline.storage.snapshots import Known, Snapshots
from paceline.storage.store import Wanted
from paceline.view import snapshots
from paceline.view.places import Reader
from support import committed, recorded
from support.committed import DEAD, NAMES, RUN
from support.recorded import REPORT, call


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a run that has ended, and its snapshots in its own folder."""
    folder = recorded.write(tmp_path / "home", RUN, report=REPORT)
    committed.life(Folder(str(folder / "snapshots")), tmp_path / "scratch")
    return tmp_path / "home"


def place(home: Path, name: str = RUN) -> Path:
    """What is at its place."""
    return home / "runs" / name / "snapshots" / name


# ---- ls


def test_those_that_count_are_listed_newest_first(home: Path) -> None:
    done = call(home, "snapshots", "ls")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0] == ["SNAPSHOT", "STEP", "GENERATION", "AGE", "SIZE", "FILES", "METRICS"]
    assert [line[:3] for line in lines[1:]] == [
        ["step-40-g2", "40", "2"], ["step-20-g2", "20", "2"], ["step-10-g1", "10", "1"],
    ]  # fmt: skip
    assert lines[1][-5:] == ["19", "KiB", "2", "loss", "0.025"]


def test_those_that_count_no_more_are_listed_when_asked_for_and_marked(home: Path) -> None:
    head, *lines = [line.split() for line in call(home, "snapshots", "ls", RUN, "--all").stdout.splitlines()]
    assert "COUNTS" in head
    assert [line[0] for line in lines] == ["step-40-g2", "step-20-g2", *DEAD, "step-10-g1"]
    assert [line[0] for line in lines if "no" in line] == DEAD
    assert call(home, "snapshots", "ls", "--all", "-o", "name").stdout.split() == [line[0] for line in lines]


def test_the_forms_of_a_list(home: Path) -> None:
    assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES
    newest = json.loads(call(home, "snapshots", "ls", "-o", "json").stdout)[0]
    assert newest == {
        "snapshot": "step-40-g2", "step": 40, "generation": 2, "counts": True, "damaged": None, "at": committed.AT,
        "bytes": len(committed.weights(40)) + 2, "files": 2, "tasks": ["worker-0"], "world": 2,
        "metrics": {"loss": 0.025}, "evaluated": None, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    assert call(home, "snapshots", "ls", "-o", "yaml").stdout.startswith("- snapshot: step-40-g2\n  step: 40\n")
    assert committed.AT in call(home, "snapshots", "ls", "-o", "wide").stdout


def test_what_an_evaluator_said_counts_more_than_what_a_snapshot_says_of_itself(home: Path) -> None:
    told = Evaluation("evaluator-0", {"loss": 0.5, "accuracy": 0.75}, committed.AT)
    snapshots_of = Snapshots(Folder(str(place(home).parent)), RUN)
    assert snapshots_of.evaluate(Id(40, 2), told) == told
    assert snapshots_of.evaluate(Id(40, 2), Evaluation("evaluator-1", {"loss": 0.1})) == told, "the first counts"
    assert "loss 0.5, accuracy 0.75" in call(home, "snapshots", "ls").stdout.splitlines()[1]
    shown = call(home, "snapshots", "show").stdout
    assert "  metrics      loss 0.025\n" in shown
    assert "  evaluated    loss 0.5, accuracy 0.75 (evaluator-0)\n" in shown
    newest = json.loads(call(home, "snapshots", "ls", "-o", "json").stdout)[0]
    assert (newest["metrics"], newest["evaluated"]["task"]) == (told.metrics, "evaluator-0")
    (place(home) / "step-40-g2" / "evaluation.json").write_text("{")
    assert "loss 0.025" in call(home, "snapshots", "ls").stdout.splitlines()[1]


def test_a_damaged_manifest_does_not_hide_the_others(home: Path) -> None:
    (place(home) / "step-40-g2" / "manifest.json").write_text("{")
    done = call(home, "snapshots", "ls")
    assert done.returncode == 0
    assert "damaged: digits-3f9a/step-40-g2/manifest.json is damaged: it is no JSON" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == NAMES


def test_a_run_without_snapshots(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, RUN, report=REPORT)
    done = call(tmp_path, "snapshots", "ls")
    where = folder / "snapshots" / RUN
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"{RUN} has no snapshot at {where}\n")
    assert call(tmp_path, "snapshots", "ls", "-o", "json").stdout == "[]\n"
    done = call(tmp_path, "snapshots", "show")
    assert (done.returncode, done.stderr) == (2, f"error: {RUN} has no snapshot at {where}\n")


def test_where_the_plan_says_another_folder_that_is_read(home: Path, tmp_path: Path) -> None:
    other = recorded.write(home, "translate-0001", report=REPORT)
    plan = json.loads((other / "plan.json").read_text())
    (other / "plan.json").write_text(json.dumps({**plan, "snapshots": {"to": str(tmp_path / "elsewhere")}}))
    committed.life(Folder(str(tmp_path / "elsewhere")), tmp_path / "more", "translate-0001")
    assert call(home, "snapshots", "ls", "translate", "-o", "name").stdout.split() == NAMES


def test_a_run_that_trains_is_read_too(home: Path) -> None:
    (home / "runs" / RUN / "report.json").unlink()
    with recorded.supervised(home / "runs" / RUN):
        assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES
        assert call(home, "snapshots", "verify", RUN, "--all").returncode == 0


# ---- runs of other machines


def test_a_run_of_another_machine_is_read_by_its_folder(home: Path, tmp_path: Path) -> None:
    nobody = tmp_path / "nobody"
    nobody.mkdir()
    for written in (str(place(home)), f"{place(home)}/", f"./{RUN}"):
        done = call(nobody, "snapshots", "ls", written, "-o", "name", cwd=place(home).parent)
        assert done.stdout.split() == NAMES, done.stderr


@pytest.mark.parametrize(
    ("written", "code", "message"),
    [
        ("{}/digits-3f9b", 2, "there are no snapshots of a run 'digits-3f9b' at {}; did you mean 'digits-3f9a'?"),
        ("{}/xyzzy", 2, "there are no snapshots of a run 'xyzzy' at {}\n"),
        ("{}", 2, "{} holds runs and is none: digits-3f9a; write {}/digits-3f9a"),
        ("{}/digits-3f9a/step-40-g2", 2, "is a snapshot: write the run first, then the snapshot: {}/digits-3f9a step"),
        ("{}/Digits", 2, "{}/Digits names no run: 'Digits' cannot be a run's id"),
        ("s3://digits-3f9a", 2, "s3://digits-3f9a names no run: write s3://bucket/path/RUN"),
        ("gcs://bucket/digits-3f9a", 1, "gcs://bucket is no place for snapshots: an absolute folder, or one of s3, gs"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_places_without_snapshots_are_told(home: Path, written: str, code: int, message: str) -> None:
    where = str(place(home).parent)
    done = call(home, "snapshots", "ls", written.replace("{}", where))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
    assert message.replace("{}", where) in done.stderr


ON_A_CLUSTER = {"on": "kubernetes", "context": "lab", "namespace": "team-a"}
NO_CLUSTER = {"KUBECONFIG": "/nowhere/config"}


def on_a_cluster(home: Path, to: str) -> None:
    """A run that has ended there, as this machine knows it."""
    folder = recorded.write(home, "translate-0001", report=REPORT, started=recorded.at(30))
    for name, more in (("run.json", ON_A_CLUSTER), ("plan.json", {"snapshots": {"to": to}})):
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**known, **more}))


@pytest.mark.parametrize(
    ("to", "written", "code", "message"),
    [
        ("", "translate", 1, "the snapshots of translate-0001 were in its captain's pod, and went with it; those in a"),
        ("claim://kept/x", "translate", 1, "there is no kubeconfig: /nowhere/config is not there"),
        ("claim://kept/x", "claim://kept/x/translate-0001", 1, "there is no kubeconfig: /nowhere/config is not there"),
        ("claim://kept/x", "claim://kept/y/translate-0001", 2, "claim://kept/y is a volume claim of a cluster, and "),
    ],
)
def test_what_is_inside_a_cluster_and_cannot_be_reached(
    home: Path, to: str, written: str, code: int, message: str
) -> None:
    on_a_cluster(home, to)
    done = call(home, "snapshots", "ls", written, env=NO_CLUSTER)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1)
    assert done.stderr.startswith(f"error: {message}")


# ---- which one


@pytest.mark.parametrize("written", ["step-40-g2", "step-40", "40"])
def test_a_snapshot_is_named_by_its_step_where_that_is_enough(home: Path, written: str) -> None:
    assert call(home, "snapshots", "show", RUN, written).stdout.startswith("step-40-g2 of digits-3f9a, committed ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", RUN, "20"], "'20' is one of several: step-20-g2 and step-20-g1; write one of them"),
        (["show", RUN, "33"], "digits-3f9a has no snapshot '33'; the nearest: step-30-g1, step-40-g2, step-20-g2"),
        (["show", RUN, "step-40-g7"], "has no snapshot 'step-40-g7'; the nearest: step-40-g2, step-30-g1, step-20-g2"),
        (["show", RUN, "latest"], "'latest' is no snapshot: write step-40-g2, step-40 or 40"),
        (["show", "step-40-g2"], "step-40-g2 is a snapshot, and the run comes first: RUN step-40-g2 (no run "),
        (["ls", "digit-3f9a"], "no run 'digit-3f9a'; did you mean 'digits-3f9a'?"),
        (["get"], "say where to: --to FOLDER"),
        (["verify", RUN, "40", "--all"], "name snapshots or say --all, not both"),
        (["rm", RUN, "40"], "say --yes to delete step-40-g2 of digits-3f9a (19 KiB)"),
        (["ls", "-o", "xml"], "-o 'xml': -o takes json, yaml, wide, name"),
        (["lss"], "there is no verb 'snapshots lss'; did you mean 'snapshots ls'?"),
        ([RUN], "there is no verb 'snapshots digits-3f9a'; there are: snapshots ls, snapshots show"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_are_told_in_words(home: Path, words: list[str], message: str) -> None:
    done = call(home, "snapshots", *words)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("error: ") and message in done.stderr


# ---- show


def test_all_that_is_known_of_the_newest(home: Path) -> None:
    lines = call(home, "snapshots", "show").stdout.splitlines()
    assert lines[0].startswith("step-40-g2 of digits-3f9a, committed ")
    assert lines[1:8] == [
        f"  place        {place(home)}/step-40-g2",
        "  counts       yes, the newest",
        "  chain        generation 2 from step-10-g1, generation 1 from nothing",
        "  size         2 files, 19 KiB",
        "  written by   worker-0; 2 tasks trained together",
        "  metrics      loss 0.025",
        "  versions     torch 2.13.0",
    ]
    digest = hashlib.sha256(committed.weights(40)).hexdigest()
    assert lines[9].split() == ["TASK", "FILE", "SIZE", "SHA256"]
    assert lines[11].split() == ["worker-0", "variables/weights", "19", "KiB", digest]


def test_one_that_counts_no_more_says_why(home: Path) -> None:
    assert (
        "\n  counts       no: generation 2 began from step-10-g1\n" in call(home, "snapshots", "show", RUN, "30").stdout
    )


def test_the_same_as_data(home: Path) -> None:
    shown = json.loads(call(home, "snapshots", "show", RUN, "step-20-g2", "-o", "json").stdout)
    assert shown["chain"] == [{"generation": 2, "from": "step-10-g1"}, {"generation": 1, "from": None}]
    assert shown["parts"][0] == {
        "task": "worker-0", "path": "step", "size": 2, "sha256": hashlib.sha256(b"20").hexdigest(),
    }  # fmt: skip
    assert (shown["run"], shown["place"]) == (RUN, f"{place(home)}/step-20-g2")
    assert call(home, "snapshots", "show", "-o", "yaml").stdout.startswith("run: digits-3f9a\n")


def test_what_a_program_called_its_metrics_cannot_get_at_the_terminal(home: Path) -> None:
    path = place(home) / "step-40-g2" / "manifest.json"
    path.write_text(path.read_text().replace('"loss"', '"\\u001b[2Jloss"'))
    for verb in ("ls", "show"):
        done = call(home, "snapshots", verb)
        assert "\x1b" not in done.stdout and "loss 0.025" in done.stdout


# ---- get


def test_a_copy_is_what_was_committed(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    done = call(home, "snapshots", "get", "--to", str(target))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"step-40-g2 of digits-3f9a is in {target}: 2 files, 19 KiB\n"
    assert recorded.contents(target) == {"variables/weights": committed.weights(40), "step": b"40"}
    (tmp_path / "empty").mkdir()
    assert call(home, "snapshots", "get", RUN, "step-10", "--to", "empty", cwd=tmp_path).returncode == 0
    assert (tmp_path / "empty" / "step").read_text() == "10"


def test_a_folder_that_holds_something_is_left_as_it_is(home: Path, tmp_path: Path) -> None:
    for name, make in (("folder", lambda path: (path / "kept").mkdir(parents=True)), ("file", Path.touch)):
        made: Callable[[Path], None] = make
        made(tmp_path / name)
        done = call(home, "snapshots", "get", "--to", str(tmp_path / name))
        assert (done.returncode, done.stderr) == (
            1, f"error: {tmp_path / name} is there already, and not an empty folder\n",
        )  # fmt: skip
    assert (tmp_path / "folder" / "kept").is_dir()


def test_of_a_damaged_snapshot_there_is_no_copy(home: Path, tmp_path: Path) -> None:
    (place(home) / "step-40-g2" / "worker-0" / "variables" / "weights").write_bytes(b"other")
    done = call(home, "snapshots", "get", "--to", str(tmp_path / "new" / "copy"))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "step-40-g2/worker-0/variables/weights is damaged: it has 5 bytes instead of" in done.stderr
    assert not (tmp_path / "new").exists()


# ---- verify


def test_every_damaged_file_is_named(home: Path) -> None:
    assert call(home, "snapshots", "verify").stdout == "step-40-g2 is as it was committed: 2 files, 19 KiB\n"
    part = place(home) / "step-40-g2" / "worker-0"
    (part / "variables" / "weights").write_bytes(bytes(len(committed.weights(40))))
    (part / "step").unlink()
    done = call(home, "snapshots", "verify", RUN, "--all")
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (1, 6)
    assert lines[:2] == [
        "step-40-g2: digits-3f9a/step-40-g2/worker-0/step is gone",
        "step-40-g2: digits-3f9a/step-40-g2/worker-0/variables/weights is damaged: its digest is another",
    ]
    assert call(home, "snapshots", "verify", RUN, "step-20-g2", "10").returncode == 0


def test_a_damaged_manifest_is_a_damage(home: Path) -> None:
    (place(home) / "step-10-g1" / "manifest.json").write_text("{}")
    done = call(home, "snapshots", "verify", RUN, "10")
    assert (done.returncode, done.stdout.startswith("step-10-g1: digits-3f9a/step-10-g1/manifest.json is da")) == (
        1,
        True,
    )


# ---- rm


def test_snapshots_are_deleted_and_what_else_is_there_is_not(home: Path) -> None:
    dry = call(home, "snapshots", "rm", RUN, "10", "step-30-g1", "--dry-run")
    assert dry.stderr == f"would delete step-10-g1 and step-30-g1 of digits-3f9a (37 KiB) at {place(home)}\n"
    done = call(home, "snapshots", "rm", RUN, "10", "step-30-g1", "10", "--yes")
    assert (done.returncode, done.stderr) == (0, "deleted step-10-g1\ndeleted step-30-g1\n")
    left = sorted(path.name for path in place(home).iterdir())
    assert left == ["generations", "step-20-g1", "step-20-g2", "step-40-g2"]
    assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == ["step-40-g2", "step-20-g2"]


def test_one_wrong_name_and_nothing_is_deleted(home: Path) -> None:
    assert call(home, "snapshots", "rm", RUN, "10", "11", "--yes").returncode == 2
    assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES


@pytest.mark.parametrize("by", ["id", "place"])
def test_the_newest_of_a_run_that_trains_is_not_deleted(home: Path, by: str) -> None:
    run = RUN if by == "id" else str(place(home))
    with recorded.supervised(home / "runs" / RUN):
        done = call(home, "snapshots", "rm", run, "10", "40", "--yes")
        assert (done.returncode, done.stderr) == (
            1, "error: step-40-g2 is the newest of digits-3f9a, which still runs: it would go on from there\n",
        )  # fmt: skip
        assert call(home, "snapshots", "ls", "-o", "name").stdout.split() == NAMES
        assert call(home, "snapshots", "rm", run, "10", "--yes").returncode == 0
    assert call(home, "snapshots", "rm", run, "40", "--yes").returncode == 0


# ---- what is loaded


def test_what_it_reads_is_what_a_run_commits(home: Path) -> None:
    """Nothing here has a form of its own."""
    known = Snapshots(Folder(str(place(home).parent)), RUN).known()
    assert [str(id) for id in known.counted()] == NAMES


# ---- whatever it reads from


class Vanishing:
    """A source of another kind, of which the run that trains lets one snapshot go while somebody looks."""

    def __init__(self, home: Path, gone: str) -> None:
        self._snapshots = Snapshots(Folder(str(place(home).parent)), RUN)
        self._gone = gone

    def known(self) -> Known:
        return self._snapshots.known()

    def manifest(self, id: Id) -> Manifest:
        if str(id) == self._gone:
            raise Gone(f"{id} is gone")
        return self._snapshots.manifest(id)

    def evaluation(self, id: Id) -> Evaluation | None:
        return None

    def check(self, id: Id, task: str, file: File, still: Wanted) -> None:
        raise Gone(f"{file.path} is gone")

    def fetch(self, wanted: Manifest, folder: str, still: Wanted) -> int:
        return 0

    def delete(self, id: Id) -> None: ...

    def delete_all(self) -> None: ...


def test_what_is_deleted_while_somebody_looks_is_no_damage(home: Path) -> None:
    made = Snapshots(Folder(str(place(home).parent)), RUN).manifest(Id(10, 1))
    reader: Reader = Vanishing(home, "step-10-g1")
    known = reader.known()
    assert [str(found.id) for found in snapshots.look_up(reader, known, known.counted())] == NAMES[:2]
    with pytest.raises(Gone):
        snapshots.damages(reader, made, lambda _: True)
    assert snapshots.damages(Vanishing(home, "another"), made, lambda _: True) == [
        "step is gone", "variables/weights is gone",
    ]  # fmt: skip
