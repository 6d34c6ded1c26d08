"""Keeps what tasks write for TensorBoard one line a tag, whatever is restarted: says when a generation begins, and of
which files the writers are gone. What follows from that is done by the porter, so that nothing waits for it.
"""

from __future__ import annotations

import os
import re
from typing import Callable

from paceline.agent import machine
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porting import Answer, Porting
from paceline.agent.written import Notes, notes_path
from paceline.plan import ALONE, Plan
from paceline.storage.curves import find
from paceline.storage.manifest import parse_id

SOON, OFTEN, SELDOM = 5.0, 60.0, 600.0  # seconds between two looks
LAST_S = 5.0  # at the end, when what the run writes besides is still to be kept
# As TensorFlow and TensorBoard name them: time, machine, process.
_PROCESS = re.compile(r"\.tfevents\.\d+\..*?\.(\d+)\.")


class Curves:
    def __init__(self, plan: Plan, options: Options, porting: Porting, loop: Loop) -> None:
        self._folder = f"{options.folder}/tensorboard"
        host = plan.host(options.host)
        self._together = plan.role(host.role).restarts != ALONE
        self._notes = Notes(notes_path(options.folder))
        # A run's folder on this machine outlives it; a pod's does not.
        kept = options.host if options.echo and plan.snapshots.in_bucket else ""
        self._request = {
            "do": "curves", "folder": self._folder, "notes": notes_path(options.folder), "host": kept,
            "scratch": f"{options.folder}/.{options.host}.curves",
        }  # fmt: skip
        self._porting, self._loop = porting, loop
        self._pause = SOON if kept else 0.0  # 0: nothing is to be done
        self._looking = self._closed = False
        if kept:
            self._later()

    def begins(self, generation: int, restore: str | None, reached: int) -> None:
        """Before its first task starts: what is there now was written before it. `reached`: the furthest step that
        tasks of this host have said; 0 where they have said none."""
        if not self._together:
            return  # these go on from nothing that others would write again
        id = parse_id(restore) if restore else None
        try:
            os.makedirs(self._folder, exist_ok=True)
            first = self._notes.begin(generation, None if id is None else (id.step, reached), self._written)
        except OSError:
            return  # a full disk: the line is not drawn again, and training goes on
        if first and generation > 1:
            self._pause = SOON
            self._ask(False, lambda _: None)
            self._later()

    def _written(self) -> list[str]:
        found = find(self._folder)
        if not found:
            return []
        pids, opened = _at_work(self._folder)
        return [path for path in found if not self._lives(path, pids, opened)]

    def _lives(self, path: str, pids: set[int], opened: set[str]) -> bool:
        named = _PROCESS.search(os.path.basename(path) + ".")
        return (named is not None and int(named[1]) in pids) or os.path.realpath(f"{self._folder}/{path}") in opened

    def _later(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.after(self._pause, self._look)

    def _look(self) -> None:
        """Less and less often: what is written anew takes the place of what was there in the first minutes, mostly."""
        self._looking = False
        if self._closed:
            return
        self._ask(False, lambda _: None)
        self._pause = OFTEN if self._request["host"] else min(SELDOM, 3 * self._pause)
        self._later()

    def _ask(self, last: bool, then: Callable[[Answer], None]) -> None:
        self._porting.ask({**self._request, "last": last}, then)

    def close(self, then: Callable[[], None]) -> None:
        """`then`: once all is as it should be, or cannot be. Tasks have ended."""
        if self._closed or (not self._pause and self._notes.read().generation < 2):
            then()
            return
        self._closed = True
        waiting = [then]

        def done(_: Answer | None = None) -> None:
            if waiting:
                waiting.pop()()

        self._ask(True, done)
        self._loop.after(LAST_S, done)


def _at_work(folder: str) -> tuple[set[int], set[str]]:
    """Processes of tasks that were given this folder, and the files that they have open."""
    pids, opened = set(), set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or machine.environment_of(int(name), "PACELINE_TENSORBOARD_DIR") != folder:
            continue
        pids.add(int(name))
        try:
            for fd in os.listdir(f"/proc/{name}/fd"):
                opened.add(os.readlink(f"/proc/{name}/fd/{fd}"))
        except OSError:
            continue
    return pids, opened
