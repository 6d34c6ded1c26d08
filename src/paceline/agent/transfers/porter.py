"""The porter: a process next to the agent that transfers snapshots to and from the store, so the agent never blocks.

It reads requests from its standard input and answers on its standard output, one JSON object per line. It does one
transfer at a time; short requests, log uploads and the watched folder do not wait for transfers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import sys
import threading
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

from paceline.agent.exhaustive import assert_never
from paceline.agent.net.frames import WireError
from paceline.agent.options import endpoint
from paceline.agent.tensorboard.generation_notes import GenerationNotes
from paceline.agent.transfers import requests as req
from paceline.agent.transfers import stored_events
from paceline.agent.transfers.requests import Answer, Request
from paceline.agent.transfers.upload_rate import UploadRate
from paceline.errors import is_out_of_threads
from paceline.storage import compiled_files
from paceline.storage.compiled_files import StoredCompiled
from paceline.storage.local_files import remove_tree
from paceline.storage.snapshots import shared_parts
from paceline.storage.snapshots.evaluation import Evaluation
from paceline.storage.snapshots.fetched_parts import FetchedParts
from paceline.storage.snapshots.generation_records import Superseded
from paceline.storage.snapshots.manifest import Damaged, Newer, parse
from paceline.storage.snapshots.repository import SnapshotRepository, Unfit, always
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores import obstore_library
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.locations import open_store
from paceline.storage.stores.peer_access import MemberAccess, part_access
from paceline.storage.stores.protocol import ContinueCheck, Store, StoreError, TransferCanceled
from paceline.storage.tensorboard_event_files import FOLDER, EventFiles
from paceline.storage.watched.capture import FolderCapture
from paceline.storage.watched.folder_contents import Later
from paceline.storage.watched.restore import TASKS, begin

if TYPE_CHECKING:
    from paceline.storage.stores.peer_client import PeerStore

SHORT, TRANSFERS, LINKS, IN_ADVANCE, WATCHED, LOGS, CURVES, COMPILED = (
    "short", "transfers", "links", "in-advance", "watched", "logs", "curves", "compiled"
)  # fmt: skip
# Each has its own thread, so slow requests delay only their own lane.
LANES = (SHORT, TRANSFERS, LINKS, IN_ADVANCE, WATCHED, LOGS, CURVES, COMPILED)
NICE = 5  # training goes first
NO_THREADS = "this machine allows no more threads or processes: a limit of processes or of memory is reached"
PATIENCE = 8.0  # seconds for one short request; the agent may retry
_KINDS: dict[type[Exception], str] = {
    Damaged: req.DAMAGED,
    Newer: req.NEWER,
    Superseded: req.SUPERSEDED,
    Unfit: req.UNFIT,
    TransferCanceled: req.UNWANTED,
    StoreError: req.STORE,
    Later: req.LATER,
}


class Porter:
    def __init__(
        self,
        short: SnapshotRepository,
        transfers: SnapshotRepository,
        answer: Callable[[int, Answer], None],
        rate: float | None = None,
        lanes: Iterable[str] = LANES,
        archive: StoredRunFiles | None = None,
        origin: str = "",
        called: str = "",
        scratch: str = "",
        fetched: FetchedParts | None = None,
        compiled: StoredCompiled | None = None,
    ) -> None:
        """`rate`: limit in bytes per second for uploads. `lanes`: each has its own thread. `origin`: the snapshot that
        the run starts from, shown to users as `called`; it is copied through the folder `scratch`. `fetched`: parts
        that other hosts have."""
        self._short, self._transfers, self._archive = short, transfers, archive
        self._compiled = compiled
        self._answer = answer
        self._rate = None if rate is None else UploadRate(rate)
        self._origin, self._called, self._scratch, self._fetched = origin, called, scratch, fetched
        self._canceled: set[int] = set()
        self._capture: FolderCapture | None = None
        self._event_files: EventFiles | None = None
        self._has_event_files = False  # whether event files of an earlier instance of the host have been fetched
        self._lanes: dict[str, queue.Queue[tuple[int, Request] | None]] = {lane: queue.Queue() for lane in lanes}
        # Daemons: if this process fails, it ends, and the agent starts another one.
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), daemon=True) for lane in self._lanes.values()
        ]
        for thread in self._threads:
            try:
                thread.start()
            except RuntimeError as error:
                for lane in self._lanes.values():
                    lane.put(None)  # ends the threads that have started
                raise StoreError(NO_THREADS, is_transient=True) from error

    def ask(self, number: int, request: Request) -> None:
        if isinstance(request, req.Cancel):
            self._canceled.add(request.number)
        else:
            self._lanes[_lane_of(request)].put((number, request))

    def close(self) -> None:
        """Waits until all requests are completed."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, lane: queue.Queue[tuple[int, Request] | None]) -> None:
        while (item := lane.get()) is not None:
            number, request = item
            self._answer(number, self.execute(request, number))
            self._canceled.discard(number)

    def execute(self, request: Request, number: int = 0) -> Answer:
        try:
            if number in self._canceled:
                raise TransferCanceled("canceled before it started")
            return self._execute(request, number)
        except tuple(_KINDS) as error:
            kind = next(_KINDS[each] for each in _KINDS if isinstance(error, each))
            return req.Failure(
                kind, str(error), bool(getattr(error, "is_transient", False)), getattr(error, "reason", "")
            )
        except OSError as error:  # an error of this machine, such as a full disk
            path, reason = error.filename or getattr(request, "folder", ""), error.strerror or str(error)
            return req.Failure(req.HERE, f"{path}: {reason}", True, reason)
        except Exception as error:  # every request must be answered
            if is_out_of_threads(error):
                return req.Failure(req.HERE, NO_THREADS, True)
            return req.Failure(req.HERE, f"{type(error).__name__}: {error}", isinstance(error, MemoryError))

    def _execute(self, request: Request, number: int) -> Answer:
        if isinstance(request, req.ListSnapshots):
            return self._list(request)
        if isinstance(request, req.BeginGeneration):
            late = self._short.begin(request.generation, request.parent, request.seen, request.by)
            return req.GenerationBegun(tuple(late))
        if isinstance(request, req.CommitSnapshot):
            self._short.commit(parse(request.manifest.encode(), "a manifest"), request.generation)
        elif isinstance(request, req.RecordEvaluation):
            evaluation = Evaluation(request.task, request.metrics, request.at)
            return req.EvaluationRecorded(dict(self._short.evaluate(request.snapshot, evaluation).metrics))
        elif isinstance(request, req.DeleteSnapshot):
            self._short.delete(request.snapshot, request.generation)
        elif isinstance(request, req.DeleteUncommitted):
            self._short.delete_uncommitted(request.snapshot, request.generation)
        elif isinstance(request, req.SweepGenerations):
            self._transfers.sweep(request.generation, request.parent)
        elif isinstance(request, req.CheckSnapshot):
            self._transfers.check_all(self._transfers.manifest(request.snapshot), self._is_wanted(number))
        elif isinstance(request, req.AdoptOrigin):
            return self._adopt(number)
        elif isinstance(request, req.SendPart):
            shared_parts.sign(request.folder)
            part = self._transfers.send(request.snapshot, request.task, request.folder, self._paced(number))
            shared_parts.verify(request.folder)
            return req.PartSent(part.files)
        elif isinstance(request, req.FetchSnapshot):
            manifest = self._transfers.manifest(request.snapshot)
            received = self._transfers.fetch(manifest, request.folder, self._is_wanted(number), request.held)
            return req.SnapshotFetched(manifest.size, received)
        elif isinstance(request, req.LinkSnapshot):
            return self._link(request, number)
        elif isinstance(request, req.FetchParts):
            return self._prefetch(request, number)
        elif isinstance(request, req.MoveToDisk):
            shared_parts.move_to_disk(request.link, self._is_wanted(number))
        elif isinstance(request, req.RestoreWatched):
            return self._restore_watched(request, number)
        elif isinstance(request, req.CaptureWatched):
            capture = self._capture_of(request)
            captured = capture.take(request.to, request.metrics, request.leader, self._is_wanted(number))
            return req.WatchedCaptured(captured)
        elif isinstance(request, req.RemoveFolders):
            for folder in request.folders:
                remove_tree(folder, ignore_errors=True)
        elif isinstance(request, req.UploadLogs):
            assert self._archive is not None
            self._short.claim()
            self._archive.send(request.piece, request.ranges, request.scratch, self._paced(number))
        elif isinstance(request, req.FoldEvents):
            assert self._archive is not None
            self._short.claim()
            stored_events.fold(self._archive, request.host, request.scratch, self._is_wanted(number))
        elif isinstance(request, req.TrimCurves):
            self._trim_curves(request, number)
        elif isinstance(request, req.KeepCompiled):
            compiled_files.trim(request.root)
            compiled_files.sync_new(request.folder)
            if request.host and self._compiled is not None:
                self._compiled.send(request.host, request.folder, request.scratch, self._paced(number))
        elif isinstance(request, req.FetchCompiled):
            if self._compiled is not None:
                self._compiled.fetch(request.host, request.folder, request.scratch, self._is_wanted(number))
        elif isinstance(request, req.Cancel):
            raise AssertionError("Cancel is handled by ask()")
        else:
            assert_never(request)
        return req.Done()

    def _list(self, request: req.ListSnapshots) -> req.SnapshotList:
        contents = self._short.inventory()
        current = tuple(contents.current())
        metrics = {}
        for snapshot in current if request.metric else ():
            try:
                metrics[snapshot] = self._short.manifest(snapshot).metrics[str(request.metric)]
            except (KeyError, Damaged, Newer):
                continue
        evaluations = {}
        for snapshot in current if request.evaluations else ():
            evaluation = self._short.evaluation(snapshot)
            if evaluation is not None:
                evaluations[snapshot] = dict(evaluation.metrics)
        return req.SnapshotList(contents.generation, current, tuple(sorted(contents.committed)), metrics, evaluations)

    def _link(self, request: req.LinkSnapshot, number: int) -> req.SnapshotFetched:
        remote = {task: address for task, address in request.sources.items() if address}
        parts = {task: shared_parts.find(request.held, task, request.snapshot) for task in request.sources}
        received = 0
        if remote:
            assert self._fetched is not None
            received = self._fetched.fetch(remote, request.snapshot, self._is_wanted(number))
            fetched = {task: self._fetched.part(task, request.snapshot) for task in remote}
            if not all(map(os.path.isdir, fetched.values())):  # a fetch in advance of another snapshot deleted one
                raise OSError(errno.ESTALE, "parts of another host were deleted while they were fetched")
            parts.update(fetched)
        is_in_memory = all(part.startswith(f"{request.held[0]}/") for part in parts.values())
        in_memory = request.in_memory if is_in_memory else ""
        return req.SnapshotFetched(shared_parts.assemble([*parts.values()], request.folder, in_memory), received)

    def _prefetch(self, request: req.FetchParts, number: int) -> req.SnapshotFetched:
        assert self._fetched is not None
        received = self._fetched.fetch_in_advance(request.sources, request.snapshot, self._paced(number))
        return req.SnapshotFetched(received, received)

    def _adopt(self, number: int) -> req.OriginAdopted:
        from paceline.storage.snapshots.origin import adopt

        adopted = adopt(self._transfers, self._origin, self._scratch, self._is_wanted(number), self._called)
        return req.OriginAdopted(adopted.id, adopted.origin, adopted.size, tuple(adopted.passed))

    def _trim_curves(self, request: req.TrimCurves, number: int) -> None:
        notes = GenerationNotes(request.notes)
        if self._event_files is None:
            self._event_files = EventFiles(request.folder, request.scratch)
        prefix = f"{self._short.run}/{FOLDER}/{request.host}"
        store = self._archive.store if self._archive is not None and request.host else None
        if store is not None and not self._has_event_files:
            notes.add(self._event_files.bring(store, prefix, self._is_wanted(number)))
            self._has_event_files = True
        noted = notes.read()
        self._event_files.trim(noted.old, noted.after)
        if store is not None:
            self._short.claim()
            self._event_files.keep(store, prefix, self._paced(number), request.last)

    # ---- the watched folder

    def _restore_watched(self, request: req.RestoreWatched, number: int) -> req.WatchedRestored:
        doubtful, kept = begin(
            request.folder, request.own, (request.run, request.host), request.generation, request.source, request.inner,
            self._is_wanted(number),
        )  # fmt: skip
        if request.copies:
            self._capture_of(request).begin(bool(request.source), doubtful)
        return req.WatchedRestored(kept, doubtful)

    def _capture_of(self, request: req.RestoreWatched | req.CaptureWatched) -> FolderCapture:
        if self._capture is None:
            self._capture = FolderCapture(request.folder, request.copies, f"{request.own}/{TASKS}")
            # An earlier porter found these files, if this is not the first.
            doubtful = request.doubtful if isinstance(request, req.CaptureWatched) else {}
            self._capture.begin(False, doubtful)
        return self._capture

    def _is_wanted(self, number: int) -> ContinueCheck:
        return lambda _: number not in self._canceled

    def _paced(self, number: int) -> ContinueCheck:
        is_wanted = self._is_wanted(number)
        return is_wanted if self._rate is None else self._rate.paced(is_wanted)


