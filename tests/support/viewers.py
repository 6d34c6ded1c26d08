"""What `paceline watch` and `paceline page` read of runs: without a terminal, a port or another process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from paceline.client.reading.find_run import Target
from paceline.client.run import Run
from paceline.page.access.request_check import names_for
from paceline.page.access.tokens_and_sessions import Sessions
from paceline.page.app import Page
from paceline.watch.run_screen_model import RunData
from paceline.watch.run_screen_reader import Output, RunReader
from paceline.watch.runs_model import RunSummary
from paceline.watch.runs_screen_reader import RunsReader
from support.person import eventually

_COOKIE = "paceline-1"
_QUERY = b"name=loss&task=worker-0&output=worker-0&series=loss"
_LIMIT_S = 60.0


def watch_all() -> dict[str, RunSummary]:
    """The screen of all runs."""
    reader = RunsReader(Target("local"), lambda: None)
    reader._read_known()
    return {run.run: run for run in reader.runs or ()}


def watch(run: str, folder: Path) -> RunData | str:
    """The screen of one run, or why there is none."""
    first = Output()
    reader = RunReader(Run(run, folder=folder), lambda: None)
    reader.output = first
    reader.start()

    def is_read() -> bool:
        has_output = reader.output is not first or "_read_output" in reader._notes
        notes = reader._notes.copy()
        has_store = reader._stored is not None or "store" in notes or "_read_store" in notes
        is_shown = reader.data is not None and {*notes.values()} <= {*reader.data.notes}
        is_over = bool(reader.problem) or not reader._threads[0].is_alive()
        return reader.bug is not None or is_over or (has_output and has_store and is_shown)

    try:
        eventually(is_read, "the data of the run")
    finally:
        reader.close()
    if reader.bug is not None:
        raise reader.bug
    return reader.problem or reader.data or ""


def page(run: str) -> dict[str, bytes]:
    """The answers to GET requests for all paths of the page, without its files. Of a stream: the first message."""
    return asyncio.run(_page(run))


def page_runs(answers: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """The runs in the list, and the same in the first message of its stream."""
    items = json.loads(answers["api/runs"])["runs"]
    name, data = answers["api/runs/stream"].decode().split("\n")[:2]
    assert name == "event: runs" and json.loads(data.removeprefix("data: "))["runs"] == items
    return {item["run"]: item for item in items}


async def _page(run: str) -> dict[str, bytes]:
    bugs: list[BaseException] = []
    sessions = Sessions()
    page = Page(sessions, names_for("127.0.0.1", "127.0.0.1"), "/", _COOKIE, False, bugs.append)
    cookie = f"{_COOKIE}={sessions.redeem(sessions.new_token())}"
    answers = {}
    try:
        for path in [route.path[1:] for route in page._routes()]:
            if path.startswith("api/"):
                answers[path] = await _get(page, path.format(key=run, snapshot="step-4-g1"), cookie)
    finally:
        feeds = [page._list, *page.feeds._feeds.values()]
        for feed in feeds:
            feed.leave_soon()
        async with asyncio.timeout(_LIMIT_S):
            while not all(feed.is_idle for feed in feeds):
                await asyncio.sleep(0.001)
        for key in list(page.feeds._feeds):
            page.feeds._drop(key)
    if bugs:
        raise bugs[0]
    return answers


async def _get(page: Page, path: str, cookie: str) -> bytes:
    status, body, has_body, is_asked = 0, b"", asyncio.Event(), False

    async def receive() -> Any:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await has_body.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")
        if body:
            has_body.set()

    scope = {
        "type": "http", "method": "GET", "path": f"/{path}", "query_string": _QUERY, "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"127.0.0.1:1"), (b"cookie", cookie.encode())],
    }  # fmt: skip
    async with asyncio.timeout(_LIMIT_S):
        await page.app(scope, receive, send)
    assert status in (200, 400, 404, 405, 502), (path, status, body[:500])
    return body
