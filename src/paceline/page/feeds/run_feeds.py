"""The feeds of runs: one for each run that someone looks at, shared by all its viewers; their number is limited."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from paceline.client.reading.find_run import Target, find_run
from paceline.errors import PacelineError
from paceline.page.feeds.clusters import Clusters
from paceline.page.feeds.run_feed import RunFeed
from paceline.page.http.errors import Busy
from paceline.page.http.threads import Threads
from paceline.storage.stores.locations import is_bucket
from paceline.view.files import run_folders
from paceline.view.files.run_folders import NoRun, Run
from paceline.view.snapshots.snapshot_locations import location_of

MOST_RUNS = 32  # that are shown at a time
_KEPT_S = 120.0  # seconds after the last viewer has left
_KEY = re.compile(r"(?P<run>[A-Za-z0-9_][A-Za-z0-9_.-]{0,250})(?:@(?P<cluster>[0-9a-f]{10}))?")
T = TypeVar("T")


class RunFeeds:
    def __init__(self, clusters: Clusters, reads: Threads, slow: Threads) -> None:
        """`reads`: for files of this machine; `slow`: for clusters and stores."""
        self._clusters, self.reads, self._slow = clusters, reads, slow
        self._feeds: dict[str, RunFeed] = {}
        self._adopted: dict[str, Run] = {}

    async def feed(self, key: str) -> RunFeed:
        """NoRun: there is no run with this key."""
        run = await self._find(key)
        feed = self._feeds.get(key)
        if feed is not None and (feed.problem is not None or feed.run != run or not _is_current(feed)):
            self._drop(key)
            feed = None
        if feed is None:
            if len(self._feeds) >= MOST_RUNS:
                self._make_room()
            feed = self._feeds[key] = RunFeed(key, run)
        return feed

    async def read(self, key: str, call: Callable[[RunFeed], T]) -> T:
        """The result of a function that reads the feed, in a thread, once the feed has read the run."""
        feed = await self.feed(key)
        async with feed.viewed():
            await feed.ready()

            def locked() -> T:
                with feed.lock:
                    return call(feed)

            return await self.reads.run(locked)

    async def ask_store(self, run: Run, call: Callable[[], T], seconds: float | None = None) -> T:
        """The result of a function that may have to wait for the store of a run, in a thread. Few functions wait for
        one store at a time: others are left for runs whose stores respond."""
        return await self._slow.run(call, seconds, await self.reads.run(lambda: _store_of(run)))

    async def ask_captain(self, run: Run, call: Callable[[], T], seconds: float | None = None) -> T:
        return await self._slow.run(call, seconds, f"the captain of {run.name}")

    async def _find(self, key: str) -> Run:
        match = _KEY.fullmatch(key)
        if match is None:
            raise NoRun(f"no run {key[:100]!r}")
        name, code = match["run"], match["cluster"]
        if code is None:
            folder = run_folders.runs_folder() / name
            if not folder.is_dir() or run_folders.deleted(folder):
                raise NoRun(f"no run {name!r}", remedy="it was deleted, or never existed")
            return Run(name, folder)
        run = self._adopted.get(key)
        if run is None or not run.folder.is_dir():
            cluster = self._clusters.by_code(code)
            target = Target("kubernetes", cluster.context or None, cluster.namespace)
            run = self._adopted[key] = await self._slow.run(
                lambda: find_run(name, target), group=f"the cluster {cluster.context}"
            )
        return run

    def sweep(self, now: float) -> None:
        """Drops what nobody has looked at for a while."""
        for key, since in [(key, feed.idle_since()) for key, feed in self._feeds.items()]:
            if since is not None and now - since > _KEPT_S:
                self._drop(key)

    def _make_room(self) -> None:
        idle = [(since, key) for key, feed in self._feeds.items() if (since := feed.idle_since()) is not None]
        if not idle:
            raise Busy(f"{MOST_RUNS} runs are shown at the moment, which is the limit", remedy="close some pages")
        self._drop(min(idle)[1])

    def _drop(self, key: str) -> None:
        self._feeds.pop(key).drop()


def _store_of(run: Run) -> str:
    """Its bucket, which other runs may share; or what only this run has: its folder, its pod, its claim."""
    try:
        location = location_of(run)
    except PacelineError:  # its plan is damaged
        location = ""
    return "/".join(location.split("/")[:3]) if is_bucket(location) else f"the store of {run.name}"


def _is_current(feed: RunFeed) -> bool:
    """An ended run may be deleted and started again under the same id."""
    return not feed.is_over or not run_folders.alive(feed.run.folder)
