"""Brings events and output of a run on a cluster into a folder here, as a run on this machine leaves them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod

from paceline.backends.kubernetes import names, reasons
from paceline.backends.kubernetes import seen as seeing
from paceline.backends.kubernetes.cluster import LOG_IN, Cluster
from paceline.backends.kubernetes.inbox import Inbox
from paceline.backends.kubernetes.reasons import Reason
from paceline.backends.kubernetes.seen import SeenPod
from paceline.plan import CAPTAIN, Plan
from paceline.view.events import seconds
from paceline.view.runs import info

RETRY_S = 1.0
AWAY = "away"
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, *LOG_IN)
LONGEST_RETRY_S = 60.0
AGAIN_S = 60.0  # until a reason that has come back is said again
KEEP_S = 1.0  # between two writings of what the pods are like
MOST_STREAMS = 64  # output of so many pods at once; each is a connection to the cluster
PAGE = 250  # objects a request
LEFT_S = 60.0  # how long a captain may be alone at the end
FETCHERS = 8
OVERLAP_S = 10  # how much of a log is read twice when its connection broke, as clocks differ


class Mirror:
    """Runs in threads of its own until the run is over; all it knows is in the folder and in these attributes."""

    def __init__(self, cluster: Cluster, run: str, folder: Path, plan: Plan) -> None:
        self._cluster = cluster
        self._run = run
        self._folder = folder
        self.hosts = [host.name for host in plan.hosts]
        self._roles = {CAPTAIN, *(role.name for role in plan.roles)}
        self._first = {names.job_of(run, group): group.first for group in names.groups(plan)}
        self._size = {run: 1} | {names.job_of(run, group): len(group.hosts) for group in names.groups(plan)}
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, int], threading.Thread] = {}
        self._listed = threading.Event()  # it is known which pods there are
        self.unheard = False  # some output was not followed
        self._pods: dict[str, SeenPod] = {}
        self._uid = str(info(folder).get("uid") or "")  # of the captain's Job
        self._uids: dict[str, str] = {}  # of all Jobs, by their names
        self._jobs: dict[str, Reason] = {}  # why a Job makes no pods, by its uid: an earlier run may have had its name
        self._mounts: dict[str, Reason] = {}  # why a pod's volumes do not come
        self._lonely: dict[str, Reason] = {}  # why a pod that runs does not find its captain
        self._said: dict[str, float] = {}
        self._left: set[str] = set()  # members' Jobs that have finished
        self._left_at: float | None = None
        self._changed = True
        self._kept_at = 0.0
        self.waited = seeing.kept_reasons(folder)  # why hosts were missing when some were
        self.inbox = Inbox(folder)
        self.over = threading.Event()  # the captain's Job has finished, or is gone
        self.gone = False

    # ---- following

    def start(self) -> None:
        for watch in (self._watch_jobs, self._watch_pods, self._watch_events):
            threading.Thread(target=watch, daemon=True).start()

    def drained(self, timeout: float) -> bool:
        """Whether all output of ended pods has arrived."""
        until = time.monotonic() + timeout
        if not self._listed.wait(timeout):
            return False
        for thread in list(self._streams.values()):
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._streams.values()))

    def _watch(self, kind: Any, replace: Callable[[list[Any]], None], **selectors: Any) -> Iterator[tuple[str, Any]]:
        """Also after the connection breaks, and after the server has forgotten where we were: then all is new."""
        client = self._cluster.client
        while not self.over.is_set():
            try:
                listed = client.list(kind, chunk_size=PAGE, **selectors)
                replace(list(listed))
                self._said.pop(AWAY, None)
                yield from client.watch(kind, resource_version=listed.resourceVersion, **selectors)
            except (ApiError, httpx2.HTTPError, ValueError, *LOG_IN) as error:
                denied = isinstance(error, ApiError) and error.status.code in (401, 403)
                # That a connection ends now and then is nothing; that it cannot be made again is worth a word.
                if kind is not Event and (denied or isinstance(error, UNREACHABLE)):
                    self._away(error)
                self.over.wait(LONGEST_RETRY_S if denied else RETRY_S)

    def _away(self, error: Exception) -> None:
        with self._lock:
            new = AWAY not in self._said
            self._said[AWAY] = time.monotonic()
        if new:
            self.inbox.note(f"the cluster does not answer ({error}): the run goes on, and is asked for again")

    def _watch_jobs(self) -> None:
        def replace(jobs: list[Any]) -> None:
            for job in jobs:
                self.see_job("ADDED", job)
            if not any(job.metadata.name == self._run for job in jobs):
                self._end(gone=True)

        for happened, job in self._watch(Job, replace, labels={names.RUN_LABEL: self._run}):
            self.see_job(happened, job)
            if self.over.is_set():
                return

    def see_job(self, happened: str, job: Any) -> None:
        with self._lock:
            self._uids[job.metadata.name], self._changed = job.metadata.uid, True
        if job.metadata.name == self._run:
            uid = self._uid = self._uid or job.metadata.uid
            if happened == "DELETED" or job.metadata.uid != uid or finished(job):
                self._end(gone=happened == "DELETED" or job.metadata.uid != uid)
            return
        if finished(job):
            self._left.add(job.metadata.name)
        if self._left >= set(self._first) and self._left_at is None:
            self._left_at = time.monotonic()

    def _end(self, gone: bool) -> None:
        self.gone = gone
        self.over.set()

    def _watch_pods(self) -> None:
        def replace(pods: list[Any]) -> None:
            self.see(pods)
            self._hear_all()
            self._listed.set()
            self._say_who_is_missing()

        for happened, pod in self._watch(Pod, replace, labels={names.RUN_LABEL: self._run}):
            if _role(pod) not in self._roles:
                continue
            with self._lock:
                if happened == "DELETED":
                    self._pods.pop(pod.metadata.uid, None)
                    self._mounts.pop(pod.metadata.uid, None)
                else:
                    self._pods[pod.metadata.uid] = seeing.seen(pod, self._first, self._pods.get(pod.metadata.uid))
                self._changed = True
            self._hear_all([self._pods[pod.metadata.uid]] if pod.metadata.uid in self._pods else [])
            self._say_who_is_missing()

    def see(self, pods: list[Any]) -> None:
        """These are all the pods that there are."""
        with self._lock:
            ours = [pod for pod in pods if _role(pod) in self._roles]
            self._pods = {p.metadata.uid: seeing.seen(p, self._first, self._pods.get(p.metadata.uid)) for p in ours}
            self._changed = True

    def _watch_events(self) -> None:
        for happened, event in self._watch(Event, self.hear_events):
            if happened != "DELETED":  # by its age, which is no news
                self._hear_event(event)
                self._say_who_is_missing()

    def hear_events(self, events: list[Any]) -> None:
        """As they happened: they are listed by their names."""
        for event in sorted(events, key=lambda event: str(event.lastTimestamp or event.metadata.creationTimestamp)):
            self._hear_event(event)

    def _hear_event(self, event: Any) -> None:
        about = event.involvedObject
        given = {"reason": event.reason, "message": event.message}
        with self._lock:
            self._changed = True
            if about.kind == "Job" and about.name in self._size:
                reason = reasons.of_job(given, about.name)
                if reason is not None:
                    self._jobs[about.uid] = reason
                elif event.reason == "SuccessfulCreate":
                    self._jobs.pop(about.uid, None)
            elif about.kind == "Pod" and about.uid in self._pods:
                reason = reasons.of_mount(given, self._pods[about.uid].host)
                if reason is not None:
                    self._mounts[about.uid] = reason

    # ---- why something is missing

    @property
    def waiting(self) -> list[Reason]:
        """Why hosts are missing, the worst first, each reason once."""
        with self._lock:
            newest = seeing.newest(self._pods.values())
            found = [self._why(pod) for pod in newest.values()]
            made = Counter(pod.job for pod in newest.values())
            found += [self._jobs.get(uid) for job, uid in self._uids.items() if made[job] < self._size.get(job, 0)]
            now = reasons.worst(reason for reason in found if reason is not None)
            self.waited = now or ([] if self.inbox.complete else self.waited)
            return now

    def _why(self, pod: SeenPod) -> Reason | None:
        if pod.reason is None and pod.began:
            return None if pod.host in self.inbox.joined else self._lonely.get(pod.uid)
        return pod.reason or self._mounts.get(pod.uid)

    @property
    def hopeless(self) -> Reason | None:
        """Why the run can never start."""
        if self.inbox.formed:
            return None
        left = self._left_at is not None and time.monotonic() - self._left_at > LEFT_S
        told = Reason(self._run, "start-timeout", "its pods have left: they found no captain within limits.start", True)
        return told if left else next((reason for reason in self.waiting if reason.final), None)

    def _say_who_is_missing(self) -> None:
        """One line for what is new: 2 of 4 pods run; worker-3: no node takes it (0 of 3): ..."""
        now = time.monotonic()
        waiting = self.waiting
        with self._lock:
            # Also of pods that have been replaced meanwhile: an eviction, for one, is worth a word.
            gone = [pod.reason for pod in self._pods.values() if pod.reason and pod.phase == "Failed"]
            waiting = reasons.worst([*waiting, *gone])
            new = [reason for reason in waiting if now - self._said.get(reason.text, -AGAIN_S) >= AGAIN_S]
            self._said |= {reason.text: now for reason in waiting}
            running = sum(map(_runs, self._pods.values()))
        if new:
            words = "; ".join(map(str, new[:3]))
            self.inbox.note(f"{running} of {len(self.hosts) + 1} pods run; {words}")

    def keep(self) -> None:
        """Write what the pods are like, now and then."""
        now = time.monotonic()
        if self._changed and now - self._kept_at >= KEEP_S:
            self._kept_at, self._changed = now, False
            waiting = self.waiting
            with self._lock:
                pods = list(self._pods.values())
            seeing.keep(self._folder, pods, waiting)

    def stuck_captains(self, after: float) -> list[SeenPod]:
        """Pods of the captain that should have gone so many seconds ago: their node is lost."""
        now = time.monotonic()
        with self._lock:
            captains = [pod for pod in self._pods.values() if pod.role == CAPTAIN and pod.leaving_since]
        return [pod for pod in captains if now - (pod.leaving_since or now) >= after]

    # ---- output

    def _hear_all(self, pods: list[SeenPod] | None = None) -> None:
        for pod in list(self._pods.values()) if pods is None else pods:
            key = pod.uid, pod.restarts
            if not pod.began or key in self._streams:
                continue
            alive = sum(thread.is_alive() for thread in self._streams.values())
            if alive >= MOST_STREAMS and pod.role != CAPTAIN:
                self._leave_unheard()
                continue
            thread = threading.Thread(target=self._follow, args=(pod,), daemon=True)
            thread.start()
            self._streams[key] = thread

    def _leave_unheard(self) -> None:
        self.unheard = True
        if "unheard" not in self._said:
            self._said["unheard"] = time.monotonic()
            self.inbox.note(
                f"the output of {MOST_STREAMS} pods is shown, not of all; that of another task, once nothing follows "
                f"the run: paceline logs {self._run} --task NAME"
            )

    def _follow(self, pod: SeenPod) -> None:
        last, wait, broke = 0.0, RETRY_S, False
        while True:
            reader = self.inbox.reader(pod.role == CAPTAIN)
            since = round(time.monotonic() - last) + OVERLAP_S if last else None
            try:
                for line in self._lines(pod, since, follow=True):
                    last, wait = time.monotonic(), RETRY_S
                    self._listen(pod, line)
                    reader.take(line)
                broke = False
            except ApiError as error:
                if not self._passes(pod, error):
                    self.unheard = self.unheard or broke or not last
                    return
                broke = True
            except (httpx2.HTTPError, *LOG_IN):
                broke = True
            over = self.over.wait(wait)
            if not broke and (over or not self._goes_on(pod)):
                return
            wait = RETRY_S if over else min(2 * wait, LONGEST_RETRY_S)
            if over:
                time.sleep(wait)  # until whoever waits for the rest has waited long enough

    def _goes_on(self, pod: SeenPod) -> bool:
        now = self._pods.get(pod.uid)
        return now is not None and now.running and now.restarts == pod.restarts

    def _passes(self, pod: SeenPod, error: ApiError) -> bool:
        """Whether it may help to ask again for the output of a pod. What is not there any more needs no word."""
        code = error.status.code or 0
        if code != 404 and self._goes_on(pod) and "output" not in self._said:
            self._said["output"] = time.monotonic()
            self.inbox.note(f"the output of {pod.host} cannot be read: {error.status.message or error}")
        return code >= 500

    def _listen(self, pod: SeenPod, line: str) -> None:
        """A member that cannot reach its captain can only say so to whoever reads its output."""
        reason = reasons.of_line(line, pod.host)
        if reason is not None:
            with self._lock:
                self._lonely[pod.uid], self._changed = reason, True
            self._say_who_is_missing()

    def fetch(self, hosts: set[str]) -> bool:
        """What the pods of these hosts have written and this folder does not hold yet, once. Whether all was had."""
        wanted: dict[str, list[SeenPod]] = {}
        for pod in sorted(self._pods.values(), key=lambda pod: pod.created):
            if pod.began and pod.host in hosts:
                wanted.setdefault(pod.host, []).append(pod)
        with ThreadPoolExecutor(FETCHERS) as pool:  # pods of one host one after the other: their lines go on
            answers = list(pool.map(self._fetch_all, wanted.values()))
        return all(map(all, answers))

    def _fetch_all(self, pods: list[SeenPod]) -> list[bool]:
        return [self._fetch(pod) for pod in pods]

    def _fetch(self, pod: SeenPod) -> bool:
        newest = seconds(self.inbox.since("events.jsonl")) if pod.role == CAPTAIN else None
        since = max(1, round(time.time() - newest)) + 60 if newest else None
        reader = self.inbox.reader(pod.role == CAPTAIN)
        try:
            for line in self._lines(pod, since):
                self._listen(pod, line)
                reader.take(line)
        except ApiError as error:
            self._passes(pod, error)
            return error.status.code == 404  # gone meanwhile
        except (httpx2.HTTPError, *LOG_IN):
            return False
        return True

    def _lines(self, pod: SeenPod, since: int | None, follow: bool = False) -> Iterator[str]:
        return self._cluster.client.log(pod.pod, container=pod.role, since=since, follow=follow, newlines=False)


def finished(job: Any) -> bool:
    conditions = (job.status.conditions if job.status else None) or []
    return any(each.type in ("Complete", "Failed") and each.status == "True" for each in conditions)


def _role(pod: Any) -> str:
    return str((pod.metadata.labels or {}).get(names.ROLE_LABEL, ""))


def _runs(pod: SeenPod) -> bool:
    return pod.phase == "Running" and pod.began and pod.reason is None
