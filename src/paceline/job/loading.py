"""Loads a job file: reads, overrides, validates and checks it, and reports all mistakes together, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import Finding, JobError, Problem, visible
from paceline.job.similar_names import nearest
from paceline.job.yaml_tree import Entry, Node, Source, plain, read, without_value

if TYPE_CHECKING:
    from paceline.job import LoadedJob

MAX_BYTES = 1_000_000


def load(path: Path, overrides: Sequence[str] = (), cluster: bool = False) -> LoadedJob:
    return load_text(read_text(path), str(path), path.absolute().parent, overrides, cluster)


def load_text(text: str, source: str, folder: Path, overrides: Sequence[str] = (), cluster: bool = False) -> LoadedJob:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise JobError([_too_large(source, size)])
    file = Source.of_file(source, text)
    root, problems = read(file)
    if root is None or root.value is None:
        raise JobError([Problem(source, None, None, "", "the file is empty", hint=_MINIMAL_JOB)])
    if not root.is_map:
        kind = "a list" if root.is_list else f'"{visible(root.raw, 60)}"'
        message = f"a job file must be a mapping (key: value), got {kind}"
        raise JobError([*problems, file.problem(root.line, root.column, "", message, _MINIMAL_JOB)])
    for override in overrides:
        root, more = _apply_override(root, override)
        problems += more
    return _check(root, text, folder.absolute(), problems, bool(overrides), cluster)


_MINIMAL_JOB = (
    "a job needs at least name, framework and command, for example: {name: a, framework: none, command: [python, a.py]}"
)


def _check(root: Node, text: str, folder: Path, problems: list[Problem], overridden: bool, cluster: bool) -> LoadedJob:
    # Imported here: errors in the YAML do not need pydantic.
    from paceline.job import LoadedJob, checks, file_checks, ingest_section, notify_section, snapshots_section
    from paceline.job.validation import validate
    from paceline.job.yaml_writer import write

    data = plain(root)
    empty = list(without_value(root))
    job, findings, broken = validate(data)
    broken += empty
    reported = set(empty)
    findings = [finding for finding in findings if finding.path not in reported]
    findings += [Finding(path, "has no value", _hint_for_no_value(path)) for path in empty[:100]]
    findings += checks.check(job, broken)
    findings += file_checks.check(job, folder, broken, cluster)
    findings += snapshots_section.check(job.snapshots, broken, cluster)
    findings += ingest_section.check(job, broken, cluster)
    findings += notify_section.check(job, broken, cluster)
    yaml_problems = {(problem.line, problem.path) for problem in problems}
    located = [_locate(root, finding) for finding in findings]
    problems += [
        problem for problem in located if not problem.path or (problem.line, problem.path) not in yaml_problems
    ]
    if problems:
        raise JobError(sorted(_distinct(problems), key=_order))
    absolute = {
        "code": file_checks.code_of(job, folder),
        "snapshots": snapshots_section.with_absolute_paths(job.snapshots, folder),
        "ingest": ingest_section.with_absolute_paths(job.ingest, folder),
    }
    job = checks.with_defaults(job).model_copy(update=absolute)
    if not cluster:
        job = file_checks.with_credentials(job)
    return LoadedJob(job, write(data) if overridden else text, checks.notes(job, cluster))


def _hint_for_no_value(path: tuple[str | int, ...]) -> str:
    if len(path) == 2 and path[0] == "roles":
        return f"write {visible(str(path[1]), 60)}: {{}} for one host"
    return "give it a value, or remove the key"


def _apply_override(root: Node, override: str) -> tuple[Node, list[Problem]]:
    from paceline.job.overrides import apply

    return apply(root, override)


def _locate(root: Node, finding: Finding) -> Problem:
    """The finding with the position of its key or value, or else of the innermost mapping or list around it."""
    node, entry = root, None
    steps: list[str] = []
    missing = False
    for step in finding.path:
        if not missing:
            if node.is_map and step == 0:  # a role that is one mapping: the index is not in the text
                continue
            child = _child(node, step)
            missing = child is None
            if child is not None:
                node, entry = child
        steps.append(visible(str(step), 60))
    at_key = finding.at_key or missing or node.is_map or node.is_list or node.value is None
    target = entry if entry is not None and at_key else node
    hint = finding.hint.replace("{text}", visible(node.raw, 60)) if finding.hint else None
    at_top = missing and node is root
    line, column = (None, None) if at_top else (target.line, target.column)
    return target.source.problem(line, column, ".".join(steps), finding.message, hint, finding.allowed)


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
    return problem.is_in_override, problem.line or 0, problem.column or 0


def _too_large(source: str, size: int | None) -> Problem:
    amount = "more than 1 MB" if size is None else f"{max(size / 1e6, 1.01):.2f} MB"
    return Problem(source, None, None, "", f"the file is too large for a job file: {amount}", hint="the limit is 1 MB")


def read_text(path: Path) -> str:
    """The text of a job file. Raises JobError."""
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        size = path.stat().st_size
    except FileNotFoundError:
        raise JobError([Problem(source, None, None, "", "the file does not exist", hint=_similar_file(path))]) from None
    except IsADirectoryError:
        hint = next(
            (f"did you mean {path / name}?" for name in _names(path) if re.fullmatch(r"job\.ya?ml", name)), None
        )
        raise JobError([Problem(source, None, None, "", "is a folder, not a job file", hint=hint)]) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise JobError([Problem(visible(source), None, None, "", f"cannot be read: {reason}")]) from None
    if len(content) > MAX_BYTES:
        raise JobError([_too_large(source, size if size > MAX_BYTES else None)])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        hint = "it looks like UTF-16: save it as UTF-8" if utf16 else "save it as UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}"
        raise JobError([Problem(source, line, None, "", message, hint=hint)]) from None


def _similar_file(path: Path) -> str | None:
    near = nearest(path.name, _names(path.parent))
    return f"did you mean {path.parent / near}?" if near else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())[:1000]
    except OSError:
        return []
