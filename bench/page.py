"""The page in a browser: when a view is complete, how long updates take, and whether memory grows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, TimeoutError

import measure

sys.path.insert(0, str(measure.ROOT / "tests"))

from support import browser as chromium
from support.page_runs import DAY, Failure, PastRun, reporting
from support.page_server import many_lines, page_server

COMPLETE_S, UPDATE_MS, GROWTH_MIB = 1.0, 100.0, 5.0  # goals: at most
MONTH = 30 * DAY
OTHER = "month-16"  # the run of a month, with which others are compared
PARTS = ("complete", "updates", "log", "memory")
LIMIT_S = 30.0  # for a view to be complete
# What a view shows once it is complete.
VIEWS = {
    "runs": "table.runs tbody tr",
    "overview": ".metric-table tr",
    "timeline": "canvas[data-rows]:not([data-rows='0'])",
    "curves": ".panel[data-series=loss] .u-over",
    "tasks": ".grid-row",
    "output": ".log-line",
    "restarts": ".restart-view:not([hidden]) h2",
    "resources": ".grid-row",
    "snapshots": ".snapshots tbody tr, .tab-snapshots .empty-title",
    "events": ".feed .event",
    "job": "pre.yaml",
    "compare": ".panel[data-series=loss] .u-over",
}
UPDATED = ("runs", "overview", "timeline", "curves", "tasks", "output")  # views that change each second
# Notes when the first element that matches appears, in milliseconds since the address was opened, and long tasks.
WATCH = """(() => {
  window.longest = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
  }).observe({ type: "longtask", buffered: true });
  const check = () => {
    if (document.querySelector(SELECTOR)) requestAnimationFrame(() => (window.completeAt = performance.now()));
    else requestAnimationFrame(check);
  };
  requestAnimationFrame(check);
})()"""


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 100, 1000])
    parser.add_argument("--lines", type=int, default=10_000_000, help="of a log")
    parser.add_argument("--minutes", type=float, default=10.0, help="for which memory is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--views", nargs="+", choices=list(VIEWS), default=list(VIEWS))
    args = parser.parse_args()
    machine_info = measure.machine("playwright", "starlette", "uvicorn")
    measure.say(
        "A live run of N tasks that all report each second; Chromium without a window, a new profile each time."
    )
    measure.say(f"On: {machine_info}\n")
    with measure.workspace() as folder, chromium.launched("--enable-precise-memory-info") as browser:
        machine_info["chromium"] = browser.version
        home = folder / "home"
        runs = [PastRun(home, f"live-{size}", size, 3600.0, [Failure(1800.0)]) for size in args.tasks]
        runs.append(PastRun(home, OTHER, 16, MONTH, [Failure(day * DAY) for day in range(1, 30)]))
        long_log = home / "runs" / runs[0].name / "logs" / "worker-0.log"
        if "log" in args.parts:
            many_lines(long_log, args.lines)
        with reporting(runs), page_server(home) as server:
            site = Site(browser, server.url, _session(browser, server.address, folder / "session.json"))
            results: dict[str, Any] = {}
            if "complete" in args.parts:
                complete = {run.name: _complete(site, run, args.views, args.rounds) for run in runs}
                results["complete_s"] = _complete_table(complete)
            if "updates" in args.parts:
                results["updates"] = _updates_table({run.name: _updates(site, run) for run in runs})
            if "log" in args.parts:
                results["log_s"] = _log_table(_long_log(site, runs[0], args.lines), args.lines)
            if "memory" in args.parts:
                results["memory"] = _memory_table(_memory(site, runs, args.minutes))
    measure.finish({"bench": "page", "machine": machine_info, "rounds": args.rounds, "results": results})


def _complete_table(complete: dict[str, dict[str, list[Times]]]) -> dict[str, Any]:
    measure.say("From opening the address to the first paint, and until the view shows its data:")
    worst = [(run, view, _worst(times)) for run, views in complete.items() for view, times in views.items()]
    rows = []
    for run, view, slowest in worst:
        first, later = complete[run][view][0], _later(complete[run][view])
        shown = [f"{seconds:.2f} s" for seconds in (first.paint, first.complete, later.paint, later.complete)]
        rows.append([run, view, *shown, f"{COMPLETE_S:g} s", _verdict(slowest, COMPLETE_S)])
    head = ["run", "view", "first time: paint", "data", "later: paint", "data", "goal, at most", "reached"]
    measure.table(head, rows)
    by_run = {
        run: {view: [vars(each) for each in times] for view, times in views.items()} for run, views in complete.items()
    }
    slowest = max(seconds for _, _, seconds in worst)
    return {"by_run": by_run, "goal": COMPLETE_S, "reached": slowest <= COMPLETE_S}


def _later(times: list[Times]) -> Times:
    """The medians without the first view, which fills caches of the server."""
    paint, complete = (
        measure.median([getattr(each, name) for each in times[1:] or times]) for name in ("paint", "complete")
    )
    assert paint is not None and complete is not None
    return Times(paint, complete)


def _worst(times: list[Times]) -> float:
    return max(times[0].complete, _later(times).complete)


def _verdict(value: float, goal: float) -> str:
    return "yes" if value <= goal else "NO"


def _updates_table(updates: dict[str, dict[str, tuple[float, float]]]) -> dict[str, Any]:
    measure.say("\nUpdates, once a second: the longest task of the main thread, and its share of the time:")
    rows = [
        [
            name, view, f"{longest:.0f} ms" if longest else "below 50 ms", f"{share:.1%}", f"{UPDATE_MS:g} ms",
            _verdict(longest, UPDATE_MS),
        ]
        for name, views in updates.items() for view, (longest, share) in views.items()
    ]  # fmt: skip
    measure.table(["run", "view", "longest task", "busy", "goal, at most", "reached"], rows)
    values = [longest for views in updates.values() for longest, _ in views.values()]
    return {"by_run": updates, "goal_ms": UPDATE_MS, "reached": max(values) <= UPDATE_MS}


def _log_table(seconds: dict[str, float], lines: int) -> dict[str, Any]:
    measure.say(f"\nA log of {lines:,} lines:")
    measure.table(["action", "time"], [[name, measure.seconds(value)] for name, value in seconds.items()])
    return {"lines": lines, **seconds}


def _memory_table(memory: dict[str, tuple[list[float], list[int]]]) -> dict[str, Any]:
    measure.say("\nJavaScript memory of pages that stay open, after a collection, and elements:")
    rows = [
        [
            view,
            f"{heaps[0]:.1f} MiB",
            f"{heaps[-1]:.1f} MiB",
            f"{nodes[0]} -> {nodes[-1]}",
            f"{GROWTH_MIB:g} MiB",
            _verdict(heaps[-1] - heaps[0], GROWTH_MIB),
        ]
        for view, (heaps, nodes) in memory.items()
    ]
    measure.table(["view", "at first", "at the end", "elements", "growth, at most", "reached"], rows)
    growth = max(heaps[-1] - heaps[0] for heaps, _ in memory.values())
    return {"by_view": memory, "goal_mib": GROWTH_MIB, "reached": growth <= GROWTH_MIB}


# ---- the browser


@dataclass(frozen=True)
class Times:
    """Seconds since the address was opened."""

    paint: float  # the first contentful paint, as the browser reports it
    complete: float


@dataclass(frozen=True)
class Site:
    browser: Browser
    url: str
    session: Path

    def context(self) -> BrowserContext:
        context = self.browser.new_context(storage_state=self.session, viewport={"width": 1440, "height": 900})
        context.set_default_timeout(60_000)
        return context

    def address(self, run: str, view: str) -> str:
        if view == "compare":
            return f"{self.url}#/compare?run={run}&run={OTHER}"
        return self.url if view == "runs" else f"{self.url}#/run/{run}/{view}{'?fit=1' if view == 'timeline' else ''}"


def _session(browser: Browser, address: str, path: Path) -> Path:
    context = browser.new_context()
    context.new_page().goto(address)
    context.storage_state(path=path)
    context.close()
    return path


def _complete(site: Site, run: PastRun, views: list[str], rounds: int) -> dict[str, list[Times]]:
    times: dict[str, list[Times]] = {}
    for view in views:
        times[view] = []
        for _ in range(rounds + 1):
            times[view].append(_first_view(site, run, view))
            if times[view][-1].complete >= LIMIT_S:
                break
    return times


def _first_view(site: Site, run: PastRun, view: str) -> Times:
    context = site.context()
    page = context.new_page()
    page.add_init_script(WATCH.replace("SELECTOR", json.dumps(VIEWS[view])))
    page.goto(site.address(run.name, view), wait_until="commit")
    complete = LIMIT_S
    with suppress(TimeoutError):
        page.wait_for_function("() => window.completeAt", timeout=LIMIT_S * 1000)
        complete = page.evaluate("window.completeAt") / 1000
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime") or LIMIT_S * 1000
    context.close()
    return Times(paint / 1000, complete)


def _updates(site: Site, run: PastRun, seconds: float = 8.0) -> dict[str, tuple[float, float]]:
    """By view: the longest task of the main thread in ms (0: none took 50), and the share of its busy time."""
    results = {}
    for view in UPDATED:
        context = site.context()
        page = context.new_page()
        page.add_init_script(WATCH.replace("SELECTOR", json.dumps(VIEWS[view])))
        page.goto(site.address(run.name, view))
        with suppress(TimeoutError):
            page.wait_for_function("() => window.completeAt", timeout=LIMIT_S * 1000)
        page.wait_for_timeout(1500)  # what follows the first paint is no update
        page.evaluate("window.longest = 0")
        metrics = context.new_cdp_session(page)
        metrics.send("Performance.enable")
        before, began = _metric(metrics, "TaskDuration"), time.monotonic()
        page.wait_for_timeout(seconds * 1000)
        busy = (_metric(metrics, "TaskDuration") - before) / (time.monotonic() - began)
        results[view] = (float(page.evaluate("window.longest")), busy)
        context.close()
    return results


def _long_log(site: Site, run: PastRun, lines: int) -> dict[str, float]:
    """How long it takes to show the end of a log, then its middle, and to find a line near the end."""
    context = site.context()
    page = context.new_page()
    page.goto(f"{site.url}#/run/{run.name}/output?task=worker-0")
    page.wait_for_selector(".log-line")
    box = page.locator(".log-track").bounding_box()
    assert box is not None
    seconds = {}
    for name, act, text in _log_actions(page, box, lines):
        began = time.perf_counter()
        act()
        page.wait_for_selector(f".log-line >> text=/line {text}/ >> nth=0")
        seconds[name] = time.perf_counter() - began
    context.close()
    return seconds


def _log_actions(page: Page, box: Any, lines: int) -> list[tuple[str, Callable[[], Any], str]]:
    middle = str(lines // 2)[:2]
    far = lines - lines // 50

    def search() -> None:
        page.get_by_label("Search the output").fill(f"line {far} of")
        page.get_by_label("Search the output").press("Enter")

    return [
        ("to the beginning", lambda: page.keyboard.press("g"), "0 of"),
        ("to the middle", lambda: page.mouse.click(box["x"] + 8, box["y"] + box["height"] / 2), rf"{middle}\d+ of"),
        ("search through half of it", search, f"{far} of"),
    ]


def _memory(site: Site, runs: list[PastRun], minutes: float) -> dict[str, tuple[list[float], list[int]]]:
    """MiB of JavaScript and the number of elements, each minute, of pages that stay open."""
    largest, smallest = max(runs, key=lambda run: run.tasks), runs[0]
    views = [(largest, "timeline"), (largest, "tasks"), (runs[1], "curves"), (smallest, "output")]
    contexts, sessions = [], {}
    for run, view in views:
        context = site.context()
        page = context.new_page()
        page.goto(site.address(run.name, view))
        page.wait_for_selector(VIEWS[view])
        contexts.append((context, page))
        sessions[f"{view}, {run.name}"] = context.new_cdp_session(page)
    samples: dict[str, tuple[list[float], list[int]]] = {name: ([], []) for name in sessions}
    until = time.monotonic() + 60 * minutes + 60
    contexts[0][1].wait_for_timeout(60_000)  # until every panel is drawn, and lists are as long as they get
    while True:
        for name, session in sessions.items():
            session.send("HeapProfiler.collectGarbage")
            session.send("Performance.enable")
            samples[name][0].append(_metric(session, "JSHeapUsedSize") / 2**20)
            samples[name][1].append(int(_metric(session, "Nodes")))
        if time.monotonic() >= until:
            break
        contexts[0][1].wait_for_timeout(min(60.0, max(1.0, until - time.monotonic())) * 1000)
    for context, _ in contexts:
        context.close()
    return samples


def _metric(session: CDPSession, name: str) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == name))


if __name__ == "__main__":
    main()
