"""The plan of a run, as the page shows it: that of another user may be made to keep the page busy."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.page.feeds.run_feeds import RunFeeds
from paceline.page.http.threads import Threads
from paceline.page.routes import snapshot_routes
from paceline.page.routes.snapshot_routes import SnapshotRoutes
from paceline.view.files import job_files
from paceline.view.files.job_files import plan_form


def write(folder: Path, **variables: str) -> int:
    text = json.dumps({"roles": [{"name": "worker", "env": variables}]})
    (folder / "plan.json").write_text(text)
    return len(text)


def test_a_plan_with_thousands_of_secrets_is_not_shown(tmp_path: Path) -> None:
    """Each would be searched in all texts of the plan: with 16 MiB, for hours."""
    write(tmp_path, **{f"TOKEN_{number}": f"secret-{number:06}" for number in range(20_000)})
    with pytest.raises(PacelineError, match=r"plan\.json cannot be shown: 20000 values look like secrets"):
        plan_form(tmp_path)


def test_a_plan_that_is_too_large_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "_LARGEST_PLAN", write(tmp_path, HF_TOKEN="0123456789"))
    assert plan_form(tmp_path)["plan"] == {"roles": [{"name": "worker", "env": {"HF_TOKEN": "***"}}]}
    monkeypatch.setattr(job_files, "_LARGEST_PLAN", 40)
    with pytest.raises(PacelineError, match=r"plan\.json is too large to be shown"):
        plan_form(tmp_path)


def test_a_run_without_a_plan_has_none_to_show(tmp_path: Path) -> None:
    assert plan_form(tmp_path) == {"text": None, "plan": None}


def test_a_large_plan_does_not_delay_other_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is converted in a thread of its own."""
    write(tmp_path)
    used: list[int] = []
    convert = snapshot_routes.json_response

    def converted(data: Any) -> Response:
        used.append(threading.get_ident())
        return convert(data)

    monkeypatch.setattr(snapshot_routes, "json_response", converted)

    class Feeds:
        async def feed(self, key: str) -> Any:
            return SimpleNamespace(run=SimpleNamespace(folder=tmp_path))

        @property
        def reads(self) -> Threads:
            return Threads(1, 1, 60.0, "the test")

    request = Request({"type": "http", "path_params": {"key": "digits"}})
    response = asyncio.run(SnapshotRoutes(cast(RunFeeds, Feeds())).plan(request))
    assert json.loads(bytes(response.body))["plan"] == {"roles": [{"name": "worker", "env": {}}]}
    assert len(used) == 1 and used != [threading.get_ident()]
