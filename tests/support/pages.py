"""Documentation pages: their commands and shown output, and a reader who runs the commands and compares the output."""

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
    file: str  # the name of the file that it shows, if the line above gives one
    text: str


@dataclass(frozen=True)
class Command:
    line: int
    words: str
    shown: tuple[str, ...]
    code: int


def blocks(page: Path) -> list[Block]:
    fenced: list[Block] = []
    body: list[str] = []
    above, opened, language = "", 0, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if opened and line.strip() == "```":
            name = re.fullmatch(r"`([\w-]+\.\w+)`:", above)
            fenced.append(Block(opened, language, name[1] if name else "", "".join(f"{row}\n" for row in body)))
            opened, above = 0, ""
        elif opened:
            body.append(line)
        elif line.startswith("```"):
            opened, language, body = number, line[3:].strip(), []
        elif line.strip():
            above = line.strip()
    assert not opened, f"{page.name}:{opened}: this block is not closed"
    return fenced


def commands(block: Block) -> list[Command]:
    """The commands after `$ `, with the output shown below; `$ echo $?` gives the exit code of the previous command."""
    entries: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            entries.append((number, line[2:], []))
        else:
            assert entries, f"line {number}: output above the first command"
            entries[-1][2].append(line)
    parsed: list[Command] = []
    for number, command, output in entries:
        if command == "echo $?":
            last = parsed.pop()
            parsed.append(Command(last.line, last.words, last.shown, int(output[0])))
        else:
            parsed.append(Command(number, command, tuple(output), 0))
    return parsed


# Patterns of text that may differ between runs, each with the pattern that it may be replaced by.
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
    """The pattern that output must match for a shown line. Columns may be wider or narrower."""
    text, parts, at = " ".join(shown.split()), [], 0
    for match in _ANY.finditer(text):
        assert match.lastindex is not None
        parts += [re.escape(text[at : match.start()]), _MAY_DIFFER[match.lastindex - 1][1]]
        at = match.end()
    return re.compile("".join([*parts, re.escape(text[at:])]))


def speaker(line: str) -> str:
    """The source of a line: tasks and Paceline print concurrently, and only lines of one source have a fixed order."""
    task = re.match(r"(\S+) +\| ", line)
    return task[1] if task else "*" if line.startswith("* ") else ""


def missing(shown: tuple[str, ...], printed: str) -> list[str]:
    """The shown lines that were not printed, or not in this order."""
    lines = printed.splitlines()
    remaining: dict[str, Iterator[str]] = {}
    not_printed = []
    for line in shown:
        if not line.strip() or line.strip() == "...":
            continue
        source = speaker(line)
        candidates = remaining.setdefault(source, iter([" ".join(p.split()) for p in lines if speaker(p) == source]))
        expected = pattern(line)
        if not any(expected.fullmatch(candidate) for candidate in candidates):
            not_printed.append(line)
    return not_printed


def unexpected(shown: tuple[str, ...], printed: str) -> list[str]:
    """Extra lines that Paceline itself printed where no `...` allows them. Notes are ignored: they vary by machine."""
    lines = [" ".join(line.split()) for line in printed.splitlines() if speaker(line) == "*"]
    lines = [line for line in lines if not line.startswith("* note: ")]
    if not any(speaker(line) == "*" for line in shown):
        return []
    extra: list[str] = []
    gap = False
    for line in shown:
        if line.strip() == "...":
            gap = True
        elif speaker(line) == "*":
            expected = pattern(line)
            while lines and not expected.fullmatch(lines[0]):
                extra += [] if gap else [lines[0]]
                lines.pop(0)
            lines = lines[1:]
            gap = False
    return extra if gap else extra + lines


@dataclass(frozen=True)
class Reader:
    """A user who follows a page: a folder, a home for runs, and `paceline` on the path."""

    folder: Path
    home: Path
    environment: dict[str, str]

    def type(self, command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=folder or self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def reports(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in self.home.glob("runs/*/report.json")]


def new_reader(root: Path, environment: dict[str, str]) -> Reader:
    folder, home, programs = root / "work", root / "home", root / "bin"
    for directory in (folder, home, programs):
        directory.mkdir()
    (programs / "paceline").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m paceline.cli "$@"\n')
    (programs / "paceline").chmod(0o755)
    return Reader(folder, home, {**environment, "PATH": f"{programs}:{environment['PATH']}"})


def follow(page: Path, reader: Reader, exceptions: Container[str]) -> None:
    """Runs every command of a page except `exceptions`, and compares exit codes and output."""
    for block in blocks(page):
        if block.file:
            (reader.folder / block.file).write_text(block.text)
        if block.language != "console":
            continue
        for command in commands(block):
            if command.words in exceptions:
                continue
            result = reader.type(command.words)
            location = f"{page.name}:{command.line}: $ {command.words}\n"
            assert result.returncode == command.code, f"{location}exit code {result.returncode}:\n{result.stdout}"
            not_printed = missing(command.shown, result.stdout)
            assert not not_printed, f"{location}did not print {not_printed}, but:\n{result.stdout}"
            extra = unexpected(command.shown, result.stdout)
            assert not extra, f"{location}also printed {extra}:\n{result.stdout}"