def _lane_of(request: Request) -> str:
    transfers = (
        req.SendPart, req.FetchSnapshot, req.SweepGenerations, req.CheckSnapshot, req.AdoptOrigin, req.FoldEvents
    )  # fmt: skip
    if isinstance(request, transfers):
        return TRANSFERS
    if isinstance(request, (req.LinkSnapshot, req.MoveToDisk)):
        return LINKS
    if isinstance(request, req.FetchParts):
        return IN_ADVANCE
    if isinstance(request, (req.RestoreWatched, req.CaptureWatched)):
        return WATCHED
    if isinstance(request, req.UploadLogs):
        return LOGS
    if isinstance(request, (req.KeepCompiled, req.FetchCompiled)):
        return COMPILED
    return CURVES if isinstance(request, req.TrimCurves) else SHORT


@dataclass(frozen=True)
class PorterSettings:
    """The argument of a porter's process, as JSON."""

    place: str  # the snapshot location: a folder, a bucket, or peer://host:port if another porter serves it
    run: str
    rate: int | None = None  # limit for uploads, in bytes per second
    tls: str = ""  # folder of certificates, for peers
    serve: str = ""  # host:port to serve the location and obstore at, for peers
    obstore: str = ""  # where to get obstore if it is not installed: an archive, or peer://host:port
    folder: str = ""  # where to install obstore
    origin: str = ""  # the snapshot that the run starts from
    token: str = ""  # proves that the run may write to its location
    to: str = ""  # the location as shown to users
    called: str = ""  # the origin as shown to users
    buckets: bool = False  # whether this host uses buckets
    held: tuple[str, ...] = ()  # members: the folders of the parts that are served to other hosts
    fetched: str = ""  # members: the folder of the parts that were fetched from other hosts


