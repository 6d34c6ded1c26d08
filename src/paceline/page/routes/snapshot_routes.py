"""Snapshots of a run, their verification, the stacks of its tasks, its job file and its plan."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.client.diagnosis import stacks
from paceline.client.reading.find_run import refresh
from paceline.client.snapshots import run_snapshots, run_store
from paceline.errors import PacelineError, UsageError
from paceline.page.feeds.run_feed import RunFeed
from paceline.page.feeds.run_feeds import RunFeeds
from paceline.page.http import requests
from paceline.page.http.errors import Busy, NotFound
from paceline.page.http.responses import error_fields, json_response
from paceline.storage.snapshots.manifest import Damaged, Gone, Newer
from paceline.view.diagnosis import stacks as stack_text
from paceline.view.files.run_folders import Run
from paceline.view.snapshots import snapshot_listing
from paceline.view.snapshots.snapshot_listing import NoSnapshot
from paceline.view.text.option_names import text_of

_STORE_S = 60.0
_STACKS_S = 60.0
_MOST_VERIFICATIONS = 6  # at a time
_MOST_OF_RUN = 2  # a store that does not respond must not keep those of other runs from being verified
_STUCK_S = 60.0  # without data, after which a verification no longer counts towards the limit
_MOST_THREADS = 32  # including those that are stuck
_KEPT = 100


@dataclass
class Verification:
    snapshot: str
    state: str = "running"  # running, sound, damaged, failed
    bytes: int = 0
    of: int = 0
    problems: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    advanced_at: float = field(default_factory=time.monotonic)

    def advance(self, amount: int) -> None:
        self.bytes, self.advanced_at = self.bytes + amount, time.monotonic()

    def is_stuck(self, now: float) -> bool:
        return now - self.advanced_at > _STUCK_S

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "advanced_at"}


class SnapshotRoutes:
    def __init__(self, feeds: RunFeeds) -> None:
        self._feeds = feeds
        self._verifications: OrderedDict[tuple[str, str], Verification] = OrderedDict()
        self._running: list[tuple[str, Verification]] = []  # with the key of the run

    async def snapshots(self, request: Request) -> Response:
        feed, every = await self._feed(request), requests.flag(request, "all")
        best = (feed.status.get("best") or {}).get("snapshot")

        def read() -> dict[str, Any]:
            run = feed.run
            refresh(run)
            with closing(run_store.open_run(run)) as source:
                listed = run_snapshots.listed(source, every)
                return {"snapshots": [_form(each, run, best) for each in listed], "address": source.address}

        form = await self._feeds.ask_store(feed.run, read, _STORE_S)
        for each in form["snapshots"]:
            verification = self._verifications.get((feed.key, each["snapshot"]))
            each["verified"] = verification and verification.to_json()
        return json_response(form)

    async def verify(self, request: Request) -> Response:
        feed, name = await self._feed(request), str(request.path_params["snapshot"])
        self._running = [(key, each) for key, each in self._running if each.state == "running"]
        verification = self._verifications.get((feed.key, name))
        if verification is None or verification.state != "running":
            if len(name) > 100:
                raise NoSnapshot("no such snapshot")
            self._check_limits(feed.key)
            verification = self._verifications[feed.key, name] = Verification(name)
            self._running.append((feed.key, verification))
            while len(self._verifications) > _KEPT:
                self._verifications.popitem(last=False)
            threading.Thread(target=_verify, args=(feed.run, verification), daemon=True).start()
        return json_response(verification.to_json(), 202)

    def _check_limits(self, key: str) -> None:
        now, running = time.monotonic(), self._running
        active = [each for _, each in running if not each.is_stuck(now)]
        of_run = [each for run, each in running if run == key]
        if len(active) >= _MOST_VERIFICATIONS or len(of_run) >= _MOST_OF_RUN or len(running) >= _MOST_THREADS:
            raise Busy("too many snapshots are being verified")

    async def verified(self, request: Request) -> Response:
        feed, name = await self._feed(request), str(request.path_params["snapshot"])
        verification = self._verifications.get((feed.key, name))
        if verification is None:
            raise NotFound(f"{name[:100]} was not verified")
        return json_response(verification.to_json())

    async def stacks(self, request: Request) -> Response:
        feed, fields = await self._feed(request), await requests.json_body(request)
        tasks = fields.get("tasks", [])
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise UsageError("tasks must be a list of task names")

        def take() -> dict[str, Any]:
            refresh(feed.run)
            processes = stacks.take(feed.run, tasks)
            text = "\n".join(stack_text.describe(processes))
            return {"run": feed.run.name, "tasks": [each.to_dict() for each in processes], "text": text}

        return json_response(await self._feeds.ask_captain(feed.run, take, _STACKS_S))

    async def job(self, request: Request) -> Response:
        from paceline.view.files.job_files import job_form

        folder = (await self._feed(request)).run.folder
        return json_response(await self._feeds.reads.run(lambda: job_form(folder)))

    async def plan(self, request: Request) -> Response:
        from paceline.view.files.job_files import plan_form

        folder = (await self._feed(request)).run.folder
        # In the thread, as it takes seconds for a large plan: the event loop has other clients.
        return await self._feeds.reads.run(lambda: json_response(plan_form(folder)))

    async def _feed(self, request: Request) -> RunFeed:
        return await self._feeds.feed(str(request.path_params["key"]))


def _form(snapshot: run_snapshots.Snapshot, run: Run, best: str | None) -> dict[str, Any]:
    origin = f"{run.name}/{snapshot.name}"
    return {
        **snapshot.to_dict(), "address": snapshot.address, "is_best": snapshot.name == best,
        "command": f"paceline run job.yaml --set snapshots.from={origin}",
    }  # fmt: skip


def _verify(run: Run, verification: Verification) -> None:
    def advance(amount: int) -> bool:
        verification.advance(amount)
        return True

    def work() -> None:
        refresh(run)
        with closing(run_store.open_run(run)) as source:
            id = snapshot_listing.find(source, source.reader.inventory(), verification.snapshot)
            try:
                manifest = source.reader.manifest(id)
                verification.of = manifest.size
                verification.problems = snapshot_listing.damages(source.transfers, manifest, advance)
            except Gone:
                raise NoSnapshot(f"{verification.snapshot} was deleted in the meantime") from None
            except (Damaged, Newer) as error:
                verification.problems = [text_of(error)]
        verification.state = "damaged" if verification.problems else "sound"

    try:
        work()
    except PacelineError as error:
        verification.error, verification.state = error_fields(error), "failed"
    except Exception as error:
        verification.error = error_fields(PacelineError(f"this is a bug in Paceline: {type(error).__name__}: {error}"))
        verification.state = "failed"
