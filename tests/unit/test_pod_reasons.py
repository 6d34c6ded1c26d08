"""What a cluster says of pods and Jobs, word for word as Kubernetes 1.36 says it, and what a person is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.backends.kubernetes import reasons
from paceline.backends.kubernetes.reasons import Reason

IMAGE = "registry.local/train:3"
CREATE = "in this namespace: create it, or correct the job file"
ROOM = "it waits for room, or ask for less (`cpu`, `memory`, `gpus` of its role)"


def pod(**status: Any) -> dict[str, Any]:
    return {"status": status}


def container(**state: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"image": IMAGE, "state": state}])


def waits(why: str, message: str = "") -> dict[str, Any]:
    return container(waiting={"reason": why, "message": message})


def ended(code: int, message: str = "", why: str = "Error") -> dict[str, Any]:
    return container(terminated={"exitCode": code, "reason": why, "message": message})


def unschedulable(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


NO_SHELL = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    'unable to start container process: exec: "/bin/sh": stat /bin/sh: no such file or directory'
)
NO_PYTHON = "there is no Python 3.9 or newer in this image: Paceline needs one on the PATH"
UNANSWERED = "dial tcp: lookup registry.local on 10.0.0.53:53: read udp {}10.0.0.53:53: i/o timeout"
ALONE = "left, without a captain for 8 s (limits.start)"
FULL = 'Usage of EmptyDir volume "volume-0" exceeds the limit "1048576"'
RIGHT = "is kubernetes.image right, or image_pull_secrets missing?"
PULL = f'failed to pull and unpack image "{IMAGE}": failed to resolve image'
PODS = {
    "an image that the registry does not have": (
        waits("ErrImagePull", f"rpc error: code = NotFound desc = {PULL}: {IMAGE}: not found"),
        "image", True,
        f"the image {IMAGE} cannot be had: {IMAGE}: not found; {RIGHT}",
    ),
    "the same while it backs off": (
        waits("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: {PULL}: {IMAGE}: not found'),
        "image", True,
        f"the image {IMAGE} cannot be had: {IMAGE}: not found; {RIGHT}",
    ),
    "a registry that does not answer, without the port that differs each time": (
        waits("ErrImagePull", f"{PULL}: {UNANSWERED.format('10.0.0.12:49540->')}"),
        "image", False,
        f"the image {IMAGE} cannot be had: {UNANSWERED.format('')}; {RIGHT}",
    ),
    "an image's name that is none": (
        waits("InvalidImageName"),
        "image", True,
        f"the image {IMAGE} cannot be had: InvalidImageName; {RIGHT}",
    ),
    "an image without Python": (
        ended(0, f"paceline: {NO_PYTHON}", "Completed"),
        "image", True,
        f"{NO_PYTHON} (image {IMAGE})",
    ),
    "an image without a shell": (
        ended(128, NO_SHELL, "StartError"),
        "image", True,
        f"the image {IMAGE} has no /bin/sh, with which Paceline starts its agent: name one that has",
    ),
    "an image for another processor": (
        ended(1, "exec /bin/sh: exec format error\n"),
        "image", True,
        f"the image {IMAGE} is for another kind of processor (exec format error): name one for these nodes",
    ),
    "an image that would run as root": (
        waits("CreateContainerConfigError", "container has runAsNonRoot and image will run as root (pod: ...)"),
        "image", True,
        f"the image {IMAGE} would run as root: set kubernetes.user to a number",
    ),
    "a container that cannot be made, for a reason we do not know": (
        waits("CreateContainerError", "context deadline exceeded."),
        "refused", False,
        "the container cannot be started: context deadline exceeded",
    ),
    "no memory": (
        ended(137, why="OOMKilled"),
        "out-of-memory", False,
        "killed for want of memory: raise `memory` of its role",
    ),
    "a Secret that is not there": (
        waits("CreateContainerConfigError", 'secret "key" not found'),
        "missing", False,
        f"there is no Secret key {CREATE}",
    ),
    "a Secret without a key": (
        waits("CreateContainerConfigError", "couldn't find key token in Secret team-a/key"),
        "missing", False,
        "the Secret key has no key token: add it, or correct the job file",
    ),
    "a claim that is not there": (
        unschedulable('0/3 nodes are available: persistentvolumeclaim "data" not found. not found'),
        "missing", False,
        f"there is no PersistentVolumeClaim data {CREATE}",
    ),
    "a claim without a volume": (
        unschedulable("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"),
        "volume", False,
        "a PersistentVolumeClaim that it mounts has no volume yet: does its storage class make them?",
    ),
    "no room": (
        unschedulable(
            "0/3 nodes are available: 1 Insufficient cpu, 3 Insufficient nvidia.com/gpu. no new claims to deallocate, "
            "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
        ),
        "no-node", False,
        f"no node takes it (0 of 3): 1 without enough cpu free, 3 without enough nvidia.com/gpu free; {ROOM}",
    ),
    "taints and labels": (
        unschedulable(
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match Pod's node "
            "affinity/selector. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
        ),
        "no-node", False,
        "no node takes it (0 of 3): 1 had untolerated taint(s), 2 didn't match Pod's node affinity/selector; "
        "kubernetes.tolerations can allow tainted nodes; kubernetes.node_selector and affinity have to fit a node",
    ),
    "a queue": (
        pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]),
        "gated", False,
        "held by a scheduling gate: it waits for its turn in a queue of the cluster",
    ),
    "a full scratch folder": (
        pod(phase="Failed", reason="Evicted", message=f"{FULL}. "),
        "evicted", False,
        f"evicted: {FULL}; write less there, or allow more",
    ),
    "a full node": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage. "),
        "evicted", False,
        "evicted: The node was low on resource: ephemeral-storage; "
        "write less to /tmp and the work folder, or mount a volume for it",
    ),
    "a member that has found no captain": (
        ended(0, json.dumps({"status": "left", "reason": ALONE}), "Completed"),
        "no-captain", True,
        ALONE,
    ),
    "a node that does not take what the scheduler gave it": (
        pod(phase="Failed", reason="OutOfcpu", message="Pod was rejected: Node didn't have enough resource: cpu"),
        "refused", False,
        "its node did not take it (OutOfcpu): Pod was rejected: Node didn't have enough resource: cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "cause", "final", "text"), PODS.values(), ids=PODS)
def test_a_pod_that_does_not_run_says_why(seen: dict[str, Any], cause: str, final: bool, text: str) -> None:
    assert reasons.of_pod(seen, "worker-host-3") == Reason("worker-host-3", cause, text, final)


@pytest.mark.parametrize(
    "seen",
    [
        pod(phase="Pending"),
        container(running={"startedAt": "2026-11-15T10:55:54Z"}),
        waits("ContainerCreating"),
        ended(0, json.dumps({"status": "succeeded", "reason": ""}), "Completed"),
        ended(1, "paceline: 3 lines are missing here: nobody read them in time\nKilled"),
    ],
)
def test_a_pod_without_trouble_has_no_reason(seen: dict[str, Any]) -> None:
    assert reasons.of_pod(seen, "worker-host-3") is None


def test_the_reason_stays_while_a_container_waits_to_be_started_again() -> None:
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    found = reasons.of_pod(pod(containerStatuses=[{"image": IMAGE, "state": state, "lastState": last}]), "ps-host-0")
    assert found is not None and found.cause == "out-of-memory"


FORBIDDEN = 'Error creating: pods "loop-1-worker-0-4px84" is forbidden: '
JOBS = {
    FORBIDDEN + "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8": (
        "quota", False,
        "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8; "
        "it waits until the quota has room, or ask for less",
    ),
    FORBIDDEN + "failed quota: small: must specify limits.cpu for: worker": (
        "quota", True,
        "failed quota: small: must specify limits.cpu for: worker; "
        "give its role `cpu` and `memory`, or ask whoever runs the cluster",
    ),
    FORBIDDEN + 'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)': (
        "admission", True,
        'refused: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true); '
        "change the job file to what it allows",
    ),
    FORBIDDEN + "ValidatingAdmissionPolicy 'budget' with binding 'budget' denied request: no budget": (
        "admission", True,
        "refused: ValidatingAdmissionPolicy 'budget' with binding 'budget' denied request: no budget; "
        "change the job file to what it allows",
    ),
    'Error creating: admission webhook "budget.example.com" denied the request: no budget': (
        "admission", True,
        'refused: admission webhook "budget.example.com" denied the request: no budget; '
        "change the job file to what it allows",
    ),
    'Error creating: Internal error occurred: failed calling webhook "budget.example.com": connection refused': (
        "admission", False,
        'Internal error occurred: failed calling webhook "budget.example.com": connection refused; '
        "it waits until that webhook answers, or ask whoever runs the cluster",
    ),
    FORBIDDEN + 'error looking up service account team-a/trainer: serviceaccount "trainer" not found': (
        "missing", False,
        "there is no ServiceAccount trainer: create it, or correct kubernetes.service_account",
    ),
    FORBIDDEN + "no PriorityClass with name high was found": (
        "missing", False,
        "there is no PriorityClass high: correct kubernetes.priority_class, or ask whoever runs the cluster",
    ),
    FORBIDDEN + "status unknown for quota: gpus, resources: pods": (
        "refused", False,
        "the cluster does not make its pod: status unknown for quota: gpus, resources: pods",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "told"), JOBS.items())
def test_a_job_that_cannot_make_its_pods_says_why(message: str, told: tuple[str, bool, str]) -> None:
    cause, final, text = told
    event = {"reason": "FailedCreate", "message": message}
    assert reasons.of_job(event, "loop-1-worker") == Reason("loop-1-worker", cause, text, final)
    assert reasons.of_job({"reason": "SuccessfulCreate", "message": message}, "loop-1-worker") is None


MOUNT = "MountVolume.SetUp failed for volume"
MOUNTS = {
    f'{MOUNT} "volume-0" : configmap "lists" not found': f"there is no ConfigMap lists {CREATE}",
    f'{MOUNT} "paceline-credentials" : secret "key" not found': f"there is no Secret key {CREATE}",
    f'{MOUNT} "paceline-credentials" : references non-existent secret key: key.json': (
        "the Secret of `credentials` has no key key.json: add it, or correct the job file"
    ),
    "AttachVolume.Attach failed: volume is in use.": (
        "a volume cannot be mounted: AttachVolume.Attach failed: volume is in use; "
        "look at the volumes of the job file"
    ),
    f'{MOUNT} "paceline-plan" : failed to sync configmap cache: timed out waiting for the condition': "",
}  # fmt: skip


@pytest.mark.parametrize(("message", "text"), MOUNTS.items())
def test_a_pod_that_waits_for_a_volume_says_which(message: str, text: str) -> None:
    found = reasons.of_mount({"reason": "FailedMount", "message": message}, "worker-host-0")
    assert (found.text if found else "") == text
    assert found is None or not found.final


def test_an_agent_that_does_not_find_its_captain_is_heard_by_its_output() -> None:
    said = "no name server answers, so the captain is not found (loop-1-0.loop-1): is the DNS up?"
    assert reasons.of_line(f"paceline: {said}", "worker-host-0") == Reason("worker-host-0", "no-captain", said)
    assert reasons.of_line(f"worker-0 2026-11-15T10:55:54.123Z g1 | paceline: {said}", "worker-host-0") is None


@pytest.mark.parametrize(
    ("reason", "message", "part"),
    [
        ("Forbidden", 'secrets is forbidden: User "bob" cannot create', "`paceline doctor --on kubernetes` shows"),
        ("Forbidden", 'services "loop-1" is forbidden: exceeded quota: small', "`kubectl describe quota -n team-a`"),
        ("Forbidden", "ValidatingAdmissionPolicy 'budget' denied request: no", "change the job file"),
        ("InternalError", 'failed calling webhook "budget.example.com"', "that webhook has to answer first"),
        ("NotFound", 'namespaces "team-a" not found', "create it, or name another with -n"),
        ("Unauthorized", "Unauthorized", "log in to the cluster again"),
        ("Invalid", "spec: Invalid value", ""),
    ],
)
def test_what_the_cluster_refuses_comes_with_a_remedy(reason: str, message: str, part: str) -> None:
    told = reasons.remedy(reason, message, "team-a")
    assert told.startswith("; ") and part in told if part else told == ""


def test_what_will_not_pass_is_said_first_and_each_text_once() -> None:
    room = Reason("worker-host-0", "no-node", "no room")
    found = reasons.worst([room, Reason("worker-host-1", "no-node", "no room"), Reason("captain", "image", "x", True)])
    assert list(map(str, found)) == ["captain: x", "worker-host-0: no room"]
