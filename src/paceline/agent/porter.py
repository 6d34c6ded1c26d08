"""The porter: a process beside the agent that carries snapshots to and from their place, so that nothing waits for it.

It reads requests from its standard input and answers on its standard output, a JSON object a line. Transfers are done
one after the other; short requests do not wait for them.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any, Callable

from paceline.storage.manifest import Damaged, Id, Manifest, Newer, parse
from paceline.storage.places import open_store
from paceline.storage.snapshots import Snapshots, Superseded, Unfit
from paceline.storage.store import StoreError, Unwanted

Request = dict[str, Any]
TRANSFERS = ("send", "fetch")
NICE = 5  # training goes first
_KINDS: dict[type[Exception], str] = {
    Damaged: "damaged", Newer: "newer", Superseded: "superseded", Unfit: "unfit", Unwanted: "unwanted",
    StoreError: "store",
}  # fmt: skip


class Porter:
    def __init__(self, snapshots: Snapshots, answer: Callable[[Request], None]) -> None:
        self._snapshots = snapshots
        self._answer = answer
        self._unwanted: set[int] = set()
        self._lanes: dict[bool, queue.Queue[Request | None]] = {True: queue.Queue(), False: queue.Queue()}
        self._threads = [threading.Thread(target=self._work, args=(lane,)) for lane in self._lanes.values()]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request) -> None:
        if request["do"] == "forget":
            self._unwanted.add(int(request["which"]))
        else:
            self._lanes[request["do"] in TRANSFERS].put(request)

    def close(self) -> None:
        """Once what was asked for is done."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, lane: queue.Queue[Request | None]) -> None:
        while (request := lane.get()) is not None:
            number = int(request["id"])
            try:
                if number in self._unwanted:
                    raise Unwanted("it was given up before it began")
                does: Callable[[Request], Request] = getattr(self, "_" + request["do"])
                self._answer({"id": number, **does(request)})
            except tuple(_KINDS) as error:
                kind = next(_KINDS[each] for each in _KINDS if isinstance(error, each))
                told = {"kind": kind, "text": str(error), "passing": getattr(error, "passing", False)}
                self._answer({"id": number, "error": told})
            except OSError as error:  # of this machine: a full disk, say
                text = f"{error.filename or request.get('folder', '')}: {error.strerror or error}"
                self._answer({"id": number, "error": {"kind": "here", "text": text, "passing": True}})
            self._unwanted.discard(number)

    # ---- short requests

    def _known(self, _: Request) -> Request:
        known = self._snapshots.known()
        return {"generation": known.generation, "counted": [[id.step, id.generation] for id in known.counted()]}

    def _manifest(self, request: Request) -> Request:
        return {"manifest": self._snapshots.manifest(_id(request["snapshot"])).to_bytes().decode()}

    def _begin(self, request: Request) -> Request:
        parent = request["parent"]
        self._snapshots.begin(int(request["generation"]), None if parent is None else _id(parent))
        return {}

    def _commit(self, request: Request) -> Request:
        return {"new": self._snapshots.commit(_manifest(request))}

    def _delete(self, request: Request) -> Request:
        self._snapshots.delete(_id(request["snapshot"]))
        return {}

    # ---- transfers

    def _send(self, request: Request) -> Request:
        part = self._snapshots.send(
            _id(request["snapshot"]), str(request["task"]), str(request["folder"]), self._wanted(request)
        )
        return {"files": [[file.path, file.size, file.sha256] for file in part.files]}

    def _fetch(self, request: Request) -> Request:
        self._snapshots.fetch(_manifest(request), str(request["folder"]), self._wanted(request))
        return {}

    def _wanted(self, request: Request) -> Callable[[], bool]:
        number = int(request["id"])
        return lambda: number not in self._unwanted


def _id(given: Any) -> Id:
    step, generation = given
    return Id(int(step), int(generation))


def _manifest(request: Request) -> Manifest:
    return parse(str(request["manifest"]).encode(), "a manifest")


def main(place: str, run: str) -> int:
    lock = threading.Lock()

    def answer(words: Request) -> None:
        data = json.dumps(words).encode() + b"\n"
        with lock:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    try:
        os.nice(NICE)
    except OSError:
        pass
    porter = Porter(Snapshots(open_store(place), run), answer)
    for line in sys.stdin.buffer:
        porter.ask(json.loads(line))
    porter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
