"""Why a run does not start or has ended: the object, the cause and the remedy, as a real cluster gives rise to them."""

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

pytestmark = pytest.mark.timeout(300, func_only=True)
Object = dict[str, Any]

# Has what a registry answers for an image that it does not have.
REGISTRY = "localhost:80"
SOON = 90.0  # seconds until a reason is said, on two cores that also run the cluster

MEMORY_HOG = "import paceline; paceline.report(step=1); hog = bytearray(400 * 2**20); print(len(hog))"
DISK_HOG = """
import time
with open("/scratch/big", "wb") as file:
    file.write(bytes(8 * 2**20))
print("written", flush=True)
time.sleep(600)
"""


def settings(**fields: Any) -> list[str]:
    """Words for the command line: section_field=value."""
    pairs = [(name.replace("__", "."), value) for name, value in fields.items()]
    return [word for name, value in pairs for word in ("--set", f"{name}={_text(value)}")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def start_each(start: Callable[..., Run], cases: dict[str, list[str]], **job: Any) -> dict[str, Run]:
    """All at once, each from a folder of its own."""
    return {name: start(*words, folder=name, name=name, **{"workers": 1, **job}) for name, words in cases.items()}


def says(run: Run, *parts: str) -> None:
    eventually(f"{run.name} says {parts}", lambda: all(part in run.said() for part in parts), SOON, run.said)


def ends_with(run: Run, cause: str, *parts: str) -> None:
    eventually(f"the end of {run.name}", lambda: run.process.poll() is not None, SOON, run.said)
    assert run.ends() == 1, run.said()
    report = run.report()
    assert (report["status"], report["cause"]) == ("failed", cause), run.said()
    missing = [part for part in parts if part not in report["reason"]]
    assert not missing, f"not in the reason of {run.name}: {missing}\n{report['reason']}"


@contextlib.contextmanager
def registry_without_images(cluster: Cluster) -> Iterator[None]:
    """On every node, as the node itself reaches it."""
    labels = {"app": "registry"}
    command = ["python3", "-m", "http.server", "80", "--bind", "127.0.0.1"]
    container = {"name": "registry", "image": IMAGE, "imagePullPolicy": "Never", "command": command}
    pod = {"hostNetwork": True, "terminationGracePeriodSeconds": 0, "containers": [container]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    with cluster.namespace(f"registry-{uuid.uuid4().hex[:6]}", restricted=False) as there:
        metadata = {"name": "registry", "namespace": there}
        cluster.apply({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec})
        yield


@contextlib.contextmanager
def rules(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Pods with the label team=red are against a policy, those with team=blue need the word of an absent webhook."""
    kind = "admissionregistration.k8s.io/v1"
    name = {"metadata": {"name": namespace}}
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    forbidden = (
        "!(has(object.metadata.labels) && 'team' in object.metadata.labels && object.metadata.labels.team == 'red')"
    )
    policy = {
        "matchConstraints": {**here, "resourceRules": [pods]},
        "validations": [{"expression": forbidden, "message": "the red team has no budget"}],
    }
    webhook = {
        **here,
        "name": "budget.example.com",
        "objectSelector": {"matchLabels": {"team": "blue"}},
        "rules": [pods],
        "clientConfig": {"service": {"namespace": namespace, "name": "budget"}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
    }
    made = [
        {"apiVersion": kind, "kind": "ValidatingAdmissionPolicy", **name, "spec": policy},
        {
            "apiVersion": kind,
            "kind": "ValidatingAdmissionPolicyBinding",
            **name,
            "spec": {"policyName": namespace, "validationActions": ["Deny"]},
        },
        {"apiVersion": kind, "kind": "ValidatingWebhookConfiguration", **name, "webhooks": [webhook]},
    ]
    cluster.apply(*made)
    try:
        for team in ("red", "blue"):
            eventually(f"the {team} team is refused", partial(_is_refused, cluster, namespace, team))
        yield
    finally:
        for each in made:
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


def test_what_cannot_pass_ends_the_run_at_once_with_its_reason(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("foreign")
    with registry_without_images(person.cluster), rules(person.cluster, person.namespace):
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
        ends_with(runs["no-shell"], "image", "lab.local/pause:1 has no /bin/sh", "name one that has")
        ends_with(runs["foreign"], "image", "lab.local/foreign:1", "another kind of processor", "name one for these")
        job = f"{runs['host-network'].name}-worker"
        ends_with(runs["host-network"], "admission", job, "violates PodSecurity", "hostNetwork=true", "change the job")
        ends_with(runs["red"], "admission", "the red team has no budget", person.namespace, "change the job file")
        ends_with(runs["absent"], "image", f"{REGISTRY}/absent:1", "not found", "is kubernetes.image right")


def test_what_may_still_come_is_waited_for_with_its_reason(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.quota(person.namespace, {"requests.nvidia.com/gpu": "0"})
    too_big = [{"replicas": 1, "cpu": 99}, {"replicas": 1, "memory": "9Ti"}, {"replicas": 1, "gpus": 1}]
    with rules(person.cluster, person.namespace):
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
        says(runs["too-big"], "worker-host-0: no node takes it (0 of 3): 3 without enough cpu free")
        says(runs["too-big"], "worker-host-1:", "memory free", "worker-host-2:", "example.com/gpu free", "ask for less")
        says(runs["selector"], "3 didn't match Pod's node affinity/selector", "kubernetes.node_selector")
        says(runs["quota"], f"{runs['quota'].name}-worker: exceeded quota", "it waits until the quota has room")
        says(runs["blue"], 'failed calling webhook "budget.example.com"', "it waits until that webhook answers")
        create = "in this namespace: create it, or correct the job file"
        says(runs["env"], f"worker-host-0: there is no Secret absent {create}")
        says(runs["claim"], f"worker-host-0: there is no PersistentVolumeClaim absent {create}")
        says(runs["files"], f"worker-host-0: there is no ConfigMap absent {create}")
        says(runs["key"], "worker-host-0: the Secret of `credentials` has no key key.json: add it")
        says(runs["account"], "there is no ServiceAccount absent: create it, or correct kubernetes.service_account")
        says(runs["tiny"], "worker-host-0: killed for want of memory: raise `memory` of its role")
        says(runs["nowhere"], "the image lab.local/nowhere:1 cannot be had", "is kubernetes.image right")
        shown = person.call("status", runs["quota"].name).stdout
        assert "exceeded quota" in shown, shown
        still = {name: run.process.poll() for name, run in runs.items()}
        assert still == dict.fromkeys(runs), runs
        # What was missing comes: the run starts by itself.
        person.cluster.kubectl("create", "secret", "generic", "absent", "-n", person.namespace)
        person.cluster.kubectl("create", "configmap", "absent", "-n", person.namespace)
        runs["env"].wait("step")


def test_limits_end_a_run_and_say_why(person: Person, start: Callable[..., Run]) -> None:
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
    ends_with(hog, "out-of-memory", "worker-0", "killed by the kernel for want of memory")
    ends_with(runs["long"], "runtime-limit", "the run took 2 s, which is limits.runtime")
    assert runs["backstop"].ends() == 1, runs["backstop"].said()
    assert "DeadlineExceeded" in runs["backstop"].report()["reason"]
    missing = "missing worker-1 after 6 s (limits.start)"
    ends_with(runs["late"], "start-timeout", missing, "worker-host-1: no node takes it", "without enough cpu free")
    says(evicted, 'worker-host-0: evicted: Usage of EmptyDir volume "volume-0" exceeds the limit', "allow more")


def test_what_is_refused_at_submission_is_said_in_one_line_and_leaves_nothing(person: Person) -> None:
    cluster, namespace = person.cluster, person.namespace
    few = [each for each in objects.RIGHTS[""] if each != "secrets"]
    person.env["KUBECONFIG"] = str(cluster.user("bob", namespace))
    rule = [{"op": "replace", "path": "/rules/0/resources", "value": few}]
    cluster.kubectl("patch", "role", "person-bob", "-n", namespace, "--type=json", "-p", json.dumps(rule))
    job = str(person.job())

    def refusal(begin: str) -> str:
        refused = person.call("run", job, "--on", "kubernetes")
        assert refused.returncode == 1 and "Traceback" not in refused.stderr
        last = refused.stderr.splitlines()[-1]
        return last if last.startswith(begin) else ""

    told = eventually("fewer rights", lambda: refusal("error: cannot create the Secret loop-"))
    assert f"`paceline doctor --on kubernetes` shows which rights are missing in {namespace}" in told
    person.env["KUBECONFIG"] = str(person.kubeconfig)
    cluster.quota(namespace, {"count/services": "0"})
    told = eventually("a quota", lambda: refusal("error: cannot create the Service loop-"))
    assert "exceeded quota: quota" in told and f"kubectl describe quota -n {namespace}" in told
    kinds = "jobs,pods,services,configmaps,secrets,networkpolicies"
    left = [kinds, "-n", namespace, "-l", "app.kubernetes.io/managed-by=paceline"]
    eventually("nothing left", lambda: not cluster.get(*left)["items"])
    assert person.call("ls", "-o", "name").stdout == ""


def test_taints_are_named_and_a_run_starts_once_they_are_gone(breakable: Cluster, start: Callable[..., Run]) -> None:
    breakable.kubectl("taint", "nodes", "--all", "lab=closed:NoSchedule")
    try:
        run = start(workers=1)
        says(run, ": no node takes it (0 of 3): 3 had untolerated taint(s)", "kubernetes.tolerations can allow")
    finally:
        breakable.kubectl("taint", "nodes", "--all", "lab-")
    run.wait("step")


def test_a_run_without_dns_ends_and_says_so(breakable: Cluster, start: Callable[..., Run]) -> None:
    scale = ["scale", "deployment/coredns", "-n", "kube-system"]
    there = ["endpointslices", "-n", "kube-system", "-l", "kubernetes.io/service-name=kube-dns"]

    def answering() -> list[Any]:
        return [each for part in breakable.get(*there)["items"] for each in part["endpoints"] or ()]

    breakable.kubectl(*scale, "--replicas=0")
    try:
        eventually("no DNS", lambda: not answering())
        run = start(*settings(limits__start="8s"), workers=1)
        ends_with(run, "no-captain", "worker-host-0: left, without a captain for 8 s", "no name server answers", "DNS")
        assert run.events("note") and "no name server answers" in run.said()
    finally:
        breakable.kubectl(*scale, "--replicas=2")
        breakable.wait_dns()
