"""The pods of a run as last seen: small records, kept in a file of the run's folder for whoever asks how it stands."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.agent.journal import replace, stamp
from paceline.backends.kubernetes import names, reasons
from paceline.backends.kubernetes.reasons import Reason
from paceline.plan import CAPTAIN
from paceline.view.runs import read_object

FILE = "pods.json"
_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class SeenPod:
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
    running: bool  # and goes on
    leaving_since: float | None  # by this machine's clock, when it was first seen to be on its way out
    reason: Reason | None


def seen(pod: Any, first: dict[str, int], before: SeenPod | None = None) -> SeenPod:
    """`first`: the index of the first host of each Job; `before`: the same pod as it was seen the last time."""
    metadata, status = pod.metadata, pod.status
    labels = metadata.labels or {}
    role = str(labels.get(names.ROLE_LABEL, ""))
    job = str(labels.get("batch.kubernetes.io/job-name", ""))
    index = int(labels.get(_INDEX, "0")) + first.get(job, 0)
    host = role if role == CAPTAIN else f"{role}-host-{index}"
    containers = [c for c in (status.containerStatuses if status else None) or [] if c.name == role]
    leaving = before.leaving_since if before and before.leaving_since else None
    if metadata.deletionTimestamp and leaving is None:
        leaving = time.monotonic()
    return SeenPod(
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
        reason=reasons.of_pod(pod.to_dict(), host),
    )


def newest(pods: Iterable[SeenPod]) -> dict[str, SeenPod]:
    """By host, the pod that came last: those before it have failed, or are on their way out."""
    return {pod.host: pod for pod in sorted(pods, key=lambda pod: (pod.created, pod.leaving_since is None))}


def keep(folder: Path, pods: Iterable[SeenPod], waiting: Iterable[Reason]) -> None:
    """`waiting`: why something does not come, of the pods and of what should make them."""
    shown = [_shown(each) for each in newest(pods).values()]
    replace(str(folder / FILE), {"at": stamp(), "pods": shown, "reasons": [asdict(each) for each in waiting]})


def _shown(each: SeenPod) -> dict[str, Any]:
    shown = {name: getattr(each, name) for name in ("host", "pod", "node", "phase", "restarts")}
    return {**shown, "leaving": each.leaving_since is not None, "reason": each.reason.text if each.reason else ""}


def kept(folder: Path) -> dict[str, Any]:
    return read_object(folder / FILE) or {}


def kept_reasons(folder: Path) -> list[Reason]:
    return [Reason(**each) for each in kept(folder).get("reasons", ())]
