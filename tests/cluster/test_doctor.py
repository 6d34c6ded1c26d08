"""`paceline doctor --on kubernetes`: for users with more and with fewer rights, and without a reachable API server."""

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

from paceline.backends.kubernetes.api.permissions import RIGHTS
from support.lab.cluster import Cluster
from support.lab.objects import RIGHTS as ALL_RIGHTS
from support.people import Person, Run, eventually
from support.ports import free_port

pytestmark = pytest.mark.timeout(900, func_only=True)

Checks = dict[str, dict[str, str]]
LIMIT_S = 5.0 + 20.0  # the documented limit, and the start of an interpreter on a busy machine


def doctor(person: Person, *arguments: str) -> tuple[int, Checks]:
    result = person.call("doctor", "--on", "kubernetes", "-o", "json", *arguments)
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"] is (result.returncode == 0)
    return result.returncode, {each["name"]: each for each in report["checks"]}


def allow(person: Person, rules: list[dict[str, Any]]) -> None:
    """Grant exactly these rights."""
    metadata = {"name": "person-ada", "namespace": person.namespace}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}
    person.cluster.apply(role)


def without(resource: str, verb: str) -> list[dict[str, Any]]:
    all_verbs = ("create", "delete", "get", "list", "patch", "watch")
    return [
        {"apiGroups": [api], "resources": [each], "verbs": [v for v in all_verbs if (each, v) != (resource, verb)]}
        for api, resources in ALL_RIGHTS.items()
        for each in resources
    ]


def test_an_administrator_is_shown_nodes_gpus_and_storage(person: Person, breakable: Cluster) -> None:
    breakable.extended_resources("n1", {"nvidia.com/gpu": 8})
    breakable.extended_resources("n2", {"nvidia.com/gpu": 1})
    person.env["KUBECONFIG"] = str(breakable.kubeconfig())
    code, checks = doctor(person, "-n", person.namespace)
    assert (code, checks["user"]["found"]) == (0, "admin")
    assert checks["pod security"]["found"].startswith("restricted level is enforced")
    assert checks["gpus"]["found"] == "nvidia.com/gpu: 1 node with 8, 1 node with 1"
    assert checks["nodes"]["found"].startswith("3 accept pods")
    assert checks["storage"]["result"] == "ok"
    missing_namespace = doctor(person, "-n", "nowhere-to-be-found")
    assert (
        missing_namespace[0] == 1
        and "namespace nowhere-to-be-found does not exist" in missing_namespace[1]["namespace"]["found"]
    )


def test_rights_in_one_namespace_are_enough(person: Person) -> None:
    code, checks = doctor(person)
    assert code == 0, checks
    assert {check["result"] for check in checks.values()} == {"ok"}
    assert checks["context"]["found"].endswith(f"namespace {person.namespace}")
    for name in ("pod security", "quota", "nodes", "storage"):
        assert checks[name]["found"].startswith("not checked: no permission to"), name
    assert checks["admission"]["found"] == "a captain's pod would be admitted"
    code_elsewhere, checks_elsewhere = doctor(person, "-n", "default")
    assert code_elsewhere == 1 and checks_elsewhere["jobs"]["result"] == "fail"


def test_a_missing_right_is_named_with_the_command_that_grants_it(person: Person) -> None:
    allow(person, without("jobs", "patch"))
    eventually("the right is revoked", lambda: doctor(person)[1]["jobs"]["result"] == "fail")
    code, checks = doctor(person)
    assert code == 1
    assert checks["jobs"]["found"] == f"no permission to patch jobs in {person.namespace}"
    commands = checks["jobs"]["remedy"].partition("ask an administrator for: ")[2]
    for command in commands.split("; "):
        person.cluster.kubectl(*command.split()[1:])
    eventually("the right is granted", lambda: doctor(person)[0] == 0)


