"""Brings events and output of a run on a cluster into a folder here, as a run on this machine leaves them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod
from lightkube.types import OnErrorAction, OnErrorResult

from paceline.agent.journal import stamp
from paceline.backends.kubernetes import names, reasons
from paceline.backends.kubernetes.cluster import Cluster
from paceline.backends.kubernetes.reasons import Reason
from paceline.plan import CAPTAIN

RETRY_S = 1.0
MOST_STREAMS = 64  # output of so many pods at once; each is a connection to the cluster
_OUTPUT = re.compile(r"(\S+) (\d{4}-\d\d-\d\dT\S+Z g\d+ [|~] ?.*)")
_INDEX = "batch.kubernetes.io/job-completion-index"


class Mirror:
    """Runs in threads of its own until the run is over; all it knows is in the folder and in these attributes."""

    def __init__(self, cluster: Cluster, run: str, folder: Path, hosts: int) -> None:
        self._cluster = cluster
        self._run = run
        self._folder = folder
        self._hosts = hosts
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, int], threading.Thread] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._pods: dict[str, Any] = {}
        self._reasons: dict[str, Reason] = {}
        self._said = ""
        self._newer = False  # take only lines newer than those there are
        self._held: dict[str, str] = {}
        self._formed = False
        self.hopeless: Reason | None = None  # why the run can never start
        self.over = threading.Event()  # the captain's Job has finished, or is gone

    def start(self) -> None:
        for watch in (self._watch_job, self._watch_pods, self._watch_events):
            threading.Thread(target=watch, daemon=True).start()

    def drained(self, timeout: float) -> bool:
        """Whether all output of ended pods has arrived."""
        for thread in list(self._streams.values()):
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._streams.values())

    # ---- what the cluster tells

    def _watch(self, kind: Any, **selectors: Any) -> Iterator[tuple[str, Any]]:
        """Also after the connection breaks, and after the server has forgotten where we were."""
        while not self.over.is_set():
            try:
                yield from self._cluster.client.watch(kind, on_error=_again, **selectors)
            except (ApiError, httpx2.HTTPError, ValueError):
                self.over.wait(RETRY_S)

    def _watch_job(self) -> None:
        for happened, job in self._watch(Job, fields={"metadata.name": self._run}):
            conditions = job.status.conditions if job.status else None
            done = any(each.type in ("Complete", "Failed") and each.status == "True" for each in conditions or [])
            if happened == "DELETED" or done:
                self.over.set()
                return

    def _watch_pods(self) -> None:
        for happened, pod in self._watch(Pod, labels={names.RUN_LABEL: self._run}):
            uid = pod.metadata.uid
            if happened == "DELETED":
                self._pods.pop(uid, None)
                self._reasons.pop(pod.metadata.name, None)
            else:
                self._pods[uid] = pod
                self._note(pod.metadata.name, reasons.of_pod(pod.to_dict(), self._name(pod)))
                self._stream(pod)
            self._say_who_is_missing()

    def _watch_events(self) -> None:
        for _, event in self._watch(Event):
            about = event.involvedObject
            if not (about.name or "").startswith(self._run):
                continue
            given = {"reason": event.reason, "message": event.message}
            if about.kind == "Job":
                self._note(about.name, reasons.of_job(given, about.name))
            elif about.kind == "Pod" and about.uid in self._pods:
                self._note(about.name, reasons.of_mount(given, self._name(self._pods[about.uid])))
            self._say_who_is_missing()

    # ---- why something is missing

    def _note(self, name: str, reason: Reason | None) -> None:
        with self._lock:
            if reason is None:
                self._reasons.pop(name, None)
            else:
                self._reasons[name] = reason
                if reason.final and not self._formed:
                    self.hopeless = self.hopeless or reason

    def _say_who_is_missing(self) -> None:
        """One line whenever it changes: 2 of 4 pods run; worker-3: no node takes it (0 of 3): ..."""
        with self._lock:
            found = reasons.worst(self._reasons.values())
            running = sum(1 for pod in self._pods.values() if pod.status and pod.status.phase == "Running")
            words = "; ".join(map(str, found[:3]))
            if words and words != self._said:
                self._event("note", f"{running} of {self._hosts + 1} pods run; {words}")
            self._said = words

    def _event(self, kind: str, text: str) -> None:
        self._append("events.jsonl", json.dumps({"at": stamp(), "event": kind, "generation": 0, "text": text}))

    # ---- output

    def _stream(self, pod: Any) -> None:
        statuses = (pod.status.containerStatuses or []) if pod.status else []
        for status in statuses:
            began = status.state and (status.state.running or status.state.terminated)
            key = pod.metadata.uid, status.restartCount or 0
            alive = sum(thread.is_alive() for thread in self._streams.values())
            if began and key not in self._streams and (alive < MOST_STREAMS or _role(pod) == CAPTAIN):
                thread = threading.Thread(target=self._follow, args=(pod, key), daemon=True)
                self._streams[key] = thread
                thread.start()

    def _follow(self, pod: Any, key: tuple[str, int]) -> None:
        take: Callable[[str], None] = self._take_event if _role(pod) == CAPTAIN else self._take_output
        for _ in range(1000):
            try:
                lines = self._cluster.client.log(pod.metadata.name, container=_role(pod), follow=True, newlines=False)
                for number, line in enumerate(lines):
                    if number >= self._taken.get(key, 0):
                        self._taken[key] = number + 1
                        take(line)
                return
            except ApiError:
                return  # the pod is gone, and its output with it
            except httpx2.HTTPError:
                threading.Event().wait(RETRY_S)

    def fetch(self, pod: Any) -> None:
        """What this pod has written and this folder does not hold yet, once."""
        take: Callable[[str], None] = self._take_event if _role(pod) == CAPTAIN else self._take_output
        self._newer = True
        try:
            for line in self._cluster.client.log(pod.metadata.name, container=_role(pod), newlines=False):
                take(line)
        except (ApiError, httpx2.HTTPError):
            pass  # not started yet, or gone
        finally:
            self._newer = False

    def _take_event(self, line: str) -> None:
        try:
            kind = json.loads(line).get("event")
            known = isinstance(kind, str)
            self._formed = self._formed or kind == "generation-formed"
        except (ValueError, AttributeError):
            known = False
        self._append("events.jsonl" if known else "agents.log", line)

    def _take_output(self, line: str) -> None:
        found = _OUTPUT.fullmatch(line)
        if found is None:
            self._append("agents.log", line)
        else:
            self._append(f"logs/{found[1]}.log", found[2])

    def _append(self, name: str, line: str) -> None:
        if self._newer and name != "agents.log" and stamp_of(line) <= self._last(name):
            return
        with (self._folder / name).open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line + "\n")

    def _last(self, name: str) -> str:
        """The time of the last line that the file held before this fetch."""
        if name not in self._held:
            try:
                lines = (self._folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
            except FileNotFoundError:
                lines = []
            self._held[name] = stamp_of(lines[-1]) if lines else ""
        return self._held[name]

    def _name(self, pod: Any) -> str:
        role, index = _role(pod), (pod.metadata.labels or {}).get(_INDEX, "0")
        return role if role == CAPTAIN else f"{role}-host-{index}"


def _role(pod: Any) -> str:
    return str((pod.metadata.labels or {}).get(names.ROLE_LABEL, ""))


def _again(error: Exception, count: int) -> OnErrorResult:
    if isinstance(error, ApiError) and error.status.code == 410:  # it has forgotten where we were
        return OnErrorResult(OnErrorAction.RAISE)
    return OnErrorResult(OnErrorAction.RETRY, sleep=min(5.0, 0.5 * count))


def stamp_of(line: str) -> str:
    """When a line of a log or an event was written, as it says itself.

    >>> stamp_of('{"at": "2026-11-15T04:30:11.123Z", "event": "note"}')
    '2026-11-15T04:30:11.123Z'
    """
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("at", ""))
        except ValueError:
            return ""
    return line[:24]
