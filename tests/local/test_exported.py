"""What the first container of a serving pod does: a model from a snapshot, and last words where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as plans
from paceline.backends.kubernetes.archive import agent_archive
from paceline.backends.kubernetes.code import collect
from paceline.job import load_text
from paceline.storage.folder import Folder
from paceline.storage.manifest import Id
from paceline.storage.snapshots import Snapshots
from support.committed import RUN, commit, weights
from support.environment import without

PROGRAM = """
import json, os, pathlib, signal, sys
import paceline
assert "agent.pyz" in paceline.__file__
restored, model = pathlib.Path(os.environ["PACELINE_RESTORE"]), pathlib.Path(os.environ["PACELINE_EXPORT_DIR"])
print("exporting", restored.name, os.environ["PACELINE_RUN"], os.environ["COLOUR"], os.environ.get("PACELINE_POD"))
if sys.argv[1] != "nothing":
    (model / "model.pt2").write_bytes((restored / "variables" / "weights").read_bytes())
    (model / "paceline.json").write_text(json.dumps({"signatures": {"serving_default": {}}}))
if sys.argv[1] == "waits":
    signal.pause()
sys.exit(3 if sys.argv[1] == "fails" else 0)
"""


def oldest() -> str:
    """An interpreter as old as an image may have, where this machine has one."""
    return next((str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python"))), sys.executable)


class Pod:
    """The folders that its first container has, and the snapshots of a run at a place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("plan", "code", "run", "place"):
            (folder / name).mkdir()
        (folder / "run" / "agent.pyz").write_bytes(agent_archive())
        work = folder / "sent"
        work.mkdir()
        (work / "export.py").write_text(PROGRAM)
        for number, part in enumerate(collect(work).chunks(100)):
            (folder / "code" / f"{number:02}").write_bytes(part)
        store = Folder(str(folder / "place"))
        Snapshots(store, RUN).begin(1, None)
        commit(store, folder / "scratch", 10)
        self.models = folder / "models" / "digits"
        self.model = self.models / "10"

    def export(self, word: str = "", limit: str = "1m", **more: Any) -> subprocess.CompletedProcess[str]:
        job: dict[str, Any] = {
            "name": "digits", "framework": "none", "command": ["python", "export.py"], "env": {"COLOUR": "blue"},
            "export": {"command": ["python", "export.py", word]},
        }  # fmt: skip
        job |= {"limits": {"start": limit}}
        plan = plans.make(load_text(json.dumps(job), "job.yaml", self.folder / "sent").job)
        (self.folder / "plan" / "plan.json").write_text(plans.to_json(plan))
        here = str(self.folder)
        told = {
            "run": RUN, "snapshot": "step-10-g1", "place": f"{here}/place", "plan": f"{here}/plan",
            "folder": f"{here}/run", "code": f"{here}/code", "work": f"{here}/work", "obstore": "", "format": "",
            "to": str(self.models), "last_words": f"{here}/words", "pinned": False, "monitoring": "", **more,
        }  # fmt: skip
        kept = without("PACELINE", "PYTHON")
        return subprocess.run(
            [oldest(), f"{here}/run/agent.pyz", "export"], env={**kept, "PACELINE_POD": json.dumps(told)},
            cwd=self.folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def words(self) -> str:
        return (self.folder / "words").read_text()


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_model_is_made_as_often_as_it_is_asked_for(pod: Pod) -> None:
    for _ in range(2):
        done = pod.export("model")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"exporting step-10-g1 {RUN} blue None\n" in done.stdout
        assert done.stdout.endswith(f"step-10-g1 of {RUN} is exported to {pod.model}: pt2\n")
    assert (pod.model / "model.pt2").read_bytes() == weights(10)
    about = {"format": "pt2", "run": RUN, "step": 10, "signatures": {"serving_default": {}}}
    assert json.loads((pod.model / "paceline.json").read_text()) == about
    assert [each.name for each in (pod.folder / "run").iterdir()] == ["agent.pyz"]  # no room taken by the snapshot


def test_where_the_run_has_deleted_it_the_newest_takes_its_place(pod: Pod) -> None:
    """A pod that comes later, while the run goes on."""
    commit(Folder(str(pod.folder / "place")), pod.folder / "scratch", 30)
    Snapshots(Folder(str(pod.folder / "place")), RUN).delete(Id(10, 1))
    counters = pod.folder / "models" / ".monitoring"
    done = pod.export("model", monitoring=str(counters))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step-10-g1 of {RUN} is not there any more" in done.stdout
    assert f": step-30-g1 is served in its place\nexporting step-30-g1 {RUN} blue" in done.stdout
    assert [each.name for each in pod.models.iterdir()] == ["30"]
    assert json.loads((pod.models / "30" / "paceline.json").read_text())["step"] == 30
    assert (pod.models / "30" / "model.pt2").read_bytes() == weights(30)
    assert counters.read_text() == 'prometheus_config { enable: true, path: "/metrics" }\n'
    assert pod.export("model", pinned=True).returncode == 66


def test_why_it_cannot_is_said_in_last_words(pod: Pod) -> None:
    def ends(word: str, **more: Any) -> tuple[int, str]:
        return pod.export(word, **more).returncode, pod.words()

    assert ends("fails") == (66, "paceline: the job's export ended with exit code 3")
    code, words = ends("nothing")
    assert code == 66 and words.startswith("paceline: the job's export has left no model in PACELINE_EXPORT_DIR: ")
    code, words = ends("model", format="saved_model")
    assert code == 66 and "has left model.pt2, and TensorFlow Serving takes a SavedModel" in words
    code, words = ends("model", snapshot="step-20-g1", pinned=True)
    gone = f"paceline: step-20-g1 of {RUN} is not there any more ({RUN}/step-20-g1/manifest.json is gone)"
    assert (code, words) == (66, f"{gone}: serve another one")
    assert ends("waits", limit="2s") == (66, "paceline: the job's export has not ended within 2 s (limits.start)")
    damaged = next((pod.folder / "place").rglob("weights"))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    code, words = ends("model")
    assert code == 66 and "is damaged: its digest is another" in words


def test_a_place_that_is_away_is_tried_again(pod: Pod) -> None:
    (pod.folder / "place").rename(pod.folder / "elsewhere")
    (pod.folder / "place").write_text("no folder")
    assert pod.export("model").returncode == 1
    assert pod.words().startswith("paceline: ") and str(pod.folder / "place") in pod.words()
