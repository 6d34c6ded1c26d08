"""The output of a run's tasks: windows by position, searches, and streams that follow it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.client.reading.find_run import refresh
from paceline.client.reading.run_logs import select
from paceline.errors import PacelineError, UsageError
from paceline.frameworks.python_start import module_command
from paceline.page.feeds.feed import stream
from paceline.page.feeds.run_feed import RunFeed
from paceline.page.feeds.run_feeds import RunFeeds
from paceline.page.feeds.run_viewer import MergedOutput, Output, OutputViewer
from paceline.page.http import requests
from paceline.page.http.errors import NotFound, TimeLimit
from paceline.page.http.responses import json_response
from paceline.page.http.streams import Streams
from paceline.page.routes.regex_search_process import CPU_S
from paceline.page.routes.selected_logs import SelectedLogs
from paceline.view.files import run_folders
from paceline.view.files.run_files import is_time
from paceline.view.output import log_blocks, log_windows, merged_logs
from paceline.view.output.log_blocks import LONGEST
from paceline.view.output.log_windows import Query
from paceline.view.series.series_query import ALL

_SEARCHES = 2  # regular expressions at a time
_SEARCH_S = 60.0  # until a search is killed; usually the limit of its CPU time comes first
_SEARCHED_S = 0.5  # then the client is told how far a search has come
_FULL_LINES = 16  # whole lines in one response: each may have a MiB
_FETCHED = 10_000
_DIRECTIONS = ("forward", "backward", "around")


class LogRoutes:
    def __init__(self, feeds: RunFeeds, streams: Streams) -> None:
        self._feeds, self._streams = feeds, streams
        self._searches = asyncio.Semaphore(_SEARCHES)
        self._fetched: OrderedDict[tuple[str, str], None] = OrderedDict()  # runs and hosts

    async def tasks(self, request: Request) -> Response:
        feed = await self._feeds.feed(str(request.path_params["key"]))
        folder = feed.run.folder / "logs"

        def read() -> list[dict[str, Any]]:
            listed = []
            for task in merged_logs.task_names(folder):
                first, end = log_windows.limits(folder / f"{task}.log")
                listed.append({"task": task, "first": first, "end": end})
            return listed

        return json_response({"tasks": await self._feeds.reads.run(read)})

    async def window(self, request: Request) -> Response:
        """`task`: one task, or ALL."""
        feed = await self._feeds.feed(str(request.path_params["key"]))
        task = requests.text(request, "task")
        selected = await self._selected(feed, task)
        usual = (
            "around"
            if requests.text(request, "at")
            else "forward"
            if requests.text(request, "position")
            else "backward"
        )
        direction = requests.text(request, "direction") or usual
        if direction not in _DIRECTIONS:
            raise UsageError("invalid value", where="direction", remedy=f"use one of {', '.join(_DIRECTIONS)}")
        position = await self._position(request, selected)
        find, grep = requests.text(request, "find"), requests.text(request, "grep")
        if find and grep:
            raise UsageError("find and grep cannot be used together")
        limit, is_full = requests.integer(request, "limit", 500, 1, 2000), requests.flag(request, "full")
        query = Query(
            position, direction == "backward", min(limit, _FULL_LINES) if is_full else limit,
            log_blocks.containing(find) if find else None, _SEARCHED_S,
            shown=LONGEST if is_full else log_blocks.SHOWN, is_final=feed.is_over,
            inside=requests.text(request, "inside"),
        )  # fmt: skip
        if grep:
            select(grep=grep)  # raises UsageError if it is not a regular expression
            return json_response({"task": task, **await self._search(selected, query, grep)})

        def read() -> dict[str, Any]:
            if direction == "around" and position is not None:
                return selected.around(position, query)
            return selected.read(query)

        return json_response({"task": task, **await self._feeds.reads.run(read)})

    async def stream(self, request: Request) -> Response:
        feed = await self._feeds.feed(str(request.path_params["key"]))
        output = await self.output(request, feed, "task")
        return self._streams.response(stream(feed, OutputViewer(feed, output), self._feeds.reads, 0.0))

    async def output(self, request: Request, feed: RunFeed, parameter: str) -> Output | MergedOutput:
        """The output of the task that this parameter names, or of all, from `position` on."""
        selected = await self._selected(feed, requests.text(request, parameter))
        position = requests.integer(request, "position", -1, 0, 10**17)
        if selected.tasks is None:
            return Output(selected.path, position)
        return MergedOutput(selected.folder, position)

    async def _selected(self, feed: RunFeed, task: str) -> SelectedLogs:
        """Only of a task that has a log, or will have one: a name cannot lead to another file."""
        folder = feed.run.folder / "logs"
        if task != ALL and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,250}", task):
            raise UsageError("task is required" if not task else "invalid task", where=f"task={task[:40]}")
        hosts = feed.reader.hosts
        if task != ALL and task not in hosts and task not in await self._names(folder):
            raise NotFound(f"{feed.run.name} has no output of task {task!r}")
        await self._fetch(feed, [hosts.get(task, "")] if task != ALL else sorted({*hosts.values()}))
        return SelectedLogs(folder, task, tuple(await self._names(folder)) if task == ALL else None)

    async def _names(self, folder: Path) -> list[str]:
        return await self._feeds.reads.run(lambda: merged_logs.task_names(folder))

    async def _fetch(self, feed: RunFeed, hosts: list[str]) -> None:
        """Of a run on a cluster that has ended, the output may still be in its store only."""
        missing = [host for host in hosts if host and (feed.key, host) not in self._fetched]
        if not missing or not feed.is_over or not run_folders.on_cluster(feed.run.folder):
            return
        await self._feeds.ask_store(feed.run, lambda: refresh(feed.run, missing))
        self._fetched.update({(feed.key, host): None for host in missing})
        while len(self._fetched) > _FETCHED:
            self._fetched.popitem(last=False)

    async def _position(self, request: Request, selected: SelectedLogs) -> int | None:
        at = requests.text(request, "at")
        if not at:
            position = requests.integer(request, "position", -1, 0, 10**17)
            return position if position >= 0 else None
        if not is_time(at):
            raise UsageError("not a time", where=f"at={at[:40]}", remedy="use 2026-11-15T04:30:00.000Z")
        return await self._feeds.reads.run(lambda: selected.position_at(at))

    async def _search(self, selected: SelectedLogs, query: Query, grep: str) -> dict[str, Any]:
        """In a process that can be killed."""
        arguments = {
            "folder": str(selected.folder), "task": selected.task, "tasks": selected.tasks, "grep": grep,
            "position": query.position, "backward": query.backward, "limit": query.limit, "shown": query.shown,
            "seconds": query.seconds, "inside": query.inside,
        }  # fmt: skip
        async with self._searches:
            process = await asyncio.create_subprocess_exec(
                *module_command(sys.executable, "paceline.page.routes.regex_search_process"),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            try:
                async with asyncio.timeout(_SEARCH_S):
                    output, _ = await process.communicate(json.dumps(arguments).encode())
            except TimeoutError:
                raise TimeLimit(f"the search took longer than {_SEARCH_S:g} s", remedy="try again") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise TimeLimit(f"the search took longer than {CPU_S} s", remedy="use a simpler expression")
        if process.returncode:
            raise PacelineError("the search failed")
        result: dict[str, Any] = json.loads(output)
        return result
