"""The process of `ingest-0`: uses existing data at its location, or runs the command and uploads the result.

Runs of one job take turns, so that the data is built only once. The process reports its progress to the agent on the
report descriptor; its output and the command's go to the log of the task.
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
from typing import Any, Callable

from paceline.agent.options import Options, parse
from paceline.agent.run_files import stamp
from paceline.agent.tasks import variable_references
from paceline.agent.tasks.python_command import parse_command, with_program_found
from paceline.agent.transfers.porter import bring_obstore
from paceline.agent.transfers.porter_client import porter_settings
from paceline.plan import Ingest, Plan, from_data
from paceline.runtime import report
from paceline.storage.ingested.dataset import LEASES, DatasetManifest, DatasetStore
from paceline.storage.ingested.fingerprint import MissingInput, fingerprint
from paceline.storage.ingested.lease import AGAIN_S, Lease, LeaseLost
from paceline.storage.snapshots.manifest import Damaged, Newer
from paceline.storage.snapshots.repository import Unfit
from paceline.storage.stores.locations import listing, open_store
from paceline.storage.stores.protocol import Sent, StoreError, TransferCanceled

POLL_S = 2.0  # while another run builds the data
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between retries while the store cannot be reached; the last repeats
PATIENCE = 60.0  # seconds of retries before the data is built; afterwards, ingest.limit is the only bound
END_S = 5.0  # seconds for the command to end after another run has taken over
_OWN = ("PACELINE_REPORT_FD", "PACELINE_REPORT_INODE")  # not passed to the command


class Terminated(Exception):
    """SIGTERM arrived; the command has received it, too."""


class CommandFailed(Exception):
    """The command failed."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the command ended with {status}")
        self.status = status  # like subprocess's returncode: negative for a signal


