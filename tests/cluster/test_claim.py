"""A volume claim as a snapshot location: the tests of all locations, in a pod that mounts it as a captain does."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from paceline.backends.kubernetes.objects import pods, run_objects
from paceline.job import load, planning
from support.lab import objects
from support.people import Person, eventually

pytestmark = pytest.mark.timeout(900, func_only=True)

# Folders that the pod also mounts, read-only: these tests, and the packages of the interpreter that runs this test.
MOUNTED = {"project": Path(__file__).parents[2], "packages": Path(sysconfig.get_path("purelib"))}
# Without crashes that are simulated in memory, which are the same anywhere; pods of test_snapshots.py really crash.
SUITE = """
cd /project && export PYTHONPATH=src:/packages && exec python3 -m pytest -p no:cacheprovider --basetemp "$1" \
tests/stores/test_places.py tests/unit/test_storage.py -k "(folder or test_storage) and not crash_at_any_call" >&2
"""
EXPECTED_TESTS = (  # names of tests, as pytest truncates them
    "test_a_run_commits_resumes_and", "test_files_changed_after_the_c", "test_only_one_of_many_captains",
    "test_names_with_spaces_and_uni", "test_deleting_a_snapshot_leave", "test_a_damaged_snapshot_is_pas",
)  # fmt: skip


def test_a_claim_works_like_any_other_snapshot_location(person: Person) -> None:
    claim_folder = person.cluster.local_volume(person.namespace, "kept", person.cluster.nodes[0])
    plan = planning.make_plan(load(person.job(snapshots={"to": "claim://kept/of tests"}), cluster=True).job)
    job = run_objects.visit(plan, "suite", "suite", is_own=True)
    pod = job["spec"]["template"]["spec"]
    for name, folder in MOUNTED.items():
        person.cluster.apply(*objects.volume(person.namespace, name, folder, "1Gi"))
        pod["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
        pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": f"/{name}", "readOnly": True})
    person.cluster.apply(job, kubeconfig=person.kubeconfig)
    in_namespace = ("-n", person.namespace)

    def running() -> list[str]:
        items = person.cluster.get("pods", *in_namespace)["items"]
        return [pod["metadata"]["name"] for pod in items if pod["status"].get("phase") == "Running"]

    [name] = eventually("the pod", running)
    person.cluster.kubectl("exec", *in_namespace, name, "--", "/bin/sh", "-c", SUITE, "sh", pods.snapshots_folder(plan))
    assert [test for test in EXPECTED_TESTS if not list((claim_folder / "of tests").glob(f"{test}0/*"))] == []
