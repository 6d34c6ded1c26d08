"""The application: its paths, and what all of them share."""

from __future__ import annotations

import getpass
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.errors import UsageError
from paceline.page.access.request_check import SIGN_IN, AccessCheck, Names, sign_in_response
from paceline.page.access.tokens_and_sessions import SessionCookie, Sessions
from paceline.page.feeds.clusters import Clusters
from paceline.page.feeds.feed import stream
from paceline.page.feeds.run_feeds import MOST_RUNS, RunFeeds
from paceline.page.feeds.run_list import RunList, RunListViewer
from paceline.page.http import requests
from paceline.page.http.errors import NotFound, TooManyAttempts
from paceline.page.http.requests import Endpoint, Handler, ReportBug
from paceline.page.http.responses import error_response, json_response
from paceline.page.http.static_files import static_file
from paceline.page.http.streams import Streams
from paceline.page.http.threads import MOST_OF_GROUP, Threads
from paceline.page.routes.log_routes import LogRoutes
from paceline.page.routes.run_routes import RunRoutes
from paceline.page.routes.snapshot_routes import SnapshotRoutes
from paceline.view.files import run_folders

_LEAST_S = 0.5
_FORM = SIGN_IN.rpartition("/")[2]  # the address of the form, relative to its own


class Page:
    """Created in the event loop of the server."""

    def __init__(
        self, sessions: Sessions, names: Names, base: str, cookie: str, is_tls: bool, report_bug: ReportBug
    ) -> None:
        self._base, self._sessions, self._report_bug = base, sessions, report_bug
        self._reads = Threads(16, 200, 60.0, "reading the files of the run")
        # Two for each run that may be shown: stores that do not respond leave threads for others.
        slow = Threads(MOST_RUNS * MOST_OF_GROUP, 200, 60.0, "the cluster or the store")
        self._clusters = Clusters()
        self.feeds = RunFeeds(self._clusters, self._reads, slow)
        self._streams = Streams()
        self._list = RunList(self._clusters)
        self._logs = LogRoutes(self.feeds, self._streams)
        self._runs = RunRoutes(self.feeds, self._streams, self._logs)
        self._snapshots = SnapshotRoutes(self.feeds)
        router = Router(self._routes(), default=_nothing, redirect_slashes=False)
        self._access = AccessCheck(router, sessions, names, SessionCookie(cookie, base, is_tls))

    @property
    def app(self) -> ASGIApp:
        return self._access

    def _routes(self) -> list[Route]:
        run, logs, snapshots = self._runs, self._logs, self._snapshots
        verify: dict[str, Endpoint] = {"post": snapshots.verify, "get": snapshots.verified}
        paths: dict[str, dict[str, Endpoint]] = {
            "api/about": {"get": self._about},
            SIGN_IN: {"post": self._sign_in},
            "api/runs": {"get": self._all_runs},
            "api/runs/stream": {"get": self._all_runs_stream},
            "api/contexts": {"get": self._contexts, "post": self._ask_context},
            "api/runs/{key}": {"get": run.status},
            "api/runs/{key}/stream": {"get": run.stream},
            "api/runs/{key}/tasks": {"get": run.tasks},
            "api/runs/{key}/events": {"get": run.events},
            "api/runs/{key}/timeline": {"get": run.timeline},
            "api/runs/{key}/series": {"get": run.series},
            "api/runs/{key}/series.csv": {"get": run.table},
            "api/runs/{key}/goodput": {"get": run.goodput},
            "api/runs/{key}/hosts": {"get": run.hosts},
            "api/runs/{key}/restarts": {"get": run.restarts},
            "api/runs/{key}/report": {"get": run.report},
            "api/runs/{key}/logs": {"get": logs.window},
            "api/runs/{key}/logs/stream": {"get": logs.stream},
            "api/runs/{key}/logs/tasks": {"get": logs.tasks},
            "api/runs/{key}/snapshots": {"get": snapshots.snapshots},
            "api/runs/{key}/snapshots/{snapshot}/verify": verify,
            "api/runs/{key}/stacks": {"post": snapshots.stacks},
            "api/runs/{key}/job": {"get": snapshots.job},
            "api/runs/{key}/plan": {"get": snapshots.plan},
            "": {"get": static_file},
            "{path:path}": {"get": static_file},
        }
        return [Route(self._base + path, Handler(self._report_bug, **methods)) for path, methods in paths.items()]

    async def _about(self, request: Request) -> Response:
        return json_response(
            {
                "version": _version(), "machine": socket.gethostname(), "user": getpass.getuser(),
                "home": str(run_folders.home()), "base": self._base, "now": time.time(),
            }
        )  # fmt: skip

    async def _sign_in(self, request: Request) -> Response:
        fields = parse_qs((await requests.body(request)).decode("utf-8", "replace"))
        address = request.client.host if request.client is not None else ""
        try:
            session = self._sessions.sign_in(fields.get("password", [""])[0], address)
        except TooManyAttempts as error:
            return sign_in_response(_FORM, str(error), 429)
        if session is None:
            return sign_in_response(_FORM, "This password is wrong.")
        return self._access.signed_in(session, "../")

    async def _all_runs(self, request: Request) -> Response:
        async with self._list.viewed():
            await self._list.ready()
            return json_response(await self._reads.run(self._list.to_json))

    async def _all_runs_stream(self, request: Request) -> Response:
        return self._streams.response(stream(self._list, RunListViewer(self._list), self._reads, _LEAST_S))

    async def _contexts(self, request: Request) -> Response:
        clusters = await self._reads.run(self._clusters.all)
        return json_response({"contexts": [each.to_json() for each in clusters]})

    async def _ask_context(self, request: Request) -> Response:
        fields = await requests.json_body(request)
        context, namespace = fields.get("context"), fields.get("namespace")
        if not isinstance(context, str) or not (namespace is None or isinstance(namespace, str)):
            raise UsageError("context and namespace must be strings", where="body")
        cluster = await self._reads.run(lambda: self._clusters.ask(context, namespace or None))
        return json_response(cluster.to_json(), 202)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(NotFound("there is nothing at this path"))(scope, receive, send)


def _version() -> Any:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return None
