"""A member: starts, watches and ends the tasks of its host, as the captain says."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, Callable

from paceline.agent import causes, machine, messages
from paceline.agent import events as ev
from paceline.agent.attempt import Attempt
from paceline.agent.journal import Echo, last_words
from paceline.agent.keeping import Keeping
from paceline.agent.link import Link, LinkClosed, context
from paceline.agent.logs import TaskLog
from paceline.agent.lookup import Found, Lookup
from paceline.agent.loop import Loop, Timer
from paceline.agent.options import LEAVING, Options, endpoint
from paceline.agent.sending import Sending
from paceline.agent.shelf import restores
from paceline.agent.staging import Staging
from paceline.agent.starting import Starting
from paceline.agent.wire import Message, WireError
from paceline.plan import from_data

STACKS_WITHIN = 3.0  # seconds a task has to write its stacks
STACKS_LIMIT = 16 * 1024
OWN_SHARE = 0.9  # of a lease: tasks are gone before the captain counts on it
DIAL_LIMIT = 10.0
SAVING_SHARE = 0.7  # of the grace: for a last snapshot of the group; the rest is for tasks to end
UNANSWERED = 3.0  # seconds until it is worth a word that no name server answers


class Member:
    def __init__(self, options: Options, instance: str, number: int) -> None:
        with open(options.plan) as file:
            self._plan = from_data(json.load(file))
        self._options = options
        self._instance = instance
        self._number = number
        self._host = self._plan.host(options.host)
        self._tasks = {task.name: task for task in self._plan.tasks if task.host == options.host}
        self.loop = Loop()
        self._memory = machine.Memory()
        self._starting = Starting(
            self._plan, options, self.loop, self._send, self._said, self._began, self._cannot_start
        )
        self._staging = Staging(self._plan, options, self.loop, self._send, self._said)
        self._keeping = Keeping(
            self._plan, options, {f"logs/{name}.log": f"{options.folder}/logs/{name}.log" for name in self._tasks},
            self._staging.porting, self.loop, lambda text: self._said(text, True),
        )  # fmt: skip
        self._echo = Echo() if options.echo else None
        self._logs: dict[str, TaskLog] = {}
        self._attempts: dict[str, Attempt] = {}
        self._exits: dict[str, ev.Exit] = {}
        self._exit_at: dict[str, float] = {}
        self._ending: dict[str, int] = {}  # asked to end and not yet told of
        self._states: dict[str, str] = {}
        self._stacks: dict[str, str] = {}
        self._early: dict[int, int] = {}  # pid -> status of children that ended before their pid was known
        self._kills_before = self._memory.kills()
        self._generation_file = f"{options.folder}/logs/.{options.host}.generation"
        self._generation = self._last_generation()
        self._roster: dict[str, str] = {}
        self._link: Link | None = None
        self._connecting: socket.socket | None = None
        self._lookup = Lookup(self.loop, self._dial_at)
        self._retry = 0.05
        self._dial_timer: Timer | None = None
        self._joined = False
        self._asked_in = False  # its join is sent
        self._since_join: list[Message] = []
        self._said_early: list[Message] = []
        self._sent_at: dict[int, float] = {}
        self._beats = 0
        self._beat_every = 1.0
        self._lease = options.lease
        self._lease_from = self.loop.now()
        self._alone_since = self.loop.now()
        self._alone_because = ""
        self._leaving = False
        self._told_tasks = False  # that this host has to go
        self._over = False
        self._exit = 0
        os.makedirs(f"{options.folder}/logs", exist_ok=True)
        self._tls = context(options.tls, "member", server=False)
        self._board = Sending(options, speaks=self._host.index == 0) if options.tensorboard else None
        if self._board is not None:
            self._board.start()
        self.loop.on_child(self._child_ended)
        self.loop.on_signal(signal.SIGTERM, self._told_to_go)
        self._dial()
        self._beat()
        self._guard()

    def run(self) -> int:
        self.loop.run()
        self._starting.close()
        self._staging.close()
        if self._over:
            self._staging.tidy()
        if self._board is not None:
            self._board.close()
        return self._exit

    # ---- the captain

    def _dial(self) -> None:
        self._hang_up()
        self._lookup.begin(*endpoint(self._options.captain))

    def _dial_at(self, found: Found) -> None:
        self._hang_up()
        if found is None:
            self._dial_later()
            return
        family, address = found
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.connect_ex(address)
        except OSError:
            self._dial_later()
            return
        self._connecting = sock
        self.loop.watch(sock, selectors.EVENT_WRITE, self._connected)
        self._dial_timer = self.loop.after(DIAL_LIMIT, self._dial)

    def _connected(self) -> None:
        sock, self._connecting = self._connecting, None
        assert sock is not None
        self.loop.unwatch(sock)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sock.close()
            self._dial_later()
            return
        try:
            self._link = Link(sock, self._tls, server=False)
            self._sent_at = {0: self.loop.now()}
            self._link.send(messages.join(self._options.run, self._join()))
            self._asked_in = True
            self._rewatch()
        except (OSError, LinkClosed):
            sock.close()
            self._dial_later()

    def _join(self) -> ev.Joined:
        now = self.loop.now()
        exits = tuple(
            ev.Exit(**{**exit.__dict__, "age": max(0.0, now - self._exit_at[name])})
            for name, exit in self._exits.items()
            if name not in self._attempts
        )
        return ev.Joined(
            host=self._options.host,
            instance=self._instance,
            agent=self._number,
            replaces=self._options.replaces,
            place=self._options.place,
            generation=self._generation,
            running={name: attempt.number for name, attempt in self._attempts.items()},
            exits=exits,
            offers=self._offers(),
            held=tuple(self._staging.held()),
        )

    def _dial_later(self) -> None:
        self._hang_up()
        self._dial_timer = self.loop.after(self._retry, self._dial)
        self._retry = min(1.0, self._retry * 1.5)

    def _hang_up(self) -> None:
        if self._dial_timer is not None:
            self._dial_timer.cancel()
            self._dial_timer = None
        if self._connecting is not None:
            self.loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None
        if self._link is not None:
            self.loop.unwatch(self._link)
            self._link.close()
            self._link = None
        self._asked_in, self._since_join = False, []
        if self._joined:
            self._joined = False
            self._alone_since = self.loop.now()

    def _rewatch(self) -> None:
        if self._link is not None:
            self.loop.watch(self._link, self._link.interest(), self._ready)

    def _ready(self) -> None:
        assert self._link is not None
        try:
            for message in self._link.ready():
                self._receive(message)
            self._rewatch()
        except (LinkClosed, WireError):
            self._dial_later()
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            self._said(f"{self._options.host} did not understand the captain: {error!r}", True)
            self._dial_later()

    def _send(self, message: Message) -> None:
        """What is said while the captain is away is lost on purpose: joining again tells it all. What is said between
        that and its welcome waits."""
        if self._link is None:
            return
        if not self._joined:
            if self._asked_in and message["type"] != "beat":
                self._since_join.append(message)
            return
        try:
            self._link.send(message)
            self._rewatch()
        except LinkClosed:
            self._dial_later()

    def _said(self, text: str, warning: bool = False) -> None:
        message: Message = {"type": "said", "text": text[:2000], "warning": warning}
        if self._joined:
            self._send(message)
        elif len(self._said_early) < 100:
            self._said_early.append(message)

    def _receive(self, message: Message) -> None:
        kind = message["type"]
        if kind == "beat":
            sent = self._sent_at.pop(int(message.get("n") or 0), None)
            self._lease_from = max(self._lease_from, sent or 0.0)
        elif kind == "welcome":
            self._welcome(message)
        elif kind == "roster":
            self._roster = message["roster"]
        elif kind == "start":
            self._start(message)
        elif kind == "end":
            self._end(
                {name: int(attempt) for name, attempt in message["tasks"].items()},
                message["how"],
                float(message["grace"]),
            )
        elif kind in ("send", "drop", "prepare", "committed"):
            self._staging.receive(kind, message)
        elif kind == "agree":
            for name in message["tasks"]:
                if name in self._attempts:
                    self._attempts[name].tell(message["words"])
        elif kind == "farewell":
            self._end_all()
        elif kind == "wait":
            self._alone_since = self.loop.now()  # another instance of this host is still there
        elif kind == "finish":
            if message.get("status") == "replaced":
                self._exit = LEAVING
            else:
                self._over = True
            last_words(self._options.last_words, {name: message.get(name) for name in ("status", "reason")})
            self._finish()

    def _welcome(self, message: Message) -> None:
        self._joined = True
        self._alone_because = ""
        self._retry = 0.05
        if self._dial_timer is not None:
            self._dial_timer.cancel()
            self._dial_timer = None
        self._lease = float(message["lease"])
        self._beat_every = float(message["beat"])
        self._lease_from = self._sent_at.pop(0, self.loop.now())
        if self.loop.now() - self._lease_from > self._beat_every:
            self._send_beat()  # it has waited for its welcome
        waiting, self._since_join = [*self._since_join, *self._said_early], []
        self._said_early = []
        for said in waiting:
            self._send(said)

    def _beat(self) -> None:
        self._staging.look()
        self._staging.watching.look(self._attempts)
        self._send_beat()
        for attempt in self._attempts.values():
            attempt.sample()
        self._starting.consider_spare(self._attempts, self._memory)
        for text in self._board.said() if self._board is not None else ():
            self._said(text, True)
        self.loop.after(self._beat_every, self._beat)

    def _send_beat(self) -> None:
        now = self.loop.now()
        self._beats += 1
        self._sent_at[self._beats] = now
        for old in [n for n in self._sent_at if n < self._beats - 64]:
            del self._sent_at[old]
        tasks = {name: attempt.progress(now) for name, attempt in self._attempts.items()}
        asking = [name for name, attempt in self._attempts.items() if attempt.asks]
        more = {"asking": asking} if asking else {}
        self._send({"type": "beat", "n": self._beats, "tasks": tasks, "memory": self._memory.share(), **more})

    def _guard(self) -> None:
        """Without the captain's word for a lease, another group may be starting: end what runs here."""
        now = self.loop.now()
        if self._attempts and now - self._lease_from > OWN_SHARE * self._lease:
            self._said(
                f"{self._options.host} heard nothing from the captain for {self._lease:g} s and ended its tasks", True
            )
            for name, attempt in self._attempts.items():
                attempt.asked = attempt.asked or "kill"
                attempt.kill()
                self._ending.setdefault(name, attempt.number)
        if not self._joined:
            self._alone(now - self._alone_since)
        often = min(0.5, self._lease / 20)
        left = self._lease_from + OWN_SHARE * self._lease - now
        self.loop.after(max(often, left) if self._joined else often, self._guard)

    def _alone(self, seconds: float) -> None:
        """Nobody hears it now but whoever reads its output, and its last words."""
        if self._lookup.unanswered and seconds > UNANSWERED and not self._alone_because:
            name = endpoint(self._options.captain)[0]
            self._alone_because = f"no name server answers, so the captain is not found ({name}): is the DNS up?"
            if self._echo is not None:
                self._echo.write(f"paceline: {self._alone_because}\n".encode())
        limit = self._plan.limits.start
        if seconds > limit:
            because = f": {self._alone_because}" if self._alone_because else ""
            reason = f"left, without a captain for {limit:g} s (limits.start){because}"
            last_words(self._options.last_words, {"status": "left", "reason": reason})
            self._finish()

    # ---- tasks

    def _start(self, message: Message) -> None:
        if self._leaving or int(message["generation"]) < self._generation:
            return
        self._remember(int(message["generation"]))
        for name, number in message["tasks"].items():
            if name not in self._tasks or name in self._attempts:
                continue
            log = self._logs.get(name)
            if log is None:
                log = self._logs[name] = TaskLog(
                    f"{self._options.folder}/logs/{name}.log", lambda text: self._said(text, True), name, self._echo
                )
            self._kills_before = self._memory.kills()
            attempt = Attempt(
                self._tasks[name], int(number), self._generation, log, self.loop, self._send_beat, self._told_by
            )
            self._attempts[name] = attempt
            try:
                restore = message["restore"] if restores(self._plan, self._tasks[name]) else None
                given = self._staging.environment(name, self._generation, restore)
                self._starting.start(attempt, self._roster, int(message["restarts"]), given)
            except OSError as error:
                self._cannot_start(attempt, error)

    def _told_by(self, attempt: Attempt, message: dict[str, Any]) -> None:
        """What the runtime in a task has to say."""
        kind, task = message["_"], attempt.task.name
        if kind == "saved":
            self._staging.look()
        elif kind == "warning":
            self._said(f"{task}: {str(message.get('text'))[:2000]}", True)
        elif kind == "asks":
            attempt.asks = True
            self._send_beat()
        elif kind == "save":
            self._send({"type": "save", "task": task})
        elif kind == "agree":
            step = attempt.step if message.get("step") is None else message["step"]
            words = {name: message.get(name) for name in ("say", "which", "count")}
            self._send({"type": "agree", "task": task, **words, "step": step or 0})

    def _cannot_start(self, attempt: Attempt, error: OSError) -> None:
        attempt.log.feed(f"{error.strerror}: {error.filename}\n".encode())
        self._ended(attempt, 127 << 8)

    def _last_generation(self) -> int:
        """The highest this host has seen, also by an agent before this one: numbers only grow."""
        try:
            with open(self._generation_file) as file:
                return int(file.read())
        except (OSError, ValueError):
            return 0

    def _remember(self, generation: int) -> None:
        if generation <= self._generation:
            return
        self._generation = generation
        try:
            with open(self._generation_file, "w") as file:
                file.write(str(generation))
        except OSError:
            pass  # a full disk: this agent still knows

    def _began(self, attempt: Attempt) -> None:
        words = {"pid": attempt.pid, "warm": attempt.warm}
        self._send({"type": "started", "task": attempt.task.name, "attempt": attempt.number, **words})
        self._staging.watching.began(attempt)
        if attempt.asked:
            attempt.kill()
        early = self._early.pop(attempt.pid, None)
        if not self._starting.asked_a_spare():
            self._early.clear()  # pids are used again
        if early is not None:
            self._ended(attempt, early)

    def _child_ended(self, pid: int, status: int) -> None:
        if self._starting.child_ended(pid) or self._staging.porting.child_ended(pid):
            return
        for attempt in list(self._attempts.values()):
            if attempt.pid == pid:
                self._ended(attempt, status)
                return
        if self._starting.asked_a_spare():
            self._early[pid] = status
        for name in self._tasks:
            if name not in self._attempts:
                self._sweep(name)  # what an orphan left behind has come here too

    def _ended(self, attempt: Attempt, status: int) -> None:
        name = attempt.task.name
        attempt.kill()  # what it started and left in its process group
        self._sweep(name)
        attempt.finish()
        well = status == 0 and attempt.asked in ("", "term")
        self._staging.watching.ended(attempt, well, lambda: self._gone(attempt, status))

    def _gone(self, attempt: Attempt, status: int) -> None:
        name = attempt.task.name
        self._staging.look()  # its last snapshot, and its last step, before the word that it is gone
        self._send_beat()
        del self._attempts[name]
        if attempt.cold_because:
            self._starting.no_spares(f"{name} starts cold from now on: {attempt.cold_because}")
        if attempt.state:
            self._states[name] = attempt.state
        if attempt.asked == "abort":
            self._stacks[name] = causes.stacks(attempt.log.tail)[-STACKS_LIMIT:]
        exit = self._exit_of(attempt, status)
        self._exits[name], self._exit_at[name] = exit, self._failed_at(attempt)
        if exit.cause or not exit.expected:
            self._send({"type": "exited", "exit": exit.__dict__})
        if exit.expected and self._ending:
            self._tell_ended()
        elif not self._leaving:
            self._offer()
        if self._leaving and not self._attempts:
            self._go()

    def _exit_of(self, attempt: Attempt, status: int) -> ev.Exit:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        expected = bool(attempt.asked)
        if expected:
            shown = attempt.log.tail if attempt.asked == "kill" else ()
            cause = causes.own_error(shown, attempt.raised) if attempt.asked != "term" else None
            cause = cause or causes.Cause("")
        else:
            memory = self._out_of_memory(attempt, number)
            cause = causes.classify(status, attempt.log.tail, self._leaving, memory, attempt.raised)
        survivor = cause.survivor and len(self._plan.tasks) > 1
        return ev.Exit(
            attempt.task.name, attempt.number, code, None if number is None else causes.signal_name(number), expected,
            cause.kind, cause.detail, cause.place, survivor, max(0.0, self.loop.now() - self._failed_at(attempt)),
        )  # fmt: skip

    def _failed_at(self, attempt: Attempt) -> float:
        """When it failed: an exception comes before the exit, and who was first is told by that."""
        return attempt.raised_at if attempt.raised is not None else self.loop.now()

    def _out_of_memory(self, attempt: Attempt, number: int | None) -> str | None:
        if number != signal.SIGKILL:
            return None
        kills = self._memory.kills()
        counted, self._kills_before = kills > self._kills_before, kills
        if counted or machine.kernel_killed(attempt.pid):
            _used, limit = self._memory.used_and_limit()
            return f"killed by the kernel for want of memory ({limit >> 20} MiB is the limit)"
        return None

    def _sweep(self, task: str) -> None:
        """What a task started and that left its process group: orphans are adopted by this agent."""
        known = {attempt.pid for attempt in self._attempts.values()} | self._starting.pids()
        known |= self._staging.porting.pids()
        for pid in machine.children(os.getpid()):
            if pid not in known and machine.environment_of(pid, "PACELINE_TASK") == task:
                _signal(pid, signal.SIGKILL)

    def _end(self, tasks: dict[str, int], how: str, grace: float) -> None:
        for name, number in tasks.items():
            attempt = self._attempts.get(name)
            self._ending[name] = number
            if attempt is not None and attempt.number == number:
                self._ask(attempt, how, grace)
        self._tell_ended()

    def _ask(self, attempt: Attempt, how: str, grace: float) -> None:
        attempt.asked = how
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        if how == "kill":
            attempt.state = "stopped" if attempt.is_stopped() else ""
            attempt.kill()
        elif how == "abort":
            attempt.state = attempt.doing()
            attempt.log.tail.clear()
            below = [] if self._starting.python is not None else machine.descendants(attempt.pid)
            for pid in below or [attempt.pid]:  # a shell has no stacks to show: what it runs has
                _signal(pid, signal.SIGABRT)
                _signal(pid, signal.SIGCONT)
            attempt.deadline = self.loop.after(STACKS_WITHIN, attempt.kill)
        else:
            attempt.signal(signal.SIGTERM, whole_group=self._starting.python is None)
            attempt.signal(signal.SIGCONT, whole_group=True)
            attempt.deadline = self.loop.after(grace, attempt.kill)

    def _tell_ended(self) -> None:
        """Once all that was asked to end is gone, say so, with addresses for the next start."""
        for name, number in self._ending.items():
            attempt = self._attempts.get(name)
            if attempt is not None and attempt.number == number:
                return
        ending, self._ending = self._ending, {}
        self._offer(ending)

    def _offer(self, ended: dict[str, int] | None = None) -> None:
        states, self._states = self._states, {}
        stacks, self._stacks = self._stacks, {}
        self._send(
            {"type": "ended", "tasks": ended or {}, "offers": self._offers(), "states": states, "stacks": stacks}
        )

    def _offers(self) -> dict[str, str]:
        if self._leaving:
            return {}
        taken: set[str] = set()
        offers = {}
        for name in self._tasks:
            if name not in self._attempts:
                address = f"{self._options.address}:{machine.free_port()}"
                while address in taken:
                    address = f"{self._options.address}:{machine.free_port()}"
                taken.add(address)
                offers[name] = address
        return offers

    # ---- leaving

    def _told_to_go(self) -> None:
        if self._leaving or self._over:
            return
        self._leaving = True
        grace = self._plan.limits.grace
        self._send({"type": "leaving", "reason": "SIGTERM"})
        for attempt in self._attempts.values():
            attempt.deadline = self.loop.after(grace, attempt.kill)
        if self._joined and any(attempt.asks for attempt in self._attempts.values()):
            # The group takes a snapshot first; the captain says when it is committed.
            self.loop.after(SAVING_SHARE * grace, self._end_all)
        else:
            self._end_all()

    def _end_all(self) -> None:
        if not self._leaving or self._told_tasks:
            return
        self._told_tasks = True
        for attempt in self._attempts.values():
            attempt.signal(signal.SIGTERM, whole_group=self._starting.python is None)
        if not self._attempts:
            self._go()

    def _go(self) -> None:
        self._exit = LEAVING
        self._farewell()

    def _finish(self) -> None:
        for attempt in self._attempts.values():
            attempt.asked = attempt.asked or "kill"
            attempt.kill()
        self._farewell()

    def _farewell(self) -> None:
        """Where the run is over, the last of its output goes first: the captain waits, and may have the place for it.
        Where it is not, another instance of this host may be waiting."""
        if self._over:
            self._keeping.close(self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self._send({"type": "left"})
        self.loop.after(0.0, self._depart)

    def _depart(self) -> None:
        self._hang_up()
        self._keeping.close(self.loop.stop)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def main(options: Options, instance: str, number: int, beat: Callable[[Any], None]) -> int:
    sys.stdout.flush()
    member = Member(options, instance, number)
    beat(member.loop)
    return member.run()
