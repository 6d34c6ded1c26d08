"""Why a run does not start or has ended: the object, the cause and the remedy, with causes from a real cluster."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from support.lab import objects
from support.lab.cluster import Cluster, LabError
from support.people import IMAGE, Person, Run, eventually

pytestmark = pytest.mark.timeout(900, func_only=True)
Object = dict[str, Any]

# Replies like a registry that does not have the image.
REGISTRY = "localhost:80"
REASON_S = 240.0  # seconds until a reason is reported, on two cores that also run the cluster

MEMORY_HOG = "import paceline; paceline.report(step=1); hog = bytearray(400 * 2**20); print(len(hog))"
DISK_HOG = """
import time
with open("/scratch/big", "wb") as file:
    file.write(bytes(8 * 2**20))
print("written", flush=True)
time.sleep(600)
"""


def settings(**fields: Any) -> list[str]:
    """Arguments of the command line; section__field=value becomes --set section.field=value."""
    pairs = [(name.replace("__", "."), value) for name, value in fields.items()]
    return [argument for name, value in pairs for argument in ("--set", f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def start_each(start: Callable[..., Run], cases: dict[str, list[str]], **job: Any) -> dict[str, Run]:
    """Start all runs at the same time, each from its own folder."""
    return {
        name: start(*arguments, folder=name, name=name, **{"workers": 1, **job}) for name, arguments in cases.items()
    }


def wait_for_output(run: Run, *parts: str) -> None:
    eventually(f"{run.name} prints {parts}", lambda: all(part in run.said() for part in parts), REASON_S, run.said)


def fails_with(run: Run, cause: str, *parts: str) -> None:
    eventually(f"the end of {run.name}", lambda: run.process.poll() is not None, REASON_S, run.said)
    assert run.ends() == 1, run.said()
    report = run.report()
    assert (report["status"], report["cause"]) == ("failed", cause), run.said()
    missing = [part for part in parts if part not in report["reason"]]
    assert not missing, f"not in the reason of {run.name}: {missing}\n{report['reason']}"


@contextlib.contextmanager
def registry_without_images(cluster: Cluster) -> Iterator[None]:
    """On every node, where the kubelet reaches it."""
    labels = {"app": "registry"}
    command = ["python3", "-m", "http.server", "80", "--bind", "127.0.0.1"]
    container = {"name": "registry", "image": IMAGE, "imagePullPolicy": "Never", "command": command}
    pod = {"hostNetwork": True, "terminationGracePeriodSeconds": 0, "containers": [container]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    with cluster.namespace(f"registry-{uuid.uuid4().hex[:6]}", restricted=False) as namespace:
        metadata = {"name": "registry", "namespace": namespace}
        cluster.apply({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec})
        yield


@contextlib.contextmanager
def admission_rules(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Pods with the label team=red violate a policy; those with team=blue need a webhook that does not exist."""
    version = "admissionregistration.k8s.io/v1"
    name = {"metadata": {"name": namespace}}
    in_namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    forbidden = (
        "!(has(object.metadata.labels) && 'team' in object.metadata.labels && object.metadata.labels.team == 'red')"
    )
    policy = {
        "matchConstraints": {**in_namespace, "resourceRules": [pods]},
        "validations": [{"expression": forbidden, "message": "the red team has no budget"}],
    }
    webhook = {
        **in_namespace,
        "name": "budget.example.com",
        "objectSelector": {"matchLabels": {"team": "blue"}},
        "rules": [pods],
        "clientConfig": {"service": {"namespace": namespace, "name": "budget"}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
    }
    created = [
        {"apiVersion": version, "kind": "ValidatingAdmissionPolicy", **name, "spec": policy},
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicyBinding",
            **name,
            "spec": {"policyName": namespace, "validationActions": ["Deny"]},
        },
        {"apiVersion": version, "kind": "ValidatingWebhookConfiguration", **name, "webhooks": [webhook]},
    ]
    cluster.apply(*created)
    try:
        for team in ("red", "blue"):
            eventually(f"the {team} team is refused", partial(_is_refused, cluster, namespace, team))
        yield
    finally:
        for each in created:
            cluster.kubectl("delete", f"{each['kind']}.v1.admissionregistration.k8s.io", namespace, "--wait=false")


def _is_refused(cluster: Cluster, namespace: str, team: str) -> bool:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    bounds = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "probe", "image": IMAGE, "securityContext": bounds}
    metadata = {"name": "probe", "namespace": namespace, "labels": {"team": team}}
    spec = {"securityContext": user, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    try:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(pod))
    except LabError:
        return True
    return False


