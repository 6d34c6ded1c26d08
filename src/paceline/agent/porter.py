"""The porter: a process beside the agent that carries snapshots to and from their place, so that nothing waits for it.

It reads requests from its standard input and answers on its standard output, a JSON object a line. Transfers are done
one after the other; neither short requests, nor what the run writes, nor a folder that is watched wait for them.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Callable

from paceline.agent.options import endpoint
from paceline.agent.written import Notes
from paceline.storage import library
from paceline.storage.curves import FOLDER, Curves
from paceline.storage.evaluation import Evaluation
from paceline.storage.folder import Folder
from paceline.storage.kept import Kept
from paceline.storage.manifest import Damaged, Id, Newer, pair, parse
from paceline.storage.places import open_store
from paceline.storage.putting import TASKS, begin
from paceline.storage.snapshots import Snapshots, Superseded, Unfit, always
from paceline.storage.store import Store, StoreError, Unwanted, Wanted
from paceline.storage.taking import Taking
from paceline.storage.watched import Later

Request = dict[str, Any]
LANES = {  # else it is short
    **dict.fromkeys(("send", "fetch", "sweep", "adopt"), "transfers"),
    **dict.fromkeys(("put", "take"), "watching"),
    "keep": "kept",
    "curves": "curves",
}
NICE = 5  # training goes first
PATIENCE = 8.0  # seconds for one short request; who asks may ask again
_KINDS: dict[type[Exception], str] = {
    Damaged: "damaged", Newer: "newer", Superseded: "superseded", Unfit: "unfit", Unwanted: "unwanted",
    StoreError: "store", Later: "later",
}  # fmt: skip


class Porter:
    def __init__(
        self,
        short: Snapshots,
        transfers: Snapshots,
        answer: Callable[[Request], None],
        rate: float | None = None,
        lanes: Iterable[str] = ("short", *LANES.values()),
        kept: Kept | None = None,
        origin: str = "",
        called: str = "",
        scratch: str = "",
    ) -> None:
        """`rate`: bytes a second that may be sent. `lanes`: each has a thread. `origin`: what the run starts from, and
        what people call it; it passes through `scratch`."""
        self._short, self._transfers, self._kept = short, transfers, kept
        self._answer = answer
        self._rate = rate
        self._origin, self._called, self._scratch = origin, called, scratch
        self._next = 0.0  # when the next piece may be sent
        self._turn = threading.Lock()
        self._unwanted: set[int] = set()
        self._taking: Taking | None = None
        self._drawn: Curves | None = None
        self._brought = False
        self._lanes: dict[str, queue.Queue[Request | None]] = {lane: queue.Queue() for lane in lanes}
        self._threads = [threading.Thread(target=self._work, args=(lane,)) for lane in self._lanes.values()]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request) -> None:
        if request["do"] == "forget":
            self._unwanted.add(int(request["which"]))
        else:
            self._lanes[LANES.get(request["do"], "short")].put(request)

    def close(self) -> None:
        """Once what was asked for is done."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, lane: queue.Queue[Request | None]) -> None:
        while (request := lane.get()) is not None:
            number = int(request["id"])
            self._answer({"id": number, **self.done(request, number)})
            self._unwanted.discard(number)

    def done(self, request: Request, number: int) -> Request:
        try:
            if number in self._unwanted:
                raise Unwanted("it was given up before it began")
            does: Callable[[Request], Request] = getattr(self, "_" + request["do"])
            return does(request)
        except tuple(_KINDS) as error:
            kind = next(_KINDS[each] for each in _KINDS if isinstance(error, each))
            return _failed(kind, str(error), getattr(error, "passing", False))
        except OSError as error:  # of this machine: a full disk, say
            return _failed("here", f"{error.filename or request.get('folder', '')}: {error.strerror or error}", True)
        except Exception as error:  # whatever it is, whoever asked must not wait for ever
            return _failed("here", f"{type(error).__name__}: {error}", False)

    # ---- short requests

    def _known(self, request: Request) -> Request:
        """`metric`: with its value where a manifest has it. `evaluated`: with what evaluators said."""
        known = self._short.known()
        counted, metric = known.counted(), request.get("metric")
        metrics = []
        told = {id: self._short.evaluation(id) for id in (counted if request.get("evaluated") else ())}
        for id in counted if metric else ():
            try:
                metrics.append([pair(id), self._short.manifest(id).metrics[str(metric)]])
            except (KeyError, Damaged, Newer):
                continue
        return {
            "generation": known.generation,
            "counted": [pair(id) for id in counted],
            "committed": [pair(id) for id in sorted(known.committed)],
            "metrics": metrics,
            "evaluated": [[pair(id), dict(found.metrics)] for id, found in told.items() if found is not None],
        }

    def _begin(self, request: Request) -> Request:
        parent = request["parent"]
        late = self._short.begin(
            int(request["generation"]), None if parent is None else _id(parent), map(_id, request["seen"]),
            str(request.get("by") or ""),
        )  # fmt: skip
        return {"late": [pair(id) for id in late]}

    def _commit(self, request: Request) -> Request:
        return {"new": self._short.commit(parse(str(request["manifest"]).encode(), "a manifest"))}

    def _evaluated(self, request: Request) -> Request:
        told = Evaluation(str(request["task"]), request["metrics"], str(request["at"]))
        return {"metrics": dict(self._short.evaluate(_id(request["snapshot"]), told).metrics)}

    def _delete(self, request: Request) -> Request:
        self._short.delete(_id(request["snapshot"]))
        return {}

    def _sweep(self, request: Request) -> Request:
        self._transfers.sweep(int(request["generation"]))
        return {}

    def _remove(self, request: Request) -> Request:
        """Folders of this machine."""
        for folder in request["folders"]:
            shutil.rmtree(str(folder), ignore_errors=True)
        return {}

    # ---- transfers

    def _send(self, request: Request) -> Request:
        part = self._transfers.send(
            _id(request["snapshot"]), str(request["task"]), str(request["folder"]), self._paced(request)
        )
        return {"files": [[file.path, file.size, file.sha256] for file in part.files]}

    def _fetch(self, request: Request) -> Request:
        found = self._transfers.manifest(_id(request["snapshot"]))
        folder, held = str(request["folder"]), str(request.get("held") or "")
        came = self._transfers.fetch(found, folder, self._wanted(request), held)
        return {"bytes": found.size, "came": came}

    def _adopt(self, request: Request) -> Request:
        from paceline.storage.origin import adopt

        found = adopt(self._transfers, self._origin, self._scratch, self._wanted(request), self._called)
        return {"snapshot": pair(found.id), "from": found.origin, "bytes": found.size, "passed": list(found.passed)}

    def _keep(self, request: Request) -> Request:
        assert self._kept is not None
        self._short.claim()
        self._kept.send(str(request["piece"]), request["ranges"], str(request["scratch"]), self._paced(request))
        return {}

    def _curves(self, request: Request) -> Request:
        """What tasks write for TensorBoard. `host`: whose copy is kept at the place; empty: none is."""
        folder, wanted = str(request["folder"]), self._wanted(request)
        notes = Notes(str(request["notes"]))
        if self._drawn is None:
            self._drawn = Curves(folder, str(request["scratch"]))
        below = f"{self._short.run}/{FOLDER}/{request['host']}"
        store = self._kept.store if self._kept is not None and request["host"] else None
        if store is not None and not self._brought:
            notes.add(self._drawn.bring(store, below, wanted))
            self._brought = True
        told = notes.read()
        trimmed = self._drawn.trim(told.old, told.after)
        if store is not None:
            self._short.claim()
            self._drawn.keep(store, below, self._paced(request), bool(request["last"]))
        return {"trimmed": len(trimmed)}

    # ---- a folder that is watched

    def _put(self, request: Request) -> Request:
        """Before tasks start."""
        source, who = str(request["source"]), (str(request["run"]), str(request["host"]))
        doubtful, kept = begin(
            str(request["folder"]), str(request["own"]), who, int(request["generation"]), source,
            map(str, request["inner"]), self._wanted(request),
        )  # fmt: skip
        if request["copies"]:
            self._taker(request).begin(bool(source), doubtful)
        return {"kept": kept, "doubtful": doubtful}

    def _take(self, request: Request) -> Request:
        taking, leader = self._taker(request), str(request["leader"])
        return {"taken": taking.take(str(request["to"]), request["metrics"], leader, self._wanted(request))}

    def _taker(self, request: Request) -> Taking:
        if self._taking is None:
            self._taking = Taking(str(request["folder"]), str(request["copies"]), f"{request['own']}/{TASKS}")
            # Where this is not the first porter, it was told of these.
            known = {path: tuple(signature) for path, signature in request.get("doubtful", {}).items()}
            self._taking.begin(False, known)
        return self._taking

    def _wanted(self, request: Request) -> Wanted:
        number = int(request["id"])
        return lambda _: number not in self._unwanted

    def _paced(self, request: Request) -> Wanted:
        """Asked before each piece: comes back when it may go."""
        wanted, rate = self._wanted(request), self._rate
        if rate is None:
            return wanted

        def in_turn(size: int) -> bool:
            with self._turn:
                begin = max(self._next, time.monotonic())
                self._next = begin + size / rate
            while wanted(size) and (left := begin - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
            return wanted(size)

        return in_turn


def _failed(kind: str, text: str, passing: bool) -> Request:
    return {"error": {"kind": kind, "text": text, "passing": passing}}


def _id(given: Any) -> Id:
    step, generation = given
    return Id(int(step), int(generation))


@dataclass(frozen=True)
class Errand:
    """What a porter is told when it starts."""

    place: str  # a folder, a bucket, or peer://host:port, where another porter has it
    run: str
    rate: int | None = None  # bytes a second that may be sent
    tls: str = ""  # folder of certificates, for peers
    serve: str = ""  # host:port that peers may use the place at, or get obstore from
    obstore: str = ""  # where it comes from, if there is none here: an archive, or peer://host:port
    folder: str = ""  # for it
    origin: str = ""  # what the run starts from
    token: str = ""  # of the run, where the place is its own to write to
    to: str = ""  # the place, as people call it,
    called: str = ""  # and what the run starts from
    buckets: bool = False  # whether anything here speaks to one


PEER = "peer://"
OBSTORE = "obstore.zip"


def _open(errand: Errand, patience: float | None) -> Store:
    return _peer(errand, errand.place) if errand.place.startswith(PEER) else open_store(errand.place, patience)


def _peer(errand: Errand, address: str) -> Store:
    from paceline.agent.link import SERVER_NAME, context
    from paceline.storage.peer import over_tls

    return over_tls(endpoint(address[len(PEER) :]), context(errand.tls, "member", server=False), SERVER_NAME)


def bring_obstore(errand: Errand) -> None:
    """It is sent along, as few images have it, and certificates of authorities with it; what is there is used."""
    if not errand.obstore or not errand.buckets or library.is_here():
        return
    folder = f"{errand.folder}/{library.FOLDER}"
    if not os.path.isdir(folder):
        archive = errand.obstore
        if archive.startswith(PEER):
            archive = f"{errand.folder}/.{OBSTORE}.{os.urandom(4).hex()}"
            _peer(errand, errand.obstore).fetch(f"{errand.run}/{OBSTORE}", archive, always)
        library.unpack(archive, folder)
        if archive != errand.obstore:
            os.unlink(archive)
    library.use(folder)


class _Served(Folder):
    """The place, where that is a folder, and the library for buckets."""

    def __init__(self, errand: Errand) -> None:
        super().__init__(
            errand.place if errand.place.startswith("/") else os.path.dirname(os.path.dirname(errand.obstore))
        )
        self._library, self._archive = f"{errand.run}/{OBSTORE}", errand.obstore

    def _path(self, name: str) -> str:
        return self._archive if name == self._library and self._archive else super()._path(name)


def _serve(errand: Errand) -> None:
    from paceline.agent.link import context
    from paceline.storage.serving import Server

    try:
        tls = context(errand.tls, "captain", server=True)
        Server(endpoint(errand.serve), tls, _Served(errand), errand.run)
    except OSError as error:
        raise StoreError(f"cannot serve {errand.place} at {errand.serve}: {error.strerror}", passing=True) from None


def main(words: str) -> int:
    errand = Errand(**json.loads(words))
    lock = threading.Lock()

    def answer(words: Request) -> None:
        data = json.dumps(words).encode() + b"\n"
        with lock:
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)  # whoever asked is gone

    try:
        os.nice(NICE)
    except OSError:
        pass
    porter: Porter | None = None
    serving = not errand.serve
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if not serving:
                _serve(errand)
                serving = True
            if porter is None:
                bring_obstore(errand)
                short = Snapshots(_open(errand, PATIENCE), errand.run, errand.token, errand.to)
                transfers = Snapshots(_open(errand, None), errand.run)
                porter = Porter(
                    short, transfers, answer, errand.rate, kept=Kept(_open(errand, PATIENCE), errand.run),
                    origin=errand.origin, called=errand.called, scratch=f"{errand.folder}/.origin",
                )  # fmt: skip
            porter.ask(request)
        except (StoreError, OSError, KeyError, zipfile.BadZipFile) as error:
            text = str(error) if isinstance(error, StoreError) else f"obstore cannot be put in place here: {error!r}"
            answer({"id": request["id"], **_failed("store", text, getattr(error, "passing", True))})
    if porter is not None:
        porter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
