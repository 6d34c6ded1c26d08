"""Python stacks of tasks: what the signals write, how members and captain pass it on, and how it is shown."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.agent.captain_process.task_requests import MOST_REQUESTS, Instruction, TaskRequests
from paceline.agent.net import messages, task_request
from paceline.agent.net.frames import LIMIT, Decoder, Message, WireError, encode
from paceline.agent.net.loop import Timer
from paceline.agent.stacks import Frame, StacksTaken, TakeStacks, ThreadSamples
from paceline.agent.tasks import stack_reader, stack_sampler
from paceline.agent.tasks.stack_reader import CannotRead, Stacks, parse_dump, parse_sample
from paceline.backends.kubernetes.runs.task_request import command
from paceline.client.task_requests import select
from paceline.errors import UsageError
from paceline.frameworks import stack_signal
from paceline.plan import Plan
from paceline.view import flame_graph
from paceline.view.stacks import ProcessStacks, ThreadStacks, describe, groups, read, task_ranges
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
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    try:
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

    def dump(self) -> Stacks:
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
    process.dump()
    taken = process.taken("host", 1, str)
    assert [thread.native_id for thread in taken.threads] == [10, 12] and taken.problem == ""


def test_a_process_that_never_replies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_of(Reader([], {}), monkeypatch)
    process.request()
    process.dump()
    assert "blocked in the kernel" in process.taken("host", 1, str).problem


def test_secrets_in_names_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_of(Reader([{10: (Frame("/home/secret/a.py", 1, "f"),)}], {}), monkeypatch)
    process.request()
    process.look()
    assert process.taken("host", 1, lambda text: text.replace("secret", "***")).frames[0].file == "/home/***/a.py"


def test_a_process_that_cannot_be_opened_is_a_problem_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the thread would end without an answer, and the next requests would wait for ever."""
    closed: list[int] = []

    def open_reader(pid: int) -> Any:
        if pid == 11:
            raise OSError(24, "Too many open files")
        return SimpleNamespace(close=lambda: closed.append(pid))

    monkeypatch.setattr(stack_sampler, "StackReader", open_reader)
    sent: list[StacksTaken] = []
    loop: Any = SimpleNamespace(watch=lambda *_: None)
    sampler = stack_sampler.StackSampler("host", loop, {}, lambda _: [], str, sent.append)
    sampler._read(TakeStacks(1, ("worker-0", "worker-1")), [("worker-0", 10), ("worker-1", 11)])
    sampler._finish()
    assert closed == [10]
    assert [(each.task, "Too many open files" in each.problem) for each in sent] == [
        ("worker-0", True), ("worker-1", True),
    ]  # fmt: skip
    for end in (sampler._wake_read, sampler._wake_write):
        end.close()


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
    captain.requests.on_reply(StacksTaken("worker-host-1", request, "worker-1", "it is starting", last=True))
    assert captain.shown() == [("worker-1", "it is starting")]
    captain.requests.on_reply(StacksTaken("worker-host-0", request, "worker-0", "", 100, last=True))
    assert captain.shown()[1:] == [("worker-0", ""), ("stacks-end", "")]
    captain.requests.on_reply(StacksTaken("worker-host-0", request, "worker-0", "", 100, last=True))
    assert len(captain.replies) == 3  # it is complete


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
