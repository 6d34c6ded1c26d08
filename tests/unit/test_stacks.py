"""Python stacks of tasks: what the signals write, how members and captain pass it on, and how it is shown."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.agent.captain_process.task_requests import MOST_REQUESTS, Instruction, TaskRequests
from paceline.agent.net import messages, task_request
from paceline.agent.net.frames import LIMIT, MEMBER_LIMIT, Decoder, Message, WireError, encode
from paceline.agent.net.loop import SLICE, Timer
from paceline.agent.net.loop import Loop as RealLoop
from paceline.agent.stack_messages import MOST_PROCESSES, Frame, StacksTaken, TakeStacks, ThreadSamples
from paceline.agent.tasks import stack_reader, stack_sampler
from paceline.agent.tasks.stack_reader import CannotRead, Stacks, parse_dump, parse_sample
from paceline.backends.kubernetes.runs import task_request as cluster_request
from paceline.backends.kubernetes.runs.task_request import command
from paceline.cli import stacks as cli_stacks
from paceline.client.diagnosis.stacks import read_reply
from paceline.client.diagnosis.task_requests import select
from paceline.errors import UsageError
from paceline.frameworks import stack_signal
from paceline.plan import Plan
from paceline.view.diagnosis import flame_graph
from paceline.view.diagnosis.stacks import ProcessStacks, ThreadStacks, describe, groups, read, task_ranges
from support.worlds import make_plan

STEP = Frame("/home/me/train.py", 41, "step")
MAIN = Frame("/home/me/train.py", 60, "<module>")
REDUCE = Frame("/usr/lib/python3/dist-packages/torch/distributed/c10d.py", 2500, "all_reduce")
WAIT = Frame("/usr/lib/python3.11/threading.py", 324, "wait")


# ---- what the signals write


def test_a_sample_has_the_stacks_of_all_threads() -> None:
    text = 'Begin 3\nThread 10\n  File "a b.py", line 4 in f\n  File "m.py", line 9 in <module>\nThread 12\nEnd 3\n'
    assert parse_sample(text, 3) == {10: (Frame("a b.py", 4, "f"), Frame("m.py", 9, "<module>"))}


@pytest.mark.parametrize(
    "text",
    ["", "Begin 3\nThread 10\n  File", 'Begin 2\nThread 10\n  File "a.py", line 4 in f\nEnd 2\n', "Begin 3\nEnd 2\n"],
)
def test_an_incomplete_sample_or_that_of_an_earlier_request_is_not_read(text: str) -> None:
    assert parse_sample(text, 3) is None


def test_a_dump_of_faulthandler_is_one_stack() -> None:
    frames = '  File "caf\\xe9.py", line 4 in f\n  File "m.py", line ??? in <module>\n  ...\n'
    text = f"Stack (most recent call first):\n{frames}"
    assert parse_dump(text) == (Frame("café.py", 4, "f"), Frame("m.py", 0, "<module>"))


def test_a_late_sample_within_a_dump_is_left_out() -> None:
    late = 'Begin 1\nThread 5\n  File "x.py", line 1 in x\nEnd 1\n'
    text = f'Stack (most recent call first):\n{late}  File "m.py", line 4 in f\n'
    assert parse_dump(text) == (Frame("m.py", 4, "f"),)


@pytest.mark.parametrize("text", ["", "Stack (most recent call first):\n  <no Python frame>\n", "Stack (mo"])
def test_a_thread_without_python_code_has_no_stack(text: str) -> None:
    assert parse_dump(text) is None


def test_two_dumps_at_once_are_not_mixed() -> None:
    one = 'Stack (most recent call first):\n  File "m.py", line 4 in f\n'
    assert parse_dump(one + one) is None


def test_the_main_thread_writes_the_stacks_of_all_threads() -> None:
    is_running, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        is_running.set()
        is_over.wait()

    other = threading.Thread(target=wait)
    other.start()
    try:
        assert is_running.wait(60)
        lines = "\n".join(stack_signal._stacks(sys._getframe()))
    finally:
        is_over.set()
        other.join()
    stacks = parse_sample(f"Begin 1\n{lines}\nEnd 1\n", 1)
    assert stacks is not None and other.native_id is not None
    assert stacks[os.getpid()][0].function == "test_the_main_thread_writes_the_stacks_of_all_threads"
    assert "run" in [frame.function for frame in stacks[other.native_id]]


def test_a_program_that_sets_its_own_handler_withdraws_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    table = os.memfd_create("stacks")
    output = os.dup(table)
    for name, value in {"_table": table, "_output": output, "_inode": os.fstat(table).st_ino}.items():
        monkeypatch.setattr(stack_signal, name, value)
    handlers: dict[int, str] = {}
    signals = SimpleNamespace(signal=lambda number, handler: handlers.update({number: handler}))
    stack_signal._withdraw_if_replaced(signals)
    signals.signal(10, "own")
    assert os.fstat(table)
    signals.signal(stack_signal.DUMP, "own")
    assert handlers == {10: "own", stack_signal.DUMP: "own"}
    for fd in (table, output):
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_process_without_handlers_gets_no_signal() -> None:
    """This process has none: the signal would end it."""
    assert not stack_reader.has_handlers(os.getpid())
    with pytest.raises(CannotRead, match="its Python has just started, was started without Paceline's hook"):
        stack_reader.StackReader(os.getpid())


# ---- samples of a process


class Reader:
    """Stands in for a process: `replies` are those to its requests, None means that the main thread is in a C call."""

    def __init__(self, replies: list[Stacks | None], dumped: Stacks) -> None:
        self.requests, self._replies, self._dumped = 0, replies, dumped

    def request(self) -> None:
        self.requests += 1

    def reply(self) -> Stacks | None:
        return self._replies.pop(0) if self._replies else None

    def dump(self, until: float) -> Stacks:
        return self._dumped

    def close(self) -> None:
        pass


def process_of(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stack_sampler, "StackReader", lambda pid: reader)
    return stack_sampler._Process("worker-0", 10)


def test_a_call_that_returns_late_counts_for_all_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader([{10: (STEP,)}, None, None, {10: (REDUCE, STEP)}], {})
    process = process_of(reader, monkeypatch)
    for _ in range(4):
        process.request()
        process.look()
    taken = process.taken("host", 1, str)
    assert reader.requests == 2  # a call that is not over yet is not interrupted again
    assert taken.frames == (STEP, REDUCE) and taken.stacks == ((0,), (1, 0))
    assert taken.threads == (ThreadSamples(10, (0, 1, 1, 1), pytest.approx(0.2)),)


def test_a_process_in_a_c_call_is_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_of(Reader([], {10: (REDUCE, STEP), 12: (WAIT,)}), monkeypatch)
    process.request()
    process.look()
    process.dump(0.0)
    taken = process.taken("host", 1, str)
    assert [thread.native_id for thread in taken.threads] == [10, 12] and taken.problem == ""


def test_a_process_that_never_replies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_of(Reader([], {}), monkeypatch)
    process.request()
    process.dump(0.0)
    assert "blocked in the kernel" in process.taken("host", 1, str).problem


def test_secrets_in_names_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_of(Reader([{10: (Frame("/home/secret/a.py", 1, "f"),)}], {}), monkeypatch)
    process.request()
    process.look()
    assert process.taken("host", 1, lambda text: text.replace("secret", "***")).frames[0].file == "/home/***/a.py"


@pytest.mark.parametrize("fails_at", ["open", "request", "reply"])
def test_a_process_that_cannot_be_read_is_a_problem_of_its_task(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program may have replaced the file by something else. The tasks beside it are read."""
    closed: list[int] = []

    class ReaderOf(Reader):
        def __init__(self, pid: int) -> None:
            super().__init__([{pid: (STEP,)}], {})
            self._pid = pid
            self._fail("open")

        def _fail(self, at: str) -> None:
            if self._pid == 11 and at == fails_at:
                raise OSError(29, "Illegal seek")

        def request(self) -> None:
            self._fail("request")

        def reply(self) -> Stacks | None:
            self._fail("reply")
            return super().reply()

        def close(self) -> None:
            closed.append(self._pid)

    monkeypatch.setattr(stack_sampler, "StackReader", ReaderOf)
    sent: list[StacksTaken] = []
    loop: Any = SimpleNamespace(watch=lambda *_: None)
    sampler = stack_sampler.StackSampler("host", loop, {}, lambda _: [], str, sent.append)
    sampler._read(TakeStacks(1, ("worker-0", "worker-1")), [("worker-0", 10), ("worker-1", 11)])
    sampler._finish()
    assert closed == ([10] if fails_at == "open" else [10, 11])
    assert [(each.task, each.problem) for each in sent] == [
        ("worker-0", ""), ("worker-1", "its stacks cannot be read: Illegal seek"),
    ]  # fmt: skip
    for end in (sampler._wake_read, sampler._wake_write):
        end.close()


