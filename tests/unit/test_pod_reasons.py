"""What Kubernetes 1.36 reports about pods and Jobs, verbatim, and the message shown to the user."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from paceline.backends.kubernetes.api import pending_reasons
from paceline.backends.kubernetes.api.pending_reasons import Reason

IMAGE = "registry.local/train:3"
CREATE = "in this namespace: create it, or correct the job file"
REQUEST_LESS = "wait for free resources, or request less (`cpu`, `memory`, `gpus` of its role)"


def pod(**status: Any) -> dict[str, Any]:
    return {"status": status}


def container(**state: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"image": IMAGE, "state": state}])


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return container(waiting={"reason": reason, "message": message})


def terminated(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return container(terminated={"exitCode": code, "reason": reason, "message": message})


def unschedulable(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


NO_SHELL = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    'unable to start container process: exec: "/bin/sh": stat /bin/sh: no such file or directory'
)
NO_PYTHON = "there is no Python 3.9 or newer in this image: Paceline needs one on the PATH"
UNANSWERED = "dial tcp: lookup registry.local on 10.0.0.53:53: read udp {}10.0.0.53:53: i/o timeout"
NO_CAPTAIN = "could not reach the captain for 8 s (limits.start)"
FULL = 'Usage of EmptyDir volume "volume-0" exceeds the limit "1048576"'
CHECK_IMAGE = "check kubernetes.image and image_pull_secrets"
PULL = f'failed to pull and unpack image "{IMAGE}": failed to resolve image'
PODS = {
    "an image that the registry does not have": (
        waiting("ErrImagePull", f"rpc error: code = NotFound desc = {PULL}: {IMAGE}: not found"),
        "image", True,
        f"the image {IMAGE} cannot be pulled: {IMAGE}: not found; {CHECK_IMAGE}",
    ),
    "the same while it backs off": (
        waiting("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: {PULL}: {IMAGE}: not found'),
        "image", True,
        f"the image {IMAGE} cannot be pulled: {IMAGE}: not found; {CHECK_IMAGE}",
    ),
    "a registry that does not answer, without the port that differs each time": (
        waiting("ErrImagePull", f"{PULL}: {UNANSWERED.format('10.0.0.12:49540->')}"),
        "image", False,
        f"the image {IMAGE} cannot be pulled: {UNANSWERED.format('')}; {CHECK_IMAGE}",
    ),
    "an invalid image name": (
        waiting("InvalidImageName"),
        "image", True,
        f"the image {IMAGE} cannot be pulled: InvalidImageName; {CHECK_IMAGE}",
    ),
    "an image without Python": (
        terminated(0, f"paceline: {NO_PYTHON}", "Completed"),
        "image", True,
        f"{NO_PYTHON} (image {IMAGE})",
    ),
    "an image without a shell": (
        terminated(128, NO_SHELL, "StartError"),
        "image", True,
        f"the image {IMAGE} has no /bin/sh, which Paceline needs to start its agent: use an image that has it",
    ),
    "an image for another processor": (
        terminated(1, "exec /bin/sh: exec format error\n"),
        "image", True,
        f"the image {IMAGE} is for another kind of processor (exec format error): use an image for these nodes",
    ),
    "an image that would run as root": (
        waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root (pod: ...)"),
        "image", True,
        f"the image {IMAGE} would run as root: set kubernetes.user to a number",
    ),
    "a container that cannot be created, for an unknown reason": (
        waiting("CreateContainerError", "context deadline exceeded."),
        "refused", False,
        "the container cannot be started: context deadline exceeded",
    ),
    "out of memory": (
        terminated(137, reason="OOMKilled"),
        "out-of-memory", False,
        "killed: out of memory; raise `memory` of its role",
    ),
    "a missing Secret": (
        waiting("CreateContainerConfigError", 'secret "key" not found'),
        "missing", False,
        f"there is no Secret key {CREATE}",
    ),
    "a Secret without a key": (
        waiting("CreateContainerConfigError", "couldn't find key token in Secret team-a/key"),
        "missing", False,
        "the Secret key has no key token: add it, or correct the job file",
    ),
    "a missing claim": (
        unschedulable('0/3 nodes are available: persistentvolumeclaim "data" not found. not found'),
        "missing", False,
        f"there is no PersistentVolumeClaim data {CREATE}",
    ),
    "a claim without a volume": (
        unschedulable("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"),
        "volume", False,
        "a PersistentVolumeClaim that it mounts has no volume yet: check that its storage class creates volumes",
    ),
    "not enough resources": (
        unschedulable(
            "0/3 nodes are available: 1 Insufficient cpu, 3 Insufficient nvidia.com/gpu. no new claims to deallocate, "
            "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
        ),
        "no-node", False,
        f"no node fits (0 of 3): 1 without enough cpu free, 3 without enough nvidia.com/gpu free; {REQUEST_LESS}",
    ),
    "taints and labels": (
        unschedulable(
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match Pod's node "
            "affinity/selector. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
        ),
        "no-node", False,
        "no node fits (0 of 3): 1 had untolerated taint(s), 2 didn't match Pod's node affinity/selector; "
        "kubernetes.tolerations can allow tainted nodes; kubernetes.node_selector and affinity must match a node",
    ),
    "a queue": (
        pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]),
        "gated", False,
        "waiting in a queue of the cluster (scheduling gate)",
    ),
    "a full scratch folder": (
        pod(phase="Failed", reason="Evicted", message=f"{FULL}. "),
        "evicted", False,
        f"evicted: {FULL}; write less to the volume, or raise its size limit",
    ),
    "a full node": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage. "),
        "evicted", False,
        "evicted: The node was low on resource: ephemeral-storage; "
        "write less to /tmp and the work folder, or mount a volume for it",
    ),
    "a member that has found no captain": (
        terminated(0, json.dumps({"status": "left", "reason": NO_CAPTAIN}), "Completed"),
        "no-captain", True,
        NO_CAPTAIN,
    ),
    "a node that rejects a scheduled pod": (
        pod(phase="Failed", reason="OutOfcpu", message="Pod was rejected: Node didn't have enough resource: cpu"),
        "refused", False,
        "its node rejected it (OutOfcpu): Pod was rejected: Node didn't have enough resource: cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pod_object", "cause", "final", "text"), PODS.values(), ids=PODS)
def test_a_pod_that_does_not_run_says_why(pod_object: dict[str, Any], cause: str, final: bool, text: str) -> None:
    reason = pending_reasons.of_pod(pod_object, "worker-host-3")
    assert reason is not None and asdict(reason) == asdict(Reason("worker-host-3", cause, text, final))


@pytest.mark.parametrize(
    "pod_object",
    [
        pod(phase="Pending"),
        container(running={"startedAt": "2026-11-15T10:55:54Z"}),
        waiting("ContainerCreating"),
        terminated(0, json.dumps({"status": "succeeded", "reason": ""}), "Completed"),
        terminated(1, "paceline: 3 lines were dropped here: stdout was not read in time\nKilled"),
    ],
)
def test_a_pod_without_trouble_has_no_reason(pod_object: dict[str, Any]) -> None:
    assert pending_reasons.of_pod(pod_object, "worker-host-3") is None


def test_the_reason_stays_while_a_container_waits_for_its_restart() -> None:
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    reason = pending_reasons.of_pod(
        pod(containerStatuses=[{"image": IMAGE, "state": state, "lastState": last}]), "ps-host-0"
    )
    assert reason is not None and reason.cause == "out-of-memory"


FORBIDDEN = 'Error creating: pods "loop-1-worker-0-4px84" is forbidden: '
JOBS = {
    FORBIDDEN + "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8": (
        "quota", False,
        "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8; "
        "wait until the quota allows it, or request less",
    ),
    FORBIDDEN + "failed quota: small: must specify limits.cpu for: worker": (
        "quota", True,
        "failed quota: small: must specify limits.cpu for: worker; "
        "set `cpu` and `memory` of its role, or ask an administrator of the cluster",
    ),
    FORBIDDEN + 'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)': (
        "admission", True,
        'refused: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true); '
        "change the job file to comply",
    ),
    FORBIDDEN + "ValidatingAdmissionPolicy 'budget' with binding 'budget' denied request: no budget": (
        "admission", True,
        "refused: ValidatingAdmissionPolicy 'budget' with binding 'budget' denied request: no budget; "
        "change the job file to comply",
    ),
    'Error creating: admission webhook "budget.example.com" denied the request: no budget': (
        "admission", True,
        'refused: admission webhook "budget.example.com" denied the request: no budget; '
        "change the job file to comply",
    ),
    'Error creating: Internal error occurred: failed calling webhook "budget.example.com": connection refused': (
        "admission", False,
        'Internal error occurred: failed calling webhook "budget.example.com": connection refused; '
        "wait until that webhook responds, or ask an administrator of the cluster",
    ),
    FORBIDDEN + 'error looking up service account team-a/trainer: serviceaccount "trainer" not found': (
        "missing", False,
        "there is no ServiceAccount trainer: create it, or correct kubernetes.service_account",
    ),
    FORBIDDEN + "no PriorityClass with name high was found": (
        "missing", False,
        "there is no PriorityClass high: correct kubernetes.priority_class, or ask an administrator of the cluster",
    ),
    FORBIDDEN + "status unknown for quota: gpus, resources: pods": (
        "refused", False,
        "the cluster cannot create its pod: status unknown for quota: gpus, resources: pods",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "expected"), JOBS.items())
def test_a_job_that_cannot_create_its_pods_says_why(message: str, expected: tuple[str, bool, str]) -> None:
    cause, final, text = expected
    event = {"reason": "FailedCreate", "message": message}
    assert pending_reasons.of_job(event, "loop-1-worker") == Reason("loop-1-worker", cause, text, final)
    assert pending_reasons.of_job({"reason": "SuccessfulCreate", "message": message}, "loop-1-worker") is None


MOUNT = "MountVolume.SetUp failed for volume"
MOUNTS = {
    f'{MOUNT} "volume-0" : configmap "lists" not found': f"there is no ConfigMap lists {CREATE}",
    f'{MOUNT} "paceline-credentials" : secret "key" not found': f"there is no Secret key {CREATE}",
    f'{MOUNT} "paceline-credentials" : references non-existent secret key: key.json': (
        "the Secret of `credentials` has no key key.json: add it, or correct the job file"
    ),
    "AttachVolume.Attach failed: volume is in use.": (
        "a volume cannot be mounted: AttachVolume.Attach failed: volume is in use; "
        "check the volumes in the job file"
    ),
    f'{MOUNT} "paceline-plan" : failed to sync configmap cache: timed out waiting for the condition': "",
}  # fmt: skip


@pytest.mark.parametrize(("message", "text"), MOUNTS.items())
def test_a_pod_that_waits_for_a_volume_says_which(message: str, text: str) -> None:
    reason = pending_reasons.of_mount({"reason": "FailedMount", "message": message}, "worker-host-0")
    assert (reason.text if reason else "") == text
    assert reason is None or not reason.final


AGAIN = "stop the run with `paceline stop loop-1`, and submit it again"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (f'{MOUNT} "paceline-tls" : secret "loop-1" not found', f"the run's Secret loop-1 was deleted: {AGAIN}"),
        (
            f'{MOUNT} "paceline-agent" : configmap "loop-1-agent-00" not found',
            f"the run's ConfigMap loop-1-agent-00 was deleted: {AGAIN}",
        ),
        (
            f'{MOUNT} "paceline-plan" : configmap "loop-1-plan" not found',
            f"the run's ConfigMap loop-1-plan was deleted: {AGAIN}",
        ),
        (
            f'{MOUNT} "paceline-tls" : references non-existent secret key: ca.pem',
            f"the run's Secret loop-1 has no key ca.pem: it is not the one that was submitted; {AGAIN}",
        ),
        (f'{MOUNT} "volume-0" : secret "loop-1-plan" not found', f"there is no Secret loop-1-plan {CREATE}"),
        (f'{MOUNT} "volume-0" : configmap "loop-1" not found', f"there is no ConfigMap loop-1 {CREATE}"),
        (f'{MOUNT} "volume-0" : secret "loop-10" not found', f"there is no Secret loop-10 {CREATE}"),
    ],
)
def test_an_object_of_the_run_that_was_deleted_cannot_be_created_by_the_user(message: str, text: str) -> None:
    reason = pending_reasons.of_mount({"reason": "FailedMount", "message": message}, "worker-host-0", "loop-1")
    assert reason == Reason("worker-host-0", "missing", text)


def test_an_agent_that_cannot_find_its_captain_is_recognized_by_its_output() -> None:
    message = (
        "cannot find the captain: no name server answers for loop-1-0.loop-1; check that the cluster's DNS is running"
    )
    assert pending_reasons.of_line(f"paceline: {message}", "worker-host-0") == Reason(
        "worker-host-0", "no-captain", message
    )
    assert (
        pending_reasons.of_line(f"worker-0 2026-11-15T10:55:54.123Z g1 | paceline: {message}", "worker-host-0") is None
    )


@pytest.mark.parametrize(
    ("reason", "message", "part"),
    [
        ("Forbidden", 'secrets is forbidden: User "bob" cannot create', "`paceline doctor --on kubernetes` shows"),
        ("Forbidden", 'services "loop-1" is forbidden: exceeded quota: small', "`kubectl describe quota -n team-a`"),
        ("Forbidden", "ValidatingAdmissionPolicy 'budget' denied request: no", "change the job file to comply"),
        ("InternalError", 'failed calling webhook "budget.example.com"', "that webhook must respond first"),
        ("NotFound", 'namespaces "team-a" not found', "create it, or choose another namespace"),
        ("Unauthorized", "Unauthorized", "log in to the cluster again"),
        ("Invalid", "spec: Invalid value", ""),
    ],
)
def test_errors_of_the_cluster_come_with_a_remedy(reason: str, message: str, part: str) -> None:
    remedy = pending_reasons.remedy(reason, message, "team-a")
    assert part in remedy if part else remedy == ""


def test_final_reasons_come_first_and_each_text_once() -> None:
    no_node = Reason("worker-host-0", "no-node", "no room")
    reasons = pending_reasons.worst(
        [no_node, Reason("worker-host-1", "no-node", "no room"), Reason("captain", "image", "x", True)]
    )
    assert list(map(str, reasons)) == ["captain: x", "worker-host-0: no room"]
