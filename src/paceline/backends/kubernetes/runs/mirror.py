"""Copies events and output of a run on a cluster to a local folder, laid out like that of a local run."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.core.exceptions import ConfigError
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod

from paceline.backends.kubernetes.api import pending_reasons, pod_output
from paceline.backends.kubernetes.api.cluster import LOG_IN_ERRORS, Cluster
from paceline.backends.kubernetes.api.pending_reasons import Reason
from paceline.backends.kubernetes.api.pod_dry_runs import PodDryRuns
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs import pod_records
from paceline.backends.kubernetes.runs.foreign_pods import is_of_job
from paceline.backends.kubernetes.runs.pod_lines import Inbox
from paceline.backends.kubernetes.runs.pod_records import INDEX_LABEL, JOB_LABEL, PodRecord
from paceline.plan import CAPTAIN, Plan
from paceline.view.files.run_folders import info

RETRY_S = 1.0
AWAY = "away"  # key of the last time a note was written because the cluster did not respond
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, *LOG_IN_ERRORS)
LONGEST_RETRY_S = 60.0
REPEAT_S = 60.0  # seconds until a recurring reason is reported again
SAVE_S = 1.0  # seconds between two updates of pods.json
MAX_STREAMS = 64  # pods whose output is followed; each is a connection to the cluster
PAGE_SIZE = 250  # objects in a response
LEFT_S = 60.0  # seconds that the captain may run after all members have exited
FETCHERS = 8
STOP_S = 2.0  # seconds for the threads to end; one that connects to a cluster that is away takes longer


class Mirror:
    """Runs in separate threads until the run has ended. Its state is the folder and these attributes."""

    def __init__(self, cluster: Cluster, run: str, folder: Path, plan: Plan) -> None:
        self._cluster = cluster
        self._run = run
        self._folder = folder
        self.hosts = [host.name for host in plan.hosts]
        self._roles = {CAPTAIN, *(role.name for role in plan.roles)}
        self._first = {names.job_of(run, pool): pool.first for pool in names.pools(plan)}
        self._size = {run: 1} | {names.job_of(run, pool): len(pool.hosts) for pool in names.pools(plan)}
        self._wanted = dict(self._size)  # how many pods each Job is to have: `scale` and `pause` change it
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, int], threading.Thread] = {}
        self._listed = threading.Event()  # all pods were listed once
        self.output_incomplete = False  # some output was not read
        self._pods: dict[str, PodRecord] = {}
        self._are_pods_known = False  # until they are listed, what an earlier process has saved is better
        self._uid = str(info(folder).get("uid") or "")  # uid of the captain's Job
        self._uids: dict[str, str] = {}  # uids of all Jobs, by name
        self._jobs: dict[str, Reason] = {}  # why a Job creates no pods, by uid: an earlier run may have had its name
        self._mounts: dict[str, Reason] = {}  # why a pod's volumes cannot be mounted
        self._without_captain: dict[str, Reason] = {}  # why a running pod cannot find its captain
        self._reported: dict[str, float] = {}  # when a note was last written
        self._finished_jobs: set[str] = set()  # Jobs of members
        self._left_at: float | None = None  # when all members had finished
        self._changed = True
        self._saved_at = 0.0
        self.last_reasons = pod_records.load_reasons(folder)  # the last reasons why hosts were missing
        self._dry_runs = PodDryRuns(cluster)
        self.inbox = Inbox(folder, plan.tasks_with_logs, plan.limits.log)
        self.over = threading.Event()  # the captain's Job has finished or was deleted
        self.job_deleted = False
        self._idle = threading.Event()  # set when the run is over, and by `stop`: ends all waiting
        self._is_stopped = False
        self._watches: list[threading.Thread] = []
        self.is_followed = False  # until it ends, or was found to be unable to start

    # ---- following

    def start(self) -> None:
        self.is_followed = True
        for watch in (self._watch_jobs, self._watch_pods, self._watch_events):
            thread = threading.Thread(target=watch, daemon=True)
            thread.start()
            self._watches.append(thread)

    def stop(self) -> None:
        """End all threads. The connections of the cluster cannot be used any more."""
        self._is_stopped = True
        self._idle.set()
        self._cluster.interrupt()
        until = time.monotonic() + STOP_S
        threads = [*self._watches, *self._streams.values()]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            self._cluster.close()
        with suppress(OSError):  # the folder may have been deleted
            self.save_pods(at_once=True)

    def drained(self, timeout: float) -> bool:
        """Whether all output of ended pods has arrived."""
        until = time.monotonic() + timeout
        if not self._listed.wait(timeout):
            return False
        for thread in list(self._streams.values()):
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._streams.values()))

    def _watch(
        self, kind: Any, replace_all: Callable[[list[Any]], None], **selectors: Any
    ) -> Iterator[tuple[str, Any]]:
        """Continues after a broken connection; if the resource version has expired, lists everything again."""
        client = self._cluster.client
        while not self._idle.is_set():
            try:
                listed = client.list(kind, chunk_size=PAGE_SIZE, **selectors)
                replace_all(list(listed))
                self._reported.pop(AWAY, None)
                yield from client.watch(kind, resource_version=listed.resourceVersion, **selectors)
            except (ApiError, httpx2.HTTPError, ValueError, *LOG_IN_ERRORS) as error:
                is_denied = _code(error) in (401, 403)
                # Connections end from time to time; report only that a new one cannot be opened.
                if kind is not Event and (is_denied or isinstance(error, UNREACHABLE)):
                    self._report_away(error)
                self._idle.wait(LONGEST_RETRY_S if is_denied else RETRY_S)

    def _report_away(self, error: Exception) -> None:
        with self._lock:
            is_new = AWAY not in self._reported and not self._is_stopped
            self._reported[AWAY] = time.monotonic()
        if not is_new:
            return
        problem = f"the cluster does not respond ({error})"
        if _code(error) == 401 or isinstance(error, ConfigError):
            problem = f"no valid credentials for context {self._cluster.context} ({error}): log in to the cluster again"
        self.inbox.note(f"{problem}; the run continues, and Paceline keeps retrying")

    def _watch_jobs(self) -> None:
        def replace_all(jobs: list[Any]) -> None:
            for job in jobs:
                self.update_job("ADDED", job)
            if not any(job.metadata.name == self._run for job in jobs):
                self._end(deleted=True)

        for change, job in self._watch(Job, replace_all, labels={names.RUN_LABEL: self._run}):
            self.update_job(change, job)
            if self._idle.is_set():
                return

    def update_job(self, change: str, job: Any) -> None:
        with self._lock:
            self._uids[job.metadata.name], self._changed = job.metadata.uid, True
            if job.metadata.name in self._wanted and job.spec is not None and job.spec.parallelism is not None:
                self._wanted[job.metadata.name] = 0 if job.spec.suspend else job.spec.parallelism  # the run is paused
        if job.metadata.name == self._run:
            uid = self._uid = self._uid or job.metadata.uid
            if change == "DELETED" or job.metadata.uid != uid or finished(job):
                self._end(deleted=change == "DELETED" or job.metadata.uid != uid)
            return
        if finished(job):
            self._finished_jobs.add(job.metadata.name)
        if self._finished_jobs >= set(self._first) and self._left_at is None:
            self._left_at = time.monotonic()

    def _end(self, deleted: bool) -> None:
        self.job_deleted = deleted
        self.over.set()
        self._idle.set()

    def _watch_pods(self) -> None:
        def replace_all(pods: list[Any]) -> None:
            self.update_pods(pods)
            self._follow_all()
            self._listed.set()
            self._report_missing()

        for change, pod in self._watch(Pod, replace_all, labels={names.RUN_LABEL: self._run}):
            if change != "DELETED" and not self._is_own(pod):
                continue
            with self._lock:
                if change == "DELETED":
                    self._pods.pop(pod.metadata.uid, None)
                    self._mounts.pop(pod.metadata.uid, None)
                else:
                    before = self._pods.get(pod.metadata.uid)
                    self._pods[pod.metadata.uid] = pod_records.record_of(pod, self._first, before)
                self._changed = True
            self._follow_all([self._pods[pod.metadata.uid]] if pod.metadata.uid in self._pods else [])
            self._report_missing()

    def _is_own(self, pod: Any) -> bool:
        """Whether a Job of the run has created the pod: others may create pods with the same labels."""
        labels = pod.metadata.labels or {}
        role, job, index = _role(pod), labels.get(JOB_LABEL, ""), str(labels.get(INDEX_LABEL, "0"))
        if role not in self._roles or job not in self._size or (role == CAPTAIN) != (job == self._run):
            return False
        if not re.fullmatch("[0-9]{1,9}", index) or int(index) >= self._size[job]:
            return False
        uid = self._uid if role == CAPTAIN else self._uids.get(job, "")
        return is_of_job(pod, uid)

    def update_pods(self, pods: list[Any]) -> None:
        """`pods`: all that exist."""
        with self._lock:
            before = self._pods
            by_uid = {pod.metadata.uid: pod for pod in pods if self._is_own(pod)}
            self._pods = {uid: pod_records.record_of(pod, self._first, before.get(uid)) for uid, pod in by_uid.items()}
            self._are_pods_known = self._changed = True

    def _watch_events(self) -> None:
        for change, event in self._watch(Event, self.update_events):
            if change != "DELETED":  # it has only expired
                self._update_event(event)
                self._report_missing()

    def update_events(self, events: list[Any]) -> None:
        """Sorts them by time: they are listed by name."""
        for event in sorted(events, key=lambda event: str(event.lastTimestamp or event.metadata.creationTimestamp)):
            self._update_event(event)

    def _update_event(self, event: Any) -> None:
        """Whoever may create events may have written it: it explains what is missing, and ends nothing by itself."""
        subject = event.involvedObject
        fields = {"reason": event.reason, "message": event.message}
        is_of_job = subject.kind == "Job" and subject.name in self._size
        reason = pending_reasons.of_job(fields, subject.name) if is_of_job else None
        if reason is not None and reason.final:
            is_refused = self.is_followed and self._dry_runs.is_refused(subject.name, subject.uid)
            reason = replace(reason, final=is_refused)
        with self._lock:
            self._changed = True
            if is_of_job:
                if reason is not None:
                    self._jobs[subject.uid] = reason
                elif event.reason == "SuccessfulCreate":
                    self._jobs.pop(subject.uid, None)
            elif subject.kind == "Pod" and subject.uid in self._pods:
                reason = pending_reasons.of_mount(fields, self._pods[subject.uid].host, self._run)
                if reason is not None:
                    self._mounts[subject.uid] = reason

    # ---- why something is missing

    @property
    def waiting(self) -> list[Reason]:
        """Why hosts are missing, the worst first, each reason once."""
        with self._lock:
            newest = pod_records.newest(self._pods.values())
            reasons = [self._why(pod) for pod in newest.values()]
            created = Counter(pod.job for pod in newest.values())
            lacking = [uid for job, uid in self._uids.items() if created[job] < self._wanted.get(job, 0)]
            reasons += map(self._jobs.get, lacking)
            current = pending_reasons.worst(reason for reason in reasons if reason is not None)
            self.last_reasons = current or ([] if self.inbox.complete else self.last_reasons)
            return current

    def _why(self, pod: PodRecord) -> Reason | None:
        if pod.reason is None and pod.began:
            return None if pod.host in self.inbox.joined else self._without_captain.get(pod.uid)
        return pod.reason or self._mounts.get(pod.uid)

    @property
    def fatal_reason(self) -> Reason | None:
        """Why the run cannot start; None: it may."""
        if self.inbox.formed:
            return None
        have_left = self._left_at is not None and time.monotonic() - self._left_at > LEFT_S
        text = "the pods of all hosts exited: they could not reach the captain within limits.start"
        timeout = Reason(self._run, "start-timeout", text, True)
        return timeout if have_left else next((reason for reason in self.waiting if reason.final), None)

    def _report_missing(self) -> None:
        """One note for new reasons: 2 of 4 pods are running; worker-3: no node fits (0 of 3): ..."""
        now = time.monotonic()
        waiting = self.waiting
        with self._lock:
            # Also of pods that were replaced in the meantime, for example after an eviction.
            lost = [pod.reason for pod in self._pods.values() if pod.reason and pod.phase == "Failed"]
            waiting = pending_reasons.worst([*waiting, *lost])
            new = [reason for reason in waiting if now - self._reported.get(reason.text, -REPEAT_S) >= REPEAT_S]
            self._reported |= {reason.text: now for reason in waiting}
            running = sum(map(_is_running, self._pods.values()))
        if new:
            reasons = "; ".join(map(str, new[:3]))
            self.inbox.note(f"{running} of {sum(self._wanted.values())} pods are running; {reasons}")

    def save_pods(self, at_once: bool = False) -> None:
        """Write pods.json and how far output was read, if that has changed, at most every SAVE_S seconds, or
        `at_once`; nothing while the cluster has not listed the pods."""
        now = time.monotonic()
        if not self._are_pods_known or (not at_once and now - self._saved_at < SAVE_S):
            return
        self._saved_at = now
        with self._lock:
            pods = list(self._pods.values())
        if pods:  # a run whose pods were all deleted has no more output
            self.inbox.save_positions({pod.container for pod in pods})
        if self._changed:
            self._changed = False
            pod_records.save(self._folder, pods, self.waiting)

    def stuck_captains(self, after: float) -> list[PodRecord]:
        """Pods of the captain that were deleted at least `after` seconds ago: their node is lost."""
        now = time.monotonic()
        with self._lock:
            captains = [pod for pod in self._pods.values() if pod.role == CAPTAIN and pod.leaving_since]
        return [pod for pod in captains if now - (pod.leaving_since or now) >= after]

    # ---- output

    def _follow_all(self, pods: list[PodRecord] | None = None) -> None:
        for pod in list(self._pods.values()) if pods is None else pods:
            key = pod.uid, pod.restarts
            if not pod.began or key in self._streams:
                continue
            alive = sum(thread.is_alive() for thread in self._streams.values())
            if alive >= MAX_STREAMS and pod.role != CAPTAIN:
                self._report_not_followed()
                continue
            thread = threading.Thread(target=self._follow, args=(pod,), daemon=True)
            thread.start()
            self._streams[key] = thread

    def _report_not_followed(self) -> None:
        self.output_incomplete = True
        if "not-followed" not in self._reported:
            self._reported["not-followed"] = time.monotonic()
            self.inbox.note(
                f"only the output of {MAX_STREAMS} pods is shown; for another task, stop following the run and use: "
                f"paceline logs {self._run} --task NAME"
            )

    def _follow(self, pod: PodRecord) -> None:
        has_output, wait, is_broken = False, RETRY_S, False
        while True:
            reader = self.inbox.reader(pod.role == CAPTAIN, pod.container)
            # All events once: they tell whether training has started, and who has joined.
            is_first = pod.role == CAPTAIN and not has_output
            since = None if is_first else self.inbox.since(pod.container)
            try:
                for line in self._lines(pod, since, follow=True):
                    has_output, wait = True, RETRY_S
                    self._check_line(pod, line)
                    reader.take(line)
                is_broken = False
            except ApiError as error:
                if not self._can_retry(pod, error):
                    self.output_incomplete = self.output_incomplete or is_broken or not has_output
                    return
                is_broken = True
            except (httpx2.HTTPError, *LOG_IN_ERRORS):
                is_broken = True
            has_ended = self._idle.wait(wait)
            if self._is_stopped or (not is_broken and (has_ended or not self._is_current(pod))):
                return
            wait = RETRY_S if has_ended else min(2 * wait, LONGEST_RETRY_S)
            if has_ended:
                time.sleep(wait)  # retry until `drained` stops waiting

    def _is_current(self, pod: PodRecord) -> bool:
        """Whether the same container still runs."""
        now = self._pods.get(pod.uid)
        return now is not None and now.running and now.restarts == pod.restarts

    def _can_retry(self, pod: PodRecord, error: ApiError) -> bool:
        """Whether reading the output of a pod again may help. A deleted pod needs no note."""
        code = _code(error)
        if code == 401:
            self._report_away(error)
        elif code != 404 and self._is_current(pod) and "output" not in self._reported:
            self._reported["output"] = time.monotonic()
            self.inbox.note(f"the output of {pod.host} cannot be read: {error.status.message or error}")
        return code >= 500 or code in (401, 429)

    def _check_line(self, pod: PodRecord, line: str) -> None:
        """A member that cannot reach its captain can report that only in its output."""
        reason = pending_reasons.of_line(line, pod.host)
        if reason is not None:
            with self._lock:
                self._without_captain[pod.uid], self._changed = reason, True
            self._report_missing()

    def fetch(self, hosts: set[str]) -> bool:
        """Fetch the output of these hosts' pods that the folder does not have yet. Return whether all was fetched."""
        pods_by_host: dict[str, list[PodRecord]] = {}
        for pod in sorted(self._pods.values(), key=lambda pod: pod.created):
            if pod.began and pod.host in hosts:
                pods_by_host.setdefault(pod.host, []).append(pod)
        with ThreadPoolExecutor(FETCHERS) as pool:  # pods of one host in order: they write to the same files
            results = list(pool.map(self._fetch_all, pods_by_host.values()))
        return all(map(all, results))

    def _fetch_all(self, pods: list[PodRecord]) -> list[bool]:
        return [self._fetch(pod) for pod in pods]

    def _fetch(self, pod: PodRecord) -> bool:
        reader = self.inbox.reader(pod.role == CAPTAIN, pod.container)
        try:
            for line in self._lines(pod, self.inbox.since(pod.container)):
                self._check_line(pod, line)
                reader.take(line)
        except ApiError as error:
            self._can_retry(pod, error)
            return error.status.code == 404  # deleted in the meantime
        except (httpx2.HTTPError, *LOG_IN_ERRORS):
            return False
        return True

    def _lines(self, pod: PodRecord, since: str | None, follow: bool = False) -> Iterator[str]:
        return pod_output.read_lines(self._cluster, pod.pod, pod.role, since, follow)


def _code(error: Exception) -> int:
    """The HTTP status of an error; 0: it has none."""
    if isinstance(error, ApiError):
        return error.status.code or 0
    return error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else 0


def finished(job: Any) -> bool:
    conditions = (job.status.conditions if job.status else None) or []
    return any(each.type in ("Complete", "Failed") and each.status == "True" for each in conditions)


def _role(pod: Any) -> str:
    return str((pod.metadata.labels or {}).get(names.ROLE_LABEL, ""))


def _is_running(pod: PodRecord) -> bool:
    return pod.phase == "Running" and pod.began and pod.reason is None
