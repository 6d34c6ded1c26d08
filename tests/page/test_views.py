"""Every view of the page in a real browser: in both themes, by keyboard, on a phone, and checked by axe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from support.page_server import page_server
from support.page_site import TABS, Site

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("page")]

# What a tab shows once it is complete.
CONTENT = {
    "overview": ".metric-table >> text=test_loss",
    "timeline": "canvas[data-rows='3']",
    "curves": ".panel[data-series=loss] canvas",
    "tasks": ".grid-row >> text=worker-1",
    "output": ".log-line >> text=/step \\d+/ >> nth=0",
    "restarts": "#panel >> text=/No restarts|Restart 1/ >> nth=0",
    "resources": ".grid-row >> text=worker-host-0 >> nth=0",
    "snapshots": ".snapshots >> text=/step-\\d+-g\\d+/ >> nth=0",
    "events": ".feed >> text=run-started",
    "job": ".yaml >> text=train.py >> nth=0",
}


def check_accessibility(page: Page) -> None:
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()


def test_the_list_of_runs(site: Site, page: Page) -> None:
    page.goto(site.url())
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.filter(has_text=site.live.folder.name)).to_contain_text("running")
    expect(rows.filter(has_text="large-1000")).to_contain_text("signal")
    check_accessibility(page)
    page.emulate_media(color_scheme="dark")
    check_accessibility(page)

    page.get_by_label("Filter runs").fill("digits")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Running").click()
    expect(page.get_by_text("No run matches")).to_be_visible()
    page.reload()  # the filter is part of the address
    expect(page.get_by_text("No run matches")).to_be_visible()
    page.get_by_role("button", name="Clear the filter").click()
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(rows.first).to_contain_text("digits-3f9a")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(rows.last).to_contain_text("digits-3f9a")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_tab_of_a_run(site: Site, page: Page, theme: str) -> None:
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    for tab in TABS:
        page.goto(site.run(tab))
        expect(page.locator(CONTENT[tab])).to_be_visible()
        expect(page.get_by_role("tab", selected=True)).to_have_text(tab.capitalize())
        check_accessibility(page)


def test_a_phone_shows_every_view_without_scrolling_sideways(site: Site, phone: Page) -> None:
    for route in (site.url(), *(site.run(tab) for tab in TABS)):
        phone.goto(route)
        tab = route.rpartition("/")[2]
        expect(phone.locator(CONTENT.get(tab, "table.runs tbody tr >> nth=0"))).to_be_visible()
        assert phone.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), route
    check_accessibility(phone)


def test_a_run_of_an_older_version_has_no_earlier_values(site: Site, page: Page) -> None:
    page.goto(site.url("#/run/digits-3f9a/curves"))
    expect(page.get_by_text("an older version of Paceline has started it")).to_be_visible()
    expect(page.locator(".panel[data-series=accuracy] canvas")).to_be_visible()
    page.goto(site.run("curves"))
    expect(page.locator(".panel[data-series=loss] canvas")).to_be_visible()
    expect(page.get_by_text("an older version of Paceline has started it")).to_be_hidden()


def test_curves_are_compared_and_downloaded(site: Site, page: Page) -> None:
    page.goto(site.run("curves"))
    panel = page.locator(".panel[data-series=loss]")
    expect(panel.locator("canvas")).to_be_visible()
    with page.expect_download() as picture:
        panel.get_by_role("button", name="PNG").click()
    assert picture.value.path().read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as table:
        panel.get_by_role("button", name="CSV").click()
    header, first, *_ = table.value.path().read_text().splitlines()
    assert header.startswith("name,task,generation,at,step,value") and first.startswith("loss,")
    page.get_by_role("button", name="Log scale").click()
    page.get_by_role("button", name="Time", exact=True).click()
    expect(panel.locator("canvas")).to_be_visible()
    expect(page).to_have_url(re.compile(r"log=1.*x=time"))

    page.goto(site.url(f"#/compare?run={site.live.folder.name}&run=digits-3f9a"))
    expect(page.locator(".panel[data-series=loss] canvas")).to_be_visible()
    expect(page.locator("table.compare")).to_contain_text("digits-3f9a")
    expect(page.locator("table.diff")).to_contain_text("framework")
    check_accessibility(page)


def test_a_snapshot_is_verified(site: Site, page: Page) -> None:
    page.goto(site.run("snapshots"))
    # The newest one may not be evaluated yet; the oldest one of 30 may be replaced before it is verified.
    row = page.locator(".snapshots tbody tr", has_text="test_loss").first
    expect(row.locator("code")).to_contain_text("paceline run")
    page.get_by_role("button", name="Verify").first.click()
    expect(page.get_by_text("sound")).to_be_visible()


def test_keyboard(site: Site, page: Page) -> None:
    page.goto(site.url())
    expect(page.locator("table.runs tbody tr")).to_have_count(3)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Next run")
    check_accessibility(page)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("/")
    expect(page.get_by_label("Filter runs")).to_be_focused()
    page.keyboard.type(site.live.folder.name)
    expect(page.locator("table.runs tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(site.live.folder.name)
    expect(page.get_by_role("tab", selected=True)).to_have_text("Overview")  # from then on, it reacts to keys
    page.keyboard.press("2")
    expect(page.get_by_role("tab", selected=True)).to_have_text("Timeline")
    page.keyboard.press("t")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_what_cannot_be_shown_is_explained(site: Site, page: Page, problems: list[str]) -> None:
    page.goto(site.url("#/run/nothing-0000"))
    expect(page.get_by_role("alert")).to_contain_text("nothing-0000")
    page.goto(site.url("#/run/digits-3f9a/timeline"))
    expect(page.locator("#live")).to_have_text("ended")
    assert problems and all("404" in problem for problem in problems), problems
    problems.clear()


def test_a_server_that_ends_is_noticed(page: Page, problems: list[str], tmp_path: Path) -> None:
    with page_server(tmp_path) as server:
        page.goto(server.address)
        expect(page.locator("#live")).to_have_text("live")
        expect(page.get_by_text("No runs yet")).to_be_visible()
    expect(page.locator("#live")).to_have_text("connection lost, retrying")
    page.close()  # it tries again
    problems.clear()  # requests that failed
