"""A run on a cluster as this process follows it: asked to stop, ended, its outcome kept."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from paceline.agent.journal import replace, stamp
from paceline.backends.kubernetes import names, pods
from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.mirror import Mirror
from paceline.backends.kubernetes.reasons import Reason
from paceline.plan import CAPTAIN
from paceline.view import runs, state

DRAIN_S = 5.0
ASKED = "asked"  # a file that says why a person has ended its Jobs, where the captain could not be asked
WHOLE = "whole"  # a file that says: all output of the run has been fetched
STOP_S = 15
STUCK_S = 30.0  # a captain's pod that should have gone so long ago is on a lost node, and has fenced itself


@dataclass
class Running:
    cluster: Cluster
    run: str
    folder: Path
    mirror: Mirror
    _given_up: Reason | None = None
    _forced: set[str] = field(default_factory=set)

    def ended(self, timeout: float) -> bool:
        self.mirror.keep()
        self._free_captain()
        if self._given_up is None:
            self._given_up = self.mirror.hopeless
            if self._given_up is not None:
                self.end_jobs()
                self.kill_pods()  # nothing has trained, and a shell that starts as PID 1 does not hear SIGTERM
        if not self.mirror.over.wait(timeout):
            return False
        words = self._last_words()
        if words and words.get("cause") == "start-timeout":
            self.end_jobs()  # what comes only now would hold its resources for nothing
        if self.mirror.drained(DRAIN_S) and not self.mirror.unheard:
            (self.folder / WHOLE).touch()
        self.mirror.keep()
        self.keep_outcome()
        return True

    def _free_captain(self) -> None:
        """The cluster itself does not replace a captain's pod on a lost node until it gives up the node."""
        for pod in self.mirror.stuck_captains(STUCK_S):
            if pod.uid not in self._forced:
                self._forced.add(pod.uid)
                self.mirror.inbox.note(f"{pod.pod} is on a lost node ({pod.node}): forced out, so that another comes")
                threading.Thread(target=self._force, args=(pod.pod,), daemon=True).start()

    def _force(self, pod: str) -> None:
        """Its Job would wait for ever to hear how the pod ended, which nobody can tell: so the pod forgets its Job."""
        self._end_pods([pod])
        free: dict[str, Any] = {"metadata": {"finalizers": None}}
        try:
            self.cluster.ask(
                "free a pod", partial(self.cluster.client.patch, Pod, pod, free, patch_type=PatchType.MERGE)
            )
        except (Refused, Unreachable):
            pass

    def stop(self, reason: str) -> bool:
        """Asks the captain, from inside its own pod; where that cannot be, its pods are ended with their grace."""
        for pod in self._pods({names.ROLE_LABEL: CAPTAIN, **self._of_its_job()}):
            try:
                answer = self.cluster.client.exec(
                    pod.metadata.name,
                    container=CAPTAIN,
                    command=stop_command(reason),
                    timeout=STOP_S,
                    stdout=True,
                    stderr=True,
                )
                if not answer.exit_code:
                    return True
            except Exception:  # whatever stands between us and the captain, the cluster can still end it
                continue
        (self.folder / ASKED).write_text(reason)
        return self.end_jobs()

    def kill(self, reason: str = "ended at once, without grace") -> None:
        """At once: no pod gets its grace."""
        (self.folder / ASKED).write_text(reason)
        self.end_jobs()
        self.kill_pods()

    def kill_pods(self) -> None:
        """Also those of lost nodes, which stay otherwise until somebody forces them away."""
        self._end_pods([pod.metadata.name for pod in self._pods()])

    def _end_pods(self, found: list[str]) -> None:
        for pod in found:
            try:
                self.cluster.ask("end a pod", partial(self.cluster.client.delete, Pod, pod, grace_period=0))
            except Refused:
                continue  # gone meanwhile
            except Unreachable:
                return

    def end_jobs(self) -> bool:
        """By their deadline: SIGTERM, and the pods' own grace. Whether the cluster has heard it."""
        patch = {"spec": {"activeDeadlineSeconds": 1}}
        try:
            jobs = self.cluster.ask("list Jobs", lambda: list(self.cluster.client.list(Job, labels=self._labels())))
            for job in jobs:
                name = job.metadata.name if job.metadata else ""
                self.cluster.ask(
                    f"end the Job {name}",
                    partial(self.cluster.client.patch, Job, name, patch, patch_type=PatchType.MERGE),
                )
        except (Refused, Unreachable):
            return False
        return True

    def _pods(self, more: dict[str, str] | None = None) -> list[Any]:
        labels: dict[str, Any] = {**self._labels(), **(more or {})}
        try:
            return self.cluster.ask("list pods", lambda: list(self.cluster.client.list(Pod, labels=labels)))
        except (Refused, Unreachable):
            return []

    def _last_words(self) -> dict[str, Any] | None:
        return spoken(self._pods({names.ROLE_LABEL: CAPTAIN, **self._of_its_job()}))

    def _of_its_job(self) -> dict[str, str]:
        uid = runs.info(self.folder).get("uid")
        return {"batch.kubernetes.io/controller-uid": str(uid)} if uid else {}

    def _labels(self) -> dict[str, Any]:
        return {names.RUN_LABEL: self.run}

    def keep_outcome(self) -> None:
        """The captain's last words are the report, also where its events did not come through."""
        words = self._last_words()
        known = state.read(runs.Run(self.run, self.folder))
        if words is None and self._given_up is not None:
            words = {"status": "failed", "reason": str(self._given_up), "cause": self._given_up.cause}
        if words is None and known.state.ended is not None:
            words = {}
        if words is None and (self.folder / ASKED).exists():
            words = {"status": "stopped", "reason": (self.folder / ASKED).read_text(), "cause": None}
        if words is None:
            words = {**self._told(), "cause": None}
        if words.get("cause") == "start-timeout":
            words = {**words, "reason": _with_reasons(str(words.get("reason")), self.mirror.waited)}
            self.end_jobs()
        ended = known.report.get("ended") or stamp()
        replace(str(self.folder / "report.json"), {**known.report, "ended": ended, **words})

    def _told(self) -> dict[str, str]:
        """As the Job itself says it: its deadline, say."""
        if self.mirror.gone:
            return {"status": "failed", "reason": runs.JOB_GONE}
        jobs: list[Any] = []
        try:
            jobs = [self.cluster.ask("read the Job", partial(self.cluster.client.get, Job, self.run))]
        except (Refused, Unreachable):
            pass
        for job in jobs:
            for each in (job.status.conditions if job.status else None) or []:
                if each.type == "Complete" and each.status == "True":
                    return {"status": "succeeded", "reason": ""}
                if each.type == "Failed" and each.status == "True":
                    return {"status": "failed", "reason": f"its Job failed: {each.reason}: {each.message}"}
        return {"status": "failed", "reason": "its captain ended without a word"}