PEER = "peer://"
OBSTORE = "obstore.zip"


def _open(settings: PorterSettings, patience: float | None) -> Store:
    return _peer(settings, settings.place) if settings.place.startswith(PEER) else open_store(settings.place, patience)


def _compiled(settings: PorterSettings) -> StoredCompiled | None:
    """All members of the run have the same key; nobody else has it."""
    try:
        with open(f"{settings.tls}/member.key", "rb") as file:
            return StoredCompiled(_open(settings, None), settings.run, file.read())
    except OSError:
        return None


def _peer(settings: PorterSettings, address: str) -> Store:
    from paceline.agent.net.tls import SERVER_NAME, context
    from paceline.storage.stores.peer_client import over_tls

    return over_tls(endpoint(address[len(PEER) :]), context(settings.tls, "member", server=False), SERVER_NAME)


def _member(settings: PorterSettings, address: str) -> PeerStore:
    from paceline.agent.net.tls import MEMBER_NAME, context
    from paceline.storage.stores.peer_client import over_tls

    try:
        host_and_port = endpoint(address)
    except ValueError:  # the store may have what this host serves
        raise StoreError(f"{address!r} is not the address of a host", is_transient=True) from None
    return over_tls(host_and_port, context(settings.tls, "member", server=False), MEMBER_NAME)