class Runner:
    def __init__(self, plan: Plan, options: Options) -> None:
        assert plan.ingest is not None
        self._ingest: Ingest = plan.ingest
        self._options = options
        self._folder = options.work or plan.code
        self._to = options.ingest or plan.ingest.to
        self._store = open_store(self._to)
        if self._to.startswith("/"):
            os.makedirs(self._to, exist_ok=True)  # with the user's umask
        inputs = self._ingest.command, self._ingest.inputs, self._folder, os.environ, listing, self._to
        digest: str = self._retrying(lambda: fingerprint(*inputs))
        self._data = DatasetStore(self._store, self._to, digest)
        self._lease = Lease(self._store, f"{LEASES}/{digest}", options.run)
        self._lock = threading.Lock()
        self._lost: LeaseLost | None = None

    def run(self) -> None:
        while True:
            dataset = self._retrying(self._data.newest)
            # A dataset built by this run is never rebuilt: the captain may have died before it learned of it.
            if dataset is not None and (dataset.run == self._options.run or not self._ingest.again):
                self._report_dataset(dataset, built=False)
                return
            holder = self._retrying(self._lease.acquire)
            if holder is not None:
                _report(f"waiting for {holder}, which is building this data", stage="waiting", run=holder)
                self._pause(POLL_S)
                continue
            try:
                dataset = self._retrying(self._data.newest)  # the last holder may have finished
                if dataset is None or (self._ingest.again and dataset.run != self._options.run):
                    dataset = self._build()
                    self._report_dataset(dataset, built=True)
                    return
            except LeaseLost as error:
                _report(f"this run may no longer build the data: {error}")
            finally:
                with contextlib.suppress(StoreError, LeaseLost):
                    self._release_lease()

    def _report_dataset(self, dataset: DatasetManifest, built: bool) -> None:
        address, size = self._data.address(dataset.name), {"files": len(dataset.files), "size": dataset.size}
        text = f"built {address}" if built else f"{address} already exists, built by {dataset.run} at {dataset.at}"
        _report(f"{text}: {len(dataset.files)} files, {dataset.size} bytes", stage="there", data=address,
                run=dataset.run, made=built, **size)  # fmt: skip

    # ---- building

    def _build(self) -> DatasetManifest:
        name = self._retrying(self._data.next_name)
        scratch = self._data.scratch(f"{self._options.folder}/ingest")
        finished = threading.Event()
        thread = threading.Thread(target=self._keep_lease, args=(finished,), daemon=True)
        thread.start()
        try:
            _report(f"building {self._data.address(name)}", stage="making", data=self._data.address(name))
            self._run_command(scratch)
            sent: Sent = {}
            files = self._retrying(lambda: self._data.put(scratch, name, sent, self._is_wanted), is_built=True)
            dataset = DatasetManifest(name, self._options.run, stamp(), files)
            self._retrying(lambda: self._data.complete(dataset, self._renew), is_built=True)
            return dataset
        except TransferCanceled:
            raise self._lost or Terminated() from None
        finally:
            finished.set()
            thread.join()
            shutil.rmtree(scratch, ignore_errors=True)

    def _run_command(self, scratch: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _OWN}
        environment["PACELINE_INGEST_DIR"] = scratch
        interpreter = self._options.interpreter or sys.executable
        command = variable_references.expand_command(self._ingest.command, environment)
        python = parse_command(command, interpreter, cwd=self._folder)
        argv = with_program_found(command, interpreter) if python is None else python.argv
        try:
            # In the process group of this process: a signal ends both.
            process = subprocess.Popen(argv, cwd=self._folder, env=environment, stdin=subprocess.DEVNULL)
        except OSError as error:
            print(f"{error.strerror}: {error.filename}", flush=True)
            raise CommandFailed(127) from None
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
        if _signals:
            raise Terminated()
        if status:
            raise CommandFailed(status)

    def _keep_lease(self, finished: threading.Event) -> None:
        while not finished.wait(AGAIN_S):
            try:
                self._renew()
            except LeaseLost as error:
                self._lost = error
                return
            except StoreError:
                continue  # the store cannot be reached; the next successful renewal shows whether the lease is lost

    def _renew(self) -> None:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._lease.renew()

    def _release_lease(self) -> None:
        with self._lock:
            self._lease.release()

    def _is_wanted(self, _: int) -> bool:
        return not _signals and self._lost is None

    # ---- the store

    def _retrying(self, call: Callable[[], Any], is_built: bool = False) -> Any:
        """Retries while the store cannot be reached. `is_built`: without a limit, as hours of work would be lost."""
        tries, until = 0, time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except StoreError as error:
                if not error.is_transient or (not is_built and time.monotonic() >= until):
                    raise
                if tries == 0:
                    _report(f"{error}; retrying")
                self._pause(PAUSES[min(tries, len(PAUSES) - 1)])
                tries += 1

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if _signals:
                raise Terminated()
            time.sleep(0.05)


_signals: list[int] = []  # received


def _report(text: str, **fields: Any) -> None:
    print(f"ingest: {text}", flush=True)
    if fields:
        report.send_to_agent({"_": "ingest", **fields})


def _report_failure(cause: str, text: str) -> int:
    _report(text, stage="failed", cause=cause, detail=text)
    return 1


def main(options_json: str) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: _signals.append(number))
    options = parse(options_json)
    with open(options.plan) as file:
        plan = from_data(json.load(file))
    try:
        bring_obstore(porter_settings(plan, options))
        Runner(plan, options).run()
        return 0
    except CommandFailed as error:
        if error.status > 0:
            return error.status
        signal.signal(-error.status, signal.SIG_DFL)
        os.kill(os.getpid(), -error.status)  # so that the agent sees the same signal
        return 128 - error.status
    except Terminated:
        return 128 + signal.SIGTERM
    except (StoreError, Damaged, Newer) as error:
        return _report_failure("store", str(error))
    except (Unfit, MissingInput) as error:
        return _report_failure("program-error", str(error))
    except OSError as error:
        return _report_failure("store", f"{error.filename}: {error.strerror}")
