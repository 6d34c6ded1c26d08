"""YAML text to a tree of values that know their place in the text. Bounded: no input takes long or much memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline.job.errors import JobError, Problem, nearest, visible
from paceline.job.syntax import explained

MOST_VALUES = 20_000
MOST_DEPTH = 30
MOST_PROBLEMS = 100
MOST_CONTENT = 256 * 1024  # characters besides comments and blank lines
MOST_LINES = 50_000
MOST_TEXT = 100_000  # characters of one value

NULLS = ("kubernetes", "pod")  # a patch, where nothing stands for removal

_TAG = "tag:yaml.org,2002:"
_LONG_TAG = re.compile(r"!\S{2000}")  # ruamel takes quadratic time for these
_INT = re.compile(r"[-+]?[0-9]{1,100}|0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,100}|[0-9]{1,100}(\.[0-9]{0,100})?)([eE][-+]?[0-9]{1,9})?")
_SPECIAL = re.compile(r"([-+]?\.(?:inf|Inf|INF))|(\.(?:nan|NaN|NAN))")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].{0,40})?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # one character, the way JSON escapes it
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """A text that values come from: the file, or what follows one --set."""

    file: str
    text: str
    lines: tuple[str, ...] | None  # None: values are not shown with a line of their own

    @staticmethod
    def of_file(file: str, text: str) -> Source:
        return Source(file, text, tuple(re.split("\r\n|\n|\r", text)))

    @staticmethod
    def of_override(override: str) -> Source:
        return Source(f"--set {visible(override)}", override.partition("=")[2], None)

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
    """A key's place, and its value."""

    line: int
    column: int
    source: Source
    node: Node
    merged: bool = False  # came in by `<<`


@dataclass
class _Reading:
    source: Source
    events: Iterator[Any]
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, Node | None] = field(default_factory=dict)  # None: still open
    count: int = 0

    def report(self, event: Any, path: str, message: str, hint: str | None = None) -> None:
        self.problems.append(self.source.problem(*_place(event), path, message, hint))
        if len(self.problems) >= MOST_PROBLEMS:
            raise JobError(self.problems)

    def refuse(self, event: Any, path: str, message: str, hint: str | None = None) -> NoReturn:
        self.problems.append(self.source.problem(*_place(event), path, message, hint))
        raise JobError(self.problems)


def read(source: Source) -> tuple[Node | None, list[Problem]]:
    """The tree of the one document in the text (None where it is empty), and what is wrong with its values.

    Text that is not YAML, or is too much of it, raises JobError.
    """
    _check_size(source)
    from ruamel.yaml import YAML

    reading = _Reading(source, iter(()))
    try:
        reading.events = iter(YAML(typ="safe", pure=True).parse(source.text.removeprefix("\ufeff")))
        root = _document(reading)
    except JobError:
        raise
    except Exception as error:  # besides its own errors, the parser leaks ValueError, IndexError and others
        raise JobError([*reading.problems, explained(error, source.problem, source.text)]) from None
    return root, reading.problems


def plain(node: Node, path: tuple[str | int, ...] = ()) -> Any:
    """The tree as ordinary data. Keys without a value are left out, but where that has a meaning."""
    if node.is_map:
        entries = ((key, entry.node) for key, entry in node.value.items())
        if path[:2] != NULLS:
            entries = ((key, inner) for key, inner in entries if inner.value is not None)
        return {key: plain(inner, (*path, key)) for key, inner in entries}
    if node.is_list:
        return [plain(item, (*path, index)) for index, item in enumerate(node.value)]
    return node.value


