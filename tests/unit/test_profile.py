"""Profiles of tasks: what a program does at its steps, what its agent takes of the files, and how captain and user get
the replies."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import plan as plans
from paceline.agent import profile_messages
from paceline.agent.captain_process.task_requests import TaskRequests
from paceline.agent.net import messages
from paceline.agent.net.frames import Decoder, Message, WireError, encode
from paceline.agent.net.loop import Timer
from paceline.agent.profile_messages import ProfileTaken, TakeProfile, profiled_tasks
from paceline.agent.tasks import profile_collector
from paceline.agent.tasks.profile_collector import ProfileCollector, Refused, move_files
from paceline.backends.kubernetes.runs import host_files
from paceline.client.diagnosis import profile as client
from paceline.errors import PacelineError, UsageError
from paceline.plan import Plan
from paceline.runtime import group_save, profiling
from paceline.runtime import report as reports
from paceline.view.files.run_folders import Run
from support.worlds import make_plan

SESSION = "2026_01_02_03_04_05"
FOLDER = f"plugins/profile/{SESSION}"

# ---- in the program


class Profiler:
    """Stands in for that of a framework."""

    log: list[Any] = []
    fails = ""

    def __init__(self, folder: str) -> None:
        self._do("start", folder)

    def begin_step(self, step: int) -> None:
        self._do("step", step)

    def stop(self) -> None:
        self._do("stop")

    def discard(self) -> None:
        self._do("discard")

    def _do(self, *call: Any) -> None:
        self.log.append(call)
        if call[0] == self.fails:
            raise OSError(28, "No space left on device")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of the socket of a program."""
    agent_end, task_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    agent_end.setblocking(False)
    task_end.setblocking(False)
    values = {
        "_descriptor": task_end.fileno(),
        "_pending": {},
        "_due": 0.0,
        "_sent": 0,
        "polls": True,
        "on_report": None,
    }
    for name, value in {**values, "_POLL_EVERY": 0.0, "_poll_at": 0.0}.items():
        monkeypatch.setattr(reports, name, value)
    monkeypatch.setattr(profiling, "_current", None)
    monkeypatch.setattr(profiling, "_PROFILERS", {"torch": Profiler})
    monkeypatch.setattr(Profiler, "log", [])
    monkeypatch.setattr(Profiler, "fails", "")
    yield agent_end
    agent_end.close()
    task_end.close()


def ask(
    agent: socket.socket, steps: int = 2, until: float = 1e12, request: int = 1, folder: str = "/f", late: float = 5.0
) -> None:
    fields = {"request": request, "framework": "torch", "steps": steps, "folder": folder}
    fields.update(until=until, discard_after=until + late)
    agent.send(json.dumps({"say": "profile", **fields}).encode())


def replies(agent: socket.socket) -> list[tuple[str, int, str]]:
    received = []
    while True:
        try:
            message = json.loads(agent.recv(65536))
        except BlockingIOError:
            return received
        if message.get("_") == "profile":
            received.append((message["stage"], message["steps"], message["error"]))


def test_the_steps_after_the_next_one_are_profiled(agent: socket.socket) -> None:
    reports.report(step=4)
    ask(agent)
    for step in range(5, 9):
        reports.report(step=step)
    assert Profiler.log == [("start", "/f"), ("step", 5), ("step", 6), ("stop",)]
    assert replies(agent) == [("started", 0, ""), ("done", 2, "")]
    assert reports.on_report is None


