"""`paceline doctor --on kubernetes`: for people with more and with fewer rights, and where nobody answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.kubernetes.rights import RIGHTS
from support.lab.cluster import Cluster
from support.lab.objects import RIGHTS as ALL
from support.people import Person, Run, eventually

pytestmark = pytest.mark.timeout(300, func_only=True)

Checks = dict[str, dict[str, str]]
MOST_S = 5.0 + 10.0  # as promised, and the start of an interpreter on a busy machine


def doctor(person: Person, *words: str) -> tuple[int, Checks]:
    done = person.call("doctor", "--on", "kubernetes", "-o", "json", *words)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is (done.returncode == 0)
    return done.returncode, {each["name"]: each for each in told["checks"]}


def allow(person: Person, rules: list[dict[str, Any]]) -> None:
    """These rights and no others."""
    metadata = {"name": "person-ada", "namespace": person.namespace}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}
    person.cluster.apply(role)


def without(resource: str, verb: str) -> list[dict[str, Any]]:
    every = ("create", "delete", "get", "list", "patch", "watch")
    return [
        {"apiGroups": [api], "resources": [each], "verbs": [v for v in every if (each, v) != (resource, verb)]}
        for api, resources in ALL.items()
        for each in resources
    ]


def test_an_administrator_is_shown_nodes_gpus_and_storage(person: Person, breakable: Cluster) -> None:
    breakable.extended_resources("n1", {"nvidia.com/gpu": 8})
    breakable.extended_resources("n2", {"nvidia.com/gpu": 1})
    person.env["KUBECONFIG"] = str(breakable.kubeconfig())
    code, checks = doctor(person, "-n", person.namespace)
    assert (code, checks["person"]["found"]) == (0, "admin")
    assert checks["pod security"]["found"].startswith("restricted level is enforced")
    assert checks["gpus"]["found"] == "nvidia.com/gpu: 1 node with 8, 1 node with 1"
    assert checks["nodes"]["found"].startswith("3 take pods")
    assert checks["storage"]["result"] == "ok"
    missing = doctor(person, "-n", "nowhere-to-be-found")
    assert missing[0] == 1 and "no namespace nowhere-to-be-found" in missing[1]["namespace"]["found"]


def test_rights_in_one_namespace_are_enough(person: Person) -> None:
    code, checks = doctor(person)
    assert code == 0, checks
    assert {check["result"] for check in checks.values()} == {"ok"}
    assert checks["context"]["found"].endswith(f"namespace {person.namespace}")
    for name in ("pod security", "quota", "nodes", "storage"):
        assert checks[name]["found"].startswith("cannot be told: you may not"), name
    assert checks["admission"]["found"] == "a captain's pod would be let in"
    elsewhere, there = doctor(person, "-n", "default")
    assert elsewhere == 1 and there["jobs"]["result"] == "fail"


def test_a_missing_right_is_named_with_the_command_that_grants_it(person: Person) -> None:
    allow(person, without("jobs", "patch"))
    eventually("the right is gone", lambda: doctor(person)[1]["jobs"]["result"] == "fail")
    code, checks = doctor(person)
    assert code == 1
    assert checks["jobs"]["found"] == f"you may not patch jobs in {person.namespace}"
    granted = checks["jobs"]["remedy"].partition("ask an administrator for: ")[2]
    for command in granted.split("; "):
        person.cluster.kubectl(*command.split()[1:])
    eventually("the right is there", lambda: doctor(person)[0] == 0)


def test_what_is_lost_without_a_right_is_only_a_warning(person: Person) -> None:
    allow(person, without("pods/exec", "create"))
    eventually("the right is gone", lambda: doctor(person)[1]["pods/exec"]["result"] == "warn")
    code, checks = doctor(person)
    assert code == 0 and "ends the pods instead of asking the captain" in checks["pods/exec"]["found"]


def test_without_the_right_to_make_claims_a_run_that_asks_for_one_is_refused_before_there_is_anything(
    person: Person,
) -> None:
    allow(person, without("persistentvolumeclaims", "create"))
    eventually("the right is gone", lambda: doctor(person)[1]["persistentvolumeclaims"]["result"] == "warn")
    found = doctor(person)[1]["persistentvolumeclaims"]["found"]
    assert found.endswith("; without, `snapshots.claim` is refused: name one that is there already"), found
    job = person.job(snapshots={"to": "claim://fresh", "claim": {"size": "1Gi"}})
    done = person.call("run", str(job), "--on", "kubernetes")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "error: cannot create the PersistentVolumeClaim fresh: " in done.stderr
    assert f"`paceline doctor --on kubernetes` shows which rights are missing in {person.namespace}" in done.stderr
    asked = [each["objectRef"] for each in person.cluster.requests("ada") if each["verb"] == "create"]
    made = {each["resource"] for each in asked if each.get("namespace") == person.namespace}
    assert made == {"persistentvolumeclaims", "pods"}  # the last by the doctor, who makes none
    assert not list((person.home / "runs").iterdir())


def test_the_rights_that_are_asked_for_are_enough_for_a_run(person: Person, start: Callable[..., Run]) -> None:
    needed = [right for right in RIGHTS if not right.without]
    allow(person, [{"apiGroups": [r.group], "resources": [r.resource], "verbs": list(r.verbs)} for r in needed])
    eventually("fewer rights", lambda: doctor(person)[1]["events"]["result"] == "warn")
    run = start("--detach")
    assert run.ends() == 0, run.said()

    def status() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(person.call("status", run.name, "-o", "json").stdout)
        return shown

    eventually("steps", lambda: (status()["steps"] or 0) > 0)
    eventually("the words of a worker", lambda: "worker-0 | pid" in person.call("logs", run.name).stdout)
    assert person.call("stop", run.name).returncode == 0
    eventually("it can be deleted", lambda: person.call("delete", "--yes", run.name).returncode == 0)


def test_a_quota_that_is_used_up_is_a_warning(person: Person) -> None:
    person.cluster.quota(person.namespace, {"pods": "0", "count/jobs.batch": "10"})
    person.env["KUBECONFIG"] = str(person.cluster.kubeconfig())

    def quota() -> dict[str, str]:
        code, checks = doctor(person, "-n", person.namespace)
        assert code == 0
        return checks["quota"]

    eventually("the quota is counted", lambda: quota()["result"] == "warn")
    assert quota()["found"] == "quota: nothing is left of pods 0 of 0"
    assert "larger quota" in quota()["remedy"]
    assert "exceeded quota" in doctor(person, "-n", person.namespace)[1]["admission"]["found"]


def test_a_captain_that_would_be_refused_fails(person: Person) -> None:
    limits = [{"type": "Container", "max": {"memory": "64Mi"}}]
    metadata = {"name": "small", "namespace": person.namespace}
    person.cluster.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": {"limits": limits}})
    eventually("a refusal", lambda: doctor(person)[1]["admission"]["result"] == "fail")
    code, checks = doctor(person)
    assert code == 1 and "maximum memory usage per Container is 64Mi" in checks["admission"]["found"]


@pytest.mark.parametrize("accepts", [False, True], ids=["nobody listens", "nobody answers"])
def test_a_server_that_is_away_is_said_in_time(accepts: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        config = write(tmp_path, f"https://127.0.0.1:{held.getsockname()[1]}")
        if not accepts:
            held.close()
        began = time.monotonic()
        done = call(config, "doctor", "--on", "kubernetes")
        took = time.monotonic() - began
    assert (done.returncode, done.stderr) == (1, "")
    *before, last = done.stdout.splitlines()
    assert last.startswith("fail  reach") and "https://127.0.0.1:" in last
    assert [line.split()[:2] for line in before] == [["ok", "context"]]
    assert took < MOST_S


def test_a_context_or_kubeconfig_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = write(tmp_path, "https://127.0.0.1:1")
    done = call(config, "doctor", "--on", "kubernetes", "--context", "elsewhere")
    assert done.returncode == 1 and "there is no context 'elsewhere'" in done.stdout
    assert "there are: here" in done.stdout
    done = call(tmp_path / "none", "doctor", "--on", "kubernetes")
    assert done.returncode == 1 and "there is no kubeconfig" in done.stdout
    done = call(config, "doctor", "-n", "team")
    assert done.returncode == 2 and "is for --on kubernetes" in done.stderr


def write(folder: Path, server: str) -> Path:
    cluster, context = {"server": server}, {"cluster": "here", "user": "here"}
    words = {"clusters": {"cluster": cluster}, "contexts": {"context": context}, "users": {"user": {"token": "t"}}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config | {kind: [{"name": "here", **named}] for kind, named in words.items()}))
    return path


def call(kubeconfig: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return subprocess.run([sys.executable, "-m", "paceline.cli", *words], env=env, capture_output=True, text=True)