def test_a_missing_optional_right_is_only_a_warning(person: Person) -> None:
    allow(person, without("pods/exec", "create"))
    eventually("the right is revoked", lambda: doctor(person)[1]["pods/exec"]["result"] == "warn")
    code, checks = doctor(person)
    assert code == 0 and "ends the pods instead of asking the captain" in checks["pods/exec"]["found"]


def test_a_run_that_requests_a_claim_creates_nothing_without_the_right_to_create_claims(
    person: Person,
) -> None:
    allow(person, without("persistentvolumeclaims", "create"))
    eventually("the right is revoked", lambda: doctor(person)[1]["persistentvolumeclaims"]["result"] == "warn")
    message = doctor(person)[1]["persistentvolumeclaims"]["found"]
    assert message.endswith("; without it, `snapshots.claim` fails: use a claim that already exists"), message
    job = person.job(snapshots={"to": "claim://fresh", "claim": {"size": "1Gi"}})
    result = person.call("run", str(job), "--on", "kubernetes")
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert "error: cannot create the PersistentVolumeClaim fresh: " in result.stderr
    assert (
        f"`paceline doctor --on kubernetes` shows which permissions are missing in {person.namespace}" in result.stderr
    )
    requested = [each["objectRef"] for each in person.cluster.requests("ada") if each["verb"] == "create"]
    resources = {each["resource"] for each in requested if each.get("namespace") == person.namespace}
    assert resources == {"persistentvolumeclaims", "pods"}  # pods: a dry run of the doctor
    assert not list((person.home / "runs").iterdir())


def test_the_required_rights_are_enough_for_a_run(person: Person, start: Callable[..., Run]) -> None:
    needed = [right for right in RIGHTS if not right.without]
    allow(person, [{"apiGroups": [r.group], "resources": [r.resource], "verbs": list(r.verbs)} for r in needed])
    eventually("fewer rights", lambda: doctor(person)[1]["events"]["result"] == "warn")
    run = start("--detach")
    assert run.ends() == 0, run.said()

    def status() -> dict[str, Any]:
        report: dict[str, Any] = json.loads(person.call("status", run.name, "-o", "json").stdout)
        return report

    eventually("steps", lambda: (status()["steps"] or 0) > 0)
    eventually("output of a worker", lambda: "worker-0 | pid" in person.call("logs", run.name).stdout)
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
    assert quota()["found"] == "quota: used up: pods 0 of 0"
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
def test_an_unreachable_server_is_reported_in_time(accepts: bool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if accepts else free_port()
        config = write_kubeconfig(tmp_path, f"https://127.0.0.1:{port}")
        began = time.monotonic()
        result = call(config, "doctor", "--on", "kubernetes")
        duration = time.monotonic() - began
    assert (result.returncode, result.stderr) == (1, "")
    *other_lines, last = result.stdout.splitlines()
    assert last.startswith("fail  reach") and "https://127.0.0.1:" in last
    assert [line.split()[:2] for line in other_lines] == [["ok", "context"]]
    assert duration < LIMIT_S


def test_a_missing_context_or_kubeconfig_is_reported(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path, "https://127.0.0.1:1")
    result = call(config, "doctor", "--on", "kubernetes", "--context", "elsewhere")
    assert result.returncode == 1 and "there is no context 'elsewhere'" in result.stdout
    assert "available contexts: here" in result.stdout
    result = call(tmp_path / "none", "doctor", "--on", "kubernetes")
    assert result.returncode == 1 and "no kubeconfig found" in result.stdout
    result = call(config, "doctor", "-n", "team")
    assert result.returncode == 2 and "requires --on kubernetes" in result.stderr


def write_kubeconfig(folder: Path, server: str) -> Path:
    cluster, context = {"server": server}, {"cluster": "here", "user": "here"}
    sections = {"clusters": {"cluster": cluster}, "contexts": {"context": context}, "users": {"user": {"token": "t"}}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config | {kind: [{"name": "here", **entry}] for kind, entry in sections.items()}))
    return path


def call(kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return subprocess.run([sys.executable, "-m", "paceline.cli", *arguments], env=env, capture_output=True, text=True)