def stop_command(reason: str) -> list[str]:
    """What asks the captain, run in its pod, which may be of a run that the version before this one has submitted: its
    agent.pyz came whole."""
    script = (
        f"export PYTHONPATH={pods.AGENT}:{pods.AGENT_FOLDER}/agent.pyz; for p in python3 python; do "
        'command -v $p >/dev/null && exec $p -m paceline.agent.control "$@"; done'
    )
    return ["/bin/sh", "-c", script, "sh", f"127.0.0.1:{names.CAPTAIN_PORT}", pods.TLS_FOLDER, CAPTAIN, reason]


def spoken(captains: list[Any]) -> dict[str, Any] | None:
    """The last words of a captain: how the run has ended."""
    for pod in captains:
        for status in (pod.status.containerStatuses or []) if pod.status else []:
            ended = status.state.terminated if status.state else None
            try:
                words = json.loads(ended.message or "") if ended else None
            except ValueError:
                words = None
            if isinstance(words, dict) and words.get("status"):
                return words
    return None


def _with_reasons(reason: str, waiting: list[Reason]) -> str:
    """Which hosts are missing is the captain's to say, why is the cluster's."""
    told = "; ".join(str(each) for each in waiting[:3] if str(each) not in reason)
    return f"{reason}; {told}" if told else reason
