"""Whether the cluster refuses the pods of a Job for good: asked of the cluster itself, with a dry run."""

from __future__ import annotations

import time
from functools import partial

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod

from paceline.backends.kubernetes.api import pending_reasons
from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable

REPEAT_S = 30.0  # seconds between two checks of a Job


class PodDryRuns:
    """Events of a Job are written by its controller, but anybody with that permission may write others."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._results: dict[str, tuple[float, bool]] = {}  # by uid of the Job: when it was checked, and the result

    def is_refused(self, job: str, uid: str) -> bool:
        """False: its pods are admitted, or this is unknown, for example because the user may not create pods."""
        now = time.monotonic()
        checked, result = self._results.get(uid, (-REPEAT_S, False))
        if now - checked >= REPEAT_S:
            result = self._check(job, uid)
            self._results = {**dict(list(self._results.items())[-100:]), uid: (now, result)}
        return result

    def _check(self, job: str, uid: str) -> bool:
        try:
            existing = self._cluster.find(Job, job)
            if existing is None or str(existing.metadata.uid) != uid:
                return False
            template = existing.spec.template
            labels, annotations = (getattr(template.metadata, name, None) for name in ("labels", "annotations"))
            metadata = ObjectMeta(name=f"{job}-check", labels=labels, annotations=annotations)
            pod = Pod(metadata=metadata, spec=template.spec)
            self._cluster.request("check a pod", partial(self._cluster.client.create, pod, dry_run=True))
        except Refused as refused:
            reason = pending_reasons.of_job({"reason": "FailedCreate", "message": refused.message}, job)
            return reason is not None and reason.final
        except Unreachable:
            pass
        return False