def bring_obstore(settings: PorterSettings) -> None:
    """Installs obstore, with CA certificates, unless it is installed: few images contain it."""
    if not settings.obstore or not settings.buckets or obstore_library.is_here():
        return
    folder = f"{settings.folder}/{obstore_library.FOLDER}"
    if not os.path.isdir(folder):
        archive = settings.obstore
        if archive.startswith(PEER):
            archive = f"{settings.folder}/.{OBSTORE}.{os.urandom(4).hex()}"
            _peer(settings, settings.obstore).fetch(f"{settings.run}/{OBSTORE}", archive, always)
        obstore_library.unpack(archive, folder)
        if archive != settings.obstore:
            os.unlink(archive)
    obstore_library.use(folder)


class _Served(FolderStore):
    """Serves the snapshot location, if it is a folder, and the archive of obstore."""

    def __init__(self, settings: PorterSettings) -> None:
        super().__init__(
            settings.place if settings.place.startswith("/") else os.path.dirname(os.path.dirname(settings.obstore))
        )
        self._library, self._archive = f"{settings.run}/{OBSTORE}", settings.obstore
        has_snapshots = settings.place.startswith("/")
        library = self._library if self._archive else ""
        self.access = MemberAccess(settings.run, library, has_snapshots, self.has)

    def _path(self, name: str) -> str:
        return self._archive if name == self._library and self._archive else super()._path(name)


