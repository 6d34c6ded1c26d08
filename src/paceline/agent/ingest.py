"""The process of `ingest-0`: finds the data at its place, or has the command make it, and puts it there, manifest last.

Runs of one job take turns at it, so that the data is made once. It tells the agent by its report descriptor how far it
is; what it prints is in the log of the task, and so is what the command prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable

from paceline.agent.command import understand
from paceline.agent.journal import stamp
from paceline.agent.options import Options, parse
from paceline.agent.porter import bring_obstore
from paceline.agent.porting import errand
from paceline.plan import Ingest, Plan, from_data
from paceline.runtime import report
from paceline.storage.data import TURNS, Data, Made
from paceline.storage.inputs import Missing, fingerprint
from paceline.storage.manifest import Damaged, Newer
from paceline.storage.places import listing, open_store
from paceline.storage.snapshots import Unfit
from paceline.storage.store import Sent, StoreError, Unwanted
from paceline.storage.turns import AGAIN_S, Lost, Turns

LOOK_S = 2.0  # between two looks at who makes the data
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds, while the place is away; then the last again
PATIENCE = 60.0  # seconds, before anything is made; for what is made, ingest.limit bounds it
END_S = 5.0  # for the command to end, once it is not its turn any more
_OWN = ("PACELINE_REPORT_FD", "PACELINE_REPORT_INODE")  # no task's


class ToldToGo(Exception):
    """SIGTERM; the command has been told, too."""


class Failed(Exception):
    """The command has failed."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the command ended with {status}")
        self.status = status  # as subprocess has it: negative for a signal


class Runner:
    def __init__(self, plan: Plan, options: Options) -> None:
        assert plan.ingest is not None
        self._ingest: Ingest = plan.ingest
        self._options = options
        self._folder = options.work or plan.code
        self._to = options.ingest or plan.ingest.to
        self._store = open_store(self._to)
        if self._inside():
            os.makedirs(self._to, exist_ok=True)  # for whom the person's umask says
        words = self._ingest.command, self._ingest.inputs, self._folder, os.environ, listing, self._to
        mark: str = self._patiently(lambda: fingerprint(*words))
        self._data = Data(self._store, self._to, mark)
        self._turns = Turns(self._store, f"{TURNS}/{mark}", options.run)
        self._lock = threading.Lock()
        self._lost: Lost | None = None

    def _inside(self) -> str:
        return self._to if self._to.startswith("/") else ""

    def run(self) -> None:
        while True:
            found = self._patiently(self._data.newest)
            # What this very run has made is not made anew: its captain may have died before it heard of it.
            if found is not None and (found.run == self._options.run or not self._ingest.again):
                self._there(found, made=False)
                return
            holder = self._patiently(self._turns.take)
            if holder is not None:
                _say(f"{holder} makes this data: waiting for it", stage="waiting", run=holder)
                self._pause(LOOK_S)
                continue
            try:
                found = self._patiently(self._data.newest)  # whoever had the turn may have finished
                if found is None or (self._ingest.again and found.run != self._options.run):
                    found = self._make()
                    self._there(found, made=True)
                    return
            except Lost as error:
                _say(f"it is not this run's turn any more: {error}")
            finally:
                with contextlib.suppress(StoreError, Lost):
                    self._leave()

    def _there(self, found: Made, made: bool) -> None:
        where, size = self._data.address(found.name), {"files": len(found.files), "size": found.size}
        words = f"made {where}" if made else f"{where} is there: {found.run} made it at {found.at}"
        _say(f"{words}: {len(found.files)} files, {found.size} bytes", stage="there", data=where, run=found.run,
             made=made, **size)  # fmt: skip

    # ---- our turn

    def _make(self) -> Made:
        name = self._patiently(self._data.next_name)
        scratch = self._data.scratch(f"{self._options.folder}/ingest")
        over = threading.Event()
        thread = threading.Thread(target=self._keep_the_turn, args=(over,), daemon=True)
        thread.start()
        try:
            _say(f"making {self._data.address(name)}", stage="making", data=self._data.address(name))
            self._command(scratch)
            sent: Sent = {}
            files = self._patiently(lambda: self._data.put(scratch, name, sent, self._wanted), made=True)
            made = Made(name, self._options.run, stamp(), files)
            self._patiently(lambda: self._data.complete(made, self._renew), made=True)
            return made
        except Unwanted:
            raise self._lost or ToldToGo() from None
        finally:
            over.set()
            thread.join()
            shutil.rmtree(scratch, ignore_errors=True)

    def _command(self, scratch: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _OWN}
        python = understand(self._ingest.command, self._options.interpreter or sys.executable, cwd=self._folder)
        argv: Sequence[str] = self._ingest.command if python is None else python.argv
        try:
            # In this process's group: what ends the one ends the other.
            process = subprocess.Popen(
                argv, cwd=self._folder, env={**kept, "PACELINE_INGEST_DIR": scratch}, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            print(f"{error.strerror}: {error.filename}", flush=True)
            raise Failed(127) from None
        while True:
            try:
                status = process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                if self._lost is not None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)
                    process.kill()
                    process.wait()
                    raise self._lost from None
        if _told:
            raise ToldToGo()
        if status:
            raise Failed(status)

    def _keep_the_turn(self, over: threading.Event) -> None:
        while not over.wait(AGAIN_S):
            try:
                self._renew()
            except Lost as error:
                self._lost = error
                return
            except StoreError:
                continue  # it is away; whether the turn is lost shows when it is back

    def _renew(self) -> None:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._turns.renew()

    def _leave(self) -> None:
        with self._lock:
            self._turns.leave()

    def _wanted(self, _: int) -> bool:
        return not _told and self._lost is None

    # ---- the place

    def _patiently(self, do: Callable[[], Any], made: bool = False) -> Any:
        """A place that is away may come back. `made`: hours of work would be lost."""
        tries, until = 0, time.monotonic() + PATIENCE
        while True:
            try:
                return do()
            except StoreError as error:
                if not error.passing or (not made and time.monotonic() >= until):
                    raise
                if tries == 0:
                    _say(f"{error}; trying again")
                self._pause(PAUSES[min(tries, len(PAUSES) - 1)])
                tries += 1

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if _told:
                raise ToldToGo()
            time.sleep(0.05)


_told: list[int] = []


def _say(text: str, **words: Any) -> None:
    print(f"ingest: {text}", flush=True)
    if words:
        report.tell({"_": "ingest", **words})


def _failed(cause: str, text: str) -> int:
    _say(text, stage="failed", cause=cause, detail=text)
    return 1


def main(words: str) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: _told.append(number))
    options = parse(words)
    with open(options.plan) as file:
        plan = from_data(json.load(file))
    try:
        bring_obstore(errand(plan, options))
        Runner(plan, options).run()
        return 0
    except Failed as error:
        if error.status > 0:
            return error.status
        signal.signal(-error.status, signal.SIG_DFL)
        os.kill(os.getpid(), -error.status)  # the agent is to see the same
        return 128 - error.status
    except ToldToGo:
        return 128 + signal.SIGTERM
    except (StoreError, Damaged, Newer) as error:
        return _failed("store", str(error))
    except (Unfit, Missing) as error:
        return _failed("program-error", str(error))
    except OSError as error:
        return _failed("store", f"{error.filename}: {error.strerror}")
