"""Files of the page's front end: text of tasks cannot become HTML, and the vendored files are those that are stated."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from support.page_site import TABS
from support.runs import SOURCE

STATIC = SOURCE / "paceline" / "page" / "static"
SOURCES = sorted(path for path in STATIC.rglob("*.js") if "vendor" not in path.parts)
# Ways to turn text into HTML or into a program.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc|setHTML"
    r"|\beval\(|new Function|javascript:|setTimeout\(\s*[\"'`]"
)


@pytest.mark.parametrize("path", [*SOURCES, *STATIC.glob("vendor/*.js")], ids=lambda path: path.name)
def test_no_text_becomes_html(path: Path) -> None:
    text = path.read_text()
    if "vendor" in path.parts:
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text
    else:
        assert not FORBIDDEN.search(text)


def test_the_page_has_no_inline_scripts_or_styles_and_loads_nothing_from_elsewhere() -> None:
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    addresses = re.findall(r"(?:src|href)=\"([^\"]*)\"", html)
    assert addresses and all(re.match(r"#|[\w./]+$", address) and "//" not in address for address in addresses)
    assert all((STATIC / address).is_file() for address in addresses if not address.startswith("#"))
    for style in STATIC.rglob("*.css"):
        assert not re.search(r"url\(|@import", style.read_text())


def test_every_imported_module_exists() -> None:
    for path in SOURCES:
        for name in re.findall(r"(?:from|import\()\s*\"(\.[^\"]+)\"", path.read_text()):
            assert (path.parent / name).resolve().is_file(), f"{path}: {name}"


def static_imports(path: Path) -> set[Path]:
    """The module itself, and all that it imports before it runs."""
    modules, new = set[Path](), [path]
    while new:
        module = new.pop()
        modules.add(module)
        names = re.findall(r"^import [^;]*?\"(\.[^\"]+)\"", module.read_text(), re.MULTILINE)
        new += [path for name in names if (path := (module.parent / name).resolve()) not in modules]
    return modules


@pytest.mark.parametrize("view", ["runs", "compare", *(f"run/{tab}" for tab in TABS)])
def test_all_modules_of_a_view_are_preloaded(view: str) -> None:
    name, _, tab = view.partition("/")
    needed = static_imports(STATIC / "app.js") | static_imports(STATIC / "views" / f"{name}.js")
    needed |= static_imports(STATIC / "tabs" / f"{tab}.js") if tab else set()
    html, script = (STATIC / "index.html").read_text(), (STATIC / "preload.js").read_text()
    lists = dict(re.findall(r"(\w+)(?:: | = )\[(.*)\]", script))
    listed = ", ".join((lists[name], lists.get(tab, ""))).replace("...CHARTS", lists["CHARTS"])
    preloaded = re.findall(r"modulepreload\" href=\"([^\"]+)", html) + re.findall(r"\"([^\"]+)\"", listed)
    assert sorted(preloaded) == sorted(str(path.relative_to(STATIC)) for path in needed)


def test_modules_stay_small() -> None:
    assert {path.name: lines for path in SOURCES if (lines := path.read_text().count("\n")) > 300} == {}


def test_vendored_files_are_those_of_the_readme() -> None:
    rows = re.findall(r"\| `([\w.]+)` \| `[^`]+` \| `([0-9a-f]{64})` \|", (STATIC / "vendor" / "README.md").read_text())
    assert len(rows) == 2
    for name, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
