"""The Python API on a real cluster: the notebook of tests/local/test_notebook.py, with pods."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import notebooks
from support.people import IMAGE, Person

pytestmark = pytest.mark.timeout(900, func_only=True)

# The pod of worker-1 is deleted, as a user would do that.
KILL = """pod = next(p["pod"] for p in run.status().to_dict()["pods"] if p["host"] == "worker-host-1")
        subprocess.run([*{kubectl!r}, "delete", "pod", pod, "-n", {namespace!r}, "--grace-period=1"], check=True)"""


def test_a_notebook_trains_follows_and_kills_a_worker(person: Person) -> None:
    settings: dict[str, Any] = {"image": IMAGE, "image_pull_policy": "IfNotPresent"}
    submit = (
        'client.submit(train, on="kubernetes", workers=2, arguments={"steps": 60, "pace": 0.05}, '
        f"limits={{'grace': '5s'}}, snapshots={{'to': 'claim://shared/kept'}}, kubernetes={settings!r})"
    )
    kill = KILL.format(kubectl=person.cluster.kubectl_command(person.kubeconfig), namespace=person.namespace)
    outputs = notebooks.execute(person.folder, notebooks.cells(submit, kill), person.env)
    result = json.loads(notebooks.text_of(outputs[6]))
    assert (result["status"], result["generations"], result["snapshot"]) == ("succeeded", 2, "step-60-g2")
    assert result["notes"][0] == "train is sent as source"
    assert result["state"][0] == 60 and abs(result["state"][1] - 3) < 0.01
    assert len(result["starts"]) == 2
    assert person.call("delete", "--yes", "--snapshots", result["run"]).returncode == 0