def _serve(settings: PorterSettings) -> None:
    from paceline.agent.net.tls import context
    from paceline.storage.stores.peer_server import Server

    try:
        if settings.held:
            tls = context(settings.tls, "member", server=True)
            with contextlib.suppress(OSError):  # the port is taken: other hosts get its snapshots from the store
                Server(endpoint(settings.serve), tls, shared_parts.PartsStore(settings.held), part_access)
            return
        tls = context(settings.tls, "captain", server=True)
        served = _Served(settings)
        Server(endpoint(settings.serve), tls, served, served.access)
    except OSError as error:
        text = f"cannot serve {settings.place} at {settings.serve}: {error.strerror}"
        raise StoreError(text, is_transient=True, reason=str(error.strerror)) from None


def main(argument: str) -> int:
    settings = PorterSettings(**json.loads(argument))
    lock = threading.Lock()

    def answer(number: int, answer: Answer) -> None:
        data = json.dumps({"id": number, **req.answer_to_object(answer)}).encode() + b"\n"
        with lock:
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)  # the agent has ended

    try:
        os.nice(NICE)
    except OSError:
        pass
    porter: Porter | None = None
    is_serving = not settings.serve
    for line in sys.stdin.buffer:
        data = json.loads(line)
        number = int(data.pop("id"))
        try:
            request = req.read_request(data)
            if not is_serving:
                _serve(settings)
                is_serving = True
            if porter is None:
                bring_obstore(settings)
                short = SnapshotRepository(_open(settings, PATIENCE), settings.run, settings.token, settings.to)
                transfers = SnapshotRepository(_open(settings, None), settings.run)
                archive = StoredRunFiles(_open(settings, PATIENCE), settings.run)
                fetched = FetchedParts(settings.fetched, lambda address: _member(settings, address))
                porter = Porter(
                    short, transfers, answer, settings.rate, archive=archive, origin=settings.origin,
                    called=settings.called, scratch=f"{settings.folder}/.origin", compiled=_compiled(settings),
                    fetched=fetched if settings.fetched else None,
                )  # fmt: skip
            porter.ask(number, request)
        except WireError as error:
            answer(number, req.Failure(req.HERE, f"invalid request: {error}", False))
        except (StoreError, OSError, KeyError, zipfile.BadZipFile) as error:
            text = str(error) if isinstance(error, StoreError) else f"cannot install obstore: {error!r}"
            answer(number, req.Failure(req.STORE, text, bool(getattr(error, "is_transient", True))))
    if porter is not None:
        porter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
