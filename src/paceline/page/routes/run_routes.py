"""What the page asks about one run: status, tasks, events, timeline, series, restarts and hosts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from paceline.errors import UsageError
from paceline.page.feeds.feed import stream
from paceline.page.feeds.run_feed import RunFeed, points_of
from paceline.page.feeds.run_feeds import RunFeeds
from paceline.page.feeds.run_viewer import RunViewer
from paceline.page.http import requests
from paceline.page.http.responses import json_response
from paceline.page.http.streams import Streams
from paceline.page.routes.log_routes import LogRoutes
from paceline.view.files import run_folders
from paceline.view.series import series_parts, series_query
from paceline.view.series.point_reduction import Row
from paceline.view.series.series_parts import PartCache
from paceline.view.state import restarts
from paceline.view.state.run_state import ENDED

NO_SERIES = (
    "Earlier values of this run are not available: an older version of Paceline has started it, "
    "or it was read from its bucket."
)
_LEAST_S = 0.5  # seconds between two batches of a stream
_MOST_TASKS = 2000
_PARTIAL_S = 0.1  # for a client that would rather have some values now
_PREPARED_AFTER_S = 0.5
_EVALUATIONS = 20_000  # events of evaluators for a series


class RunRoutes:
    def __init__(self, feeds: RunFeeds, streams: Streams, logs: LogRoutes) -> None:
        self._feeds, self._streams, self._logs = feeds, streams, logs
        self._parts = PartCache()
        self._prepared: set[str] = set()  # runs whose series were read

    async def status(self, request: Request) -> Response:
        return await self._read(request, lambda feed: feed.status)

    async def tasks(self, request: Request) -> Response:
        return await self._read(request, lambda feed: {"tasks": list(feed.tasks.values())})

    async def goodput(self, request: Request) -> Response:
        return await self._read(request, lambda feed: feed.status.get("goodput"))

    async def report(self, request: Request) -> Response:
        from paceline.client.reading import run_status

        return await self._read(
            request, lambda feed: run_status.json_form(feed.reader.standing(run_folders.alive(feed.run.folder)))
        )

    async def stream(self, request: Request) -> Response:
        series, tasks = requests.texts(request, "series"), requests.texts(request, "task")
        feed = await self._feeds.feed(_key(request))
        output = await self._logs.output(request, feed, "log") if requests.text(request, "log") else None
        viewer = RunViewer(feed, series, tasks, output)
        return self._streams.response(self._prepared_after(feed, stream(feed, viewer, self._feeds.reads, _LEAST_S)))

    async def events(self, request: Request) -> Response:
        after = requests.integer(request, "after", 0, 0, 10**12)
        limit = requests.integer(request, "limit", 500, 1, 5000)
        kinds, task = requests.texts(request, "kind"), requests.text(request, "task")
        newest = requests.flag(request, "newest")

        def read(feed: RunFeed) -> dict[str, Any]:
            selected = feed.reader.selected(after, limit, kinds, task, newest)
            is_more = not newest and len(selected) == limit
            return {
                "total": feed.reader.count, "events": [each.to_json() for each in selected],
                "next": selected[-1].number if is_more else None,
            }  # fmt: skip

        return await self._read(request, read)

    async def timeline(self, request: Request) -> Response:
        begin, end = requests.number(request, "from"), requests.number(request, "to")
        first = requests.integer(request, "first", 0, 0, 10**9)
        most = requests.integer(request, "tasks", 200, 1, _MOST_TASKS)
        resolution = requests.number(request, "resolution") or 0.0
        return await self._read(
            request,
            lambda feed: feed.reader.timeline.to_json(_now(feed), begin, end, first, most, resolution),
        )

    async def series(self, request: Request) -> Response:
        name, tasks = requests.text(request, "name"), requests.texts(request, "task")
        begin, end = requests.number(request, "from"), requests.number(request, "to")
        points = requests.integer(request, "points", 1000, 10, 5000)
        seconds = _PARTIAL_S if requests.flag(request, "partial") else math.inf
        evaluated = await self._evaluated(request)
        feed = await self._feeds.feed(_key(request))
        self._prepare(feed)

        def read() -> Any:
            if not name:
                users = {each: list(by_task) for each, by_task in evaluated.items()}
                names = series_query.names(self._parts, feed.run.folder, users)
                has_reported = feed.status.get("steps")  # read before its series, which are written first
                note = NO_SERIES if has_reported and not any(series_parts.parts_between(feed.run.folder)) else ""
                return {"series": [each.to_json() for each in names], "note": note}
            extra = {
                task: [row for row in rows if (begin is None or row[0] >= begin) and (end is None or row[0] <= end)]
                for task, rows in evaluated.get(name, {}).items()
                if not tasks or task in tasks or series_query.ALL in tasks
            }
            return series_query.read(self._parts, feed.run.folder, name, tasks, begin, end, points, extra, seconds)

        return json_response(await self._feeds.reads.run(read))

    async def table(self, request: Request) -> Response:
        wanted, tasks = requests.texts(request, "name"), requests.texts(request, "task")
        if not wanted:
            raise UsageError("name is required", remedy="add ?name=loss")
        evaluated = await self._evaluated(request)
        feed = await self._feeds.feed(_key(request))
        extra = [
            (name, task, row)
            for name in wanted
            for task, rows in evaluated.get(name, {}).items()
            if not tasks or task in tasks
            for row in rows
        ]
        pieces = series_query.table(self._parts, feed.run.folder, wanted, tasks, extra)
        headers = {"content-disposition": f'attachment; filename="{feed.run.name}.csv"'}
        return StreamingResponse(self._in_threads(lambda: next(pieces, None)), 200, headers, "text/csv; charset=utf-8")

    async def restarts(self, request: Request) -> Response:
        recorded = await self._feeds.read(
            _key(request), lambda feed: [each for each in feed.reader.history if each.kind in restarts.KINDS]
        )
        feed = await self._feeds.feed(_key(request))
        logs = feed.run.folder / "logs"
        is_over = feed.status.get("status") in ENDED
        details = await self._feeds.reads.run(
            lambda: restarts.details((each.event() for each in recorded), logs, is_over)
        )
        return json_response({"restarts": details})

    async def hosts(self, request: Request) -> Response:
        def read(feed: RunFeed) -> dict[str, Any]:
            standing = feed.reader.standing(run_folders.alive(feed.run.folder))
            used = standing.report.get("resources") or {}
            by_host = feed.reader.wanted_hosts()
            names = [host for host in dict.fromkeys([*by_host, *used.get("hosts", {})]) if host]
            return {
                "hosts": [
                    {
                        "host": host, "is_joined": standing.alive and host in feed.reader.joined,
                        "tasks": by_host.get(host, []), **used.get("hosts", {}).get(host, {}),
                    }
                    for host in names
                ],
                "tasks": [
                    {"task": task, "host": feed.reader.hosts.get(task, ""), **numbers}
                    for task, numbers in used.get("tasks", {}).items()
                ],
            }  # fmt: skip

        return await self._read(request, read)

    # ----

    async def _prepared_after(self, feed: RunFeed, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """What the page shows first comes first: reading the series would delay it."""
        async with aclosing(events):
            async for each in events:
                yield each
                self._prepare(feed)

    def _prepare(self, feed: RunFeed) -> None:
        """Someone has opened the run, and will probably look at its curves. What is shown first comes first."""
        if feed.run.name in self._prepared:
            return
        self._prepared.add(feed.run.name)
        timer = threading.Timer(_PREPARED_AFTER_S, series_query.prepare, (self._parts, feed.run.folder))
        timer.daemon = True
        timer.start()

    async def _read(self, request: Request, call: Callable[[RunFeed], Any]) -> Response:
        return json_response(await self._feeds.read(_key(request), call))

    async def _evaluated(self, request: Request) -> dict[str, dict[str, list[Row]]]:
        """Metrics of evaluators, which are in events only: by name and task."""

        def read(feed: RunFeed) -> dict[str, dict[str, list[Row]]]:
            values: dict[str, dict[str, list[Row]]] = {}
            for each in feed.reader.selected(limit=_EVALUATIONS, kinds=("evaluated",), newest=True):
                for point in points_of(each.event()):
                    value, step = float(point["value"]), point["step"]
                    if not math.isfinite(value):
                        continue
                    row = point["at"], math.nan if step is None else step, point["generation"], value, value, value
                    values.setdefault(point["name"], {}).setdefault(point["task"], []).append(row)
            return values

        return await self._feeds.read(_key(request), read)

    async def _in_threads(self, piece: Callable[[], str | None]) -> AsyncIterator[str]:
        while (text := await self._feeds.reads.run(piece)) is not None:
            yield text


def _key(request: Request) -> str:
    return str(request.path_params["key"])


def _now(feed: RunFeed) -> float:
    """The end of the bars: of a run that has ended without saying so, its last event."""
    return time.time() if feed.status.get("is_live") else feed.reader.timeline.last
