"""Modules of the page that only compute: curves after a restart, smoothing, several lines on one axis, formats."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from support.page_site import Site

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("page")]


def call(page: Page, module: str, function: str, *arguments: Any) -> Any:
    code = "async ([module, name, values]) => (await import(module))[name](...values)"
    return page.evaluate(code, [f"./lib/{module}.js", function, list(arguments)])


@pytest.fixture
def modules(page: Page, site: Site) -> Page:
    page.goto(site.url())
    return page


def points(*values: tuple[float, int, float]) -> list[list[float]]:
    """(at, step, value)"""
    return [[at, step, 1, value, value, value] for at, step, value in values]


def test_steps_that_were_done_again_count_once(modules: Page) -> None:
    line = points((1, 10, 0.9), (2, 20, 0.8), (3, 30, 0.7), (9, 20, 0.5), (10, 30, 0.4))
    kept = call(modules, "lines", "withoutRedone", line)
    assert [(point[1], point[3]) for point in kept] == [(10, 0.9), (20, 0.5), (30, 0.4)]
    by_time = call(modules, "lines", "along", {"points": line}, "elapsed")
    assert [point[0] for point in by_time] == [0, 1, 2, 8, 9]


def test_smoothing_starts_without_bias(modules: Page) -> None:
    assert call(modules, "lines", "smoothed", [4, 4, None, 4], 0.9) == pytest.approx([4, 4, None, 4])
    assert call(modules, "lines", "smoothed", [0, 1], 0.5) == pytest.approx([0, 2 / 3])


def test_lines_with_other_steps_share_one_axis(modules: Page) -> None:
    tables = [[[10, 1, 1, 1], [20, 2, 2, 2]], [[15, 5, 5, 5]]]
    result = call(modules, "lines", "aligned", tables)
    assert result["x"] == [10, 15, 20]
    assert [point and point[1] for point in result["columns"][1]] == [None, 5, None]
    long = [[[number * (line + 1), 1, 1, 1] for number in range(5000)] for line in range(2)]
    assert len(call(modules, "lines", "aligned", long)["x"]) <= 600


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("duration", 4.2, "4.2 s"), ("duration", 192, "3 min 12 s"), ("duration", 18_180, "5 h 03 min"),
        ("duration", 1_051_200, "12 d 4 h"), ("bytes", 1536, "1.5 KiB"), ("bytes", 3 * 2**34, "48 GiB"),
        ("number", 0.000213456, "0.0002135"), ("number", 7.94e-5, "7.94e-5"), ("number", 1234567.0, "1.23e6"),
        ("speed", 0.1, "6.0 steps/min"), ("count", 151288, "151,288"),
    ],
)  # fmt: skip
def test_formats(modules: Page, function: str, value: float, text: str) -> None:
    assert call(modules, "format", function, value) == text


def test_ticks_of_an_axis_differ(modules: Page) -> None:
    assert call(modules, "format", "ticks", [1e-4, 1.5e-4, 2e-4]) == ["1.0e-4", "1.5e-4", "2.0e-4"]
    assert call(modules, "format", "ticks", [0, 20_000, 40_000]) == ["0", "20k", "40k"]