def test_names_and_numbers_that_no_python_writes_are_left_out() -> None:
    lines = ["Thread 7", f'  File "a.py", line {"1" * 5000} in f', "Thread \u00b2", "Thread " + "9" * 17]
    text = "\n".join(["Begin 1", *lines, '  File "m.py", line 4 in f', "End 1", ""])
    assert parse_sample(text, 1) == {7: (Frame("m.py", 4, "f"),)}


def test_a_stack_is_not_deeper_than_the_signal_writes_it() -> None:
    text = "Begin 1\nThread 7\n" + '  File "m.py", line 4 in f\n' * 10_000 + "End 1\n"
    stacks = parse_sample(text, 1)
    assert stacks is not None and len(stacks[7]) == stack_signal.MOST_FRAMES


def test_whatever_a_program_writes_fits_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the captain would close the connection of the host."""

    def sample(number: int) -> Stacks:
        names = [f"{number} {index} ".ljust(stack_reader.LONGEST_NAME, "\u2603") for index in range(180)]
        return {thread: tuple(Frame(name, 1, name) for name in names) for thread in (10, 11)}

    process = process_of(Reader([*map(sample, range(100))], {}), monkeypatch)
    for _ in range(100):
        process.request()
        process.look()
    taken = process.taken("host", 1, str)
    assert len(encode(messages.member_message(taken))) < MEMBER_LIMIT
    assert taken.threads and all(taken.stacks), "what fits is there, and no stack is empty"


def test_a_reply_as_large_as_a_member_may_send_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode({"type": "stacks-taken", "problem": "x" * (LIMIT + 1)}) + encode({"type": "stacks-end"})
    pieces = [frame[at : at + 65536] for at in range(0, len(frame), 65536)]

    class Socket:
        sendall = settimeout = staticmethod(lambda _: None)
        recv = staticmethod(lambda _: pieces.pop(0))

        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None: ...

    wrapping = SimpleNamespace(wrap_socket=lambda *_, **__: Socket())
    monkeypatch.setattr(task_request, "context", lambda *_, **__: wrapping)
    monkeypatch.setattr(task_request.socket, "create_connection", lambda *_, **__: Socket())
    replies = task_request.ask_captain("127.0.0.1:1", "", "captain", {"type": "stacks"}, 0.0)
    assert [each["type"] for each in replies] == ["stacks-taken", "stacks-end"]


# ---- the captain


class Loop:
    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def after(self, _: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(callback)
        return Timer(callback)


class CaptainOfTwo:
    """The requests of a captain with two hosts; `away` are not connected."""

    def __init__(self, plan: Plan, away: tuple[str, ...] = ()) -> None:
        self.loop, self.received = Loop(), Decoder()
        self.sent: list[tuple[str, Any]] = []
        self.replies: list[Message] = []
        self._away = away
        self.requests = TaskRequests(plan, self.loop, self._send)  # type: ignore[arg-type]

    def _send(self, host: str, message: Instruction) -> bool:
        if host in self._away:
            return False
        self.sent.append((host, message))
        return True

    def begin(self, **fields: Any) -> None:
        self.requests.begin({"type": "stacks", **fields}, lambda data: self.replies.extend(self.received.feed(data)))

    def reply(self, taken: StacksTaken) -> None:
        (message,) = Decoder().feed(encode(messages.member_message(taken)))
        self.requests.on_reply(taken.host, message)

    def shown(self) -> list[tuple[str, str]]:
        """Tasks and their problems; the end."""
        return [(reply.get("task", reply["type"]), reply.get("problem", "")) for reply in self.replies]


def test_the_replies_of_members_reach_the_user_as_they_come() -> None:
    captain = CaptainOfTwo(make_plan(2))
    captain.begin(seconds=2)
    assert [(host, message.tasks, message.seconds) for host, message in captain.sent] == [
        ("worker-host-0", ("worker-0",), 2.0), ("worker-host-1", ("worker-1",), 2.0),
    ]  # fmt: skip
    request = captain.sent[0][1].request
    captain.reply(StacksTaken("worker-host-1", request, "worker-1", "it is starting", last=True))
    assert captain.shown() == [("worker-1", "it is starting")]
    threads = (ThreadSamples(100, (0, 0), 0.1),)
    taken = StacksTaken("worker-host-0", request, "worker-0", "", 100, (STEP,), ((0,),), threads, last=True)
    captain.reply(taken)
    assert captain.shown()[1:] == [("worker-0", ""), ("stacks-end", "")]
    assert messages.read_member(captain.replies[1], "worker-host-0") == taken
    captain.reply(StacksTaken("worker-host-0", request, "worker-0", "", 100, last=True))
    assert len(captain.replies) == 3  # it is complete


@pytest.mark.parametrize(
    "fields",
    [{"task": "worker-1"}, {"task": "other-0"}, {"task": ["worker-0"]}, {"request": "1"}, {"last": 1}, {"task": None}],
)
def test_a_reply_that_names_no_task_of_its_host_is_rejected(fields: dict[str, Any]) -> None:
    captain = CaptainOfTwo(make_plan(2))
    captain.begin()
    with pytest.raises(WireError):
        captain.requests.on_reply("worker-host-0", {"type": "stacks", "request": 1, "task": "worker-0", **fields})
    assert captain.replies == []


@pytest.mark.parametrize("depth", [60, 900, 940])
def test_a_reply_that_is_nested_too_deeply_is_rejected(depth: int) -> None:
    """It can be read, but not always be sent on, or read by the command line among the replies of others."""
    captain = CaptainOfTwo(make_plan(2))
    captain.begin()
    frames = "[" * depth + "]" * depth
    data = f'{{"type":"stacks","request":1,"task":"worker-0","last":true,"frames":{frames}}}'.encode()
    with pytest.raises(WireError):
        for message in Decoder().feed(struct.pack(">I", len(data)) + data):
            captain.requests.on_reply("worker-host-0", message)
    assert captain.replies == []


def test_a_host_replies_once_per_process_up_to_a_limit() -> None:
    captain = CaptainOfTwo(make_plan(1))
    captain.begin()
    request = captain.sent[0][1].request
    for pid in range(3 * MOST_PROCESSES):
        captain.reply(StacksTaken("worker-host-0", request, "worker-0", pid=pid))
    assert captain.shown() == [*[("worker-0", "")] * MOST_PROCESSES, ("stacks-end", "")]


def test_an_invalid_reply_is_a_problem_of_its_task() -> None:
    """The captain passes replies on without reading them."""
    reply = {"type": "stacks", "request": 1, "task": "worker-0", "pid": 5, "frames": [["a.py", "x", "f"]]}
    shown = read_reply(reply)
    assert shown.task == "worker-0" and shown.problem.startswith("its host sent an invalid reply: ")


def test_replies_of_a_thousand_hosts_do_not_delay_timers() -> None:
    """They arrive at the same time; the captain also has leases to renew."""
    loop, seen, done = RealLoop(), list[float](), list[int]()
    pairs = [socket.socketpair() for _ in range(40)]

    def receive(number: int) -> None:
        pairs[number][1].recv(1)
        now[0] += SLICE / 4  # what a reply takes
        done.append(number)

    now = [0.0]
    loop.now = lambda: now[0]  # type: ignore[method-assign]
    try:
        for number, (far, near) in enumerate(pairs):
            loop.watch(near, selectors.EVENT_READ, lambda number=number: receive(number))  # type: ignore[misc]
            far.send(b"12" if number == 0 else b"1")  # the first is always ready

        def tick() -> None:
            seen.append(now[0])
            loop.after(SLICE, tick)

        tick()
        while len(done) < 41:
            loop.once()
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 2.1 * SLICE
        assert sorted(done) == [0, *range(40)] and done.index(39) == 39, "each has its turn before one has a second"
    finally:
        for pair in pairs:
            for end in pair:
                end.close()
        signal.set_wakeup_fd(-1)  # set by the loop


def test_hosts_that_are_away_or_silent_are_named() -> None:
    captain = CaptainOfTwo(make_plan(2), away=("worker-host-0",))
    captain.begin()
    assert captain.shown() == [("worker-0", "its host is not connected to the captain")]
    captain.loop.timers[0]()
    assert captain.shown()[1:] == [("worker-1", "its host has not replied"), ("stacks-end", "")]


@pytest.mark.parametrize(
    "fields", [{"tasks": ["other-0"]}, {"tasks": "worker-0"}, {"seconds": 1e9}, {"seconds": True}, {"seconds": "1"}]
)
def test_an_invalid_request_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        CaptainOfTwo(make_plan(2)).begin(**fields)


def test_requests_are_limited() -> None:
    captain = CaptainOfTwo(make_plan(2))
    for _ in range(MOST_REQUESTS):
        captain.begin(tasks=["worker-0"])
    with pytest.raises(WireError):
        captain.begin(tasks=["worker-0"])


def test_the_program_in_the_captains_pod_gets_the_request() -> None:
    request = {"type": "stacks", "tasks": ["worker-0"], "seconds": 2.0}
    assert json.loads(command(request, 6.0)[-1]) == {"request": request, "seconds": 6.0}


# ---- for the user


def process(task: str, *stacks: tuple[Frame, ...], pid: int = 1) -> ProcessStacks:
    """With a main thread and others."""
    threads = [ThreadStacks(pid + number, number == 0, (stack,), 0.05) for number, stack in enumerate(stacks)]
    return ProcessStacks(task, pid, tuple(threads))


def test_a_reply_with_an_index_out_of_range_is_rejected() -> None:
    for frames, stacks, samples in [((), ((0,),), (0,)), ((STEP,), ((-1,),), (0,)), ((STEP,), ((0,),), (1,))]:
        with pytest.raises(WireError):
            read(StacksTaken("host", 1, "worker-0", "", 5, frames, stacks, (ThreadSamples(5, samples),)))


@pytest.mark.parametrize(
    ("stacks", "threads"),
    [
        (((0,) * 100_000,), (ThreadSamples(5, (0,)),)),
        (((0,),), (ThreadSamples(5, (0,) * 100_000),)),
        (((0,),), (ThreadSamples(5, (0,)),) * 10_000),
    ],
)
def test_a_reply_that_stands_for_more_than_members_send_is_rejected(stacks: Any, threads: Any) -> None:
    """As a file for speedscope, the samples of one such reply would take gigabytes."""
    with pytest.raises(WireError, match="too many"):
        read(StacksTaken("host", 1, "worker-0", "", 5, (STEP,), stacks, threads))


def test_a_thread_without_frames_is_left_out() -> None:
    threads = (ThreadSamples(5, (0,)), ThreadSamples(6, (1,)))
    shown = read(StacksTaken("host", 1, "worker-0", "", 5, (STEP,), ((0,), ()), threads))
    assert [thread.native_id for thread in shown.threads] == [5]
    assert next(iter(describe([shown]))) == "worker-0: train.py:41 in step"


class EndlessProgram:
    """In a captain's pod of another user: it sends one byte, or a chunk, whenever it is read."""

    def __init__(self, size: int, clock: list[float]) -> None:
        self._size, self._clock = size, clock

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 10.0

    def recv_into(self, buffer: memoryview, most: int) -> int:
        self._clock[0] += 1.0
        buffer[:1] = b"\n"
        return self._size


