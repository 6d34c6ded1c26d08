"""How a generation begins: what was saved is committed, one snapshot is chosen, every host that needs it has it, and
the record of the generation is there. Then, and not before, its tasks start. Decides, does nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.shelf import PAUSE, Shelf
from paceline.storage.manifest import Id, pair

SETTLING, ASKING, ADOPTING, FETCHING, RECORDING, READY = (
    "settling", "asking", "adopting", "fetching", "recording", "ready"
)  # fmt: skip


class Beginning:
    def __init__(
        self,
        shelf: Shelf,
        number: int,
        hosts: Iterable[str],
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
        now: float,
        settle: float,
    ) -> None:
        """`number`: of the generation. `settle`: how long to wait for what is saved to be committed."""
        self._shelf, self._put, self._emit = shelf, put, emit
        self.number = number
        self.hosts = set(hosts)
        self.since = now
        self.stage = SETTLING
        self.choice: Id | None = None
        self.trouble: tuple[str, bool] | None = None  # what the place said, and whether it may pass
        self.owed: tuple[dict[str, Any], str] | None = None  # the record, and why the place could not take it
        self._settle_until = now + settle
        self._prepared: set[str] = set()
        self._bad: set[Id] = set()
        self._seen: list[Id] = []
        self._again_at: float | None = None
        self._asked = 0
        self._said = False

    def missing(self) -> list[str]:
        """The hosts that do not have the snapshot yet."""
        return sorted(self.hosts - self._prepared) if self.stage == FETCHING else []

    def advance(self, now: float) -> None:
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            {ASKING: self._ask, ADOPTING: self._adopt, FETCHING: self._fetch, RECORDING: self._record}[self.stage]()
        settled = not self._shelf.busy() or (now >= self._settle_until and not self._shelf.committing())
        if self.stage == SETTLING and settled:
            self._shelf.open(self.number)
            self._choose() if self._shelf.known else self._ask()

    def _ask(self) -> None:
        self.stage = ASKING
        self._request(self._shelf.question())

    def _choose(self) -> None:
        self._seen = list(self._shelf.counted)
        self.choice = next((id for id in self._seen if id not in self._bad), None)
        self._prepared = set()
        if self.choice is None and self._shelf.origin and not self._bad:
            self._adopt()
        elif self.choice is None and self._shelf.origin:
            self.trouble = f"nothing of {self._shelf.origin}, which the run starts from, can be read", False
        elif (self.choice is not None or self._shelf.watches) and self.hosts:
            self._fetch()
        else:
            self._record()

    def _adopt(self) -> None:
        self.stage = ADOPTING
        self._request({"do": "adopt"})

    def _adopted(self, answer: Mapping[str, Any], now: float) -> None:
        for text in answer["passed"]:
            self._emit("warning", text=text)
        words = {"bytes": answer["bytes"], "took_s": round(now - self.since, 3), "origin": answer["from"]}
        self._shelf.adopted(Id(*answer["snapshot"]), words)
        self._choose()

    def _fetch(self) -> None:
        self.stage = FETCHING
        for host in sorted(self.hosts - self._prepared):
            self._prepare(host)

    def _prepare(self, host: str) -> None:
        snapshot = None if self.choice is None else pair(self.choice)
        self._put(ev.Say(host, {"type": "prepare", "snapshot": snapshot, "generation": self.number}))

    def _record(self) -> None:
        self.stage = RECORDING
        self._shelf.open(self.number)
        self._request(self._request_of_record())

    def _request_of_record(self) -> dict[str, Any]:
        parent = None if self.choice is None else pair(self.choice)
        seen = [pair(id) for id in self._seen]
        return {"do": "begin", "generation": self.number, "parent": parent, "seen": seen}

    def _request(self, request: dict[str, Any]) -> None:
        self._asked = next(self._shelf.numbers)  # one that was given up may still be answered
        self._put(ev.Ask({**request, "_number": self._asked}))

    # ---- what is told

    def joined(self, host: str) -> None:
        """It may not have heard, and is asked again."""
        if self.stage == FETCHING and host in self.hosts:
            self._prepared.discard(host)
            self._prepare(host)

    def prepared(self, told: ev.Prepared, now: float) -> None:
        if self.stage != FETCHING or told.id != self.choice or told.host not in self.hosts:
            return
        if told.error is None:
            self.trouble = None
            self._prepared.add(told.host)
            if self._prepared == self.hosts:
                self._record()
        elif told.error["kind"] in ("damaged", "newer") and told.id is not None:
            text = f"the snapshot of step {told.id.step} is passed over: {told.error['text']}"
            self._emit("warning", text=text)
            self._bad.add(told.id)
            if told.error["kind"] == "newer":
                self._shelf.leave(told.id)
            self._choose()
        else:
            self._later(told.error, now)

    def answered(self, request: Mapping[str, Any], answer: Mapping[str, Any], now: float) -> None:
        if request.get("_number") != self._asked:
            return
        if "error" in answer:
            self._later(answer["error"], now, request.get("by"))
        elif self.stage == ASKING:
            self.trouble = None
            self._shelf.take(answer)
            self.number = max(self.number, int(answer["generation"]) + 1)
            self._choose()
        elif self.stage == ADOPTING:
            self.trouble = None
            self._adopted(answer, now)
        elif self.stage == RECORDING:
            self.trouble = None
            self._shelf.recorded = self.number
            if answer["late"]:
                self._shelf.counted = [Id(*each) for each in answer["late"]]
                self.number += 1
                self._choose()
            else:
                self.stage = READY

    def _later(self, error: Mapping[str, Any], now: float, by: str | None = None) -> None:
        if self.stage == RECORDING and error["passing"] and self.number > 1:
            self.trouble = None
            self.stage = READY  # training need not wait for it: the record is owed, and until then nothing is committed
            # Whoever asks again, it is the same record: it may be there, and only its answer be lost.
            self.owed = {**self._request_of_record(), "by": by}, str(error["text"])
            return
        self.trouble = str(error["text"]), bool(error["passing"])
        if not self._said and error["passing"] and self.number > 1:
            self._said = True
            self._emit("warning", text=f"generation {self.number} waits for its snapshot: {error['text']}")
        self._again_at = now + PAUSE
