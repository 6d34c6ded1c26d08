"""A server of the page with a live run, an ended one and one of a thousand tasks, and a browser that has signed in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from support import browser as chromium
from support import recorded
from support.page_server import many_lines, many_tasks, page_server
from support.page_site import LINES, Site
from support.runs import Run

HERE = Path(__file__).parent
LIMIT_MS = 120_000

expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """From then on, playwright's event loop runs in this process, and no test can start one of its own: tests that use
    this are marked long, those others are not."""
    with chromium.launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("page")
    home = root / "home"
    recorded.write(home, "digits-3f9a", report=recorded.REPORT, logs={"worker-0": f"{recorded.at(1)} g1 | done\n"})
    many_lines(many_tasks(home, 1000) / "logs" / "worker-0.log", LINES)
    job = {
        "name": "live", "framework": "none", "snapshots": {"keep": 30, "best": {"metric": "test_loss"}},
        "roles": {
            "worker": {"replicas": 2, "command": ["python", str(HERE / "train.py"), "100000"]},
            "evaluator": {"replicas": 1, "command": ["python", str(HERE / "evaluate.py")]},
        },
    }  # fmt: skip
    live = Run(root / "live", job, home=home)
    try:
        with page_server(home) as server:
            context = browser.new_context()
            context.set_default_timeout(LIMIT_MS)
            page = context.new_page()
            page.goto(server.address)
            state = root / "session.json"
            context.storage_state(path=state)
            context.close()
            live.wait("evaluated")
            yield Site(server, live, state)
    finally:
        live.clean_up()


class Problems(list[str]):
    """What the browser complained about: errors of scripts, and requests that the policy of the page forbids."""

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.append(f"error: {error}"))
        page.on("console", lambda message: self.append(message.text) if message.type == "error" else None)


@pytest.fixture
def problems() -> Iterator[Problems]:
    noted = Problems()
    yield noted
    assert not noted


@pytest.fixture
def page(browser: Browser, site: Site, problems: Problems) -> Iterator[Page]:
    """A tab of a window on a desk."""
    context = browser.new_context(storage_state=site.state, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(LIMIT_MS)
    opened = context.new_page()
    problems.watch(opened)
    yield opened
    context.close()


@pytest.fixture
def phone(browser: Browser, site: Site, problems: Problems) -> Iterator[Page]:
    context = browser.new_context(
        storage_state=site.state, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True
    )
    context.set_default_timeout(LIMIT_MS)
    opened = context.new_page()
    problems.watch(opened)
    yield opened
    context.close()