def test_a_program_that_asks_whether_to_save_reads_the_request_there(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a report could take a message about saving away from it."""
    agreement = group_save._Agreement()
    for step in range(5):
        reports.report(step=step)
        agreement.should_save(step)
        if step == 0:
            assert not reports.polls
            ask(agent, steps=1)
            agent.send(json.dumps({"say": "where", "which": 7}).encode())
    assert Profiler.log == [("start", "/f"), ("step", 2), ("stop",)]


def test_steps_that_are_not_reported_one_by_one_are_counted(agent: socket.socket) -> None:
    ask(agent, steps=20)
    for step in (10, 20, 20, 30, 40):
        reports.report(step=step)
    assert Profiler.log == [("start", "/f"), ("step", 10), ("step", 20), ("stop",)]
    assert replies(agent)[-1] == ("done", 20, "")


def test_a_program_that_goes_back_to_an_earlier_step_completes_its_profile(agent: socket.socket) -> None:
    ask(agent, steps=3)
    for step in (10, 11, 5, 6, 7):
        reports.report(step=step)
    assert replies(agent)[-1] == ("done", 3, "")


@pytest.mark.parametrize(
    ("fails", "log"),
    [
        ("start", [("start", "/f")]),
        ("step", [("start", "/f"), ("step", 1), ("discard",)]),
        ("stop", [("start", "/f"), ("step", 1), ("step", 2), ("stop",)]),
    ],
)
def test_a_profiler_that_fails_is_reported_and_the_program_goes_on(
    agent: socket.socket, fails: str, log: list[Any]
) -> None:
    Profiler.fails = fails
    ask(agent)
    for step in range(1, 6):
        reports.report(step=step)
    assert Profiler.log == log
    assert replies(agent)[-1][::2] == ("failed", "OSError: [Errno 28] No space left on device")
    assert reports.on_report is None


def test_steps_that_take_too_long_end_the_profile_early(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: clock[0])
    ask(agent, steps=5, until=12.0)
    for step in range(1, 5):
        reports.report(step=step)
        clock[0] += 1.0
    assert Profiler.log == [("start", "/f"), ("step", 1), ("step", 2), ("stop",)]
    assert replies(agent)[-1] == ("done", 2, "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [10.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now[0])
    return now


def test_a_report_without_a_step_ends_a_profile_whose_time_is_over(agent: socket.socket, clock: list[float]) -> None:
    ask(agent, steps=5, until=12.0)
    reports.report(step=1)
    reports.report(step=2)
    reports.report(loss=0.5)
    assert Profiler.log[-1] == ("step", 2)
    clock[0] = 12.0
    reports.report(loss=0.5)
    assert Profiler.log == [("start", "/f"), ("step", 1), ("step", 2), ("stop",)]
    assert replies(agent) == [("started", 0, ""), ("done", 1, "")] and reports.on_report is None


def test_a_report_without_a_step_starts_nothing(agent: socket.socket) -> None:
    ask(agent)
    reports.report(loss=0.5)
    assert Profiler.log == []


@pytest.mark.parametrize("fields", [{"step": 2}, {"loss": 0.5}])
def test_a_profile_that_the_agent_has_given_up_is_discarded_with_its_folder(
    agent: socket.socket, clock: list[float], tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Profilers create the folder again that the agent has removed."""
    folder = tmp_path / "profile"
    ask(agent, steps=5, until=12.0, folder=str(folder))
    reports.report(step=1)
    clock[0], _ = 17.0, folder.mkdir()
    reports.report(**fields)
    assert Profiler.log[-1] == ("discard",) and not folder.exists()
    assert replies(agent)[-1][0] == "discarded" and reports.on_report is None


def test_files_that_take_too_long_to_write_are_discarded(
    agent: socket.socket, clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profile"

    def stop(_: Profiler) -> None:
        folder.mkdir()
        clock[0] = 17.0

    monkeypatch.setattr(Profiler, "stop", stop)
    ask(agent, steps=1, until=12.0, folder=str(folder))
    reports.report(step=1)
    reports.report(step=2)
    assert replies(agent)[-1][0] == "discarded" and not folder.exists()


def test_a_reply_for_which_the_agent_is_too_busy_is_sent_later(agent: socket.socket) -> None:
    ask(agent)
    for step in (1, 2):
        reports.report(step=step)
    filled = 0
    while reports.send_to_agent({"_": "other"}):
        filled += 1
    reports.report(step=3)
    assert Profiler.log[-1] == ("stop",) and reports.on_report is not None
    assert filled and replies(agent) == [("started", 0, "")]
    reports.report(loss=0.5)
    assert replies(agent) == [("done", 2, "")] and reports.on_report is None


def test_a_request_that_is_read_too_late_starts_nothing(agent: socket.socket) -> None:
    ask(agent, until=0.0)
    reports.report(step=1)
    assert Profiler.log == [] and reports.on_report is None


def test_another_thread_does_not_count_steps(agent: socket.socket) -> None:
    ask(agent)
    reports.report(step=1)
    other = threading.Thread(target=lambda: reports.report(step=50))
    other.start()
    other.join()
    assert Profiler.log == [("start", "/f"), ("step", 1)]


def test_a_new_request_replaces_one_that_was_not_completed(agent: socket.socket) -> None:
    ask(agent)
    reports.report(step=1)
    ask(agent, steps=1, request=2)
    for step in (2, 3, 4):
        reports.report(step=step)
    assert Profiler.log == [("start", "/f"), ("step", 1), ("discard",), ("start", "/f"), ("step", 2), ("stop",)]


@pytest.mark.parametrize("data", [b"", b"x", b"[]", b'{"say": "profile"}', b'{"say": "profile", "request": []}'])
def test_a_message_that_is_not_understood_changes_nothing(agent: socket.socket, data: bytes) -> None:
    agent.send(data)
    reports.report(step=1)
    assert reports.on_report is None


def test_the_messages_of_an_evaluator_are_left_to_it(monkeypatch: pytest.MonkeyPatch, agent: socket.socket) -> None:
    for role, expected in (("worker", True), ("evaluator", False)):
        monkeypatch.setattr(reports, "polls", True)
        monkeypatch.setenv("PACELINE_ROLE", role)
        reports._open()
        assert reports.polls is expected


def test_a_framework_is_not_imported_for_a_profile() -> None:
    with pytest.raises(RuntimeError, match="the program has not imported no_framework"):
        profiling._imported("no_framework")


# ---- the files of a task


def written(folder: Path, *names: str) -> str:
    for name in names:
        (folder / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "task" / name).write_bytes(b"data")
    return str(folder / "task")


def test_files_get_the_name_of_their_task(tmp_path: Path) -> None:
    task = written(tmp_path, "plugins/profile/x/node.xplane.pb", "plugins/profile/x/node.trace.json.gz", "other.txt")
    assert move_files(task, str(tmp_path / "tb"), SESSION, "worker-0") == {
        f"{FOLDER}/worker-0.trace.json.gz": 4, f"{FOLDER}/worker-0.xplane.pb": 4,
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "tb" / FOLDER).iterdir()) == [
        "worker-0.trace.json.gz", "worker-0.xplane.pb",
    ]  # fmt: skip


def test_torchs_plugin_gets_the_name_that_it_expects(tmp_path: Path) -> None:
    (path,) = move_files(written(tmp_path, "1.pt.trace.json"), str(tmp_path / "tb"), SESSION, "worker-0")
    task, number, suffix = path.removeprefix(f"{FOLDER}/").split(".", 2)
    assert (task, suffix) == ("worker-0", "pt.trace.json") and number.isdecimal()


def test_files_with_the_same_suffix_are_all_kept(tmp_path: Path) -> None:
    files = move_files(written(tmp_path, "a.xplane.pb", "b.xplane.pb"), str(tmp_path / "tb"), SESSION, "worker-0")
    assert list(files) == [f"{FOLDER}/worker-0.xplane.pb", f"{FOLDER}/worker-0-1.xplane.pb"]


def test_links_and_pipes_are_not_taken(tmp_path: Path) -> None:
    secret = tmp_path / "secret.xplane.pb"
    secret.write_text("secret")
    task = Path(written(tmp_path, "other.txt"))
    (task / "a.xplane.pb").symlink_to(secret)
    (task / "below").symlink_to(tmp_path)
    os.mkfifo(task / "b.xplane.pb")
    with pytest.raises(Refused, match="wrote no files"):
        move_files(str(task), str(tmp_path / "tb"), SESSION, "worker-0")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(Refused, match="has replaced the folder"):
        move_files(str(tmp_path / "link"), str(tmp_path / "tb"), SESSION, "worker-0")
    assert secret.read_text() == "secret"


def test_a_profile_that_is_too_large_is_refused(tmp_path: Path) -> None:
    task = Path(written(tmp_path, "a.xplane.pb"))
    os.truncate(task / "a.xplane.pb", profile_messages.MOST_BYTES + 1)
    with pytest.raises(Refused, match=r"1 files with 256 MiB, the limit is 16 with 256 MiB: use fewer steps"):
        move_files(str(task), str(tmp_path / "tb"), SESSION, "worker-0")
    assert not (tmp_path / "tb").exists()


# ---- the agent


class Loop:
    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[Timer] = []

    def now(self) -> float:
        return self.time

    def after(self, _: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(callback))
        return self.timers[-1]

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.callback()


class Attempt:
    def __init__(self, name: str, step: int | None = 1) -> None:
        self.task, self.pid, self.exited, self.step = SimpleNamespace(name=name), 10, False, step
        self.on_profile: Callable[[dict[str, Any]], None] | None = None
        self.sent: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def says(self, stage: str, **fields: Any) -> None:
        assert self.on_profile is not None
        self.on_profile({"_": "profile", "request": 1, "stage": stage, **fields})


class Host:
    def __init__(self, folder: Path, *attempts: Attempt) -> None:
        self.folder, self.loop = folder, Loop()
        self.attempts = {attempt.task.name: attempt for attempt in attempts}
        self.sent: list[ProfileTaken] = []
        self.removed: list[str] = []
        arguments: Any = (
            self.loop, self.attempts, lambda text: text.replace("secret", "***"), self.sent.append, self._remove,
        )  # fmt: skip
        self.collector = ProfileCollector("host", "torch", str(folder), *arguments)

    def _remove(self, folders: list[str]) -> None:
        """As HostSnapshots does, with the porter."""
        for folder in folders:
            self.removed.append(Path(folder).name)
            shutil.rmtree(folder, ignore_errors=True)

    def take(self, *tasks: str, request: int = 1, seconds: float = 60.0) -> None:
        self.collector.take(TakeProfile(request, tasks or tuple(self.attempts), 20, seconds, SESSION))

    def shown(self) -> list[tuple[str, str, bool]]:
        return [(taken.task, taken.problem, taken.last) for taken in self.sent]


@pytest.fixture
def worker() -> Attempt:
    return Attempt("worker-0")


@pytest.fixture
def host(tmp_path: Path, worker: Attempt) -> Host:
    return Host(tmp_path, worker)


def test_the_files_of_a_task_are_collected(host: Host, worker: Attempt) -> None:
    host.take()
    (message,) = worker.sent
    assert (message["steps"], message["until"], message["framework"]) == (20, 160.0, "torch")
    worker.says("started", steps=0)
    (Path(message["folder"]) / "node.xplane.pb").write_bytes(b"data")
    worker.says("done", steps=20)
    (taken,) = host.sent
    assert taken == ProfileTaken("host", 1, "worker-0", "", 20, {f"{FOLDER}/worker-0.xplane.pb": 4}, True)
    assert (host.folder / "tensorboard" / FOLDER / "worker-0.xplane.pb").read_bytes() == b"data"
    assert [path.name for path in host.folder.iterdir()] == ["tensorboard"]
    host.take(request=2)
    host.loop.pass_time(1)
    assert len(host.loop.timers) == 1  # that of the first request has ended


def test_fewer_steps_than_requested_are_kept_and_reported(host: Host, worker: Attempt) -> None:
    host.take()
    (Path(worker.sent[0]["folder"]) / "node.xplane.pb").write_bytes(b"data")
    worker.says("done", steps=7)
    assert host.shown() == [("worker-0", "it completed 7 of 20 steps within 60 s", True)]
    assert host.sent[0].files and host.sent[0].steps == 7


def test_the_error_of_a_profiler_is_shown_without_secrets(host: Host, worker: Attempt) -> None:
    host.take()
    worker.says("failed", error="OSError:\n secret", steps=0)
    assert host.shown() == [("worker-0", "the profiler failed: OSError: ***", True)]
    assert list(host.folder.iterdir()) == []


@pytest.mark.parametrize(
    "fields",
    [{"stage": "other"}, {"request": 2, "stage": "done"}, {"request": [], "stage": "failed"}, {"stage": ["failed"]}],
)
def test_other_messages_of_a_task_are_ignored(host: Host, worker: Attempt, fields: dict[str, Any]) -> None:
    host.take()
    worker.says(fields.get("stage"), **{name: value for name, value in fields.items() if name != "stage"})  # type: ignore[arg-type]
    assert host.sent == []


def test_an_invalid_number_of_steps_counts_as_none(host: Host, worker: Attempt) -> None:
    host.take()
    (Path(worker.sent[0]["folder"]) / "node.xplane.pb").write_bytes(b"data")
    worker.says("done", steps="many")
    assert host.sent[0].steps == 0


@pytest.mark.parametrize(
    ("started", "problem"),
    [(False, "it ended or was restarted"), (True, "it ended or was restarted while it was profiled")],
)
def test_a_task_that_ends_is_named(host: Host, worker: Attempt, started: bool, problem: str) -> None:
    host.take()
    if started:
        worker.says("started")
    host.attempts["worker-0"] = Attempt("worker-0")  # of the next generation
    host.loop.pass_time(1)
    assert host.shown() == [("worker-0", problem, True)]


def test_every_wait_has_a_limit(host: Host, worker: Attempt) -> None:
    host.take()
    host.loop.pass_time(60)
    assert host.sent == []
    host.loop.pass_time(2)
    assert host.shown() == [("worker-0", "it completed no step within 60 s", True)]
    host.sent.clear()
    host.take()
    worker.says("started")
    host.loop.pass_time(60 + profile_messages.FINISH_WITHIN)
    assert host.sent == []
    host.loop.pass_time(1)
    assert host.shown() == [("worker-0", "its profile was not complete 60 s after the limit", True)]


@pytest.mark.parametrize("stage", ["done", "failed", "discarded"])
def test_what_a_task_writes_after_it_was_given_up_is_removed(host: Host, worker: Attempt, stage: str) -> None:
    host.take()
    folder = Path(worker.sent[0]["folder"])
    worker.says("started")
    host.loop.pass_time(61 + profile_messages.FINISH_WITHIN)
    assert len(host.sent) == 1 and not folder.exists()
    folder.mkdir()
    (folder / "node.xplane.pb").write_bytes(b"data")
    worker.says("started")
    assert folder.exists()
    for _ in range(3):
        worker.says(stage, steps=20)
    assert list(host.folder.iterdir()) == [] and len(host.sent) == 1
    assert len(host.removed) == 2, "not whenever a task says so"


def test_a_discarded_profile_does_not_take_the_place_of_the_next(host: Host, worker: Attempt) -> None:
    host.take()
    late = worker.on_profile
    host.loop.pass_time(62)
    host.collector.take(TakeProfile(2, ("worker-0",), 20, 60.0, "2026_01_02_03_04_59"))
    folder = Path(worker.sent[1]["folder"])
    assert late is not None and folder.exists() and folder != Path(worker.sent[0]["folder"])
    late({"_": "profile", "request": 1, "stage": "done", "steps": 20})
    assert folder.exists() and len(host.sent) == 1


def test_an_agent_that_leaves_removes_all_that_profiles_have_left(host: Host, worker: Attempt) -> None:
    other = host.folder / ".profile-worker-10-x"  # of another host in the same folder
    other.mkdir()
    host.take()
    folder = Path(worker.sent[0]["folder"])
    (folder / "below").mkdir()
    (host.folder / f".{folder.name}.1a2b.gone").mkdir()  # the porter has not removed it yet
    (host.folder / ".profile-worker-0-link").symlink_to(other)
    host.collector.close()
    assert list(host.folder.iterdir()) == [other]
    host.loop.pass_time(1)
    assert host.sent == [] and host.loop.timers == []


def test_the_folder_of_an_earlier_agent_is_removed(host: Host) -> None:
    (host.folder / ".profile-worker-0-2026_01_01_00_00_00").mkdir()
    host.take()
    assert host.removed == [".profile-worker-0-2026_01_01_00_00_00"]


def test_a_task_that_reports_no_steps_is_not_waited_for_until_the_limit(tmp_path: Path) -> None:
    host = Host(tmp_path, Attempt("worker-0", step=None), Attempt("worker-1", step=None))
    host.take()
    host.attempts["worker-1"].step = 1
    host.loop.pass_time(profile_collector.FIRST_STEP_WITHIN + 1)
    assert host.shown() == [("worker-0", profile_collector.NO_STEPS, False)]


def test_tasks_that_do_not_run_are_named_at_once(tmp_path: Path) -> None:
    host = Host(tmp_path, Attempt("worker-0"), Attempt("worker-1"))
    host.attempts["worker-0"].pid = 0
    host.attempts["worker-1"].exited = True
    host.take("worker-0", "worker-1", "worker-2")
    assert host.shown() == [
        ("worker-0", "it is starting", False), ("worker-1", "it is not running", False),
        ("worker-2", "it is not running", True),
    ]  # fmt: skip


def test_a_host_takes_one_profile_at_a_time(host: Host, worker: Attempt) -> None:
    host.take()
    host.take(request=2)
    assert host.shown() == [("worker-0", "another profile is being taken", True)]
    worker.says("failed", error="x")
    assert host.sent[-1].request == 1


def test_a_session_that_is_not_a_name_is_refused(host: Host) -> None:
    host.collector.take(TakeProfile(1, ("worker-0",), 20, 60.0, "../.."))
    assert host.sent[0].last and host.sent[0].problem


# ---- the captain


class Captain:
    """The requests of a captain; `away` are not connected."""

    def __init__(self, plan: Plan, away: tuple[str, ...] = ()) -> None:
        self.loop, self._decoder, self._away = Loop(), Decoder(), away
        self.sent: list[tuple[str, Any]] = []
        self.replies: list[Message] = []
        loop: Any = self.loop
        self.requests = TaskRequests(plan, loop, self._send)

    def _send(self, host: str, message: Any) -> bool:
        self.sent.append((host, message))
        return host not in self._away

    def begin(self, **fields: Any) -> float:
        request = {"type": "profile", "steps": 3, "seconds": 60, **fields}
        return self.requests.begin(request, lambda data: self.replies.extend(self._decoder.feed(data)))

    def reply(self, taken: ProfileTaken) -> None:
        (message,) = Decoder().feed(encode(messages.member_message(taken)))
        self.requests.on_reply(taken.host, message)

    def shown(self) -> list[tuple[str, str]]:
        return [(reply.get("task", reply["type"]), reply.get("problem", "")) for reply in self.replies]


def test_all_tasks_that_train_get_the_same_request() -> None:
    captain = Captain(make_plan(2, evaluator=1))
    assert captain.begin() == 60 + profile_messages.FINISH_WITHIN + profile_messages.ANSWER_WITHIN
    (first, one), (second, two) = captain.sent
    assert (first, second) == ("worker-host-0", "worker-host-1")
    assert (one.steps, one.seconds, one.session) == (two.steps, two.seconds, two.session) == (3, 60.0, one.session)
    for host, task in ((first, "worker-0"), (second, "worker-1")):
        captain.reply(ProfileTaken(host, one.request, task, steps=3, last=True))
    assert captain.shown() == [("worker-0", ""), ("worker-1", ""), ("profile-end", "")]


def test_a_host_whose_connection_breaks_when_it_is_asked_is_named() -> None:
    captain = Captain(make_plan(1))

    def breaks(host: str, message: Any) -> bool:
        captain.requests.on_disconnect(host)
        return True

    captain.requests._send = breaks
    captain.begin()
    assert captain.shown() == [("worker-0", "its host has lost its connection to the captain"), ("profile-end", "")]
    captain.requests.on_disconnect("worker-host-0")
    assert len(captain.replies) == 2


def test_a_second_profile_is_refused_until_the_first_is_complete() -> None:
    captain = Captain(make_plan(1))
    captain.begin()
    captain.begin()
    assert captain.replies == [{"type": "refused", "reason": "another profile of this run is being taken"}]
    captain.requests.begin({"type": "stacks"}, lambda data: None)  # goes on
    captain.reply(ProfileTaken("worker-host-0", captain.sent[0][1].request, "worker-0", last=True))
    captain.begin()
    assert len([message for _, message in captain.sent if isinstance(message, TakeProfile)]) == 2


def test_a_host_that_is_away_or_is_lost_meanwhile_is_named() -> None:
    captain = Captain(make_plan(2), away=("worker-host-0",))
    captain.begin()
    captain.requests.on_disconnect("worker-host-1")
    assert captain.shown() == [
        ("worker-0", "its host is not connected to the captain"),
        ("worker-1", "its host has lost its connection to the captain"),
        ("profile-end", ""),
    ]


def test_a_host_that_replies_without_end_is_given_up() -> None:
    captain = Captain(make_plan(2, per_host=2))
    captain.begin()
    ((host, message),) = captain.sent
    for _ in range(3):
        captain.reply(ProfileTaken(host, message.request, "worker-0"))
    assert captain.shown() == [
        ("worker-0", ""), ("worker-1", "its host has sent too many replies"), ("profile-end", ""),
    ]  # fmt: skip


def test_a_reply_for_a_task_that_was_not_requested_is_not_sent_on() -> None:
    captain = Captain(make_plan(2, per_host=2))
    captain.begin(tasks=["worker-0"])
    ((host, message),) = captain.sent
    captain.reply(ProfileTaken(host, message.request, "worker-1", "other"))
    assert captain.shown() == [("worker-0", "its host has sent too many replies"), ("profile-end", "")]


@pytest.mark.parametrize(
    "fields", [{"steps": 0}, {"steps": 1001}, {"steps": "3"}, {"steps": True}, {"seconds": 0}, {"tasks": ["other-0"]}]
)
def test_an_invalid_request_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        Captain(make_plan(2)).begin(**fields)


def test_tasks_that_only_serve_are_not_profiled() -> None:
    servers = replace(make_plan(2, ps=1, chief=True, evaluator=1), strategy="parameter-server")
    assert profiled_tasks(servers) == ["chief-0"]
    assert profiled_tasks(make_plan(2, chief=True)) == ["chief-0", "worker-0", "worker-1"]


# ---- for the user


@pytest.fixture
def run(tmp_path: Path) -> Run:
    plan = replace(make_plan(2, evaluator=1), framework="torch")
    (tmp_path / "plan.json").write_text(plans.to_json(plan))
    return Run("digits-1", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0: invalid value; use 1 to 1000"),
        ({"seconds": 0.5}, "timeout=0.5: invalid value; use 1 to 3600 s"),
        (
            {"tasks": ["evaluator-0"]},
            "evaluator-0 cannot be profiled: it runs no training steps; the tasks that train",
        ),
        ({"tasks": ["evaluator"]}, "evaluator cannot be profiled"),
        ({"tasks": ["worker-9"]}, "digits-1 has no task 'worker-9'; did you mean"),
    ],
)
def test_wrong_usage_is_explained(run: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        client.take(run, **options)


def test_a_run_without_a_framework_has_no_profiler(run: Run) -> None:
    (run.folder / "plan.json").write_text(plans.to_json(replace(make_plan(1), framework="none")))
    with pytest.raises(PacelineError, match="digits-1 cannot be profiled: it uses no framework") as error:
        client.take(run)
    assert error.value.remedy == "to see what its tasks are doing: client.get('digits-1').stacks(seconds=10)"


def test_profiles_are_copied_and_missing_ones_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{FOLDER}/worker-0.xplane.pb"
    (run.folder / "tensorboard" / FOLDER).mkdir(parents=True)
    (run.folder / "tensorboard" / name).write_bytes(b"data")
    taken = ProfileTaken("", 1, "worker-0", "", 20, {name: 4})
    monkeypatch.setattr(client, "ask", lambda *_: [messages.member_message(taken)])
    assert client.take(run) == [
        client.TaskProfile("worker-0", 20, (run.folder / "tensorboard" / name,)),
        client.TaskProfile("worker-1", problem="the captain did not reply"),
    ]
    copied = client.take(run, to=tmp_path / "to")[0]
    assert copied.files == (tmp_path / "to" / name,) and copied.files[0].read_bytes() == b"data"
    (run.folder / "tensorboard" / name).unlink()
    (run.folder / "tensorboard" / name).symlink_to(copied.files[0])
    assert client.take(run, to=tmp_path / "other")[0].problem.startswith("its files cannot be copied: ")


@pytest.mark.parametrize(
    "files", [{"../x": 1}, {"/etc/passwd": 1}, {"train/events": 1}, {f"{FOLDER}/a": -1}, {f"{FOLDER}/a": 2**40}]
)
def test_paths_and_sizes_from_a_run_are_checked(
    run: Run, monkeypatch: pytest.MonkeyPatch, files: dict[str, int]
) -> None:
    message = messages.member_message(ProfileTaken("", 1, "worker-0", "", 20, files))
    monkeypatch.setattr(client, "ask", lambda *_: [message])
    (worker,) = [profile for profile in client.take(run) if profile.task == "worker-0"]
    assert worker.problem.startswith("its host sent an invalid reply: ") and worker.files == ()


class Program:
    """A program in a pod that sends these bytes and ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= host_files.SILENCE_S

    def recv_into(self, buffer: memoryview, most: int) -> int:
        if not self._data:
            raise ConnectionError("the program ended")
        part, self._data = self._data[:most], self._data[most:]
        buffer[: len(part)] = part
        return len(part)


def test_a_file_from_a_pod_has_the_size_that_was_stated(tmp_path: Path) -> None:
    def receive(data: bytes, size: int) -> bytes:
        program: Any = Program(data)
        host_files._receive(program, tmp_path / ".file.partial", size, host_files.Deadline(60))
        return (tmp_path / ".file.partial").read_bytes()

    content = os.urandom(200_000)
    assert receive(zlib.compress(content), len(content)) == content
    for data, size in ((zlib.compress(bytes(10**7)), 100), (zlib.compress(content)[:-9], 200_000), (b"no zlib", 5)):
        with pytest.raises(PacelineError):
            receive(data, size)
    assert (tmp_path / ".file.partial").stat().st_size <= 200_000


def test_a_pod_that_sends_a_little_at_a_time_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(host_files.time, "monotonic", lambda: now[0])

    class Slow(Program):
        def recv_into(self, buffer: memoryview, most: int) -> int:
            now[0] += 30
            return super().recv_into(buffer, 1)

    program: Any = Slow(zlib.compress(os.urandom(1000)))
    with pytest.raises(PacelineError, match=r"^file: its pod did not send the files of its host within 100 s$"):
        host_files._receive(program, tmp_path / ".file.partial", 1000, host_files.Deadline(100))
    assert now == [120.0]


def test_a_pod_that_is_silent_is_not_waited_for_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [0.0], list[float]()
    monkeypatch.setattr(host_files.time, "monotonic", lambda: now[0])

    class Silent(Program):
        def settimeout(self, seconds: float) -> None:
            waits.append(seconds)

        def recv_into(self, buffer: memoryview, most: int) -> int:
            now[0] += waits[-1]
            raise TimeoutError("timed out")

    program: Any = Silent(b"")
    for seconds, message in ((600, "sent nothing for 60 s"), (20, "did not send the files of its host within 20 s")):
        with pytest.raises(PacelineError, match=message):
            host_files._receive(program, tmp_path / ".file.partial", 1000, host_files.Deadline(seconds))
    assert waits == [60.0, 20.0]
