"""Many runs of one job in one namespace: each succeeds, and none of them leaves anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.people import IMAGE, Person, eventually

pytestmark = pytest.mark.timeout(600, func_only=True)

RUNS = 10
AT_ONCE = 2  # command lines: they cost more than what they submit
SECOND = """
import os, time
mark = "/shared/" + os.environ["PACELINE_RUN"]
open(mark + ".began", "x").close()
while not os.path.exists("/shared/finish"):
    time.sleep(0.5)
time.sleep(1)
open(mark + ".ended", "x").close()
"""
KINDS = "jobs,pods,services,configmaps,secrets,networkpolicies"


def test_ten_runs_at_once_finish_and_vanish(person: Person) -> None:
    volumes = [{"mount": "/shared", "claim": "shared"}]
    kubernetes = {"image": IMAGE, "image_pull_policy": "IfNotPresent", "volumes": volumes}
    limits = {"grace": "1s", "keep_finished": "1s"}
    job = str(person.job(SECOND, workers=1, kubernetes=kubernetes, limits=limits, restart={"warm": False}))

    def submit(_: int) -> str:
        done = person.call("run", job, "--on", "kubernetes", "--detach")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = set(pool.map(submit, range(RUNS)))
    assert len(runs) == RUNS

    def left() -> list[str]:
        found = person.cluster.get(KINDS, "-n", person.namespace)["items"]
        names = [f"{each['kind']} {each['metadata']['name']}" for each in found]
        return [name for name in names if name != "ConfigMap kube-root-ca.crt"]

    def marked(how: str) -> set[str]:
        return {path.stem for path in person.shared.glob(f"*.{how}")}

    eventually("all runs at once", lambda: marked("began") == runs, 180, more=lambda: "\n".join(runs - marked("began")))
    person.finish()
    person.cluster.kubectl("wait", "--for=delete", "jobs", "--all", "-n", person.namespace, "--timeout=180s")
    eventually("an empty namespace", lambda: not left(), 60, more=lambda: "\n".join(left()))
    assert marked("ended") == runs
    # Only those of the captains: the last of a member's Job may not be seen before ttl takes it.
    assert _completed(person) >= runs


def _completed(person: Person) -> set[str]:
    """The Jobs that the cluster has seen complete; its events outlive them."""
    events = person.cluster.get("events", "-n", person.namespace)["items"]
    return {each["involvedObject"]["name"] for each in events if each["reason"] == "Completed"}