def test_a_permanent_problem_ends_the_run_immediately_with_its_reason(
    person: Person, start: Callable[..., Run]
) -> None:
    person.cluster.images("foreign")
    with registry_without_images(person.cluster), admission_rules(person.cluster, person.namespace):
        runs = start_each(
            start,
            {
                "no-shell": settings(kubernetes__image="lab.local/pause:1"),
                "foreign": settings(kubernetes__image="lab.local/foreign:1"),
                "host-network": settings(kubernetes__pod={"hostNetwork": True}),
                "red": settings(kubernetes__labels={"team": "red"}),
                "absent": settings(kubernetes__image=f"{REGISTRY}/absent:1"),
            },
        )
        fails_with(runs["no-shell"], "image", "lab.local/pause:1 has no /bin/sh", "use an image that has it")
        fails_with(
            runs["foreign"], "image", "lab.local/foreign:1", "another kind of processor", "use an image for these"
        )
        job = f"{runs['host-network'].name}-worker"
        fails_with(runs["host-network"], "admission", job, "violates PodSecurity", "hostNetwork=true", "change the job")
        fails_with(runs["red"], "admission", "the red team has no budget", person.namespace, "change the job file")
        fails_with(runs["absent"], "image", f"{REGISTRY}/absent:1", "not found", "check kubernetes.image")


def test_a_run_waits_during_a_temporary_problem_and_reports_the_reason(
    person: Person, start: Callable[..., Run]
) -> None:
    person.cluster.quota(person.namespace, {"requests.nvidia.com/gpu": "0"})
    too_big = [{"replicas": 1, "cpu": 99}, {"replicas": 1, "memory": "9Ti"}, {"replicas": 1, "gpus": 1}]
    with admission_rules(person.cluster, person.namespace):
        runs = start_each(
            start,
            {
                "nowhere": settings(kubernetes__image="lab.local/nowhere:1"),
                "too-big": settings(roles__worker=too_big, kubernetes__gpu_resource="example.com/gpu"),
                "selector": settings(kubernetes__node_selector={"disk": "gold"}),
                "quota": settings(roles__worker__gpus=1),
                "blue": settings(kubernetes__labels={"team": "blue"}),
                "env": settings(kubernetes__env_from=[{"secret": "absent"}]),
                "claim": settings(kubernetes__volumes=[{"mount": "/data", "claim": "absent"}]),
                "files": settings(kubernetes__volumes=[{"mount": "/data", "config_map": "absent"}]),
                "key": settings(credentials={"secret": "empty", "file": "key.json"}),
                "account": settings(kubernetes__service_account="absent"),
                "tiny": settings(roles__worker__memory="10Mi"),
            },
        )
        person.cluster.kubectl("create", "secret", "generic", "empty", "-n", person.namespace)
        wait_for_output(runs["too-big"], "worker-host-0: no node fits (0 of 3): 3 without enough cpu free")
        wait_for_output(
            runs["too-big"], "worker-host-1:", "memory free", "worker-host-2:", "example.com/gpu free", "request less"
        )
        wait_for_output(runs["selector"], "3 didn't match Pod's node affinity/selector", "kubernetes.node_selector")
        wait_for_output(runs["quota"], f"{runs['quota'].name}-worker: exceeded quota", "wait until the quota allows it")
        wait_for_output(runs["blue"], 'failed calling webhook "budget.example.com"', "wait until that webhook responds")
        remedy = "in this namespace: create it, or correct the job file"
        wait_for_output(runs["env"], f"worker-host-0: there is no Secret absent {remedy}")
        wait_for_output(runs["claim"], f"worker-host-0: there is no PersistentVolumeClaim absent {remedy}")
        wait_for_output(runs["files"], f"worker-host-0: there is no ConfigMap absent {remedy}")
        wait_for_output(runs["key"], "worker-host-0: the Secret of `credentials` has no key key.json: add it")
        wait_for_output(
            runs["account"], "there is no ServiceAccount absent: create it, or correct kubernetes.service_account"
        )
        wait_for_output(runs["tiny"], "worker-host-0: killed: out of memory; raise `memory` of its role")
        wait_for_output(runs["nowhere"], "the image lab.local/nowhere:1 cannot be pulled", "check kubernetes.image")
        status = person.call("status", runs["quota"].name).stdout
        assert "exceeded quota" in status, status
        exit_codes = {name: run.process.poll() for name, run in runs.items()}
        assert exit_codes == dict.fromkeys(runs), runs
        # Once the missing objects exist, the run starts automatically.
        person.cluster.kubectl("create", "secret", "generic", "absent", "-n", person.namespace)
        person.cluster.kubectl("create", "configmap", "absent", "-n", person.namespace)
        runs["env"].wait("step")


