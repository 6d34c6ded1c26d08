"""A run of a thousand tasks and a long log: only what is visible exists in the page."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from support.page_site import LINES, Site

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("page")]
RUN = "#/run/large-1000"


def test_a_thousand_tasks(site: Site, page: Page) -> None:
    page.goto(site.url(f"{RUN}/tasks"))
    grid = page.get_by_role("table", name="Tasks")
    expect(grid).to_have_attribute("aria-rowcount", "1001")
    assert page.locator(".grid-row").count() < 60
    grid.evaluate("element => element.scrollTop = element.scrollHeight")
    expect(page.locator(".grid-row", has_text="worker-999")).to_be_visible()
    assert page.locator(".grid-row").count() < 60
    page.get_by_label("Filter tasks").fill("worker-77 ")
    expect(page.locator(".grid-row")).to_have_count(11)

    page.goto(site.url(f"{RUN}/timeline?fit=1"))
    expect(page.locator("canvas[data-rows='1000']")).to_be_visible()
    # All rows are drawn: the last one, too, has a bar.
    page.wait_for_function(
        """() => {
          const canvas = document.querySelector("canvas[data-rows]");
          const colour = (x) => canvas.getContext("2d").getImageData(x, canvas.height - 3, 1, 1).data.join();
          return colour(canvas.width / 2) !== colour(40);
        }"""
    )


# In place of the server's messages: `send` delivers one.
MESSAGES = """
  const sources = [];
  window.EventSource = class extends EventTarget {
    constructor() {
      super();
      sources.push(this);
    }
    close() {}
  };
  window.send = (name, data) => sources.at(-1).dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data) }));
  window.frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  window.at = (second) => new Date(Date.UTC(2030, 0, 1) + second * 1000).toISOString();
"""


def test_a_page_that_is_open_for_a_day_does_not_grow(site: Site, page: Page) -> None:
    page.add_init_script(MESSAGES)
    page.goto(site.url("#/run/digits-3f9a/output?task=worker-0"))
    lines = page.locator(".log-line")
    expect(lines).not_to_have_count(0)
    page.evaluate("async () => send('status', {...await (await fetch('api/runs/digits-3f9a')).json(), is_live: true})")
    follow = page.get_by_role("button", name="Follow new output")
    if follow.get_attribute("aria-pressed") != "true":
        follow.click()
    expect(follow).to_have_attribute("aria-pressed", "true")
    page.evaluate("""async () => {
      for (let batch = 0; batch < 40; batch++) {
        const lines = Array.from({ length: 1000 }, (_, place) => 1e6 + batch * 1000 + place).map((position) => (
          { position, at: at(position), generation: 1, text: `<img src=x> line ${position} ${"x".repeat(200)}` }));
        send("lines", { task: "worker-0", lines, next: lines.at(-1).position + 1, end: 1e9, skipped: 0 });
        if (batch % 4 === 0) await frame();
      }
    }""")
    expect(lines.last).to_contain_text("line 1039999 ")
    assert lines.count() <= 1400 and page.locator("#log-lines img").count() == 0

    page.get_by_role("tab", name="Events").click()
    rows = page.locator(".feed .event")
    expect(rows).not_to_have_count(0)
    page.evaluate("""async () => {
      for (let batch = 0; batch < 40; batch++) {
        const events = Array.from({ length: 500 }, (_, place) => 1e6 + batch * 500 + place).map((number) => (
          { number, at: at(number), event: "note", generation: 1, text: `<b>note</b> ${number}`, data: {} }));
        send("events", { events, skipped: 0 });
        if (batch % 4 === 0) await frame();
      }
    }""")
    expect(page.locator(".feed")).to_contain_text("1019999")
    assert rows.count() <= 3000

    page.goto(site.url("#/run/digits-3f9a/curves"))
    panel = page.locator(".panel[data-series=accuracy]")
    expect(panel.locator("canvas")).to_be_visible()
    most = panel.evaluate("""async (element) => {
      let most = 0;
      const { task } = element.panel.lines[0];
      for (let second = 0; second < 86400; second++) {
        const point = { name: "accuracy", task, at: 2e9 + second, step: second, generation: 1, value: 0.5 };
        send("points", { points: [point] });
        most = Math.max(most, element.panel.lines[0].points.length);
        if (second % 2000 === 0) await frame();
      }
      return most;
    }""")
    assert 1000 < most <= 2500


def test_a_long_log(site: Site, page: Page) -> None:
    page.goto(site.url(f"{RUN}/output?task=worker-0"))
    lines = page.locator(".log-line")
    expect(lines.last).to_contain_text(f"line {LINES - 1} of")
    page.keyboard.press("g")
    expect(lines.first).to_contain_text("line 0 of")
    for _ in range(8):
        page.locator("#log-lines").evaluate("element => element.scrollTop = element.scrollHeight")
        page.wait_for_timeout(50)
    track = page.get_by_role("scrollbar")
    box = track.bounding_box()
    assert box is not None
    track.click(position={"x": 8, "y": box["height"] / 2})
    expect(page.locator("#log-lines")).to_contain_text(f"line {LINES // 2 + 20} of")
    assert lines.count() <= 1400

    search = page.get_by_label("Search the output")
    search.fill("line 77777 of")
    search.press("Enter")
    expect(page.locator(".log-line.target")).to_contain_text("line 77777 of")
    page.get_by_role("button", name="Show only matching lines").click()
    expect(lines).to_have_count(1)
    lines.first.click()
    expect(lines.nth(100)).to_be_attached()
    expect(page.locator(".log-line.target")).to_contain_text("line 77777 of")
    expect(page).to_have_url(re.compile("position="))


def test_a_log_with_a_thousand_lines_for_each_time(site: Site, page: Page) -> None:
    """In the output of all tasks, those with the same time are in several windows: none is missing in any direction."""
    page.goto(site.url(f"{RUN}/output?task=*"))
    expect(page.locator(".log-line").last).to_contain_text(f"line {LINES - 1} of")
    follow = page.get_by_role("button", name="Follow new output")
    if follow.get_attribute("aria-pressed") == "true":
        follow.click()

    def scroll(to: str) -> list[int]:
        """The numbers of the lines that are then in the page."""
        for _ in range(12):
            page.locator("#log-lines").evaluate(f"element => element.scrollTop = {to}")
            page.wait_for_timeout(150)
        texts = page.locator(".log-line .line-text").all_inner_texts()
        return [int(text.split()[1]) for text in texts]

    earlier = scroll("0")
    assert earlier == list(range(earlier[0], earlier[-1] + 1)) and earlier[0] < LINES - 2500 and len(earlier) <= 1400
    later = scroll("element.scrollHeight")
    assert later == list(range(later[0], LINES)) and len(later) <= 1400
    again = scroll("0")
    assert again == list(range(again[0], again[-1] + 1)) and again[0] < LINES - 2500
    search = page.get_by_label("Search the output")
    search.fill("line")
    page.get_by_role("button", name="Show only matching lines").click()
    expect(page.locator(".log-line mark").last).to_be_attached()
    matches = scroll("0")
    assert matches == list(range(matches[0], matches[-1] + 1)) and matches[0] < LINES - 2000
