"""What clients of the page are sent: the whole state first, then only changes; a slow one never gets a queue."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from paceline.client.contexts import Context, known_contexts
from paceline.errors import PacelineError
from paceline.page.access.request_check import names_for
from paceline.page.access.tokens_and_sessions import Sessions
from paceline.page.app import Page
from paceline.page.feeds import clusters as clusters_module
from paceline.page.feeds import run_feed, run_feeds, run_list
from paceline.page.feeds.clusters import Clusters
from paceline.page.feeds.feed import Feed, stream
from paceline.page.feeds.run_feed import RunFeed, points_of
from paceline.page.feeds.run_feeds import RunFeeds
from paceline.page.feeds.run_list import RunList, RunListViewer
from paceline.page.feeds.run_viewer import Output, RunViewer
from paceline.page.http.errors import Busy, NotFound, TimeLimit
from paceline.page.http.streams import Streams
from paceline.page.http.threads import Threads
from paceline.page.routes import run_routes
from paceline.page.routes.log_routes import LogRoutes
from paceline.page.routes.run_routes import RunRoutes
from paceline.view.files.run_folders import NoRun, Run
from paceline.view.state import run_reader
from paceline.view.state.events import Event
from support import recorded
from support.recorded import LIFE, event, supervised

Events = list[tuple[str, Any]]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


@pytest.fixture
def folder(home: Path) -> Iterator[Path]:
    """Of a run that is alive."""
    folder = recorded.write(home, events=LIFE[:8])
    with supervised(folder):
        yield folder


def append(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in events))


def in_loop(test: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return test()

    return asyncio.run(run())


def fields(events: Events) -> dict[str, Any]:
    assert len({name for name, _ in events}) == len(events)
    return dict(events)


def test_a_client_gets_everything_once_and_then_what_has_changed(folder: Path) -> None:
    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        viewer = RunViewer(feed, ["loss"])
        first = fields(viewer.changes())
        assert first["status"]["status"] == "running" and first["status"]["is_live"]
        assert first["tasks"]["full"] and [row["task"] for row in first["tasks"]["tasks"]] == sorted(recorded.TASKS)
        assert set(first) == {"status", "tasks"} and "stacks" not in first["status"]
        append(folder, LIFE[8], LIFE[10])
        feed.update()
        change = fields(viewer.changes())
        assert [row["task"] for row in change["tasks"]["tasks"]] == ["worker-0"] and not change["tasks"]["full"]
        assert change["tasks"]["tasks"][0]["step"] == 120 and change["status"]["steps"] == 120
        assert [each["event"] for each in change["events"]["events"]] == ["saved"]
        [point] = change["points"]["points"]
        assert (point["name"], point["task"], point["step"], point["value"]) == ("loss", "worker-0", 120, 0.3123)
        assert "tasks" not in dict(viewer.changes())
        feed.close()

    in_loop(test)


def test_of_a_plan_only_some_hosts_are_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reader, "MOST_NAMES", 2)
    tasks = [{"name": f"worker-{number}", "host": f"worker-host-{number}"} for number in range(3)]
    (folder / "plan.json").write_text(json.dumps({"version": 1, "tasks": tasks}))

    async def test() -> None:
        feed = RunFeed(folder.name, Run(folder.name, folder))
        async with feed.viewed():
            await feed.ready()
            assert feed.status["hosts"] == ["worker-host-0", "worker-host-1"]
        feed.leave_soon()
        await until(lambda: feed.is_idle)

    asyncio.run(test())


def test_tasks_that_a_run_has_no_longer_or_could_have_are_not_counted(home: Path) -> None:
    names = [f"worker-{number}" for number in range(4)]  # the plan has as many as `scale` may ask for
    plan = {
        "tasks": [{"name": name, "host": f"{name}-host"} for name in names], "elastic": {"hosts": []},
    }  # fmt: skip
    begin: dict[str, Any] = {"run": "digits-1", "job": "digits", "framework": "torch", "strategy": ""}
    step = {"task": "worker-0", "step": 20, "metrics": {"loss": 0.5, "total_steps": 80}}
    events = [
        event(0, "run-started", 0, **begin, tasks=names[:3], hosts=[]),
        event(1, "generation-formed", tasks=names[:3]),
        *(event(2, "task-started", task=name, pid=1, warm=False, host=f"{name}-host") for name in names[:3]),
        event(3, "scaled", role="worker", count=2, was=3, tasks=names[:2]),
        event(4, "step", **step),
    ]
    folder = recorded.write(home, "digits-1", events=events)
    (folder / "plan.json").write_text(json.dumps(plan))

    def item() -> dict[str, Any]:
        listed = RunList(Clusters(list))
        listed.update()
        listed.close()
        return listed.items["digits-1"]

    async def test() -> None:
        feeds, streams = RunFeeds(Clusters(list), threads(), threads()), Streams()
        feed = await feeds.feed("digits-1")
        scope = {"type": "http", "query_string": b"", "path_params": {"key": "digits-1"}}
        response = await RunRoutes(feeds, streams, LogRoutes(feeds, streams)).hosts(Request(scope))
        assert [each["host"] for each in json.loads(response.body)["hosts"]] == ["worker-0-host", "worker-1-host"]
        assert feed.status["hosts"] == ["worker-0-host", "worker-1-host"]
        assert (feed.status["task_count"], feed.status["task_states"]) == (2, {"running": 2})
        assert feed.status["total_steps"] == 80
        assert item()["tasks"] == 2 and item()["total_steps"] == 80

    with supervised(folder):
        asyncio.run(test())
    (folder / "report.json").write_text(json.dumps(recorded.REPORT))
    assert in_loop(item)["tasks"] == 2
    (folder / "events.jsonl").unlink()
    assert in_loop(item)["tasks"] is None


def test_a_slow_client_gets_the_newest_state_and_how_much_it_has_missed(folder: Path) -> None:
    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        viewer = RunViewer(feed, ["loss"], ["worker-0"])
        viewer.changes()
        for number in range(20):
            steps = [
                event(9, "step", task="worker-0", step=1000 * number + each, metrics={"loss": 0.1}, steps_per_s=1.0)
                for each in range(600)
            ]
            append(folder, *steps, *(event(9, "note", text=f"{number} {each}") for each in range(100)))
            feed.update()
        change = fields(viewer.changes())
        assert len(change["events"]["events"]) == 500 and change["events"]["skipped"] == 1500
        assert change["events"]["events"][-1]["data"]["text"] == "19 99"
        assert len(change["points"]["points"]) == 5000 and change["points"]["points"][-1]["step"] == 19_599
        assert change["tasks"]["tasks"][0]["step"] == 19_599 and len(feed.points) <= 20_000
        feed.close()

    in_loop(test)


def test_the_mean_of_all_tasks_is_sent_instead_of_all_tasks(folder: Path) -> None:
    def step(at: float, task: str, loss: float) -> dict[str, Any]:
        return event(at, "step", task=task, step=7, metrics={"loss": loss}, steps_per_s=1.0)

    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        viewer = RunViewer(feed, ["loss"], ["*"])
        viewer.changes()
        append(folder, step(8, "worker-0", 1.0), step(8.5, "worker-1", 3.0), step(8.6, "evaluator-0", 100.0))
        feed.update()
        [point] = fields(viewer.changes())["points"]["points"]
        assert (point["task"], point["value"], point["least"], point["largest"], point["step"]) == ("*", 2, 1, 3, 7)
        append(folder, step(9, "worker-0", 5.0))
        feed.update()
        [point] = fields(viewer.changes())["points"]["points"]
        assert (point["value"], point["least"], point["largest"]) == (4, 3, 5)
        feed.close()

    in_loop(test)


@pytest.mark.parametrize("metrics", [[1], "abc", 5, True, [["loss", 1]], None, {"loss": [1]}], ids=str)
@pytest.mark.parametrize("kind", ["step", "evaluated"])
def test_metrics_of_any_type_do_not_hide_the_run(folder: Path, kind: str, metrics: Any) -> None:
    """A captain of another user may write anything."""

    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        viewer = RunViewer(feed, ["loss", "step"])
        viewer.changes()
        append(folder, event(20, kind, 2, task="worker-0", step=150, metrics=metrics))
        feed.update()
        changes = fields(viewer.changes())
        assert [each["name"] for each in changes.get("points", {"points": []})["points"]] == ["step"] * (kind == "step")
        feed.close()

    in_loop(test)
    assert points_of(Event(recorded.at(1), kind, 1, {"task": "worker-0", "metrics": metrics})) == []


def test_the_output_of_a_task_is_followed_with_its_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.page.feeds.run_viewer._BEHIND", 10_000)
    log = folder / "logs" / "worker-0.log"
    line = f"{recorded.at(1)} g1 | hello\n"

    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        viewer = RunViewer(feed, output=Output(log, 0))
        assert "lines" not in fields(viewer.changes()) and viewer.poll_s
        log.write_text(line)
        lines = fields(viewer.changes())["lines"]
        assert (lines["task"], lines["next"], lines["end"], lines["skipped"]) == ("worker-0", len(line), len(line), 0)
        assert [each["text"] for each in lines["lines"]] == ["hello"]
        assert viewer.changes() == []
        with log.open("a") as file:
            file.write(line * 5000)
        lines = fields(viewer.changes())["lines"]
        assert len(lines["lines"]) == 1000 and lines["skipped"] == 4000 * len(line) and lines["next"] == lines["end"]
        assert viewer.has_more and viewer.changes() == [] and not viewer.has_more
        feed.close()

    in_loop(test)


def test_a_run_that_ends_or_is_deleted(home: Path) -> None:
    folder = recorded.write(home, report=recorded.REPORT)

    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        assert feed.is_over and feed.status["status"] == "succeeded" and not feed.status["is_live"]
        (folder / "deleted").touch()
        with pytest.raises(PacelineError, match="was deleted"):
            feed.update()

    in_loop(test)


def test_a_cluster_that_cannot_be_followed_is_shown_in_its_last_known_state(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded.write(home, events=LIFE[:8])
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "on": "kubernetes", "context": "prod", "namespace": "ml"}))
    attempts = []

    def followed(folder: Path, follow: bool, notify: Any) -> Any:
        attempts.append(folder)
        raise PacelineError("the login has expired")

    monkeypatch.setattr(run_feed, "followed", followed)

    def test() -> None:
        feed = RunFeed("digits-3f9a", Run("digits-3f9a", folder))
        feed.update()
        assert feed.status["status"] == "running" and feed.status["problems"] == [] and not attempts
        assert (feed.status["on"], feed.status["where"]) == ("kubernetes", "prod/ml")
        feed.update()
        append(folder, LIFE[10])
        feed.update()
        assert feed.status["problems"] == ["the login has expired"] and feed.status["steps"] == 120
        assert not feed.is_over and len(attempts) == 1
        feed.close()

    in_loop(test)


def test_runs_of_other_users_are_found_on_their_cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"run": "digits-3f9a", "status": "running", "restarts": None, "started": recorded.at(0)}
    monkeypatch.setattr(clusters_module.run_listing, "on_cluster", lambda target: [report])
    asked: list[Any] = []

    def find_run(name: str, target: Any) -> Run:
        asked.append((name, target.context, target.namespace))
        return Run(name, recorded.write(home, "adopted-3f9a"))

    monkeypatch.setattr(run_feeds, "find_run", find_run)

    async def test() -> None:
        clusters = Clusters(lambda: [Context("prod", "ml", True)])
        listed = RunList(clusters)
        feeds = RunFeeds(clusters, threads(), threads())
        listed.update()
        await until(lambda: clusters.all()[0].state == "listed")
        listed.update()
        [item] = listed.items.values()
        assert item["where"] == "prod/ml" and item["is_live"] and item["restarts"] is None
        assert await feeds.read(item["key"], lambda feed: feed.status["status"]) == "succeeded"
        assert await feeds.read(item["key"], lambda feed: feed.key) == item["key"]
        assert asked == [("digits-3f9a", "prod", "ml")]
        with pytest.raises(NotFound):
            await feeds.feed("digits-3f9a@0123456789")
        with pytest.raises(NoRun):
            await feeds.feed("../digits-3f9a")
        listed.close()

    asyncio.run(test())


def test_what_nobody_looks_at_is_dropped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_feeds, "MOST_RUNS", 2)
    for number in range(3):
        recorded.write(home, f"digits-{number}", report=recorded.REPORT)

    async def test() -> None:
        feeds = RunFeeds(Clusters(list), threads(), threads())
        first = await feeds.feed("digits-0")
        async with first.viewed():
            await first.ready()
            for number in (1, 2):
                assert await feeds.read(f"digits-{number}", lambda feed: feed.run.name) == f"digits-{number}"
            assert set(feeds._feeds) == {"digits-0", "digits-2"}
            second = await feeds.feed("digits-2")
            async with second.viewed():
                with pytest.raises(Busy):
                    await feeds.feed("digits-1")
        feeds.sweep(time.monotonic() + 1)
        assert len(feeds._feeds) == 2
        feeds.sweep(time.monotonic() + 1000)
        assert feeds._feeds == {}

    asyncio.run(test())


def test_the_list_of_runs_changes_run_by_run(home: Path, folder: Path) -> None:
    recorded.write(home, "mnist-1a2b", report=recorded.REPORT)

    def test() -> None:
        feed = RunList(Clusters(list))
        feed.update()
        viewer = RunListViewer(feed)
        [(name, first)] = viewer.changes()
        runs = {item["key"]: item for item in first["runs"]}
        assert name == "runs" and set(runs) == {"digits-3f9a", "mnist-1a2b"}
        ended, live = runs["mnist-1a2b"], runs["digits-3f9a"]
        assert (ended["status"], ended["restarts"], ended["causes"]) == ("succeeded", 1, {"signal": 1})
        assert (live["status"], live["is_live"], live["steps"], live["metrics"]) == ("running", True, 60, {"loss": 0.8})
        append(folder, LIFE[10])
        feed.update()
        [(name, change)] = viewer.changes()
        assert name == "change" and [item["key"] for item in change["runs"]] == ["digits-3f9a"]
        assert change["runs"][0]["steps"] == 120 and change["gone"] == [] and "sources" not in change
        (home / "runs" / "mnist-1a2b" / "deleted").touch()
        feed._scan_at = 0.0  # ended runs are looked at less often
        feed.update()
        changes = viewer.changes()
        assert changes[0][1]["gone"] == ["mnist-1a2b"]
        feed.close()

    in_loop(test)


def test_a_long_list_is_shown_in_pieces(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "_PIECE", 2)
    for number in range(5):
        recorded.write(home, f"digits-{number}", report=recorded.REPORT, started=recorded.at(number))
    shown: list[list[str]] = []
    states: list[str] = []

    def test() -> None:
        feed = RunList(Clusters(list))
        monkeypatch.setattr(
            feed, "publish", lambda: (shown.append(list(feed.items)), states.append(feed.sources[0]["state"]))
        )
        feed.update()
        feed.update()

    in_loop(test)
    newest_first = [f"digits-{number}" for number in (4, 3, 2, 1, 0)]
    assert shown == [newest_first[:2], newest_first[:4], newest_first] and states == ["asking", "asking", "listed"]


class Counting(Feed):
    """Counts what its thread does."""

    def __init__(self, limit: int = 10**9) -> None:
        super().__init__(0.001, 0.0)
        self.opened = self.updates = self.closed = 0
        self._limit = limit
        self.is_failing = False

    def open(self) -> None:
        self.opened += 1

    def update(self) -> None:
        self.updates += 1
        if self.is_failing:
            raise PacelineError("it is gone")
        self.is_over = self.updates >= self._limit
        self.publish()

    def close(self) -> None:
        self.closed += 1


class CountingViewer:
    poll_s, has_more = None, False

    def __init__(self, feed: Counting) -> None:
        self._feed = feed

    def changes(self) -> list[tuple[str, object]]:
        return [("count", self._feed.updates)]


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.001)


def threads() -> Threads:
    return Threads(4, 10, 60.0, "the test")


def test_one_thread_for_all_viewers_which_ends_with_the_last() -> None:
    async def test() -> None:
        feed = Counting()
        streams = [stream(feed, CountingViewer(feed), threads(), 0.0) for _ in range(3)]
        for each in streams:
            assert (await anext(each)).startswith(b"event: count\ndata: ")
        assert feed.opened == 1
        for each in streams:
            await each.aclose()
        await until(lambda: feed.is_idle)
        assert feed.closed == 1
        again = stream(feed, CountingViewer(feed), threads(), 0.0)
        await anext(again)
        assert feed.opened == 2
        await again.aclose()
        await until(lambda: feed.is_idle)

    asyncio.run(test())


def test_what_takes_long_to_read_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files of another user's run must not keep the page from answering."""

    async def test() -> None:
        times = iter([100.0, 100.05, 200.0, 201.5, 300.0, 300.0])  # of the beginning and the end of each update
        pauses: list[float] = []
        feed = Counting(3)
        monkeypatch.setattr(feed, "_wanted", SimpleNamespace(clear=lambda: None, wait=pauses.append))
        monkeypatch.setattr(feed, "_poll_s", 0.5)
        monkeypatch.setattr("paceline.page.feeds.feed.time", SimpleNamespace(monotonic=times.__next__))
        feed._viewers = 1
        await asyncio.to_thread(feed._run)
        assert pauses == [0.5, 5.0]

    asyncio.run(test())


