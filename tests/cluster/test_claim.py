"""A volume claim as a place for snapshots: the tests of every place, in a pod that has it as a captain does."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from paceline import plan as plans
from paceline.backends.kubernetes import pods, render
from paceline.job import load
from support.lab import objects
from support.people import Person, eventually

pytestmark = pytest.mark.timeout(300, func_only=True)

# What the pod has besides, to be read: these tests, and the packages of the interpreter that runs this.
BESIDES = {"project": Path(__file__).parents[2], "packages": Path(sysconfig.get_path("purelib"))}
# Without the crashes that are simulated in memory, wherever it runs; the pods of test_snapshots.py really die.
SUITE = """
cd /project && export PYTHONPATH=src:/packages && exec python3 -m pytest -p no:cacheprovider --basetemp "$1" \
tests/stores/test_places.py tests/unit/test_storage.py -k "(folder or test_storage) and not crash_at_any_call" >&2
"""
SOME = (  # as pytest shortens them
    "test_a_run_commits_goes_on_and", "test_what_was_changed_after_th", "test_of_many_captains_one_begi",
    "test_names_with_spaces_and_uni", "test_deleting_a_snapshot_leave", "test_a_damaged_snapshot_is_pas",
)  # fmt: skip


def test_a_claim_is_a_place_like_any_other(person: Person) -> None:
    kept = person.cluster.local_volume(person.namespace, "kept", person.cluster.nodes[0])
    plan = plans.make(load(person.job(snapshots={"to": "claim://kept/of tests"}), cluster=True).job)
    job = render.visit(plan, "suite", "suite")
    pod = job["spec"]["template"]["spec"]
    for name, folder in BESIDES.items():
        person.cluster.apply(*objects.volume(person.namespace, name, folder, "1Gi"))
        pod["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
        pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": f"/{name}", "readOnly": True})
    person.cluster.apply(job, kubeconfig=person.kubeconfig)
    here = ("-n", person.namespace)

    def running() -> list[str]:
        found = person.cluster.get("pods", *here)["items"]
        return [pod["metadata"]["name"] for pod in found if pod["status"].get("phase") == "Running"]

    [name] = eventually("the pod", running)
    person.cluster.kubectl("exec", *here, name, "--", "/bin/sh", "-c", SUITE, "sh", pods.place(plan))
    assert [test for test in SOME if not list((kept / "of tests").glob(f"{test}0/*"))] == []
