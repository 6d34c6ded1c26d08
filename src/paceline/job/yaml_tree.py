"""Parses YAML into a tree of values with their positions. Limits keep time and memory small for any input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline.job.errors import OVERRIDE, JobError, Problem, visible
from paceline.job.similar_names import nearest
from paceline.job.yaml_errors import explain

MAX_VALUES = 20_000
MAX_DEPTH = 30
MAX_PROBLEMS = 100
MAX_CONTENT = 256 * 1024  # characters besides comments and blank lines
MAX_LINES = 50_000
MAX_TEXT = 100_000  # characters of one value

NULLS = ("kubernetes", "pod")  # a patch, in which null removes a key

_TAG = "tag:yaml.org,2002:"
_LONG_TAG = re.compile(r"!\S{2000}")  # ruamel takes quadratic time for these
_INT = re.compile(r"[-+]?[0-9]{1,100}|0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,100}|[0-9]{1,100}(\.[0-9]{0,100})?)([eE][-+]?[0-9]{1,9})?")
_SPECIAL = re.compile(r"([-+]?\.(?:inf|Inf|INF))|(\.(?:nan|NaN|NAN))")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].{0,40})?")
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # one character, as JSON escapes it
_UNSUPPORTED = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """The text that values come from: the file, or the value of one --set."""

    file: str
    text: str
    lines: tuple[str, ...] | None  # None: problems have no line and no snippet

    @staticmethod
    def of_file(file: str, text: str) -> Source:
        return Source(file, text, tuple(re.split("\r\n|\n|\r", text)))

    @staticmethod
    def of_override(override: str) -> Source:
        return Source(f"{OVERRIDE}{visible(override)}", override.partition("=")[2], None)

    def problem(
        self,
        line: int | None,
        column: int | None,
        path: str,
        message: str,
        hint: str | None = None,
        allowed: str | None = None,
    ) -> Problem:
        if self.lines is None or line is None:
            return Problem(self.file, None, None, path, message, allowed, hint, None)
        row = self.lines[line - 1] if line <= len(self.lines) else ""
        start = max(0, (column or 1) - 60) if len(row) > 100 else 0
        snippet = visible(row[start:].rstrip()) if start == 0 else "..." + visible(row[start:].rstrip())
        return Problem(self.file, line, column, path, message, allowed, hint, snippet if snippet.strip() else None)


@dataclass
class Node:
    """A value: `value` is a scalar, a list of nodes, or a dict of entries."""

    value: Any
    raw: str
    line: int
    column: int
    source: Source
    size: int = 1

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)


@dataclass
class Entry:
    """A key's position, and its value."""

    line: int
    column: int
    source: Source
    node: Node
    merged: bool = False  # merged in by `<<`


@dataclass
class _Reading:
    source: Source
    events: Iterator[Any]
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, Node | None] = field(default_factory=dict)  # None: still open
    count: int = 0

    def report(self, event: Any, path: str, message: str, hint: str | None = None) -> None:
        self.problems.append(self.source.problem(*_position(event), path, message, hint))
        if len(self.problems) >= MAX_PROBLEMS:
            raise JobError(self.problems)

    def fail(self, event: Any, path: str, message: str, hint: str | None = None) -> NoReturn:
        self.problems.append(self.source.problem(*_position(event), path, message, hint))
        raise JobError(self.problems)


def read(source: Source) -> tuple[Node | None, list[Problem]]:
    """The tree of the document (None if it is empty), and the problems with its values.

    Raises JobError if the text is not YAML or exceeds a limit.
    """
    _check_size(source)
    from ruamel.yaml import YAML

    reading = _Reading(source, iter(()))
    try:
        reading.events = iter(YAML(typ="safe", pure=True).parse(source.text.removeprefix("\ufeff")))
        root = _document(reading)
    except JobError:
        raise
    except Exception as error:  # the parser also raises ValueError, IndexError and others
        raise JobError([*reading.problems, explain(error, source.problem, source.text)]) from None
    return root, reading.problems