def test_a_captain_on_a_cluster_cannot_keep_a_user_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cluster_request, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    program: Any = EndlessProgram(1, clock)
    assert len([*cluster_request._lines(program, 10.0)]) == 10


def test_a_captain_on_a_cluster_cannot_reply_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cluster_request, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(cluster_request, "MOST_BYTES", 1 << 20)
    program: Any = EndlessProgram(65536, clock)
    with pytest.raises(WireError, match="too long"):
        [*cluster_request._lines(program, 10.0)]


def test_a_reply_is_read_from_the_wire() -> None:
    taken = StacksTaken(
        "host", 1, "worker-0", "", 5, (STEP, MAIN), ((0, 1), (1,)), (ThreadSamples(5, (0, 1)), ThreadSamples(7, ()))
    )
    received = messages.read_member(messages.member_message(taken), "host")
    assert isinstance(received, StacksTaken)
    assert read(received) == ProcessStacks("worker-0", 5, (ThreadStacks(5, True, ((STEP, MAIN), (MAIN,)), 0.0),))


def test_tasks_that_do_the_same_are_shown_once() -> None:
    same = [process(f"worker-{index}", (REDUCE, STEP, MAIN), (WAIT,), (WAIT,)) for index in range(998)]
    others = [process("worker-998", (STEP, MAIN)), ProcessStacks("worker-999", problem="it is not running")]
    assert list(describe([*same, *others])) == [
        "worker-0 .. worker-997 (998 tasks): train.py:41 in step, in torch/distributed/c10d.py:2500 in all_reduce",
        "  main thread",
        "    torch/distributed/c10d.py:2500 in all_reduce",
        "    /home/me/train.py:41 in step",
        "    /home/me/train.py:60 in <module>",
        "  2 threads",
        "    threading.py:324 in wait",
        "worker-998: train.py:41 in step",
        "  main thread",
        "    /home/me/train.py:41 in step",
        "    /home/me/train.py:60 in <module>",
        "worker-999: no stacks: it is not running",
    ]


