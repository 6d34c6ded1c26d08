"""The first container of a serving pod: it exports a model from a snapshot, or reports why it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as plans
from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.backends.kubernetes.payload.code_archive import collect
from paceline.job import load_text, planning
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from support.committed import RUN, commit, weights
from support.environment import without

PROGRAM = """
import json, os, pathlib, signal, sys
import paceline
assert "agent.pyz" in paceline.__file__
restored, model = pathlib.Path(os.environ["PACELINE_RESTORE"]), pathlib.Path(os.environ["PACELINE_EXPORT_DIR"])
print("exporting", restored.name, os.environ["PACELINE_RUN"], os.environ["COLOUR"], os.environ.get("PACELINE_POD"))
assert "NODE" not in os.environ and sys.argv[2] == str(model)
if sys.argv[1] != "nothing":
    (model / "model.pt2").write_bytes((restored / "variables" / "weights").read_bytes())
    (model / "paceline.json").write_text(json.dumps({"signatures": {"serving_default": {}}}))
if sys.argv[1] == "waits":
    signal.pause()
sys.exit(3 if sys.argv[1] == "fails" else 0)
"""


def oldest() -> str:
    """The oldest Python that an image may have, if this machine has it."""
    return next((str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python"))), sys.executable)


class Pod:
    """The folders of its first container, and the snapshots of a run in a folder."""

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
        store = FolderStore(str(folder / "place"))
        SnapshotRepository(store, RUN).begin(1, None)
        commit(store, folder / "scratch", 10)
        self.models = folder / "models" / "digits"
        self.model = self.models / "10"

    def export(self, behavior: str = "", limit: str = "1m", **more: Any) -> subprocess.CompletedProcess[str]:
        job: dict[str, Any] = {
            "name": "digits", "framework": "none", "command": ["python", "export.py"],
            "env": {"COLOUR": "blue-$PACELINE_RUN", "NODE": "$PACELINE_RANK"},
            "export": {"command": ["python", "export.py", behavior, "$PACELINE_EXPORT_DIR"]},
        }  # fmt: skip
        job |= {"limits": {"start": limit}}
        plan = planning.make_plan(load_text(json.dumps(job), "job.yaml", self.folder / "sent").job)
        (self.folder / "plan" / "plan.json").write_text(plans.to_json(plan))
        root = str(self.folder)
        settings = {
            "run": RUN, "snapshot": "step-10-g1", "place": f"{root}/place", "plan": f"{root}/plan",
            "folder": f"{root}/run", "code": f"{root}/code", "work": f"{root}/work", "obstore": "", "format": "",
            "to": str(self.models), "last_words": f"{root}/words", "pinned": False, "monitoring": "", **more,
        }  # fmt: skip
        env = without("PACELINE", "PYTHON")
        return subprocess.run(
            [oldest(), f"{root}/run/agent.pyz", "export"], env={**env, "PACELINE_POD": json.dumps(settings)},
            cwd=self.folder, capture_output=True, text=True, timeout=180,
        )  # fmt: skip

    def termination_message(self) -> str:
        return (self.folder / "words").read_text()


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_model_can_be_exported_again(pod: Pod) -> None:
    for _ in range(2):
        result = pod.export("model")
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"exporting step-10-g1 {RUN} blue-{RUN} None\n" in result.stdout
        assert result.stdout.endswith(f"exported step-10-g1 of {RUN} to {pod.model}: pt2\n")
    assert (pod.model / "model.pt2").read_bytes() == weights(10)
    about = {"format": "pt2", "run": RUN, "step": 10, "signatures": {"serving_default": {}}}
    assert json.loads((pod.model / "paceline.json").read_text()) == about
    assert [each.name for each in (pod.folder / "run").iterdir()] == ["agent.pyz"]  # the snapshot takes up no space


def test_the_newest_snapshot_replaces_one_that_the_run_has_deleted(pod: Pod) -> None:
    """For a pod that starts later, while the run continues."""
    commit(FolderStore(str(pod.folder / "place")), pod.folder / "scratch", 30)
    SnapshotRepository(FolderStore(str(pod.folder / "place")), RUN).delete(SnapshotId(10, 1))
    counters = pod.folder / "models" / ".monitoring"
    result = pod.export("model", monitoring=str(counters))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"step-10-g1 of {RUN} no longer exists" in result.stdout
    assert f"; serving step-30-g1 instead\nexporting step-30-g1 {RUN} blue-{RUN}" in result.stdout
    assert [each.name for each in pod.models.iterdir()] == ["30"]
    assert json.loads((pod.models / "30" / "paceline.json").read_text())["step"] == 30
    assert (pod.models / "30" / "model.pt2").read_bytes() == weights(30)
    assert counters.read_text() == 'prometheus_config { enable: true, path: "/metrics" }\n'
    assert pod.export("model", pinned=True).returncode == 66


def test_the_termination_message_says_why_an_export_failed(pod: Pod) -> None:
    def outcome(behavior: str, **more: Any) -> tuple[int, str]:
        return pod.export(behavior, **more).returncode, pod.termination_message()

    assert outcome("fails") == (66, "paceline: the job's export ended with exit code 3")
    code, message = outcome("nothing")
    assert code == 66 and message.startswith("paceline: the job's export did not write exactly one model to ")
    code, message = outcome("model", format="saved_model")
    assert code == 66 and "wrote model.pt2, but TensorFlow Serving needs a SavedModel" in message
    code, message = outcome("model", snapshot="step-20-g1", pinned=True)
    missing = f"paceline: step-20-g1 of {RUN} no longer exists ({RUN}/step-20-g1/manifest.json is missing)"
    assert (code, message) == (66, f"{missing}; serve another snapshot")
    assert outcome("waits", limit="2s") == (66, "paceline: the job's export did not end within 2 s (limits.start)")
    damaged = next((pod.folder / "place").rglob("weights"))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    code, message = outcome("model")
    assert code == 66 and "is damaged: its SHA-256 differs" in message


def test_an_unreachable_location_is_retried(pod: Pod) -> None:
    (pod.folder / "place").rename(pod.folder / "elsewhere")
    (pod.folder / "place").write_text("no folder")
    assert pod.export("model").returncode == 1
    assert pod.termination_message().startswith("paceline: ") and str(pod.folder / "place") in pod.termination_message()
