"""Snapshots that the page verifies: stores that do not respond leave room for those of other runs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from paceline.page.feeds.run_feeds import RunFeeds
from paceline.page.http.errors import Busy
from paceline.page.routes import snapshot_routes
from paceline.page.routes.snapshot_routes import SnapshotRoutes, Verification
from paceline.view.files.run_folders import Run


class Feeds:
    async def feed(self, key: str) -> Any:
        return SimpleNamespace(key=key, run=Run(key, Path("/nonexistent")))


@pytest.mark.parametrize("stuck_s", [60.0, -1.0])
def test_verifications_without_data_do_not_count(stuck_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(run: Run, verification: Verification) -> None:
        release.wait()

    monkeypatch.setattr(snapshot_routes, "_verify", hang)
    monkeypatch.setattr(snapshot_routes, "_STUCK_S", stuck_s)
    routes = SnapshotRoutes(cast(RunFeeds, Feeds()))

    def verify(run: int, snapshot: str) -> None:
        request = Request({"type": "http", "path_params": {"key": f"run-{run}", "snapshot": snapshot}})
        asyncio.run(routes.verify(request))

    try:
        for run in range(3):
            verify(run, "step-1-g1")
            verify(run, "step-2-g1")
            with pytest.raises(Busy):
                verify(run, "step-3-g1")
        if stuck_s > 0:
            with pytest.raises(Busy, match="too many snapshots are being verified"):
                verify(3, "step-1-g1")
            return
        for run in range(3, 16):
            verify(run, "step-1-g1")
            verify(run, "step-2-g1")
        with pytest.raises(Busy, match="too many snapshots are being verified"):
            verify(16, "step-1-g1")
    finally:
        release.set()