def test_processes_of_one_task_are_told_apart() -> None:
    lines = [*describe([process("worker-0", (STEP,), pid=7), process("worker-0", (MAIN,), pid=8)])]
    assert [line for line in lines if line[0] != " "] == [
        "worker-0 (pid 7): train.py:41 in step",
        "worker-0 (pid 8): train.py:60 in <module>",
    ]


def test_tasks_at_other_lines_are_other_groups() -> None:
    assert len(groups([process("worker-0", (STEP,)), process("worker-1", (MAIN,)), process("worker-2", (STEP,))])) == 2


def test_names_of_many_tasks_are_shortened() -> None:
    assert task_ranges(["worker-3"]) == "worker-3"
    assert task_ranges(["worker-0", "worker-0"]) == "worker-0 (2 processes)"
    assert task_ranges(["worker-0", "worker-2", "worker-3"]) == "worker-0, worker-2 .. worker-3 (3 tasks)"
    text = task_ranges([f"worker-{index}" for index in range(0, 100, 2)])
    assert text.endswith("worker-14, ... (50 tasks)")


def test_tasks_are_selected_by_name_or_role() -> None:
    names = ["chief-0", "worker-0", "worker-1"]
    assert select([], names, "run") == names
    assert select(["worker", "chief-0"], names, "run") == names
    assert select(["worker-1"], names, "run") == ["worker-1"]
    with pytest.raises(UsageError, match="run has no task 'worker-9'; did you mean"):
        select(["worker-9"], names, "run")