def plain(node: Node, path: tuple[str | int, ...] = ()) -> Any:
    """The tree as plain data. Keys without a value are omitted, except in patches."""
    if node.is_map:
        entries = ((key, entry.node) for key, entry in node.value.items())
        if path[:2] != NULLS:
            entries = ((key, inner) for key, inner in entries if inner.value is not None)
        return {key: plain(inner, (*path, key)) for key, inner in entries}
    if node.is_list:
        return [plain(item, (*path, index)) for index, item in enumerate(node.value)]
    return node.value


def without_value(node: Node, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of keys without a value, except in patches."""
    if path == NULLS:
        return
    if node.is_map:
        for key, entry in node.value.items():
            if entry.node.value is None:
                yield (*path, key)
            else:
                yield from without_value(entry.node, (*path, key))
    elif node.is_list:
        for index, item in enumerate(node.value):
            yield from without_value(item, (*path, index))


def scalar(raw: str) -> Any:
    """The value of an unquoted scalar in YAML 1.2.

    >>> [scalar(word) for word in ("12", "0x1F", "1e3", "true", "yes", "~", "08:30")]
    [12, 31, 1000.0, True, 'yes', None, '08:30']
    """
    if len(raw) <= 5 and raw in (raw.lower(), raw.upper(), raw.capitalize()) and raw.lower() in _CONSTANTS:
        return _CONSTANTS[raw.lower()]
    if _INT.fullmatch(raw):
        return int(raw, 0) if raw.startswith("0") and raw[1:2] in ("o", "x") else int(raw)
    if _FLOAT.fullmatch(raw):
        return float(raw)
    special = _SPECIAL.fullmatch(raw)
    return float(raw.replace(".", "")) if special else raw


def _check_size(source: Source) -> None:
    rows = re.split("\r\n|\n|\r", source.text)
    if len(rows) > MAX_LINES:
        message = f"the file has more than {MAX_LINES} lines: a job file cannot be that long"
        raise JobError([source.problem(None, None, "", message)])
    content = sum(len(row) for row in rows if row.strip() and not row.lstrip().startswith("#"))
    if content > MAX_CONTENT:
        message = f"the file has {content} characters besides comments; a job file can have at most {MAX_CONTENT}"
        raise JobError([source.problem(None, None, "", message)])
    tag = _LONG_TAG.search(source.text)
    if tag:
        line = source.text.count("\n", 0, tag.start()) + 1
        raise JobError([source.problem(line, 1, "", 'a tag ("!") of more than 2000 characters')])


def _position(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _document(reading: _Reading) -> Node | None:
    from ruamel.yaml import events as kinds

    root: Node | None = None
    documents = 0
    for event in reading.events:
        if isinstance(event, kinds.DocumentStartEvent):
            documents += 1
            if documents > 1:
                reading.fail(event, "", 'a second document starts here ("---"): a job file contains one document')
            if event.version not in (None, (1, 2)):
                reading.fail(event, "", "declares another version of YAML; job files are YAML 1.2")
        elif isinstance(event, kinds.NodeEvent):
            root = _node(reading, event, "", 0)
    return root


def _node(reading: _Reading, event: Any, path: str, depth: int) -> Node:
    from ruamel.yaml import events as kinds

    if depth > MAX_DEPTH:
        reading.fail(event, "", f"values are nested more than {MAX_DEPTH} levels deep")
    line, column = _position(event)
    if isinstance(event, kinds.AliasEvent):
        node = reading.anchors.get(event.anchor)
        if event.anchor not in reading.anchors:
            near = nearest(event.anchor, reading.anchors)
            hint = f'did you mean "*{near}"?' if near else f'put text that starts with "*" in quotes: "*{event.anchor}"'
            reading.fail(event, path, f'the alias "*{visible(event.anchor)}" is not defined above', hint)
        if node is None:
            reading.fail(event, path, f'the alias "*{visible(event.anchor)}" refers to a value that contains it')
        _count(reading, event, node.size)
        return node
    _count(reading, event, 1)
    if event.anchor is not None:
        reading.anchors[event.anchor] = None
    if isinstance(event, kinds.ScalarEvent):
        node = Node(_scalar(reading, event, path), event.value, line, column, reading.source)
    elif isinstance(event, kinds.SequenceStartEvent):
        _check_tag(reading, event, path, ("seq",))
        node = _list(reading, Node([], "", line, column, reading.source), path, depth)
    else:
        _check_tag(reading, event, path, ("map",))
        node = _map(reading, Node({}, "", line, column, reading.source), path, depth)
    if event.anchor is not None:
        reading.anchors[event.anchor] = node
    return node


def _count(reading: _Reading, event: Any, more: int) -> None:
    reading.count += more
    if reading.count > MAX_VALUES:
        message = f"more than {MAX_VALUES} values after expanding aliases: a job file cannot be that large"
        reading.fail(event, "", message)


def _list(reading: _Reading, node: Node, path: str, depth: int) -> Node:
    from ruamel.yaml import events as kinds

    for event in reading.events:
        if isinstance(event, kinds.SequenceEndEvent):
            break
        item = _node(reading, event, f"{path}.{len(node.value)}", depth + 1)
        node.value.append(item)
        node.size += item.size
    return node


def _map(reading: _Reading, node: Node, path: str, depth: int) -> Node:
    from ruamel.yaml import events as kinds

    for event in reading.events:
        if isinstance(event, kinds.MappingEndEvent):
            break
        key = _node(reading, event, path, depth + 1)
        name = key.value if isinstance(key.value, str) else key.raw
        inner = f"{path}.{visible(name)}" if path else visible(name)
        value = _node(reading, next(reading.events), inner, depth + 1)
        node.size += 1 + value.size
        line, column = _position(event)
        if key.is_map or key.is_list:
            reading.report(event, path, f"a key must be a string, got a {'mapping' if key.is_map else 'list'}")
        elif not isinstance(key.value, str):
            problem = "is empty" if key.value is None else f"must be a string, got {visible(key.raw)}"
            reading.report(event, path, f"a key {problem}", f'write "{visible(key.raw)}"' if key.raw else None)
        elif name == "<<" and getattr(event, "style", "") is None:
            _merge(reading, event, path, node, value)
        elif name in node.value and not node.value[name].merged:
            first = node.value[name].line
            lines = f"lines {first} and {line}" if first != line else f"both times on line {line}"
            reading.report(event, inner, f'the key "{visible(name)}" appears twice: {lines}')
        else:
            node.value[name] = Entry(line, column, reading.source, value)
    return node


def _merge(reading: _Reading, event: Any, path: str, node: Node, value: Node) -> None:
    for mapping in value.value if value.is_list else [value]:
        if not mapping.is_map:
            reading.report(event, path, '"<<" must be a mapping or a list of mappings')
            return
        for key, entry in mapping.value.items():
            if key not in node.value:
                node.value[key] = Entry(entry.line, entry.column, entry.source, entry.node, merged=True)


def _check_tag(reading: _Reading, event: Any, path: str, allowed: tuple[str, ...]) -> None:
    tag = str(event.tag) if event.tag is not None else None
    if tag in (None, "!", *(_TAG + name for name in allowed)):
        return
    short = tag.replace(_TAG, "!!") if tag else ""
    reading.report(event, path, f'the tag "{visible(short)}" is not supported: only plain values are', "remove it")


def _scalar(reading: _Reading, event: Any, path: str) -> Any:
    raw = event.value
    _check_tag(reading, event, path, ("str", "int", "float", "bool", "null"))
    if len(raw) > MAX_TEXT:
        reading.report(event, path, f"a string of {len(raw)} characters; at most {MAX_TEXT} are allowed")
    raw = _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), raw)
    unsupported = _UNSUPPORTED.search(raw)
    if unsupported:
        reading.report(
            event, path, f"contains the character {visible(unsupported[0])}, which cannot be passed to a program"
        )
        raw = _UNSUPPORTED.sub("?", raw)
    if event.style is not None or (event.tag is not None and str(event.tag) in ("!", _TAG + "str")):
        return raw
    if _DATE.fullmatch(raw):
        reading.report(event, path, f"{visible(raw)} is read as a date by YAML", f'write "{visible(raw)}"')
    return scalar(raw)
