"""A run on a cluster that this process has submitted: followed, asked to stop, ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from paceline.backends.kubernetes.prepare import Prepared
from paceline.plan import CAPTAIN, to_json
from paceline.view import runs, state

DRAIN_S = 5.0
STOP_S = 15


@dataclass
class Running:
    cluster: Cluster
    run: str
    folder: Path
    mirror: Mirror
    _given_up: bool = False

    def ended(self, timeout: float) -> bool:
        if self.mirror.hopeless is not None and not self._given_up:
            self._given_up = True
            self.end_jobs()
        if not self.mirror.over.wait(timeout):
            return False
        self.mirror.drained(DRAIN_S)
        self.keep_outcome()
        return True

    def stop(self, reason: str) -> bool:
        """Asks the captain, from inside its own pod; where that cannot be, its pods are ended with their grace."""
        words = [f"127.0.0.1:{names.CAPTAIN_PORT}", pods.TLS_FOLDER, CAPTAIN, reason]
        script = (
            f"export PYTHONPATH={pods.AGENT_FOLDER}/agent.pyz; for p in python3 python; do "
            'command -v $p >/dev/null && exec $p -m paceline.agent.control "$@"; done'
        )
        for pod in self._captains():
            try:
                answer = self.cluster.client.exec(
                    pod, container=CAPTAIN, command=["/bin/sh", "-c", script, "sh", *words], timeout=STOP_S,
                    stdout=True, stderr=True,
                )  # fmt: skip
                if not answer.exit_code:
                    return True
            except Exception:  # whatever stands between us and the captain, the cluster can still end it
                break
        self.end_jobs()
        return True

    def kill(self) -> None:
        """At once: no pod gets its grace."""
        self.end_jobs()
        self.kill_pods()

    def kill_pods(self) -> None:
        """Also those of lost nodes, which stay otherwise until somebody forces them away."""
        try:
            for pod in self._pods():
                self.cluster.ask("end a pod", partial(self.cluster.client.delete, Pod, pod, grace_period=0))
        except (Refused, Unreachable):
            pass

    def end_jobs(self) -> None:
        """By their deadline: SIGTERM, and the pods' own grace."""
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
            pass

    def _captains(self) -> list[str]:
        return self._pods({names.ROLE_LABEL: CAPTAIN})

    def _pods(self, more: dict[str, str] | None = None) -> list[str]:
        try:
            found = self.cluster.ask(
                "list pods", lambda: list(self.cluster.client.list(Pod, labels={**self._labels(), **(more or {})}))
            )
        except (Refused, Unreachable):
            return []
        return [pod.metadata.name for pod in found if pod.metadata and pod.metadata.name]

    def _labels(self) -> dict[str, Any]:
        return {names.RUN_LABEL: self.run}

    def keep_outcome(self) -> None:
        """The captain's last words are the report, also where its events did not come through."""
        if self.mirror.hopeless is not None:
            reason = self.mirror.hopeless
            self._report({"status": "failed", "reason": str(reason), "cause": reason.cause, "ended": stamp()})
            return
        for pod in self.cluster.client.list(Pod, labels={**self._labels(), names.ROLE_LABEL: CAPTAIN}):
            for status in (pod.status.containerStatuses or []) if pod.status else []:
                ended = status.state.terminated if status.state else None
                try:
                    words = json.loads(ended.message or "") if ended else None
                except ValueError:
                    words = None
                if isinstance(words, dict) and words.get("status"):
                    self._report(words)

    def _report(self, words: dict[str, Any]) -> None:
        known = state.read(runs.Run(self.run, self.folder), over=True).report
        replace(str(self.folder / "report.json"), {**known, **words})


def make_folder(prepared: Prepared, cluster: Cluster, run: str) -> Path:
    """Where this machine keeps what it knows of the run."""
    folder = runs.runs_folder() / run
    (folder / "logs").mkdir(parents=True, mode=0o700)
    (folder / "plan.json").write_text(to_json(prepared.plan))
    (folder / "job.yaml").write_text(prepared.text)
    plan = prepared.plan
    words = {"run": run, "job": plan.name, "framework": plan.framework, "strategy": plan.strategy, "started": stamp()}
    where = {"on": "kubernetes", "context": cluster.context, "namespace": cluster.namespace}
    replace(str(folder / "run.json"), {**words, **where})
    return folder
