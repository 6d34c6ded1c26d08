"""The addresses of the page that tests open in a browser, and the runs behind them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.page_server import PageServer
from support.runs import Run

LINES = 100_000  # in the log of the run with a thousand tasks
TABS = (
    "overview", "timeline", "curves", "tasks", "output", "restarts", "resources", "snapshots", "events", "job",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    server: PageServer
    live: Run
    state: Path  # the browser's session

    def url(self, route: str = "") -> str:
        return f"{self.server.url}{route}"

    def run(self, tab: str = "overview", more: str = "") -> str:
        return self.url(f"#/run/{self.live.folder.name}/{tab}{more}")
