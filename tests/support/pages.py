"""Pages with commands: what they show, and somebody who follows them and looks whether it is so."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ON_A_CLUSTER = ROOT / "docs" / "kubernetes.md"
LIMIT_S = 180.0


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
    (r"-[0-9a-f]{4}\b(?!-)", r"-[0-9a-z]{4,6}"),  # the end of a run's id
    (rf"\b{_SPAN}(?![\w/])", _SPAN),
    (rf"\b{_NUMBER} steps/s", rf"{_NUMBER} steps/s"),
    (r"\b\d+\.\d+\.\d+\b", r"\d+\.\d+\.\d+"),
    (r"\b\d+\.\d+(?:e-?\d+)?", _NUMBER),
    (r"from step \d+", r"from step \d+"),
    (r"snapshots step ", r"snapshots (?:\d+ skipped, )?step "),
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


def new_reader(place: Path, environment: dict[str, str]) -> Reader:
    folder, home, path = place / "work", place / "home", place / "bin"
    for made in (folder, home, path):
        made.mkdir()
    (path / "paceline").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m paceline.cli "$@"\n')
    (path / "paceline").chmod(0o755)
    return Reader(folder, home, {**environment, "PATH": f"{path}:{environment['PATH']}"})


def follow(page: Path, reader: Reader, exceptions: Container[str]) -> None:
    """Word by word, but for these commands."""
    for block in blocks(page):
        if block.file:
            (reader.folder / block.file).write_text(block.text)
        if block.language != "console":
            continue
        for command in commands(block):
            if command.words in exceptions:
                continue
            done = reader.type(command.words)
            where = f"{page.name}:{command.line}: $ {command.words}\n"
            assert done.returncode == command.code, f"{where}exit code {done.returncode}:\n{done.stdout}"
            lost = missing(command.shown, done.stdout)
            assert not lost, f"{where}did not print {lost}, but:\n{done.stdout}"
            extra = unexpected(command.shown, done.stdout)
            assert not extra, f"{where}also said {extra}:\n{done.stdout}"