def test_streams_end_with_what_they_show() -> None:
    async def test() -> None:
        ending = Counting(limit=5)
        events = [event async for event in stream(ending, CountingViewer(ending), threads(), 0.0)]
        assert events[-1] == b"event: end\ndata: {}\n\n" and events[-2] == b"event: count\ndata: 5\n\n"
        failing = Counting()
        failing.is_failing = True
        events = [event async for event in stream(failing, CountingViewer(failing), threads(), 0.0)]
        assert len(events) == 1 and events[0].startswith(b"event: failure\n") and b"it is gone" in events[0]

    asyncio.run(test())


def test_series_are_read_after_the_first_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes seconds of a core, which the first view needs."""
    prepared = threading.Event()
    monkeypatch.setattr(run_routes.series_query, "prepare", lambda cache, folder: prepared.set())
    monkeypatch.setattr(run_routes, "_PREPARED_AFTER_S", 0.0)

    async def look() -> None:
        feeds, streams = RunFeeds(Clusters(list), threads(), threads()), Streams()
        routes = RunRoutes(feeds, streams, LogRoutes(feeds, streams))
        scope = {"type": "http", "query_string": b"", "path_params": {"key": folder.name}}
        response = await routes.stream(Request(scope))
        assert isinstance(response, StreamingResponse)
        messages = aiter(response.body_iterator)
        await anext(messages)
        assert not prepared.is_set()
        append(folder, LIFE[8])
        await anext(messages)
        assert prepared.wait(60.0)

    asyncio.run(look())


def test_the_number_of_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.page.http.streams._MOST", 1)

    async def endless() -> AsyncGenerator[bytes]:
        while True:
            yield b"x"

    async def test() -> None:
        streams = Streams()
        body: Any = streams.response(endless()).body_iterator
        assert await anext(body) == b"x"
        with pytest.raises(Busy):
            streams.response(endless())
        await body.aclose()
        streams.response(endless())

    asyncio.run(test())


def test_calls_in_threads_have_limits() -> None:
    async def test() -> None:
        release = threading.Event()
        few = Threads(1, 2, 0.05, "the test")
        with pytest.raises(TimeLimit, match=r"the test took longer than 0\.05 s"):
            await few.run(release.wait)
        with pytest.raises(TimeLimit):  # its thread is still at work
            await few.run(lambda: 1)
        waiting = [asyncio.create_task(few.run(lambda: 1, 60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await few.run(lambda: 1)
        release.set()
        assert await asyncio.gather(*waiting) == [1, 1]
        with pytest.raises(ZeroDivisionError):
            await few.run(lambda: 1 // 0, 60.0)

    asyncio.run(test())


def test_a_store_that_does_not_respond_leaves_threads_for_other_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.page.http.threads._WAIT_S", 0.05)
    stores = {"hung-1": "s3://slow/a", "hung-2": "s3://slow/b", "digits-1": "s3://fast/a"}
    monkeypatch.setattr(run_feeds, "location_of", lambda run: stores.get(run.name, str(run.folder)))

    async def test() -> None:
        release = threading.Event()
        feeds = RunFeeds(Clusters(list), Threads(4, 50, 60.0, "a file"), Threads(3, 50, 60.0, "the store"))

        def ask(run: str, call: Callable[[], T]) -> asyncio.Task[T]:
            return asyncio.create_task(feeds.ask_store(Run(run, home / run), call))

        hung = [ask(f"hung-{1 + number % 2}", release.wait) for number in range(20)]
        await until(lambda: sum(each.done() for each in hung) == 18)
        refused, waiting = [each for each in hung if each.done()], [each for each in hung if not each.done()]
        problems = {str(each.exception()) for each in refused}
        assert problems == {"s3://slow has not responded to earlier requests yet; try again later"}
        assert isinstance(refused[0].exception(), Busy)
        assert [await ask(run, lambda: 1) for run in ("digits-1", "digits-2", "digits-1")] == [1, 1, 1]
        release.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert await ask("hung-1", lambda: 2) == 2

    asyncio.run(test())


@pytest.mark.parametrize("most_late", [4, 5])
def test_many_stores_that_do_not_respond_leave_threads_for_other_runs(
    most_late: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.page.http.threads._LATE_S", 0.01)
    monkeypatch.setattr("paceline.page.http.threads._MOST_LATE", most_late)

    async def test() -> None:
        release = threading.Event()
        slow = Threads(1, 50, 60.0, "the store")
        hung = [asyncio.create_task(slow.run(release.wait, group=f"store {number // 2}")) for number in range(5)]
        last = asyncio.create_task(slow.run(lambda: 1, group="another store"))
        if most_late == 5:
            assert await last == 1
        else:  # one thread keeps its place
            await until(lambda: slow._late == most_late)
            assert not last.done()
        release.set()
        assert await asyncio.gather(*hung) == [True] * 5 and await last == 1
        await until(lambda: slow._late == 0)
        assert slow._free._value == 1, "its places are free again, and there are no more of them"

    asyncio.run(test())


def test_eight_stores_that_do_not_respond_leave_threads_for_a_ninth(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.page.http.threads._LATE_S", 1000.0)

    async def test() -> None:
        release = threading.Event()
        page = Page(Sessions(None), names_for("127.0.0.1", "127.0.0.1"), "/", "cookie", False, lambda error: None)
        runs = [Run(f"hung-{number}", home / f"hung-{number}") for number in range(8)]
        hung = [asyncio.create_task(page.feeds.ask_store(run, release.wait)) for run in 2 * runs]
        await asyncio.sleep(0)
        assert await page.feeds.ask_store(Run("digits-1", home / "digits-1"), lambda: 1) == 1
        assert not any(each.done() for each in hung)
        release.set()
        assert await asyncio.gather(*hung) == [True] * 16

    asyncio.run(asyncio.wait_for(test(), 60.0))


def test_requests_for_one_store_wait_for_each_other(home: Path) -> None:
    async def test() -> None:
        feeds, run = RunFeeds(Clusters(list), threads(), Threads(8, 50, 60.0, "the store")), Run("a", home / "a")
        calls = [feeds.ask_store(run, lambda number=number: number) for number in range(6)]  # type: ignore[misc]
        assert await asyncio.gather(*calls) == list(range(6))

    asyncio.run(test())


def test_contexts_of_all_kubeconfigs_the_current_one_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, current: str, *contexts: dict[str, Any]) -> Path:
        path = tmp_path / name
        entries = [{"name": each.pop("name"), "context": {"cluster": "c", "user": "u", **each}} for each in contexts]
        path.write_text(json.dumps({"current-context": current, "contexts": entries, "clusters": [], "users": []}))
        return path

    first = write("one", "", {"name": "b", "namespace": "ml"}, {"name": "a"})
    second = write("two", "prod/1", {"name": "prod/1"}, {"name": "b", "namespace": "other"})
    monkeypatch.setenv("KUBECONFIG", f"{first}:{second}")
    assert known_contexts() == [Context("prod/1", None, True), Context("a", None, False), Context("b", "ml", False)]
    first.write_text("{[")
    assert known_contexts() == []
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert known_contexts() == []


def test_clusters_are_asked_in_threads_with_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, release, asked = 0.0, threading.Event(), []

    def listing(target: Any) -> list[dict[str, Any]]:
        asked.append(target.context)
        if target.context == "slow":
            release.wait(60)
        if target.context == "broken":
            raise PacelineError("no access")
        return [{"run": "digits-1", "status": "running", "restarts": None}]

    monkeypatch.setattr(clusters_module.run_listing, "on_cluster", listing)
    contexts = [Context("slow", None, True), Context("other", "ml", False), Context("broken", None, False)]
    clusters = Clusters(lambda: contexts, lambda: now)

    def states() -> dict[str, str]:
        return {each.context: each.state for each in clusters.all()}

    async def test() -> None:
        nonlocal now
        clusters.look([])
        assert states() == {"slow": "asking", "other": "idle", "broken": "idle"}
        clusters.ask("other", None)
        clusters.ask("broken", None)
        await until(lambda: states() == {"slow": "asking", "other": "listed", "broken": "failed"})
        with pytest.raises(NotFound):
            clusters.ask("unknown", None)
        now = 61.0
        clusters.look([])
        slow = clusters.all()[0]
        assert slow.state == "failed" and slow.error is not None and slow.error["kind"] == "TimeLimit"
        clusters.ask("slow", None)  # no second thread while the login blocks
        assert asked.count("slow") == 1
        release.set()
        await until(lambda: states()["slow"] == "listed")
        assert slow.to_json()["runs"] == 1 and clusters.by_code(slow.code) is slow

    asyncio.run(test())
