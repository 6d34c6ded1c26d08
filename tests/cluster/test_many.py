"""Many runs of one job in one namespace: each succeeds, and none leaves anything behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.people import IMAGE, Person, eventually

pytestmark = pytest.mark.timeout(900, func_only=True)

RUNS = 10
CONCURRENT = 2  # command lines: they use more CPU time than the runs they submit
PROGRAM = """
import os, time
mark = "/shared/" + os.environ["PACELINE_RUN"]
open(mark + ".began", "x").close()
while not os.path.exists("/shared/finish"):
    time.sleep(0.5)
time.sleep(1)
open(mark + ".ended", "x").close()
"""
KINDS = "jobs,pods,services,configmaps,secrets,networkpolicies"


@pytest.mark.xdist_group("more-clusters")  # not while others start: two cores are few for both
def test_ten_concurrent_runs_finish_and_are_deleted(person: Person) -> None:
    volumes = [{"mount": "/shared", "claim": "shared"}]
    kubernetes = {"image": IMAGE, "image_pull_policy": "IfNotPresent", "volumes": volumes}
    limits = {"grace": "1s", "keep_finished": "1s"}
    job = str(person.job(PROGRAM, workers=1, kubernetes=kubernetes, limits=limits, restart={"warm": False}))

    def submit(_: int) -> str:
        result = person.call("run", job, "--on", "kubernetes", "--detach")
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    with ThreadPoolExecutor(CONCURRENT) as pool:
        runs = set(pool.map(submit, range(RUNS)))
    assert len(runs) == RUNS

    def remaining() -> list[str]:
        items = person.cluster.get(KINDS, "-n", person.namespace)["items"]
        names = [f"{each['kind']} {each['metadata']['name']}" for each in items]
        return [name for name in names if name != "ConfigMap kube-root-ca.crt"]

    def marked_runs(mark: str) -> set[str]:
        return {path.stem for path in person.shared.glob(f"*.{mark}")}

    eventually(
        "all runs at once",
        lambda: marked_runs("began") == runs,
        300,
        more=lambda: "\n".join(runs - marked_runs("began")),
    )
    person.finish()
    person.cluster.kubectl("wait", "--for=delete", "jobs", "--all", "-n", person.namespace, "--timeout=300s")
    eventually("an empty namespace", lambda: not remaining(), more=lambda: "\n".join(remaining()))
    assert marked_runs("ended") == runs
    # Only the captains' Jobs: a member's Job may be deleted by its TTL before its completion is recorded.
    eventually("all Jobs are recorded as completed", lambda: _completed(person) >= runs)  # events come a little later


def _completed(person: Person) -> set[str]:
    """The Jobs that the cluster has recorded as completed; its events outlive them."""
    events = person.cluster.get("events", "-n", person.namespace)["items"]
    return {each["involvedObject"]["name"] for each in events if each["reason"] == "Completed"}
