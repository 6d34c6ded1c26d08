"""Keeps one curve per tag in TensorBoard across restarts: notes when a generation begins, and which files no longer
have a writer. The porter then trims the files, so nothing waits for it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Callable

from paceline.agent import os_processes
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.tensorboard.generation_notes import GenerationNotes, notes_path
from paceline.agent.transfers.porter_client import PorterClient
from paceline.agent.transfers.requests import Answer, TrimCurves
from paceline.plan import ALONE, Plan
from paceline.storage.snapshots.manifest import parse_id
from paceline.storage.tensorboard_event_files import find

SOON, OFTEN, SELDOM = 5.0, 60.0, 600.0  # seconds between requests
LAST_S = 5.0  # time limit at the end, when logs still have to be uploaded
# File names of TensorFlow and TensorBoard contain time, machine and process.
_PROCESS = re.compile(r"\.tfevents\.\d+\..*?\.(\d+)\.")


class TrimRequests:
    def __init__(self, plan: Plan, options: Options, porter: PorterClient, loop: Loop) -> None:
        self._folder = f"{options.folder}/tensorboard"
        host = plan.host(options.host)
        self._restarts_together = plan.role(host.role).restarts != ALONE
        self._notes = GenerationNotes(notes_path(options.folder))
        # A pod's folder is deleted with the pod, so its files are copied to the store.
        copied = options.host if options.echo and plan.snapshots.in_bucket else ""
        scratch = f"{options.folder}/.{options.host}.curves"
        self._request = TrimCurves(self._folder, notes_path(options.folder), copied, scratch)
        self._porter, self._loop = porter, loop
        self._pause = SOON if copied else 0.0  # 0: nothing to do
        self._is_scheduled = self._is_closed = False
        if copied:
            self._schedule()

    def begin_generation(self, generation: int, restore: str | None, reached: int) -> None:
        """Called before its first task starts: all present files are of earlier generations. `reached`: the furthest
        step that tasks of this host have reported; 0: none."""
        if not self._restarts_together:
            return  # a role that restarts alone repeats no steps
        id = parse_id(restore) if restore else None
        try:
            os.makedirs(self._folder, exist_ok=True)
            first = self._notes.begin(generation, None if id is None else (id.step, reached), self._finished_files)
        except OSError:
            return  # a full disk: the curve is not trimmed, and training continues
        if first and generation > 1:
            self._pause = SOON
            self._request_trim(False, lambda _: None)
            self._schedule()

    def _finished_files(self) -> list[str]:
        """Event files whose writers have ended."""
        paths = find(self._folder)
        if not paths:
            return []
        pids, open_files = _writers(self._folder)
        return [path for path in paths if not self._has_writer(path, pids, open_files)]

    def _has_writer(self, path: str, pids: set[int], open_files: set[str]) -> bool:
        match = _PROCESS.search(os.path.basename(path) + ".")
        return (match is not None and int(match[1]) in pids) or os.path.realpath(f"{self._folder}/{path}") in open_files

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.after(self._pause, self._trim)

    def _trim(self) -> None:
        """Less and less often: tasks repeat the steps of an earlier generation mostly in the first minutes."""
        self._is_scheduled = False
        if self._is_closed:
            return
        self._request_trim(False, lambda _: None)
        self._pause = OFTEN if self._request.host else min(SELDOM, 3 * self._pause)
        self._schedule()

    def _request_trim(self, last: bool, then: Callable[[Answer], None]) -> None:
        self._porter.ask(replace(self._request, last=last), then)

    def close(self, then: Callable[[], None]) -> None:
        """Called when tasks have ended. Calls `then` once the files are trimmed and copied, or cannot be."""
        if self._is_closed or (not self._pause and self._notes.read().generation < 2):
            then()
            return
        self._is_closed = True
        pending = [then]

        def finish(_: Answer | None = None) -> None:
            if pending:
                pending.pop()()

        self._request_trim(True, finish)
        self._loop.after(LAST_S, finish)


def _writers(folder: str) -> tuple[set[int], set[str]]:
    """Processes of tasks that may write to this folder, and the files that they have open."""
    pids, open_files = set(), set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or os_processes.environment_of(int(name), "PACELINE_TENSORBOARD_DIR") != folder:
            continue
        pids.add(int(name))
        try:
            for fd in os.listdir(f"/proc/{name}/fd"):
                open_files.add(os.readlink(f"/proc/{name}/fd/{fd}"))
        except OSError:
            continue
    return pids, open_files
