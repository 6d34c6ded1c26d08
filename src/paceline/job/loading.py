"""A job file to a checked job: read, override, validate, check, and every mistake with its line, all at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import Finding, JobError, Problem, nearest, visible
from paceline.job.tree import Entry, Node, Source, plain, read, without_value

if TYPE_CHECKING:
    from paceline.job import Loaded

MOST_BYTES = 1_000_000


def load(path: Path, overrides: Sequence[str] = (), cluster: bool = False) -> Loaded:
    return load_text(_text_of(path), str(path), path.absolute().parent, overrides, cluster)


def load_text(text: str, source: str, folder: Path, overrides: Sequence[str] = (), cluster: bool = False) -> Loaded:
    size = len(text.encode("utf-8", "replace"))
    if size > MOST_BYTES:
        raise JobError([_too_large(source, size)])
    file = Source.of_file(source, text)
    root, problems = read(file)
    if root is None or root.value is None:
        raise JobError([Problem(source, None, None, "", "the file is empty", hint=_SMALLEST)])
    if not root.is_map:
        what = "a list" if root.is_list else f'"{visible(root.raw, 60)}"'
        message = f"a job is a mapping (key: value), this is {what}"
        raise JobError([*problems, file.problem(root.line, root.column, "", message, _SMALLEST)])
    for override in overrides:
        root, more = _overridden(root, override)
        problems += more
    return _checked(root, text, folder.absolute(), problems, bool(overrides), cluster)


_SMALLEST = "the least is name, framework and command, such as: {name: a, framework: none, command: [python, a.py]}"


def _checked(root: Node, text: str, folder: Path, problems: list[Problem], overridden: bool, cluster: bool) -> Loaded:
    # Imported here: text that is not YAML need not wait for pydantic.
    from paceline.job import Loaded, checks, files, ingest, snapshots
    from paceline.job.validate import validate
    from paceline.job.writing import write

    data = plain(root)
    empty = list(without_value(root))
    job, findings, broken = validate(data)
    broken += empty
    reported = set(empty)
    findings = [finding for finding in findings if finding.path not in reported]
    findings += [Finding(path, "has no value", _for_nothing(path)) for path in empty[:100]]
    findings += checks.check(job, broken)
    findings += files.check(job, folder, broken, cluster)
    findings += snapshots.check(job.snapshots, broken, cluster)
    findings += ingest.check(job, broken, cluster)
    said = {(problem.line, problem.path) for problem in problems}
    located = [_located(root, finding) for finding in findings]
    problems += [problem for problem in located if not problem.path or (problem.line, problem.path) not in said]
    if problems:
        raise JobError(sorted(_distinct(problems), key=_order))
    placed = {
        "code": files.code_of(job, folder),
        "snapshots": snapshots.placed(job.snapshots, folder),
        "ingest": ingest.placed(job.ingest, folder),
    }
    job = checks.with_defaults(job).model_copy(update=placed)
    if not cluster:
        job = files.with_credentials(job)
    return Loaded(job, write(data) if overridden else text, checks.notes(job, cluster))


def _for_nothing(path: tuple[str | int, ...]) -> str:
    if len(path) == 2 and path[0] == "roles":
        return f"write {visible(str(path[1]), 60)}: {{}} for one host"
    return "give it one, or remove the key"


def _overridden(root: Node, override: str) -> tuple[Node, list[Problem]]:
    from paceline.job.overrides import apply

    return apply(root, override)


def _located(root: Node, finding: Finding) -> Problem:
    """The finding with its place: that of its key or value, or else of the nearest thing around it."""
    node, entry = root, None
    shown: list[str] = []
    missing = False
    for step in finding.path:
        if not missing:
            if node.is_map and step == 0:  # a role that is one mapping: the index is not in the text
                continue
            found = _child(node, step)
            missing = found is None
            if found is not None:
                node, entry = found
        shown.append(visible(str(step), 60))
    at_key = finding.at_key or missing or node.is_map or node.is_list or node.value is None
    place = entry if entry is not None and at_key else node
    hint = finding.hint.replace("{text}", visible(node.raw, 60)) if finding.hint else None
    top = missing and node is root
    line, column = (None, None) if top else (place.line, place.column)
    return place.source.problem(line, column, ".".join(shown), finding.message, hint, finding.allowed)


def _child(node: Node, step: str | int) -> tuple[Node, Entry | None] | None:
    if node.is_map and step in node.value:
        entry: Entry = node.value[step]
        return entry.node, entry
    if node.is_list and isinstance(step, int) and step < len(node.value):
        return node.value[step], None
    return None


def _distinct(problems: Iterable[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def _order(problem: Problem) -> tuple[bool, int, int]:
    return problem.file.startswith("--set "), problem.line or 0, problem.column or 0


def _too_large(source: str, size: int | None) -> Problem:
    said = "more than 1 MB" if size is None else f"{max(size / 1e6, 1.01):.2f} MB"
    return Problem(source, None, None, "", f"the file is too large for a job file: {said}; at most 1 MB is read")


def _text_of(path: Path) -> str:
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        size = path.stat().st_size
    except FileNotFoundError:
        raise JobError([Problem(source, None, None, "", "there is no such file", hint=_like(path))]) from None
    except IsADirectoryError:
        hint = next(
            (f"did you mean {path / name}?" for name in _files(path) if re.fullmatch(r"job\.ya?ml", name)), None
        )
        raise JobError([Problem(source, None, None, "", "is a folder, not a job file", hint=hint)]) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise JobError([Problem(visible(source), None, None, "", f"cannot be read: {reason}")]) from None
    if len(content) > MOST_BYTES:
        raise JobError([_too_large(source, size if size > MOST_BYTES else None)])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        hint = "it looks like UTF-16: save it as UTF-8" if utf16 else "save it as UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}"
        raise JobError([Problem(source, line, None, "", message, hint=hint)]) from None


def _like(path: Path) -> str | None:
    near = nearest(path.name, _files(path.parent))
    return f"did you mean {path.parent / near}?" if near else None


def _files(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())[:1000]
    except OSError:
        return []