# ---- pictures


def sampled() -> list[ProcessStacks]:
    main = ThreadStacks(5, True, ((STEP, MAIN),) * 3 + ((REDUCE, STEP, MAIN),), 0.2)
    waits = ThreadStacks(6, False, ((WAIT,),) * 4, 0.2)
    works = ThreadStacks(7, False, ((WAIT,), (STEP, WAIT)), 0.1)
    return [ProcessStacks("worker-0", 5, (main, waits, works)), ProcessStacks("worker-1", problem="it is starting")]


def test_the_flame_graph_shows_shares_and_leaves_out_threads_that_only_wait() -> None:
    root = ElementTree.fromstring(flame_graph.svg(sampled(), "run <1> & more"))
    svg = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{svg}title")]
    assert titles[0] == "run <1> & more: 100.0%"
    assert "worker-0: 66.7%" in titles and "worker-0, other threads: 33.3%" in titles
    assert "/home/me/train.py:60 in <module>: 66.7%" in titles
    assert "torch/distributed/c10d.py:2500 in all_reduce: 16.7%" in titles
    assert not [each for each in root.iter() if each.tag == f"{svg}script"]


def test_a_flame_graph_is_valid_whatever_functions_are_called() -> None:
    odd = Frame("/\ud800/\x1b[31m.py", 1, '\0</title><script>alert("x")</script>\ufffe')
    root = ElementTree.fromstring(flame_graph.svg([process("worker-0", (odd,))], "run \x07"))
    assert not [each for each in root.iter() if "script" in each.tag]


