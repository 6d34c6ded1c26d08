"""Snapshots on a host: collects those that tasks save, uploads them on request, fetches those to restore.

<folder>/staging/<task>/g<generation>/step-<n>     written by the task
<folder>/held/<task>/step-<n>-g<generation>        collected by the agent, until the captain has it deleted
<folder>/fetched-parts/<host>/<task>/step-<n>-g<generation>    of other hosts; see fetched_parts.py
<folder>/restored/<host>/step-<n>-g<generation>    to resume from: files of these parts, or a verified copy
<folder>/committed/<host>/step-<n>                 for evaluators that poll this folder; see also evaluator_copies.py
<memory>/staging, held, restored                   the same in memory, with `snapshots.memory`
A part stays where the task wrote it, on disk or in memory. A folder to resume from is in memory only if all its files
are; <folder>/restored/<host> then has a link to it.
If tasks write checkpoints to a watched folder instead, see watched_checkpoints.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.events import PartSaved
from paceline.agent.net.codec import is_finite, not_finite_text
from paceline.agent.net.loop import Loop
from paceline.agent.net.messages import stored_messages
from paceline.agent.options import Options
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter_client import PorterClient, fetched_folder, held_folders, porter_settings
from paceline.agent.transfers.watched_checkpoints import WatchedFolder
from paceline.plan import Plan
from paceline.storage import boots
from paceline.storage.json_values import parse_json
from paceline.storage.local_files import remove_tree
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots import shared_parts
from paceline.storage.snapshots.manifest import File, SnapshotId, parse_id
from paceline.storage.stores import obstore_library
from paceline.storage.watched.folder_contents import ABOUT

ABOUT_LIMIT = 8 * 1024 * 1024
MAX_PARTS = 100_000
MAX_HELD = 1000  # parts of a task that are reported at once; the captain needs the newest
LARGEST_STEP = 2**53 - 1
MAX_ENTRIES = 100  # entries of `metrics` and of `versions`
MAX_COPIES = 3  # kept for evaluators
LONGEST_STALL = 1e8  # seconds
RETRY_S = 2.0  # seconds until a failed fetch is retried
NO_ROOM = "no-room"  # a file next to what a task has saved on disk: memory was full; see runtime/snapshot_folders.py
REMOVED = ".gone"  # ends the names of folders that are about to be deleted
BOOT = "boot"  # a file next to the held parts: the boot id of the machine that wrote them
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_GENERATION = re.compile(r"g([1-9][0-9]{0,7})")


class _InvalidSnapshot(Exception):
    """The folder is not a snapshot; the text says why."""


class HostSnapshots:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        send: Callable[[ev.MemberEvent], None],
        notify: Callable[..., None],
    ) -> None:
        """`send`: sends an event to the captain. `notify`: shows a text to the user."""
        self._plan, self._options, self._loop = plan, options, loop
        self._send, self._notify = send, notify
        host = plan.host(options.host)
        self._tasks = host.tasks
        self._is_evaluator = host.role == "evaluator"
        self._resumed: dict[str, str] = {}  # running task -> the name of the folder that it resumes from
        self._folder, self._memory = options.folder, options.memory
        self._held_folders = held_folders(options)
        self._held_on_disk = self._held_folders[-1]
        self._fetched_folder = fetched_folder(options)
        self._restored_folder = f"{options.folder}/restored/{options.host}"
        self._restored_in_memory = f"{options.memory}/restored/{options.host}" if options.memory else ""
        self._committed_folder = f"{options.folder}/committed/{options.host}"
        environment = {**os.environ, **plan.role(host.role).env}
        self.porter = PorterClient(porter_settings(plan, options), environment, loop)
        self.watched = WatchedFolder(plan, options, loop, self.porter, self._collect_part, notify)
        self._uploads: dict[tuple[str, SnapshotId], int] = {}  # -> number of the request
        # Files of stored parts, in case the captain asks again.
        self._stored: dict[tuple[str, SnapshotId], tuple[File, ...]] = {}
        self._preparing: tuple[ins.PrepareHost, int] | None = None  # and the number of the request
        self._prepared: tuple[SnapshotId | None] | None = None  # not used by a task yet
        self._prefetch: tuple[SnapshotId, int] | None = None  # what is being fetched in advance, and the request
        self._move: int | None = None  # number of the request that moves the restored folder from memory to disk
        self._use_memory: set[str] = set()  # tasks that have saved to memory
        self._noted: set[str] = set()  # notes on `snapshots.memory`
        self._is_fetching = False  # a copy for evaluators
        self._newest: SnapshotId | None = None  # the newest snapshot to copy for evaluators
        self._next_fetch: SnapshotId | None = None  # for evaluators, once the current fetch has ended
        self._discard_other_boots()
        self._finish_removals()
        # Of an earlier agent: they may be incomplete if the machine has restarted since.
        self.remove([f"{self._fetched_folder}/{name}" for name in _names(self._fetched_folder)])

    # ---- for tasks

    def environment(self, task: str, generation: int, restore: str | None) -> dict[str, str]:
        """Environment variables of a task. Its staging folders belong to this task and generation alone."""
        self._prepared = None
        self._resumed[task] = restore or ""
        restored = f"{self._restored_folder}/{restore}" if restore else ""
        staging = self._make_staging(self._folder, task, generation)
        variables = {"PACELINE_SNAPSHOT_DIR": staging, "PACELINE_RESTORE": restored}
        if self._memory:
            with contextlib.suppress(OSError):  # then the task saves to disk
                staging = self._make_staging(self._memory, task, generation)
                variables["PACELINE_SNAPSHOT_MEMORY_DIR"] = staging
        if self._plan.snapshots.trust:
            variables["PACELINE_TRUST"] = "1"
        if self._is_evaluator:
            os.makedirs(self._committed_folder, exist_ok=True)
            variables["PACELINE_COMMITTED_DIR"] = self._committed_folder
        return variables

    def attempt_ended(self, task: str) -> None:
        self._resumed.pop(task, None)

    def _make_staging(self, root: str, task: str, generation: int) -> str:
        """What remains there was not complete when an earlier attempt ended, perhaps in the same generation."""
        folder = f"{root}/staging/{task}"
        staging = f"{folder}/g{generation}"
        self.remove(f"{folder}/{name}" for name in _names(folder) if not name.endswith(REMOVED))
        os.makedirs(staging, exist_ok=True)
        return staging

    def fetch_env(self) -> dict[str, str]:
        """Environment variables for paceline.fetch, the same for all tasks of a host and for an ingest."""
        obstore = obstore_library.own() or (f"{self._folder}/{obstore_library.FOLDER}" if self._options.obstore else "")
        return {"PACELINE_FETCHED_DIR": f"{self._folder}/fetched", **({"PACELINE_OBSTORE": obstore} if obstore else {})}

    def bring_library(self) -> None:
        """Installs obstore for tasks that fetch, if this host has none: the porter does so on its first request."""

        def answered(answer: req.Answer) -> None:
            if isinstance(answer, req.Failure) and answer.passing:
                self._loop.after(RETRY_S, self.bring_library)

        if self._options.obstore:
            self.porter.ask(req.RemoveFolders(), answered)

    def collect(self) -> None:
        """Collects the snapshots that tasks have saved since the last call, and reports them to the captain."""
        for task in self._tasks:
            for generation, step, path in sorted(self._staged(task)):
                if self.watched.folder:
                    self.remove([path])
                    self._notify(f"{task}: its snapshots are ignored because snapshots.watch is set", True)
                else:
                    self._collect_part(task, SnapshotId(step, generation), path)

    def _collect_part(self, task: str, id: SnapshotId, path: str) -> None:
        is_in_memory = bool(self._memory) and path.startswith(f"{self._memory}/")
        target = f"{self._held_folders[0] if is_in_memory else self._held_on_disk}/{task}/{id}"
        try:
            if id.step > LARGEST_STEP:
                raise _InvalidSnapshot(f"the largest step is {LARGEST_STEP}")
            if os.path.exists(self._part(task, id)):
                self.remove([path])  # the same step again: the first one is being uploaded
                return
            about = _read_about(path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not is_in_memory:
                self._write_boot(task)
            os.rename(path, target)
        except _InvalidSnapshot as error:
            self._notify(f"{task}: the snapshot of step {id.step} is invalid and is ignored: {error}", True)
            self.remove([path])
            return
        except OSError as error:
            self._notify(f"{task}: cannot collect the snapshot in {path}: {error.strerror}", True)
            return
        self._send(self._saved_part(task, id, about))  # not read again: the task may still change it
        if is_in_memory:
            self._use_memory.add(task)
        elif self._memory:
            self._note_disk(task, id.step, is_full=os.path.exists(f"{os.path.dirname(path)}/{NO_ROOM}"))
        if self._options.serve:
            self.porter.start()  # other hosts may need it

    def _note_disk(self, task: str, step: int, is_full: bool) -> None:
        """Notify the user once that memory is full, and once that a program does not use it."""
        if is_full or task in self._use_memory:
            reason, text = "full", f"no room for the snapshot of step {step} of {task}: written to disk"
        else:
            program = "only the helpers, and programs that use PACELINE_SNAPSHOT_MEMORY_DIR, save to memory"
            reason, text = "unused", f"{task} has written the snapshot of step {step} to disk: {program}"
        if reason not in self._noted:
            self._noted.add(reason)
            self._notify(f"snapshots.memory: {text}")

    def _part(self, task: str, id: SnapshotId) -> str:
        """The folder of a part that a task has saved, in memory or on disk."""
        return shared_parts.find(self._held_folders, task, id)

    def _held(self, task: str) -> set[SnapshotId]:
        names = (name for folder in self._held_folders for name in _names(f"{folder}/{task}"))
        return set(filter(None, map(parse_id, names)))

    def _write_boot(self, task: str) -> None:
        path = f"{self._held_on_disk}/{task}/{BOOT}"
        if not os.path.exists(path):
            boots.write_mark(path)

    def _discard_other_boots(self) -> None:
        """Parts that were held on disk when the machine lost power may be incomplete or empty."""
        for task in self._tasks:
            folder = f"{self._held_on_disk}/{task}"
            parts = [name for name in _names(folder) if parse_id(name) is not None]
            is_same_boot = boots.read_mark(f"{folder}/{BOOT}") == boots.boot_id()
            if parts and not is_same_boot:
                text = f"{', '.join(sorted(parts))} was saved before this machine restarted and is ignored"
                self._notify(f"{task}: {text}", True)
                self.remove([f"{folder}/{name}" for name in parts])
            if not is_same_boot:
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{BOOT}")

    def _finish_removals(self) -> None:
        """Those of an earlier agent that was killed before they were done: what remains would occupy memory as long as
        the pod exists."""
        folders = [f"{folder}/{task}" for folder in self._held_folders for task in self._tasks]
        removed = [f"{folder}/{name}" for folder in folders for name in _names(folder) if name.endswith(REMOVED)]
        if removed:
            self.porter.ask(req.RemoveFolders(tuple(removed)), lambda _: None)

    def held_parts(self) -> list[PartSaved]:
        """All parts on this host, including those that an earlier agent collected."""
        parts = []
        for task in self._tasks:
            # The captain would reject the message if there were too many, or if a step were too large.
            for id in sorted(id for id in self._held(task) if id.step <= LARGEST_STEP)[-MAX_HELD:]:
                with contextlib.suppress(_InvalidSnapshot):
                    parts.append(self._saved_part(task, id, _read_about(self._part(task, id))))
        return parts

    def _staged(self, task: str) -> Iterator[tuple[int, int, str]]:
        """Generation, step and folder of what the task has saved."""
        for root in filter(None, (self._folder, self._memory)):
            folder = f"{root}/staging/{task}"
            for generation in filter(None, map(_GENERATION.fullmatch, _names(folder))):
                for step in filter(None, map(_STEP.fullmatch, _names(f"{folder}/{generation[0]}"))):
                    yield int(generation[1]), int(step[1]), f"{folder}/{generation[0]}/{step[0]}"

    def _saved_part(self, task: str, id: SnapshotId, about: Mapping[str, Any]) -> PartSaved:
        parts, metrics, versions = about.get("parts", 1), about.get("metrics", {}), about.get("versions", {})
        numbers = {k[:100]: float(v) for k, v in _items(metrics) if isinstance(v, (int, float)) and abs(v) < 1e300}
        not_finite = {k[:100]: text for k, v in _items(metrics) if (text := not_finite_text(v))}
        texts = {k[:100]: str(v)[:200] for k, v in _items(versions) if isinstance(v, (str, int, float))}
        stall: Any = about.get("stall_s")
        stall = float(stall) if is_finite(stall) and 0 <= stall < LONGEST_STALL else 0.0
        return PartSaved(self._options.host, task, id, parts, numbers, texts, not_finite, stall)

    # ---- instructions of the captain

    def store(self, message: ins.StorePart) -> None:
        task, snapshot = message.task, message.snapshot
        if (task, snapshot) in self._stored and not message.anew:
            self._report_stored(task, snapshot)
            return
        if (task, snapshot) in self._uploads or task not in self._tasks:
            return

        def sent(answer: req.Answer) -> None:
            self._uploads.pop((task, snapshot), None)
            if isinstance(answer, req.Failure):
                self._send(ev.PartStored(self._options.host, task, snapshot, error=answer))
            else:
                assert isinstance(answer, req.PartSent)
                self._stored[task, snapshot] = answer.files
                self._report_stored(task, snapshot)

        request = req.SendPart(snapshot, task, self._part(task, snapshot))
        self._uploads[task, snapshot] = self.porter.ask(request, sent)

    def has_unsent(self) -> bool:
        """Whether the newest part of a task is not in the store, as far as this agent knows."""
        for task in self._tasks:
            newest = max(self._held(task), default=None)
            if newest is not None and (task, newest) not in self._stored:
                return True
        return False

    def _report_stored(self, task: str, snapshot: SnapshotId) -> None:
        for message in stored_messages(self._options.host, task, snapshot, self._stored[task, snapshot]):
            self._send(message)

    def drop(self, message: ins.DropPart) -> None:
        task, id = message.task, message.snapshot
        self._stored.pop((task, id), None)
        number = self._uploads.pop((task, id), None)
        if number is not None:
            self.porter.cancel(number)
        if task in self._tasks:
            part = self._part(task, id)
            self.remove([part])
            shared_parts.forget(part)
            self._move_restored(id)

    def _move_restored(self, id: SnapshotId) -> None:
        """Moves a restored folder from memory to disk: it shares its files with a part that is deleted, so that room is
        only free when the folder is moved. Tasks may still read it."""
        link = f"{self._restored_folder}/{id}"
        if self._move is None and os.path.islink(link) and os.readlink(link).startswith(f"{self._memory}/"):
            self._move = self.porter.ask(req.MoveToDisk(link), lambda _: None)

    def prepare(self, message: ins.PrepareHost) -> None:
        id, from_hosts = message.snapshot, bool(message.sources)
        if self._preparing is not None:
            if self._preparing[0] == message:
                return
            self.porter.cancel(self._preparing[1])
            self._preparing = None
        if self._prepared == (id,):
            self._send(ev.HostPrepared(self._options.host, id, from_hosts=from_hosts))
            return
        self._prepared = None
        self._cancel_prefetch(except_of=id)
        if self._move is not None:
            self.porter.cancel(self._move)
            self._move = None
        # Other tasks of this host may be running, and still read what they resume from.
        in_use = set(self._resumed.values())
        for restored in filter(None, (self._restored_folder, self._restored_in_memory)):
            self.remove([f"{restored}/{name}" for name in _names(restored) if name not in in_use])
        folder = f"{self._restored_folder}/{id}"
        if str(id) in in_use and os.path.exists(folder):
            self._prepared = (id,)
            self._send(ev.HostPrepared(self._options.host, id, from_hosts=from_hosts))
            return

        def fetched(answer: req.Answer) -> None:
            failure = answer if isinstance(answer, req.Failure) else None
            if failure is None and self.watched.folder and self._preparing == (message, number):
                self._preparing = message, self.watched.restore(message.generation, id, folder, finished)
            else:
                finished(failure)

        def finished(failure: req.Failure | None) -> None:
            if self._preparing is not None and self._preparing[0] == message:
                self._preparing = None
            if failure is None:
                self._prepared = (id,)
            elif failure.kind == req.UNWANTED:
                return
            self._send(ev.HostPrepared(self._options.host, id, failure, from_hosts))

        if id is None:
            self._preparing = message, self.watched.restore(message.generation, None, "", finished)
            return
        request: req.Request = req.FetchSnapshot(id, folder, self._held_folders)
        if not message.sources:
            # Parts of an older snapshot would take up the room that this one needs.
            self.remove([f"{self._fetched_folder}/{name}" for name in _names(self._fetched_folder)])
        else:
            in_memory = f"{self._restored_in_memory}/{id}" if self._memory else ""
            request = req.LinkSnapshot(id, folder, self._held_folders, message.sources, in_memory)
        number = self.porter.ask(request, fetched)
        self._preparing = message, number

    def prefetch(self, message: ins.PrefetchSnapshot) -> None:
        id = message.snapshot
        if self._prefetch is not None and self._prefetch[0] == id:
            return
        self._cancel_prefetch()
        if not message.sources:
            return

        def fetched(answer: req.Answer) -> None:
            if self._prefetch == (id, number):
                self._prefetch = None
            failure = answer if isinstance(answer, req.Failure) else None
            self._send(ev.SnapshotPrefetched(self._options.host, id, failure))

        number = self.porter.ask(req.FetchParts(id, message.sources), fetched)
        self._prefetch = id, number

    def _cancel_prefetch(self, except_of: SnapshotId | None = None) -> None:
        """`except_of`: the snapshot that tasks resume from, as what was fetched of it is used."""
        if self._prefetch is not None and self._prefetch[0] != except_of:
            self.porter.cancel(self._prefetch[1])
            self._prefetch = None

    def copy_for_evaluators(self, id: SnapshotId, is_retry: bool = False) -> None:
        """Fetches the snapshot for evaluators that poll PACELINE_COMMITTED_DIR."""
        if is_retry and id != self._newest:
            return
        self._newest = id
        if self._is_fetching:
            self._next_fetch = id
            return
        names = filter(_STEP.fullmatch, _names(self._committed_folder))
        copies = sorted(names, key=lambda name: int(name[len("step-") :]))
        if f"step-{id.step}" in copies:
            return
        self._is_fetching = True

        def fetched(answer: req.Answer) -> None:
            self._is_fetching = False
            failure = answer if isinstance(answer, req.Failure) else None
            if failure is not None and self._next_fetch is None:
                if not is_retry:
                    text = f"cannot fetch the snapshot of step {id.step} for {self._options.host}: {failure.text}"
                    self._notify(f"{text}; retrying" if failure.passing else text, True)
                if failure.passing:
                    self._loop.after(RETRY_S, lambda: self.copy_for_evaluators(id, is_retry=True))
            elif failure is None:
                self.remove([f"{self._committed_folder}/{name}" for name in copies[: 1 - MAX_COPIES]])
            next_fetch, self._next_fetch = self._next_fetch, None
            if next_fetch is not None:
                self.copy_for_evaluators(next_fetch)

        self.porter.ask(req.FetchSnapshot(id, f"{self._committed_folder}/step-{id.step}"), fetched)

    def remove(self, folders: Iterable[str]) -> None:
        """Renames the folders immediately, as others may replace them, and has the porter delete them."""
        renamed = []
        for folder in folders:
            try:
                if os.path.islink(folder):
                    os.unlink(folder)
                    continue
                parent, name = os.path.split(folder)
                aside = f"{parent}/.{name}.{os.urandom(4).hex()}{REMOVED}"
                os.rename(folder, aside)
                renamed.append(aside)
            except OSError:
                continue  # it does not exist
        if renamed:
            self.porter.ask(req.RemoveFolders(tuple(renamed)), lambda _: None)

    def tidy(self, may_return: bool = False) -> None:
        """Removes copies after the end of the run. Held parts stay: they are stored nowhere else. `may_return`: the run
        continues, and this host may come back."""
        if self._memory:
            remove_tree(f"{self._memory}/staging", ignore_errors=True)
            remove_tree(f"{self._memory}/restored", ignore_errors=True)
        task_folders = [f"{folder}/{task}" for folder in self._held_folders for task in self._tasks]
        for folder in task_folders:
            if not any(map(parse_id, _names(folder))):
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{BOOT}")
        leftovers = [f"{folder}/{name}" for folder in task_folders for name in _names(folder) if parse_id(name) is None]
        staged = [f"{self._folder}/staging/{task}" for task in self._tasks]
        copies = self._restored_folder, self._fetched_folder, self._committed_folder, f"{self._folder}/fetched"
        for folder in (*copies, *staged, *leftovers):
            remove_tree(folder, ignore_errors=True)
        parents = [f"{self._folder}/{name}" for name in ("held", "restored", "fetched-parts", "committed", "staging")]
        self.watched.tidy(may_return)
        for folder in (*task_folders, *parents):
            try:
                os.rmdir(folder)
            except OSError:
                continue  # not empty; other hosts may use it, too

    def close(self) -> None:
        self.porter.close()


def _read_about(folder: str) -> Mapping[str, Any]:
    """The program's description of a part. Raises if the number of parts is unknown: one part is not the whole."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise _InvalidSnapshot("it is not a folder")
        with open(open_regular(f"{folder}/{ABOUT}"), "rb") as file:
            about = parse_json(file.read(ABOUT_LIMIT))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _InvalidSnapshot(f"cannot read its {ABOUT}: {error}") from None
    if not isinstance(about, dict):
        raise _InvalidSnapshot(f"its {ABOUT} is not a JSON object")
    parts = about.get("parts", 1)
    if type(parts) is not int or not 1 <= parts <= MAX_PARTS:
        raise _InvalidSnapshot(f"parts is {_shown(parts)} in its {ABOUT}, but must be an integer from 1 to {MAX_PARTS}")
    return about


def _shown(value: Any) -> str:
    """A value that may be anything, for a message."""
    return repr(value)[:50] if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return list(value.items())[:MAX_ENTRIES] if isinstance(value, dict) else ()
