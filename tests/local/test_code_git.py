"""Files that git ignores are not sent: compared with git itself."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.environment import without
from support.folders import make, sent, write

GIT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}


def git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=folder, env={**without("GIT"), **GIT}, stdout=subprocess.PIPE, check=True
    ).stdout


def listed_by_git(folder: Path) -> set[str]:
    listed = git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return {os.fsdecode(path) for path in listed.split(b"\0") if path}


ODD = ("a", "b", "ab", "a.b", "b a", "!a", "#a", "A", "0", "]", "[", "-", "é", "a ", "\\", "a*", "a\nb")


FOLDERS = ("a", "b", "ab", "!a", "é", "[")


PIECES = (
    "a", "b", "ab", ".", "*", "**", "?", "/", "/", "/", "[ab]", "[!a]", "[^b]", "[a-b]", "[b-a]", "[]]", "[!]]",
    "[\\]]", "[a-]", "[[-]", "[+--]", "[\\-a]", "[[:alpha:]]", "[![:digit:]]", "[[:punct:]]", "[[:nonsense:]]", "[:a]",
    "[[:a]", "[a", "\\a", "\\", "\\ ", " ", "\t", "!", "#", "é", "-",
)  # fmt: skip


PATTERNS = st.builds(
    "".join, st.tuples(st.sampled_from(["", "", "!", "/"]), st.lists(st.sampled_from(PIECES), max_size=5).map("".join))
).filter(lambda line: not re.search(r"[^/*!]\*\*|\*\*[^/*]", line))  # git handles `a**/b` inconsistently


LINES = st.lists(PATTERNS, max_size=4)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "--quiet")
    for name in ODD:
        make(folder, f"{name}/" if name in FOLDERS else name)
    for above in FOLDERS:
        for name in ODD:
            inner = [f"{name}/{below}" for below in ODD] if name in FOLDERS[:3] else [name]
            make(folder, *(f"{above}/{path}" for path in inner))
    (folder / "link").symlink_to("a")
    return folder


@settings(max_examples=250)
@given(LINES, LINES, st.sampled_from(["\n", "\r\n"]))
def test_it_ignores_what_git_ignores(repository: Path, above: list[str], below: list[str], end: str) -> None:
    (repository / ".gitignore").write_bytes(end.join(above).encode())
    (repository / "a" / ".gitignore").write_bytes(end.join(below).encode())
    assert sent(repository) == listed_by_git(repository)


@pytest.mark.parametrize(
    "line",
    ["/a[!x]b", "a[/]b", "[A-Z-z]", "[A[:digit:]-z]", "[[:alpha:]-z]", "[z-a]", "[a", "a\\", "!!a", "\\!a", "\\#a",
     "a\\ ", "a ", "**", "**/", "/**", "a/**", "a/**/b", "**/a/b", "a/**/", "//a", "a//", "/", "é", "?", "??"],
)  # fmt: skip
def test_patterns_that_are_easy_to_get_wrong(repository: Path, line: str) -> None:
    for lines in (line, f"*\n!*/\n!{line}"):
        (repository / ".gitignore").write_text(lines)
        (repository / "a" / ".gitignore").write_text("")
        assert sent(repository) == listed_by_git(repository)


@pytest.mark.parametrize(
    ("lines", "ignored"),
    [
        ("*.log", {"keep/b.log", "a.log", "keep/c/d.log"}),
        ("*.log\n!a.log", {"keep/b.log", "keep/c/d.log"}),
        ("/*.log", {"a.log"}),
        ("keep/", {"keep/b.log", "keep/a.txt", "keep/c/d.log"}),
        ("keep/\n!keep/a.txt", {"keep/b.log", "keep/a.txt", "keep/c/d.log"}),
        ("keep/**\n!keep/a.txt", {"keep/b.log", "keep/c/d.log"}),
        ("keep/*\n!keep/c/", {"keep/b.log", "keep/a.txt"}),
        ("**/c/d.log", {"keep/c/d.log"}),
        ("\ufeffa.log  \n# b.txt\n\n  ", {"a.log"}),
    ],
)
def test_the_usual_patterns(tmp_path: Path, lines: str, ignored: set[str]) -> None:
    git(tmp_path, "init", "--quiet")
    everything = {"a.log", "b.txt", "keep/a.txt", "keep/b.log", "keep/c/d.log"}
    make(tmp_path, *everything)
    write(tmp_path, {".gitignore": lines})
    assert sent(tmp_path) - {".gitignore"} == everything - ignored
    assert sent(tmp_path) == listed_by_git(tmp_path)


def test_ignore_files_of_the_enclosing_repository_apply_too(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, {".gitignore": "*.bin\n/jobs/mine/data/\n!/jobs/mine/small.bin", "jobs/.gitignore": "*.tmp"})
    write(tmp_path, {"jobs/.pacelineignore": "notes.md"})
    job = make(tmp_path / "jobs" / "mine", "a.bin", "small.bin", "data/x", "b.tmp", "notes.md", "train.py")
    assert sent(job) == {"small.bin", "train.py"} == listed_by_git(job) - {"notes.md"}


def test_a_folder_that_its_repository_ignores_can_still_be_sent(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, {".gitignore": "build/\n*.o"})
    job = make(tmp_path / "build" / "job", "train.py", "a.o")
    assert sent(job) == {"train.py"}


def test_a_repository_of_dotfiles_does_not_hide_the_files_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    git(tmp_path, "init", "--quiet")
    write(tmp_path, {".gitignore": "*"})
    assert sent(make(tmp_path / "job", "train.py")) == {"train.py"}
