"""The captain's surroundings: connections of members, the clock, events.jsonl, its notes and the report."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from typing import Any

from paceline.agent import events as ev
from paceline.agent import machine, messages
from paceline.agent.captain import Captain
from paceline.agent.journal import Appender, Echo, last_words, replace, replace_text, stamp
from paceline.agent.keeping import Keeping
from paceline.agent.link import Link, LinkClosed, context
from paceline.agent.lookup import Found, Lookup
from paceline.agent.loop import Loop
from paceline.agent.options import FAILED, LEAVING, SAVING_SHARE, Options, endpoint
from paceline.agent.porting import Porting, errand
from paceline.agent.wire import Message, WireError, encode, encode_packed
from paceline.plan import from_data

INTRODUCTION = 10.0  # seconds a connection may take to say who it is
HEAD_START = 0.1  # seconds
SAVE_EVERY = 5.0  # seconds between notes of what members could tell as well
RESERVE = 256 * 1024  # bytes
MEMBER_LIMIT = 8 * 1024 * 1024
NAMED_EVERY = 10.0  # seconds between looks at who bears the captain's name
TOLD_WITHIN = 1.0  # seconds: hosts that have to go with the captain's
SUCCEEDED_AFTER = 25.0  # seconds that another bears it; less is a name server that is behind


class Connection:
    """One peer: a stranger until its first message, then a member or a person's command line."""

    def __init__(self, captaincy: Captaincy, sock: socket.socket) -> None:
        self._captaincy = captaincy
        self.link = Link(sock, captaincy.tls, server=True, limit=MEMBER_LIMIT)
        self.host = ""
        self.heard = captaincy.loop.now()
        self.rewatch()

    def rewatch(self) -> None:
        self._captaincy.loop.watch(self.link, self.link.interest(), self._ready)

    def _ready(self) -> None:
        try:
            received = self.link.ready()
            for message in received:
                self.heard = self._captaincy.loop.now()
                self._captaincy.receive(self, message)
            if self in self._captaincy.connections:
                self.rewatch()
        except (LinkClosed, WireError) as error:
            self._captaincy.drop(self, str(error))

    def send_bytes(self, *frames: bytes) -> None:
        try:
            self.link.send_bytes(*frames)
            self.rewatch()
        except LinkClosed as error:
            self._captaincy.drop(self, str(error))