def test_a_run_that_exceeds_a_limit_ends_with_that_reason(person: Person, start: Callable[..., Run]) -> None:
    one_too_big = [{"replicas": 1}, {"replicas": 1, "cpu": 99}]
    scratch = [{"mount": "/scratch", "empty": "1Mi"}]
    memory = settings(roles__worker__memory="200Mi", restart__limit=0)
    evicted = start(*settings(kubernetes__volumes=scratch), folder="disk", name="disk", workers=1, program=DISK_HOG)
    hog = start(*memory, folder="memory", name="memory", workers=1, program=MEMORY_HOG)
    runs = start_each(
        start,
        {
            "late": settings(roles__worker=one_too_big, limits__start="6s"),
            "long": settings(limits__runtime="2s", limits__grace="1s"),
            "backstop": settings(limits__runtime="1h", limits__grace="1s"),
        },
    )
    runs["backstop"].wait("step")
    deadline = json.dumps({"spec": {"activeDeadlineSeconds": 1}})
    person.cluster.kubectl("patch", "job", runs["backstop"].name, "-n", person.namespace, "-p", deadline)
    fails_with(hog, "out-of-memory", "worker-0", "killed by the kernel: out of memory")
    fails_with(runs["long"], "runtime-limit", "the run exceeded limits.runtime of 2 s")
    assert runs["backstop"].ends() == 1, runs["backstop"].said()
    assert "DeadlineExceeded" in runs["backstop"].report()["reason"]
    missing = "worker-1 did not start within 6 s (limits.start)"
    fails_with(runs["late"], "start-timeout", missing, "worker-host-1: no node fits", "without enough cpu free")
    wait_for_output(
        evicted, 'worker-host-0: evicted: Usage of EmptyDir volume "volume-0" exceeds the limit', "raise its size limit"
    )


def test_a_refused_submission_is_reported_in_one_line_and_leaves_nothing(person: Person) -> None:
    cluster, namespace = person.cluster, person.namespace
    allowed = [each for each in objects.RIGHTS[""] if each != "secrets"]
    person.env["KUBECONFIG"] = str(cluster.user("bob", namespace))
    patch = [{"op": "replace", "path": "/rules/0/resources", "value": allowed}]
    cluster.kubectl("patch", "role", "person-bob", "-n", namespace, "--type=json", "-p", json.dumps(patch))
    job = str(person.job())

    def refusal(prefix: str) -> str:
        refused = person.call("run", job, "--on", "kubernetes")
        assert refused.returncode == 1 and "Traceback" not in refused.stderr
        last = refused.stderr.splitlines()[-1]
        return last if last.startswith(prefix) else ""

    message = eventually("fewer rights", lambda: refusal("error: cannot create the Secret loop-"))
    assert f"`paceline doctor --on kubernetes` shows which permissions are missing in {namespace}" in message
    person.env["KUBECONFIG"] = str(person.kubeconfig)
    cluster.quota(namespace, {"count/services": "0"})
    message = eventually("a quota", lambda: refusal("error: cannot create the Service loop-"))
    assert "exceeded quota: quota" in message and f"kubectl describe quota -n {namespace}" in message
    kinds = "jobs,pods,services,configmaps,secrets,networkpolicies"
    selection = [kinds, "-n", namespace, "-l", "app.kubernetes.io/managed-by=paceline"]
    eventually("nothing remains", lambda: not cluster.get(*selection)["items"])
    assert person.call("ls", "-o", "name").stdout == ""


def test_taints_are_named_and_a_run_starts_once_they_are_removed(breakable: Cluster, start: Callable[..., Run]) -> None:
    breakable.kubectl("taint", "nodes", "--all", "lab=closed:NoSchedule")
    try:
        run = start(workers=1)
        wait_for_output(run, ": no node fits (0 of 3): 3 had untolerated taint(s)", "kubernetes.tolerations can allow")
    finally:
        breakable.kubectl("taint", "nodes", "--all", "lab-")
    run.wait("step")


def test_a_run_without_dns_ends_with_that_reason(breakable: Cluster, start: Callable[..., Run]) -> None:
    scale = ["scale", "deployment/coredns", "-n", "kube-system"]
    dns_endpoints = ["endpointslices", "-n", "kube-system", "-l", "kubernetes.io/service-name=kube-dns"]

    def endpoints() -> list[Any]:
        return [each for part in breakable.get(*dns_endpoints)["items"] for each in part["endpoints"] or ()]

    breakable.kubectl(*scale, "--replicas=0")
    try:
        eventually("no DNS", lambda: not endpoints())
        run = start(*settings(limits__start="8s"), workers=1)
        fails_with(
            run, "no-captain", "worker-host-0: could not reach the captain for 8 s", "no name server answers", "DNS"
        )
        assert run.events("note") and "no name server answers" in run.said()
    finally:
        breakable.kubectl(*scale, "--replicas=2")
        breakable.wait_dns()