def test_files_are_not_written_through_links_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder may be /tmp, and the names can be guessed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "100000")
    (tmp_path / "run-100000.svg").symlink_to("private")
    with pytest.raises(FileExistsError):
        cli_stacks._write("run", sampled())
    assert not (tmp_path / "private").exists()


def test_many_tasks_are_drawn_by_role() -> None:
    many = [process(f"worker-{index}", (STEP, MAIN)) for index in range(flame_graph.MOST_TASKS + 1)]
    assert ">worker: 100.0%<" in flame_graph.svg(many, "run")


def test_a_flame_graph_of_nothing_is_valid() -> None:
    ElementTree.fromstring(flame_graph.svg([], "run"))


def test_speedscope_gets_a_profile_for_each_thread() -> None:
    data = flame_graph.speedscope(sampled(), "run")
    names = [profile["name"] for profile in data["profiles"]]
    assert names == ["worker-0, main thread", "worker-0, thread 6", "worker-0, thread 7"]
    main = data["profiles"][0]
    frames = [frame["name"] for frame in data["shared"]["frames"]]
    assert [[frames[number] for number in sample] for sample in main["samples"][-2:]] == [
        ["<module>", "step"], ["<module>", "step", "all_reduce"],
    ]  # fmt: skip
    assert sum(main["weights"]) == pytest.approx(main["endValue"]) == pytest.approx(0.2)
