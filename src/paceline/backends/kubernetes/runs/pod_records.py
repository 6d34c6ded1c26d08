"""Records of a run's pods, saved in the run's folder for `paceline status`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.agent.run_files import replace, stamp
from paceline.backends.kubernetes.api import pending_reasons
from paceline.backends.kubernetes.api.pending_reasons import Reason
from paceline.backends.kubernetes.objects import names
from paceline.plan import CAPTAIN
from paceline.view.files.run_folders import read_object

FILE = "pods.json"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"


@dataclass(frozen=True)
class PodRecord:
    uid: str
    pod: str
    created: str
    job: str
    role: str
    host: str  # worker-host-3, or captain
    phase: str
    node: str
    restarts: int
    began: bool  # its container has started: there may be output
    running: bool  # its container runs
    leaving_since: float | None  # on this machine's clock: when it was first seen as being deleted
    reason: Reason | None

    @property
    def container(self) -> str:
        """Identifies its container: one that is restarted has an output of its own."""
        return f"{self.uid}/{self.restarts}"


def record_of(pod: Any, first: dict[str, int], before: PodRecord | None = None) -> PodRecord:
    """`first`: the index of the first host of each Job; `before`: the last record of the same pod."""
    metadata, status = pod.metadata, pod.status
    labels = metadata.labels or {}
    role = str(labels.get(names.ROLE_LABEL, ""))
    job = str(labels.get(JOB_LABEL, ""))
    index = int(labels.get(INDEX_LABEL, "0")) + first.get(job, 0)
    host = role if role == CAPTAIN else f"{role}-host-{index}"
    containers = [c for c in (status.containerStatuses if status else None) or [] if c.name == role]
    leaving = before.leaving_since if before and before.leaving_since else None
    if metadata.deletionTimestamp and leaving is None:
        leaving = time.monotonic()
    return PodRecord(
        uid=metadata.uid,
        pod=metadata.name,
        created=str(metadata.creationTimestamp or ""),
        job=job,
        role=role,
        host=host,
        phase=(status.phase if status else None) or "Pending",
        node=(pod.spec.nodeName if pod.spec else None) or "",
        restarts=sum(c.restartCount or 0 for c in containers),
        began=any(c.state and (c.state.running or c.state.terminated) for c in containers),
        running=any(c.state and c.state.running for c in containers),
        leaving_since=leaving,
        reason=pending_reasons.of_pod(pod.to_dict(), host),
    )


def newest(pods: Iterable[PodRecord]) -> dict[str, PodRecord]:
    """The newest pod of each host: earlier pods have failed or are being deleted."""
    return {pod.host: pod for pod in sorted(pods, key=lambda pod: (pod.created, pod.leaving_since is None))}


def save(folder: Path, pods: Iterable[PodRecord], waiting: Iterable[Reason]) -> None:
    """`waiting`: why pods are missing."""
    records = [_to_dict(each) for each in newest(pods).values()]
    replace(str(folder / FILE), {"at": stamp(), "pods": records, "reasons": [asdict(each) for each in waiting]})


def _to_dict(pod: PodRecord) -> dict[str, Any]:
    fields = {name: getattr(pod, name) for name in ("host", "pod", "node", "phase", "restarts")}
    return {**fields, "leaving": pod.leaving_since is not None, "reason": pod.reason.text if pod.reason else ""}


def load(folder: Path) -> list[dict[str, Any]]:
    """The records of the pods; those that cannot be read are left out."""
    pods = (read_object(folder / FILE) or {}).get("pods")
    return [pod for pod in pods if _is_record(pod)] if isinstance(pods, list) else []


def _is_record(pod: Any) -> bool:
    texts = ("host", "pod", "node", "phase")
    if not isinstance(pod, dict) or not all(isinstance(pod.get(name), str) for name in texts):
        return False
    return isinstance(pod.get("restarts"), int) and isinstance(pod.get("leaving"), bool)


def load_reasons(folder: Path) -> list[Reason]:
    reasons = (read_object(folder / FILE) or {}).get("reasons")
    return [
        Reason(each["what"], each["cause"], each["text"], each.get("final") is True)
        for each in (reasons if isinstance(reasons, list) else ())
        if isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("what", "cause", "text"))
    ]
