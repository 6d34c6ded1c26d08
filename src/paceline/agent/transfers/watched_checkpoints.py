"""The folder or files to which tasks write their own checkpoints (`snapshots.watch`). The agent of the leading task
captures them as a snapshot whenever they change. Every agent restores them before tasks start.

Files that a task left when it died are not captured: it may have died while writing them.

<folder>/watched/<host>/        captured copies
<folder>/watched/tasks/<task>   the processes that may write to the folder
<folder>/watched/begun.json     the generation that the folder was restored for
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Callable

from paceline.agent.captain.snapshots.restoring_tasks import restores
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.tasks.attempt import Attempt
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter_client import PorterClient
from paceline.plan import Plan
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.storage.watched.restore import TASKS, tidy
from paceline.storage.watched.selection import is_empty

RUN = "$PACELINE_RUN"  # allowed in the folder's name, so that runs with the same working folder watch different folders
WARN_AFTER_S = 120.0  # seconds of captures that fail because files keep changing
RETRY_S = 0.2  # seconds until the last capture is retried
NOTHING_AFTER_S = 600.0  # of a task that has written nothing that could be captured


class WatchedFolder:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        porter: PorterClient,
        collect: Callable[[str, SnapshotId, str], None],
        notify: Callable[..., None],
    ) -> None:
        """`collect`: takes a captured folder as a snapshot of a task."""
        self._plan, self._options, self._loop, self._porter = plan, options, loop, porter
        self._collect, self._notify = collect, notify
        watch = plan.snapshots.watch.replace(RUN, options.run)
        work = options.work or plan.code
        self.folder = os.path.join(work, watch) if watch else ""
        self._own = f"{options.folder}/watched"
        first = next((task for task in plan.tasks if restores(plan, task)), None)
        self._leader = first.name if first is not None and first.host == options.host and watch else ""
        self._copies = f"{self._own}/{options.host}" if self._leader else ""
        self._inner = [work, options.folder, *filter(os.path.isabs, [options.snapshots, plan.snapshots.to])]
        self._request: int | None = None  # number of the current capture
        self._step = 0  # step of the last snapshot that was restored or captured
        self._late_since: float | None = None
        self._doubtful: req.Signatures = {}  # files that a task may have been writing when it died
        self._warned: set[str] = set()
        self._has_snapshot = False  # in any generation
        self._has_checked = False  # whether there is anything to capture

    # ---- before tasks start

    def restore(
        self, generation: int, id: SnapshotId | None, source: str, then: Callable[[req.Failure | None], None]
    ) -> int:
        """`source`: the snapshot; empty: none. Returns the number of the request."""

        def answered(answer: req.Answer) -> None:
            self._step, self._doubtful = 0 if id is None else id.step, {}
            self._has_snapshot = self._has_snapshot or id is not None
            if isinstance(answer, req.WatchedRestored):
                self._doubtful = answer.doubtful
                if answer.kept:
                    self._notify(f"moved the previous contents of {self.folder} to {answer.kept}")
            then(answer if isinstance(answer, req.Failure) else None)

        request = req.RestoreWatched(
            self.folder, self._own, self._copies, self._options.run, self._options.host, generation, source,
            tuple(self._inner),
        )  # fmt: skip
        return self._porter.ask(request, answered)

    # ---- while they run

    def attempt_started(self, attempt: Attempt) -> None:
        if self.folder and restores(self._plan, attempt.task):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK  # it may be a pipe now
                fd = os.open(f"{self._own}/{TASKS}/{attempt.task.name}", flags, 0o600)
                with os.fdopen(fd, "w") as file:
                    file.write(str(attempt.pid))
            except OSError as error:
                self._warn_once(f"cannot take snapshots of {self.folder}: {error.filename}: {error.strerror}")

    def capture(self, attempts: Mapping[str, Attempt]) -> None:
        """Called once a second."""
        attempt = attempts.get(self._leader)
        if attempt is not None and attempt.pid and self._request is None:
            self._request_capture(attempt, self._leader, self._warn)
            self._warn_if_empty(attempt)

    def _warn_if_empty(self, attempt: Attempt) -> None:
        if self._has_snapshot or self._has_checked or self._loop.now() - attempt.started < NOTHING_AFTER_S:
            return
        self._has_checked = True
        if not is_empty(self.folder):
            return  # what prevents a capture leads to another warning
        text = f"no snapshot has been taken: there is nothing at {self.folder} (snapshots.watch) after"
        self._warn_once(f"{text} {NOTHING_AFTER_S / 60:g} minutes; is that where the program writes its checkpoints?")

    def _request_capture(self, attempt: Attempt, leader: str, then: Callable[[req.Failure | None], None]) -> None:
        """`leader`: empty once the leading task has succeeded. `then`: receives the reason why nothing could be
        captured; None if there is nothing left to capture."""
        to, step = f"{self._copies}/taken-{os.urandom(4).hex()}", attempt.step

        def answered(answer: req.Answer) -> None:
            if number == self._request:
                self._request = None
            if isinstance(answer, req.WatchedCaptured) and answer.captured:
                self._step = max(self._step + 1, step or 0)
                self._has_snapshot = True
                self._collect(attempt.task.name, SnapshotId(self._step, attempt.generation), to)
            then(answer if isinstance(answer, req.Failure) else None)

        request = req.CaptureWatched(
            self.folder, self._own, self._copies, to, attempt.metrics, leader, self._doubtful
        )  # fmt: skip
        self._request = number = self._porter.ask(request, answered)

    def _warn(self, failure: req.Failure | None) -> None:
        now = self._loop.now()
        if failure is None or failure.kind == req.UNWANTED:
            self._late_since = None
        elif failure.kind != req.LATER:
            self._warn_once(f"cannot take a snapshot of {self.folder}: {failure.text}")
        elif self._late_since is None:
            self._late_since = now
        elif now - self._late_since > WARN_AFTER_S:
            text = f"{self.folder} has changed, but no snapshot of it could be taken for {WARN_AFTER_S:g} s"
            self._warn_once(f"{text}: {failure.text}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._notify(text, True)

    # ---- once the leading task has ended

    def attempt_ended(self, attempt: Attempt, well: bool, then: Callable[[], None]) -> None:
        """Calls `then` when everything is captured; immediately if there is nothing to capture."""
        task = attempt.task.name
        if well and self.folder and restores(self._plan, attempt.task):
            with contextlib.suppress(OSError):
                os.unlink(f"{self._own}/{TASKS}/{task}")
        if well and task == self._leader:
            self._capture_last(attempt, then)
            return
        if task == self._leader and self._request is not None:
            self._porter.cancel(self._request)
        then()

    def _capture_last(self, attempt: Attempt, then: Callable[[], None]) -> None:
        attempt.pid = 0  # the process has ended, and its pid may be reused
        problem = "it did not finish in time"

        def answered(failure: req.Failure | None) -> None:
            nonlocal problem
            problem = "" if failure is None else failure.text
            if failure is not None and failure.kind == req.LATER:
                self._loop.after(RETRY_S, ask)
            else:
                finish()

        def ask() -> None:
            if attempt.gives_up is not None:
                self._request_capture(attempt, "", answered)

        def finish() -> None:
            if attempt.gives_up is None:
                return
            attempt.gives_up = None
            timer.cancel()
            if problem:
                name = attempt.task.name
                self._notify(f"could not take a snapshot of {self.folder} after {name} ended: {problem}", True)
            if self._request is not None:
                self._porter.cancel(self._request)
            then()

        def give_up() -> None:
            self._loop.after(0.0, finish)

        timer = self._loop.after(self._time_limit(), finish)
        attempt.gives_up = give_up
        ask()

    def _time_limit(self) -> float:
        """Seconds for the last capture: a task that needs more would seem to hang."""
        hang_after, commit = self._plan.restart.hang_after, self._plan.limits.commit
        return commit if hang_after is None else min(commit, hang_after / 2)

    def tidy(self, may_return: bool = False) -> None:
        """Removes Paceline's own files after the end of the run. `may_return`: but not what the next generation has to
        know about the folder."""
        if self.folder:
            tidy(self.folder, self._own, (self._options.run, self._options.host), keep_record=may_return)
