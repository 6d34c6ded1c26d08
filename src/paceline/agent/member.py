"""A member: has the tasks of its host started and ended as the captain says, and leaves when it is told to."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.curves import Curves
from paceline.agent.following import Following
from paceline.agent.journal import Echo, last_words
from paceline.agent.keeping import Keeping
from paceline.agent.line import Line
from paceline.agent.loop import Loop
from paceline.agent.options import LEAVING, SAVING_SHARE, Options
from paceline.agent.sending import Sending
from paceline.agent.staging import Staging
from paceline.agent.tasks import Tasks
from paceline.agent.wire import Message
from paceline.plan import INGEST, from_data


class Member:
    def __init__(self, options: Options, instance: str, number: int) -> None:
        with open(options.plan) as file:
            self._plan = from_data(json.load(file))
        self._options = options
        self._instance = instance
        self._number = number
        host = self._plan.host(options.host)
        self.loop = Loop()
        os.makedirs(f"{options.folder}/logs", exist_ok=True)
        echo = Echo() if options.echo else None
        self._line = Line(options, self.loop, echo, self._join, lambda: self._tasks.beat(), self._receive)
        self._staging = Staging(self._plan, options, self.loop, self._line.send, self._line.said)
        self._following = Following(
            self._plan, options, self._staging.porting, self.loop, self._line.send, self._line.said,
            self._staging.remove, lambda task, words: self._tasks.tell({"tasks": [task], "words": words}),
        )  # fmt: skip
        self._tasks = Tasks(
            self._plan, options, self.loop, self._line, self._staging, self._following, echo, self._go
        )  # fmt: skip
        first = self._plan.ingest_task
        written = [*host.tasks, *([INGEST] if first is not None and first.host == host.name else [])]
        self._keeping = Keeping(
            self._plan, options, {f"logs/{name}.log": f"{options.folder}/logs/{name}.log" for name in written},
            self._staging.porting, self.loop, lambda text: self._line.said(text, True),
        )  # fmt: skip
        self._curves = Curves(self._plan, options, self._staging.porting, self.loop)
        self._leaving = False
        self._told_tasks = False  # that this host has to go
        self._over = False
        self._exit = 0
        self._board = Sending(options, speaks=host.index == 0) if options.tensorboard else None
        if self._board is not None:
            self._board.start()
        self.loop.on_child(self._tasks.child_ended)
        self.loop.on_signal(signal.SIGTERM, self._told_to_go)
        self._staging.bring_library()
        self._line.dial()
        self._beat()
        self._guard()

    def run(self) -> int:
        self.loop.run()
        self._tasks.close()
        self._staging.close()
        if self._over:
            self._staging.tidy()
            self._following.tidy()
        if self._board is not None:
            self._board.close()
        return self._exit

    # ---- the captain

    def _join(self) -> ev.Joined:
        return ev.Joined(
            host=self._options.host,
            instance=self._instance,
            agent=self._number,
            replaces=self._options.replaces,
            place=self._options.place,
            generation=self._tasks.generation,
            running={name: attempt.number for name, attempt in self._tasks.attempts.items()},
            exits=self._tasks.exits(),
            offers=self._tasks.offers(),
            held=tuple(self._staging.held()),
            follows=self._following.follows(),
            evaluated=self._following.unnoted(),
            data=self._tasks.data,
        )

    def _receive(self, message: Message) -> None:
        kind = message["type"]
        if kind == "roster":
            self._tasks.roster = message["roster"]
        elif kind == "start":
            self._curves.begins(int(message["generation"]), message["restore"], self._tasks.reached)
            self._tasks.start(message)
        elif kind == "end":
            self._tasks.end(message)
        elif kind in ("evaluate", "noted"):
            self._following.receive(message)
        elif kind in ("send", "drop", "prepare") or (kind == "committed" and not self._following):
            self._staging.receive(kind, message)
        elif kind == "agree":
            self._tasks.tell(message)
        elif kind == "farewell":
            self._end_all()
        elif kind == "finish":
            if message.get("status") == "replaced":
                self._exit = LEAVING
            else:
                self._over = True
            last_words(self._options.last_words, {name: message.get(name) for name in ("status", "reason")})
            self._finish()

    def _beat(self) -> None:
        self._staging.look()
        self._staging.watching.look(self._tasks.attempts)
        self._line.beat()
        self._tasks.look()
        for text in self._board.said() if self._board is not None else ():
            self._line.said(text, True)
        self.loop.after(self._line.beat_every, self._beat)

    def _guard(self) -> None:
        """Without the captain's word for a lease, another group may be starting: end what runs here."""
        if self._tasks.attempts and self._line.left() < 0:
            text = f"heard nothing from the captain for {self._line.lease:g} s and ended its tasks"
            self._line.said(f"{self._options.host} {text}", True)
            self._tasks.kill_unasked()
        if reason := self._line.alone(self._plan.limits.start):
            last_words(self._options.last_words, {"status": "left", "reason": reason})
            self._finish()
        often = min(0.5, self._line.lease / 20)
        self.loop.after(max(often, self._line.left()) if self._line.joined else often, self._guard)

    # ---- leaving

    def _told_to_go(self) -> None:
        if self._leaving or self._over:
            return
        self._leaving = True
        grace = self._plan.limits.grace
        self._line.send({"type": "leaving", "reason": "SIGTERM"})
        self._tasks.leave(grace)
        if self._line.joined and any(attempt.asks for attempt in self._tasks.attempts.values()):
            # The group takes a snapshot first; the captain says when it is committed.
            self.loop.after(SAVING_SHARE * grace, self._end_all)
        else:
            self._end_all()

    def _end_all(self) -> None:
        if not self._leaving or self._told_tasks:
            return
        self._told_tasks = True
        self._tasks.terminate()
        if not self._tasks.attempts:
            self._go()

    def _go(self) -> None:
        self._exit = LEAVING
        self._farewell()

    def _finish(self) -> None:
        self._tasks.kill()
        self._farewell()

    def _farewell(self) -> None:
        """Where the run is over, the last of its output goes first: the captain waits, and may have the place for it.
        Where it is not, another instance of this host may be waiting."""
        if self._over:
            self._curves.close(lambda: self._keeping.close(self._leave))
        else:
            self._leave()

    def _leave(self) -> None:
        self._line.send({"type": "left"})
        self.loop.after(0.0, self._depart)

    def _depart(self) -> None:
        self._line.hang_up()
        self._curves.close(lambda: self._keeping.close(self.loop.stop))


def main(options: Options, instance: str, number: int, beat: Callable[[Any], None]) -> int:
    sys.stdout.flush()
    member = Member(options, instance, number)
    beat(member.loop)
    return member.run()