def without_value(node: Node, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of keys that hold nothing, where that has no meaning."""
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
    """What an unquoted word means in YAML 1.2.

    >>> [scalar(word) for word in ("12", "0x1F", "1e3", "true", "yes", "~", "08:30")]
    [12, 31, 1000.0, True, 'yes', None, '08:30']
    """
    if len(raw) <= 5 and raw in (raw.lower(), raw.upper(), raw.capitalize()) and raw.lower() in _WORDS:
        return _WORDS[raw.lower()]
    if _INT.fullmatch(raw):
        return int(raw, 0) if raw.startswith("0") and raw[1:2] in ("o", "x") else int(raw)
    if _FLOAT.fullmatch(raw):
        return float(raw)
    special = _SPECIAL.fullmatch(raw)
    return float(raw.replace(".", "")) if special else raw


def _check_size(source: Source) -> None:
    rows = re.split("\r\n|\n|\r", source.text)
    if len(rows) > MOST_LINES:
        message = f"the file has more than {MOST_LINES} lines: no job file is that long"
        raise JobError([source.problem(None, None, "", message)])
    content = sum(len(row) for row in rows if row.strip() and not row.lstrip().startswith("#"))
    if content > MOST_CONTENT:
        message = f"the file holds {content} characters besides comments; a job file holds at most {MOST_CONTENT}"
        raise JobError([source.problem(None, None, "", message)])
    tag = _LONG_TAG.search(source.text)
    if tag:
        line = source.text.count("\n", 0, tag.start()) + 1
        raise JobError([source.problem(line, 1, "", 'a word of more than 2000 characters that starts with "!"')])


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _document(reading: _Reading) -> Node | None:
    from ruamel.yaml import events as kinds

    root: Node | None = None
    documents = 0
    for event in reading.events:
        if isinstance(event, kinds.DocumentStartEvent):
            documents += 1
            if documents > 1:
                reading.refuse(event, "", 'a second document starts here ("---"): a file holds one job')
            if event.version not in (None, (1, 2)):
                reading.refuse(event, "", "says it is of another version of YAML; job files are YAML 1.2")
        elif isinstance(event, kinds.NodeEvent):
            root = _node(reading, event, "", 0)
    return root


def _node(reading: _Reading, event: Any, path: str, depth: int) -> Node:
    from ruamel.yaml import events as kinds

    if depth > MOST_DEPTH:
        reading.refuse(event, "", f"values within values, more than {MOST_DEPTH} deep")
    line, column = _place(event)
    if isinstance(event, kinds.AliasEvent):
        known = reading.anchors.get(event.anchor)
        if event.anchor not in reading.anchors:
            near = nearest(event.anchor, reading.anchors)
            hint = f'did you mean "*{near}"?' if near else f'text that starts with "*" needs quotes: "*{event.anchor}"'
            reading.refuse(event, path, f'"*{visible(event.anchor)}" stands for nothing: no "&" names it above', hint)
        if known is None:
            reading.refuse(event, path, f'"*{visible(event.anchor)}" stands for a value that holds itself')
        _count(reading, event, known.size)
        return known
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
    if reading.count > MOST_VALUES:
        message = f"more than {MOST_VALUES} values, counting what each alias stands for: no job file is that large"
        reading.refuse(event, "", message)


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
        line, column = _place(event)
        if key.is_map or key.is_list:
            reading.report(event, path, f"a key must be text, got a {'mapping' if key.is_map else 'list'}")
        elif not isinstance(key.value, str):
            what = "is empty" if key.value is None else f"must be text, got {visible(key.raw)}"
            reading.report(event, path, f"a key {what}", f'write "{visible(key.raw)}"' if key.raw else None)
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
            reading.report(event, path, '"<<" takes a mapping, or a list of mappings')
            return
        for key, entry in mapping.value.items():
            if key not in node.value:
                node.value[key] = Entry(entry.line, entry.column, entry.source, entry.node, merged=True)


def _check_tag(reading: _Reading, event: Any, path: str, known: tuple[str, ...]) -> None:
    tag = str(event.tag) if event.tag is not None else None
    if tag in (None, "!", *(_TAG + name for name in known)):
        return
    shown = tag.replace(_TAG, "!!") if tag else ""
    reading.report(event, path, f'the tag "{visible(shown)}" is not taken: only plain values are', "remove it")


def _scalar(reading: _Reading, event: Any, path: str) -> Any:
    raw = event.value
    _check_tag(reading, event, path, ("str", "int", "float", "bool", "null"))
    if len(raw) > MOST_TEXT:
        reading.report(event, path, f"a text of {len(raw)} characters; at most {MOST_TEXT} are taken")
    raw = _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), raw)
    unstorable = _UNSTORABLE.search(raw)
    if unstorable:
        reading.report(event, path, f"holds the character {visible(unstorable[0])}, which no program can be given")
        raw = _UNSTORABLE.sub("?", raw)
    if event.style is not None or (event.tag is not None and str(event.tag) in ("!", _TAG + "str")):
        return raw
    if _DATE.fullmatch(raw):
        reading.report(event, path, f"{visible(raw)} is read as a date by YAML", f'write "{visible(raw)}"')
    return scalar(raw)
