"""Every command that README.md and docs/ show is run here, page by page, and has to print what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import person
import pytest

from paceline.cli.app import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/digits/README.md"))]
LIMIT_S = 180.0

# Commands that no page test runs, and who runs them instead.
EXCEPTIONS = {
    "make demo": "sets up an environment from the package index; test_the_demo runs what its target runs after that",
    "make test": "runs the tests, this one among them",
}
LANGUAGES = {"console", "python", "yaml"}


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    line: int
    language: str
    file: str  # the file that it shows, where the line above it says so
    text: str


@dataclass(frozen=True)
class Command:
    line: int
    words: str
    shown: tuple[str, ...]
    code: int


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    body: list[str] = []
    above, opened, language = "", 0, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if opened and line.strip() == "```":
            name = re.fullmatch(r"`([\w-]+\.\w+)`:", above)
            found.append(Block(opened, language, name[1] if name else "", "".join(f"{row}\n" for row in body)))
            opened, above = 0, ""
        elif opened:
            body.append(line)
        elif line.startswith("```"):
            opened, language, body = number, line[3:].strip(), []
        elif line.strip():
            above = line.strip()
    assert not opened, f"{page.name}:{opened}: this block has no end"
    return found


def commands(block: Block) -> list[Command]:
    """What follows `$ `, with the lines shown below it; `$ echo $?` states the exit code of the command before."""
    given: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            given.append((number, line[2:], []))
        else:
            assert given, f"line {number}: output above the first command"
            given[-1][2].append(line)
    found: list[Command] = []
    for number, words, shown in given:
        if words == "echo $?":
            last = found.pop()
            found.append(Command(last.line, last.words, last.shown, int(shown[0])))
        else:
            found.append(Command(number, words, tuple(shown), 0))
    return found


# What may differ from run to run, and what stands for it.
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_SPAN = r"(?:\d+ h(?: \d+ min)?|\d+ min(?: \d+ s)?|\d+(?:\.\d+)? s)"
_MAY_DIFFER = (
    (r"\.\.\.", r".*"),
    (r"\b127\.0\.0\.1:\d+", r"127\.0\.0\.1:\d+"),
    (r"\b\d\d:\d\d:\d\d\b", r"\d\d:\d\d:\d\d"),
    (r"-[0-9a-f]{4}\b(?!-)", r"-[0-9a-f]{4}"),  # the end of a run's id
    (rf"\b{_SPAN}(?![\w/])", _SPAN),
    (rf"\b{_NUMBER} steps/s", rf"{_NUMBER} steps/s"),
    (r"\b\d+\.\d+\.\d+\b", r"\d+\.\d+\.\d+"),
    (r"\b\d+\.\d+(?:e-?\d+)?", _NUMBER),
    (r"from step \d+", r"from step \d+"),
)
_ANY = re.compile("|".join(f"({looks})" for looks, _ in _MAY_DIFFER))


def pattern(shown: str) -> re.Pattern[str]:
    """What a shown line stands for. Columns may be wider or narrower."""
    text, parts, at = " ".join(shown.split()), [], 0
    for match in _ANY.finditer(text):
        assert match.lastindex is not None
        parts += [re.escape(text[at : match.start()]), _MAY_DIFFER[match.lastindex - 1][1]]
        at = match.end()
    return re.compile("".join([*parts, re.escape(text[at:])]))


def speaker(line: str) -> str:
    """Whose line it is: tasks and Paceline itself speak at once, and only the lines of one are in a fixed order."""
    task = re.match(r"(\S+) +\| ", line)
    return task[1] if task else "*" if line.startswith("* ") else ""


def missing(shown: tuple[str, ...], printed: str) -> list[str]:
    """The shown lines that were not printed, or not in this order."""
    lines = printed.splitlines()
    left: dict[str, Iterator[str]] = {}
    lost = []
    for line in shown:
        if not line.strip() or line.strip() == "...":
            continue
        who = speaker(line)
        rest = left.setdefault(who, iter([" ".join(p.split()) for p in lines if speaker(p) == who]))
        wanted = pattern(line)
        if not any(wanted.fullmatch(candidate) for candidate in rest):
            lost.append(line)
    return lost


def unexpected(shown: tuple[str, ...], printed: str) -> list[str]:
    """What Paceline itself said beyond the shown lines, where no `...` allows for it. Notes depend on the machine."""
    said = [" ".join(line.split()) for line in printed.splitlines() if speaker(line) == "*"]
    said = [line for line in said if not line.startswith("* note: ")]
    if not any(speaker(line) == "*" for line in shown):
        return []
    extra: list[str] = []
    gap = False
    for line in shown:
        if line.strip() == "...":
            gap = True
        elif speaker(line) == "*":
            wanted = pattern(line)
            while said and not wanted.fullmatch(said[0]):
                extra += [] if gap else [said[0]]
                said.pop(0)
            said = said[1:]
            gap = False
    return extra if gap else extra + said


@dataclass(frozen=True)
class Reader:
    """Somebody who follows a page: a folder, a home for runs, and `paceline` on the path."""

    folder: Path
    home: Path
    environment: dict[str, str]

    def type(self, words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", words], cwd=folder or self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def reports(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in self.home.glob("runs/*/report.json")]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    folder, home, path = tmp_path / "work", tmp_path / "home", tmp_path / "bin"
    for made in (folder, home, path):
        made.mkdir()
    (path / "paceline").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m paceline.cli "$@"\n')
    (path / "paceline").chmod(0o755)
    given = person.environment(home, PATH=f"{path}:{os.environ['PATH']}", XDG_CACHE_HOME=str(tmp_path / "cache"))
    with person.nothing_left(home):
        yield Reader(folder, home, {name: value for name, value in given.items() if name != "VIRTUAL_ENV"})


def with_commands() -> list[Path]:
    return [page for page in PAGES if any(block.language == "console" for block in blocks(page))]


@pytest.mark.parametrize("page", with_commands(), ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        if block.file:
            (reader.folder / block.file).write_text(block.text)
        if block.language != "console":
            continue
        for command in commands(block):
            if command.words in EXCEPTIONS:
                continue
            done = reader.type(command.words)
            where = f"{page.name}:{command.line}: $ {command.words}\n"
            assert done.returncode == command.code, f"{where}exit code {done.returncode}:\n{done.stdout}"
            lost = missing(command.shown, done.stdout)
            assert not lost, f"{where}did not print {lost}, but:\n{done.stdout}"
            extra = unexpected(command.shown, done.stdout)
            assert not extra, f"{where}also said {extra}:\n{done.stdout}"


def test_the_demo(reader: Reader) -> None:
    """What `make demo` runs, once its environment is there; README shows what it prints."""
    recipe = re.search(r"^demo:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    [words] = [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]
    assert words.startswith("paceline run ")
    done = reader.type(words, ROOT)
    assert done.returncode == 0, done.stdout
    [shown] = [c.shown for b in blocks(ROOT / "README.md") if b.language == "console" for c in commands(b)
               if c.words == "make demo"]  # fmt: skip
    digits = tuple(re.sub(r"\d+\.\d%", "...%", line) for line in shown)
    assert not missing(digits, done.stdout), f"{missing(digits, done.stdout)} not in:\n{done.stdout}"
    [report] = reader.reports()
    assert (report["status"], report["restarts"]) == ("succeeded", [])
    metrics = report["metrics"]
    assert isinstance(metrics, dict) and metrics["evaluator-0"]["accuracy"] >= 0.95


@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax", "none"])
def test_the_page_names_every_variable_that_a_task_is_given(framework: str, reader: Reader) -> None:
    done = reader.type(f"paceline run --framework {framework} -- env")
    assert done.returncode == 0, done.stdout
    given = set(re.findall(r"^worker-0 \| (\w+)=", done.stdout, re.M)) - reader.environment.keys()
    given -= {"LC_CTYPE", "_"}  # set by Python where the locale is C, and by the shell that typed the command
    assert {"PACELINE_TASK", "PACELINE_RESTORE"} <= given
    page = (ROOT / "docs" / "what-a-task-is-given.md").read_text()
    assert [name for name in sorted(given) if f"`{name}`" not in page] == []


def test_every_cause_and_every_verb_has_its_row() -> None:
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text())
    ended = next(one for one in schema["oneOf"] if one["properties"]["event"]["const"] == "run-ended")
    failures, index = ((ROOT / "docs" / name).read_text() for name in ("failures.md", "index.md"))
    assert [c for c in ended["properties"]["cause"]["enum"] if c and f"\n| `{c}` |" not in failures] == []
    assert [verb for verb in VERBS if f"\n| `paceline {verb}" not in index] == []


def test_no_command_hides_from_these_tests() -> None:
    shown = {command.words for page in with_commands() for block in blocks(page) if block.language == "console"
             for command in commands(block)}  # fmt: skip
    assert EXCEPTIONS.keys() <= shown, "an exception that no page shows any more"
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: write commands as `console`"
            if block.language != "console":
                assert not re.search(r"^\$ ", block.text, re.M), f"{page.name}:{block.line}: a command"


def test_links_lead_somewhere_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for page in WRITTEN:
        text = page.read_text()
        assert set(re.findall(r"\bmake (\w+)`", text)) <= targets, page.name
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, f"{page.name}: {link}"


def test_what_counts_as_shown_and_printed() -> None:
    printed = "worker-1 | b 1\n* generation 1 starts\nworker-0 | a\ndigits-0a1b succeeded after 1 min 2 s\n* restart\n"
    assert missing(("worker-0 | a", "worker-1 | b ...", "* generation 1 starts", "* restart"), printed) == []
    assert missing(("digits-3f9a succeeded after 29 s",), printed) == []
    assert missing(("digits-3f9a failed after 29 s",), printed) == ["digits-3f9a failed after 29 s"]
    assert missing(("* restart", "* generation 1 starts"), printed) == ["* generation 1 starts"]
    assert missing(("worker-1 | b 2", "...", ""), printed) == ["worker-1 | b 2"]
    assert missing(("line-3597  300  19 s  18 s",), "line-0a1b  300  8 s  7.4 s\n") == []
    assert unexpected(("* generation 1 starts", "* restart"), printed) == []
    assert unexpected(("* generation 1 starts",), printed) == ["* restart"]
    assert unexpected(("* restart",), printed) == ["* generation 1 starts"]
    assert unexpected(("...", "* restart"), printed) == unexpected(("* generation 1 starts", "..."), printed) == []
    assert missing(("800 steps, 67.2 steps/s, 1 generation",), "  800 steps, 9 steps/s, 1 generation\n") == []
