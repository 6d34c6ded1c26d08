"""A run that the page follows: a worker that dies is seen live, its output is followed, and text stays text."""

from __future__ import annotations

import re
import signal

import pytest
from playwright.sync_api import Page, expect

from support.page_site import Site
from support.runs import kill

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("page")]

ODD_NAMES = ("<img src=x onerror=document.title=1>", "constructor", "__proto__")  # of metrics that train.py reports


def stat(label: str) -> str:
    return f".stat:has(.label:text-is('{label}')) .value"


def test_output_is_followed_and_never_becomes_html(site: Site, page: Page) -> None:
    page.goto(site.run("output", "?task=worker-1"))
    lines = page.locator(".log-line")
    expect(lines.filter(has_text="<img src=x onerror=")).not_to_have_count(0)
    last = page.locator(".log-line >> nth=-1")
    before = last.text_content()
    expect(last).not_to_have_text(before or "")
    assert page.locator("#log-lines img, #log-lines script").count() == 0
    assert page.title() == f"{site.live.folder.name} · Paceline"


def test_the_output_of_all_tasks_is_interleaved_and_followed(site: Site, page: Page) -> None:
    page.goto(site.run("output", "?task=worker-1"))
    page.get_by_label("Task", exact=True).select_option("All tasks")
    names = page.locator(".line-task")
    expect(names.filter(has_text="worker-0")).not_to_have_count(0)
    expect(names.filter(has_text="worker-1")).not_to_have_count(0)
    last = page.locator(".log-line >> nth=-1")
    before = last.text_content()
    expect(last).not_to_have_text(before or "")
    page.get_by_label("Search the output").fill("step 1")
    page.get_by_role("button", name="Show only matching lines").click()
    matches = page.locator(".matches .log-line")  # before that, matches are marked among all lines
    expect(matches.filter(has=page.locator(".line-task:text-is('worker-0')")).locator("mark").first).to_have_text(
        "step 1"
    )
    matches.first.click()
    expect(page.locator(".log-line.target").first).to_contain_text("step 1")


def test_a_worker_that_is_killed_is_seen_live(site: Site, page: Page) -> None:
    page.goto(site.run())
    page.evaluate("window.isSamePage = true")
    restarts = page.locator(stat("Restarts"))
    expect(restarts).to_have_text(re.compile(r"\d+"))
    before = int(restarts.text_content() or "")
    expect(page.locator("#live")).to_have_text("live")
    kill(site.live.task("worker-1"), signal.SIGKILL)
    expect(restarts).to_have_text(str(before + 1))
    expect(page.locator(".feed:visible")).to_contain_text("SIGKILL")
    expect(page.locator(".feed:visible")).to_contain_text("recovered")
    page.get_by_role("tab", name="Restarts").click()
    expect(page.get_by_role("heading", name=re.compile("signal"))).to_be_visible()
    expect(page.locator(".restart-view pre").last).to_contain_text("step")
    page.get_by_role("tab", name="Timeline").click()
    expect(page.locator("canvas[data-rows='3']")).to_be_visible()
    page.get_by_role("tab", name="Tasks").click()
    expect(page.locator(".grid-row", has_text="worker-1")).to_contain_text("training")
    assert page.evaluate("window.isSamePage"), "the page was loaded again"


def test_a_pause_is_seen_live(site: Site, page: Page) -> None:
    name = site.live.folder.name
    page.goto(site.run("tasks"))
    status, rows = page.locator(".run-head .status"), page.locator(".grid-row")
    expect(status).to_have_text("running")
    paused = site.live.call("pause", name)
    assert paused.returncode == 0, paused.stderr
    expect(status).to_have_text("paused")
    expect(page.locator(".notice")).to_contain_text("paused")
    expect(rows.filter(has_text="worker-1")).to_contain_text("waiting")
    resumed = site.live.call("resume", name)
    assert resumed.returncode == 0, resumed.stderr
    expect(status).to_have_text("running")
    expect(rows.filter(has_text="worker-1")).to_contain_text("training")
    timeline = page.request.get(site.url(f"api/runs/{name}/timeline")).json()
    assert {"paused", "resumed"} <= {mark["kind"] for mark in timeline["marks"]}


def test_names_of_metrics_are_only_text(site: Site, page: Page) -> None:
    page.goto(site.run("curves"))
    for name in ODD_NAMES:
        expect(page.locator(".panel h3").get_by_text(name, exact=True)).to_have_count(1)
    page.get_by_role("tab", name="Overview").click()
    for name in ODD_NAMES:
        expect(page.locator(".metric-table").get_by_text(name, exact=True)).to_have_count(1)
    assert page.locator("main img, main script").count() == 0
    assert page.title() == f"{site.live.folder.name} · Paceline"


def test_curves_grow(site: Site, page: Page) -> None:
    page.goto(site.run("curves", "?only=loss"))
    value = page.locator(".panel[data-series=loss] .values b").first
    before = value.text_content()
    expect(value).not_to_have_text(before or "")


def time_of_training(site: Site, page: Page) -> tuple[float, float]:
    """A part of the longest time that worker-0 has trained without a restart."""
    rows = page.request.get(site.url(f"api/runs/{site.live.folder.name}/timeline")).json()["tasks"]
    [segments] = [row["segments"] for row in rows if row["task"] == "worker-0"]
    length, begin = max((end - begin, begin) for kind, begin, end, *_ in segments if kind == "training")
    return begin + 0.25 * length, begin + 0.75 * length


def test_a_bar_of_the_timeline_leads_to_the_output_of_that_time(site: Site, page: Page) -> None:
    begin, end = time_of_training(site, page)
    page.goto(site.run("timeline", f"?from={begin:.2f}&to={end:.2f}"))
    canvas = page.locator("canvas[data-rows='3']")
    expect(canvas).to_be_visible()
    box = canvas.bounding_box()
    assert box is not None
    canvas.hover(position={"x": box["width"] * 0.7, "y": 46 + 33})  # the second row
    expect(page.locator(".tip")).to_contain_text("worker-0: training")
    canvas.click(position={"x": box["width"] * 0.7, "y": 46 + 33})
    expect(page).to_have_url(re.compile(r"/output\?task=worker-0&at="))
    expect(page.locator(".log-line").first).to_contain_text("step")
    page.go_back()
    expect(canvas).to_be_visible()  # from then on, it reacts to keys
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("from="))
