"""The metrics of a run, as its captain knows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.agent.captain.ledger import ENDING, OVER, PAUSED
from paceline.agent.captain.state_machine import Captain
from paceline.agent.goodput import Goodput
from paceline.agent.metrics import families as fam
from paceline.agent.metrics.openmetrics_text import Samples, render
from paceline.agent.metrics.run_samples import (
    add_disk,
    add_goodput,
    add_reported,
    add_resources,
    add_restarts,
    known_cause,
)
from paceline.agent.resource_usage import Resources


class CaptainSamples:
    """Reads the captain's state whenever metrics are requested; what that does not contain, it learns from events."""

    def __init__(
        self,
        captain: Captain,
        goodput: Goodput,
        resources: Resources,
        folder: str,
        started: float | None,
        version: str,
        now: float,
    ) -> None:
        """`folder`: of the run. `started`: when it was started, in seconds since 1970."""
        self._captain, self._goodput, self._resources, self._folder = captain, goodput, resources, folder
        self._started, self._version = started, version
        self._began = now  # of this captain
        self._restarts = Counter(known_cause(restart.cause) for restart in captain.failures.restarts)
        self._steps, self._progress_at = captain.watch.steps, now if captain.watch.steps else None
        self._saved: dict[str, tuple[int, float]] = {}  # state -> step, and when that snapshot was saved
        self._commit: tuple[int, float] | None = None  # bytes and seconds
        self._stall: float | None = None  # seconds

    def on_event(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        if kind == "step":
            if self._captain.watch.steps > self._steps:
                self._steps, self._progress_at = self._captain.watch.steps, now
        elif kind == "restart":
            self._restarts[known_cause(fields["cause"])] += 1
        elif kind == "saved":
            self._saved[fam.SAVED] = fields["step"], now
            self._progress_at, self._stall = now, fields.get("stall_s")
        elif kind == "committed":
            self._saved[fam.COMMITTED] = fields["step"], now - fields["took_s"]
            self._commit = fields["bytes"], fields["took_s"]

    def text(self, openmetrics: bool, now: float) -> bytes:
        return render([self.samples(now)], fam.FAMILIES, openmetrics)

    def samples(self, now: float) -> Samples:
        captain = self._captain
        samples = Samples(captain.run)
        plan = captain.plan
        samples.add(fam.RUN, 1, plan.name, plan.framework, plan.strategy, self._version)
        samples.add(fam.STATUS, 1, self._status())
        samples.add(fam.STARTED, self._started)
        samples.add(fam.GENERATION, captain.generation)
        add_restarts(samples, self._restarts)
        add_goodput(samples, self._goodput.to_report(time.time()))
        add_disk(samples, self._folder)
        self._add_progress(samples, now)
        self._add_snapshots(samples, now)
        self._add_hosts(samples, now)
        hosts = {member.host for member in captain.members.values() if member.connected}
        add_resources(samples, self._resources.to_report(), captain.ledger.live, hosts)
        return samples.end()

    def _status(self) -> str:
        if self._captain.phase in (ENDING, OVER):
            return "ending"
        if self._captain.ledger.pause == PAUSED:
            return "paused"
        return "running" if self._captain.generation else "starting"

    def _add_progress(self, samples: Samples, now: float) -> None:
        captain, watch = self._captain, self._captain.watch
        if watch.steps:
            samples.add(fam.STEP, watch.steps)
        samples.add(fam.SPEED, watch.current_rate())
        if self._progress_at is not None:
            samples.add(fam.PROGRESS_AGE, now - self._progress_at)
        unwanted = self._unwanted_hosts()
        for task in samples.first([task for task in captain.plan.tasks if task.host not in unwanted]):
            samples.add(fam.TASK_UP, task.name in captain.ledger.live, task.name)
            samples.add(fam.TASK_STEP, watch.step(task.name), task.name)
            samples.add(fam.TASK_SPEED, watch.rate(task.name), task.name)
        add_reported(samples, watch.metrics)

    def _add_snapshots(self, samples: Samples, now: float) -> None:
        commits, evaluations = self._captain.commits, self._captain.evaluations
        saved = dict(self._saved)
        if commits.contents.chain:  # of a snapshot that an earlier captain has committed, the time is not known
            saved.setdefault(fam.COMMITTED, (commits.contents.newest_step(), self._began))
        for state, (step, saved_at) in saved.items():
            samples.add(fam.SNAPSHOT_STEP, step, state)
            samples.add(fam.SNAPSHOT_AGE, now - saved_at, state)
        if self._commit is not None:
            samples.add(fam.SNAPSHOT_SIZE, self._commit[0])
            samples.add(fam.COMMIT_TIME, self._commit[1])
        samples.add(fam.STALL, self._stall)
        samples.add(fam.SKIPPED, commits.skipped)
        samples.add(fam.HELD, commits.held_count)
        samples.add(fam.OWED, len(commits.records))
        if any(role.name == "evaluator" for role in self._captain.plan.roles) and commits.contents.is_known:
            samples.add(fam.UNEVALUATED, len(evaluations.unevaluated()))
            evaluated = max((each.step for each in commits.contents.evaluations), default=0)
            samples.add(fam.EVALUATOR_LAG, max(0, commits.contents.newest_step() - evaluated))

    def _add_hosts(self, samples: Samples, now: float) -> None:
        lease = self._captain.lease
        samples.add(fam.LEASE, lease)
        unwanted = self._unwanted_hosts()
        for member in samples.first([each for each in self._captain.members.values() if each.host not in unwanted]):
            samples.add(fam.HOST_UP, member.connected, member.host)
            if member.instance and not member.has_left:
                samples.add(fam.LEASE_AGE, max(0.0, now - (member.lease_until - lease)), member.host)

    def _unwanted_hosts(self) -> set[str]:
        """Hosts of the plan that are not to take part: that they are not up is no problem."""
        return set(self._captain.ledger.unwanted_hosts)