class Captaincy:
    def __init__(self, options: Options) -> None:
        with open(options.plan) as file:
            plan = from_data(json.load(file))
        self._options = options
        self._folder = options.folder
        self._notes = f"{options.folder}/captain.json"
        self._reserve = f"{options.folder}/.reserve"
        self._plan = plan
        self._rank = {task.name: task.rank for task in plan.tasks}
        self.loop = Loop()
        self.tls = context(options.tls, "captain", server=True)
        self.connections: set[Connection] = set()
        self._members: dict[str, Connection] = {}
        self._successors: dict[str, tuple[Connection, ev.Joined]] = {}  # of hosts that are still there
        self._later: dict[str, tuple[bytes, ...]] = {}  # first starts that give the leader of the group a head start
        self._instances: dict[str, list[str]] = {}  # host -> instances in the order they came; the last is the one
        self._events = Appender(f"{self._folder}/events.jsonl", self._trouble)
        self._echo = Echo() if options.echo else None
        self._exit = 0
        self._saved = ""
        self._milestone: tuple[object, ...] = ()
        self._saved_at = 0.0
        self._ticked = self.loop.now()
        saved = self._read_notes()
        self._started = saved.get("started") or stamp()
        self._beat = 1.0 if len(plan.hosts) <= 256 else options.lease / 4
        now, self._boot = self.loop.now(), machine.boot()
        # Another start of the machine has another clock: how long nobody was there is not known, and does not count.
        ahead = now - saved["now"] if saved and saved["boot"] != self._boot else 0.0
        there = errand(plan, options)
        copies = bool(there.serve) or not there.place.startswith("/")
        self._captain = Captain(plan, options.run, options.lease, now, time.time(), saved.get("captain"), copies, ahead)
        environment = {**os.environ, **next(role.env for role in plan.roles if role.decides)}
        self._name = os.urandom(8).hex()
        self._porting = Porting(there, environment, self.loop)
        if there.serve:
            self._porting.start()
        files = {name: f"{self._folder}/{name}" for name in ("events.jsonl", "report.json")}
        self._keeping = Keeping(
            plan, options, {"plan.json": options.plan, **files}, self._porting, self.loop,
            lambda text: self._tell(ev.Said(options.host, text, warning=True)),
        )  # fmt: skip
        self.loop.on_child(self._child_ended)
        self.loop.on_signal(signal.SIGTERM, self._told_to_go)
        _raise_file_limit()
        self._listener = self._listen()
        self.loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        if not saved:
            tasks, hosts = [task.name for task in plan.tasks], [host.name for host in plan.hosts]
            words = {"framework": plan.framework, "strategy": plan.strategy, "tasks": tasks, "hosts": hosts}
            self._write_event("run-started", 0, {"run": options.run, "job": plan.name, **words})
        self._keep_room()
        self._save()
        self._tick()
        self._mine = 0.0  # when its name led here for the last time; 0: it has not done so yet
        self._lookup = Lookup(self.loop, self._named)
        if options.listen:
            self._look_for_itself()

    def run(self) -> int:
        self.loop.run()
        self._porting.close()
        return self._exit

    def _told_to_go(self) -> None:
        """Hosts on the same node may be told, too: the snapshot that their group takes then needs a captain, and so
        does the reason why their tasks have ended, until it is written down."""
        most = SAVING_SHARE * self._plan.limits.grace
        until = self.loop.now() + most

        def look() -> None:
            if (self._captain.leaving or self._captain.is_stopping) and self.loop.now() < until:
                self.loop.after(0.1, look)
            else:
                self._exit = LEAVING
                self.loop.stop()

        self.loop.after(min(TOLD_WITHIN, most), look)

    # ---- connections

    def _listen(self) -> socket.socket:
        host, port = endpoint(self._options.listen or self._options.captain)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
        listener.setblocking(False)
        return listener

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return  # out of descriptors or a peer that left at once; the next round tries again
            self.connections.add(Connection(self, sock))

    def receive(self, connection: Connection, message: Message) -> None:
        if connection.host:
            if message["type"] == "beat":
                connection.send_bytes(encode({"type": "beat", "n": message.get("n")}))
            told = messages.read_member(message, connection.host)
            if told is not None:
                self._tell(told)
        elif message["type"] == "join":
            self._join(connection, messages.read_join(message, self._options.run))
        elif message["type"] == "stop":
            reason = str(message.get("reason") or "stopped by a person")[:500]
            connection.send_bytes(encode({"type": "stopping", "grace": self._plan.limits.grace}))
            self._tell(ev.Stop(reason))
        else:
            raise WireError(f"{message['type']!r} before join")

    def _join(self, connection: Connection, joined: ev.Joined) -> None:
        if joined.host not in self._captain.members:
            raise WireError(f"no host {joined.host!r} in this run")
        lives = self._instances.setdefault(joined.host, [])
        if joined.instance in lives[:-1]:
            connection.send_bytes(
                encode({"type": "finish", "status": "replaced", "reason": "another instance took this host's place"})
            )
            return
        connection.heard = self.loop.now()
        earlier = self._members.get(joined.host)
        if joined.instance not in lives:
            if self._is_there(joined.host) and not self._displaces(joined):
                # It trains, or its tasks have their grace: when it leaves, it says how they ended.
                self._successors[joined.host] = connection, joined
                connection.send_bytes(encode({"type": "wait"}))
                return
            if earlier is not None and joined.running:
                del lives[-1]  # it came first to a captain that has returned, and waits from now on
            lives.append(joined.instance)
        if earlier is not None:
            self.drop(earlier, "joined again")
        connection.host = joined.host
        self._members[joined.host] = connection
        connection.send_bytes(encode({"type": "welcome", "lease": self._options.lease, "beat": self._beat}))
        if connection in self.connections:
            self._tell(joined)

    def _is_there(self, host: str) -> bool:
        """Also one whose connection has ended: it runs its tasks, and may dial again, as long as it has its lease."""
        member = self._captain.members[host]
        leased = not member.left and self.loop.now() < member.lease_until
        return host in self._members or (leased and bool(self._captain.books.held(host)))

    def _displaces(self, joined: ev.Joined) -> bool:
        """Whether the instance before this one cannot be running; or runs nothing, while this one does."""
        member = self._captain.members[joined.host]
        trains = bool(joined.running) and not self._captain.books.held(joined.host)
        return joined.replaces or trains or bool(joined.place and joined.place == member.place)

    def _hand_over(self) -> None:
        """To those that wait for a host that has gone."""
        for host, (connection, joined) in list(self._successors.items()):
            if connection not in self.connections:
                del self._successors[host]  # it will dial again
            elif not self._is_there(host):
                del self._successors[host]
                self._join(connection, joined)

    def drop(self, connection: Connection, why: str) -> None:
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.loop.unwatch(connection.link)
        connection.link.close()
        if connection.host and self._members.get(connection.host) is connection:
            del self._members[connection.host]
            self._later.pop(connection.host, None)
            self._tell(ev.Disconnected(connection.host))
            if connection.host in self._successors:
                self.loop.after(0.0, self._hand_over)

    def _child_ended(self, pid: int, _: int) -> None:
        self._porting.child_ended(pid)

    # ---- the captain's word

    def _tell(self, told: ev.Told) -> None:
        for instruction in self._captain.handle(told, self.loop.now()):
            self._carry_out(instruction)
        stale = isinstance(told, ev.Tick) and self.loop.now() - self._saved_at > SAVE_EVERY
        if stale or self._captain.milestone() != self._milestone:
            self._save()  # what lies between two ticks, members that join again will tell

    def _carry_out(self, instruction: ev.Instruction) -> None:
        if isinstance(instruction, ev.Emit):
            if instruction.kind == "run-ended":
                self._make_room()
            self._write_event(instruction.kind, instruction.generation, instruction.fields)
        elif isinstance(instruction, ev.Start):
            self._save()  # a captain that returns must know of this generation
            roster = encode_packed(
                {"type": "roster", "generation": instruction.generation, "roster": instruction.roster}
            )
            restore = None if instruction.restore is None else str(instruction.restore)
            common = {"type": "start", "generation": instruction.generation, "restarts": instruction.restarts}
            common["data"] = instruction.data
            for host, tasks in instruction.hosts.items():
                frames = (roster, encode({**common, "restore": restore, "tasks": tasks}))
                if instruction.generation == 1 and self._follows(tasks):
                    self._later[host] = frames
                    self.loop.after(HEAD_START, lambda host=host: self._send(host))  # type: ignore[misc]
                else:
                    self._send(host, *frames)
        elif isinstance(instruction, ev.End):
            words = {"tasks": instruction.tasks, "how": instruction.how, "grace": instruction.grace}
            self._send(instruction.host, encode({"type": "end", **words}))
        elif isinstance(instruction, ev.Finish):
            self._send(
                instruction.host, encode({"type": "finish", "status": instruction.status, "reason": instruction.reason})
            )
        elif isinstance(instruction, ev.Say):
            self._send(instruction.host, encode(instruction.message))
        elif isinstance(instruction, ev.Ask):
            request = {"by": self._name, **instruction.request}
            self._porting.ask(request, lambda answer: self._tell(ev.Answered(request, answer)))
        elif isinstance(instruction, ev.Leave):
            self._leave(instruction.reason)
        elif isinstance(instruction, ev.Over):
            self._over(instruction)

    def _follows(self, tasks: Iterable[str]) -> bool:
        """Whether these dial the first of their group when they start, and wait a second where it is not up yet."""
        if self._plan.framework not in ("tensorflow", "jax") or self._plan.strategy == "parameter-server":
            return False
        return all(self._rank.get(name, 0) > 0 for name in tasks)

    def _send(self, host: str, *frames: bytes) -> None:
        """What was held back for this host goes first, so that nothing overtakes it."""
        frames = (*self._later.pop(host, ()), *frames)
        connection = self._members.get(host)
        if connection is not None and frames:
            connection.send_bytes(*frames)

    def _tick(self) -> None:
        now = self.loop.now()
        late = now - self._ticked > 2.0  # this process was held up itself: what members said may not be read yet
        self._ticked = now
        for connection in [] if late else list(self.connections):
            limit = self._options.lease if connection.host else INTRODUCTION
            if now - connection.heard > limit:
                self.drop(connection, "silent")
        self._tell(ev.Tick())
        self._hand_over()
        self.loop.after(0.5 if len(self._captain.members) <= 256 else 1.0, self._tick)

    # ---- a successor

    def _look_for_itself(self) -> None:
        self._lookup.begin(*endpoint(self._options.captain))
        self.loop.after(NAMED_EVERY, self._look_for_itself)

    def _named(self, _: Found) -> None:
        """Its name leads to another for good: the backend has given this captain up, and the members find that one."""
        now, addresses = self.loop.now(), self._lookup.addresses
        if not addresses or self._options.address in addresses:
            self._mine = now if addresses else self._mine
        elif self._mine and now - self._mine > SUCCEEDED_AFTER:
            self._leave(f"{self._options.captain} is another captain now ({', '.join(addresses)})")

    def _leave(self, why: str) -> None:
        self._trouble(f"{why}: this captain leaves")
        self._exit = LEAVING
        for connection in list(self.connections):
            self.connections.discard(connection)
            connection.link.close()
        self.loop.stop()

    # ---- files

    def _write_event(self, kind: str, generation: int, fields: dict[str, Any]) -> None:
        line = json.dumps({"at": stamp(), "event": kind, "generation": generation, **fields}).encode() + b"\n"
        self._events.write(line)
        if self._echo is not None:
            self._echo.write(line)

    def _trouble(self, text: str) -> None:
        try:
            print(text, flush=True)
        except OSError:
            pass  # the disk that is full may hold this output too

    def _keep_room(self) -> None:
        """A few blocks that are given up at the end, so that a full disk does not cost the report."""
        try:
            with open(self._reserve, "wb") as file:
                file.write(b"\0" * RESERVE)
        except OSError:
            pass

    def _make_room(self) -> None:
        try:
            os.unlink(self._reserve)
        except OSError:
            pass
        self._events.try_again()

    def _read_notes(self) -> dict[str, Any]:
        try:
            with open(self._notes) as file:
                notes: dict[str, Any] = json.load(file)
                return notes
        except (OSError, ValueError):
            return {}

    def _save(self) -> None:
        self._milestone = self._captain.milestone()
        self._saved_at = self.loop.now()
        saved = json.dumps(self._captain.saved())
        if saved == self._saved:
            return
        when = json.dumps({"started": self._started, "boot": self._boot, "now": self._saved_at})
        try:
            replace_text(self._notes, f'{when[:-1]}, "captain": {saved}}}')
            self._saved = saved
        except OSError:
            pass  # a full disk: a captain that returns learns from its members what it can

    def _over(self, over: ev.Over) -> None:
        watch = self._captain.watch
        report = {
            "run": self._options.run,
            "status": over.status,
            "reason": over.reason,
            "cause": over.cause,
            "generations": self._captain.generation,
            "restarts": [_shown(record) for record in self._captain.failing.restarts],
            "steps": watch.steps,
            "steps_per_s": watch.steps_per_second(),
            "metrics": watch.metrics,
            "best": self._captain.shelf.best_words().get("best"),
            "skipped": self._captain.shelf.skipped,
            "started": self._started,
            "ended": stamp(),
            "folder": self._folder,
            "stacks": self._captain.failing.stacks,
        }
        try:
            replace(f"{self._folder}/report.json", report)
        except OSError as error:
            self._trouble(f"cannot write the report: {error}")
        told = ("status", "reason", "cause", "generations", "steps", "steps_per_s", "started", "ended")
        last_words(self._options.last_words, {name: report[name] for name in told})
        self._exit = FAILED if over.status == "failed" else 0
        for connection, _ in self._successors.values():
            connection.send_bytes(encode({"type": "finish", "status": over.status, "reason": over.reason}))
        for connection in list(self.connections):
            self.connections.discard(connection)
            connection.link.close()
        self.loop.unwatch(self._listener)
        if self._captain.generation or self._options.echo:
            self._keeping.close(self.loop.stop)
        else:
            self.loop.stop()  # there is nothing at the place, which may be what does not answer


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in record.items() if not k.startswith("_")}, "at": stamp(record["at"])}


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass


def main(options: Options, beat: Any | None = None) -> int:
    captaincy = Captaincy(options)
    if beat is not None:
        beat(captaincy.loop)
    os.chdir("/")
    return captaincy.run()
