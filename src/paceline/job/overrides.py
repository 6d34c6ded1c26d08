"""Applies `--set a.b=c`: replaces one value of the tree. The result is checked like a file."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from paceline.job.errors import JobError, Problem, visible
from paceline.job.yaml_tree import Entry, Node, Source, read


def apply(root: Node, override: str) -> tuple[Node, list[Problem]]:
    """A copy of the tree with the override applied."""
    source = Source.of_override(override)
    key, equals, text = override.partition("=")
    if not equals:
        return root, [source.problem(None, None, "", 'has no "="', "write --set roles.worker.replicas=4")]
    if re.search("[\x00\ud800-\udfff]", override):  # bytes that are not UTF-8 arrive as surrogates
        return root, [source.problem(None, None, "", "contains a character that cannot be passed to a program")]
    path = _split(key.strip())
    if not all(path):
        return root, [source.problem(None, None, "", "has an empty key", "write --set roles.worker.replicas=4")]
    try:
        value, problems = (Node(text, text, 1, 1, source), []) if _is_string(path) else _read(source)
        return (root, problems) if problems else (_replace(root, path, 0, value, source), [])
    except JobError as error:
        return root, error.problems


def override_of(field: str, value: Any) -> str:
    """The override that gives a field this value, which is data and not text to be parsed.

    >>> override_of("roles.worker.replicas", 4), override_of("limits.runtime", "6h"), override_of("env.SEED", "7")
    ('roles.worker.replicas=4', 'limits.runtime="6h"', 'env.SEED=7')
    """
    if isinstance(value, str) and _is_string(_split(field.strip())):
        return f"{field}={value}"
    return f"{field}={json.dumps(value, ensure_ascii=False)}"


def _split(key: str) -> list[str]:
    """The steps of a path. The name of a variable or label is one step, even if it contains dots."""
    steps = key.split(".")
    for start in range(len(steps)):
        if _is_string_mapping(steps[: start + 1]):
            return [*steps[: start + 1], ".".join(steps[start + 1 :])] if start + 1 < len(steps) else steps
    return steps


def _is_string_mapping(path: list[str]) -> bool:
    """Whether this is a mapping of names to strings: variables, labels."""
    if path[0] == "kubernetes":
        return len(path) == 2 and path[1] in ("node_selector", "labels", "annotations")
    return path[-1] == "env" and (len(path) == 1 or (path[0] == "roles" and len(path) in (3, 4)))


def _is_string(path: list[str]) -> bool:
    """Values of variables and labels, and arguments of a command, are always strings."""
    return len(path) > 1 and (_is_string_mapping(path[:-1]) or (path[-2] == "command" and path[-1].isdecimal()))


def _read(source: Source) -> tuple[Node, list[Problem]]:
    node, problems = read(source)
    return node if node is not None else Node(None, "", 1, 1, source), problems


def _replace(node: Node, path: list[str], at: int, value: Node, source: Source) -> Node:
    """A copy of the node with the value at the remaining path, which starts at step `at`."""
    if at == len(path):
        return value
    step, parent = path[at], ".".join(path[:at])
    if node.value is None:
        node = Node({}, "", 1, 1, source)
    changed = copy.copy(node)
    if node.is_list:
        index = _index(node, step, parent, source)
        # The index may be omitted if there is only one host pool.
        inner = _replace(node.value[index], path, at + 1 if step.isdecimal() else at, value, source)
        changed.value = [inner if position == index else item for position, item in enumerate(node.value)]
        return changed
    if not node.is_map:
        message = f'"{visible(parent)}" is the single value {visible(node.raw, 60)}: it has no keys to set'
        raise JobError([source.problem(None, None, visible(".".join(path)), message)])
    if step.isdecimal() and at == 2 and path[0] == "roles":
        if int(step[:9]) > 0:
            message = f'"{visible(parent)}" has one host pool: there is no host pool {visible(step, 20)}'
            raise JobError([source.problem(None, None, visible(".".join(path)), message, "the first host pool is 0")])
        return _replace(node, path, at + 1, value, source)
    old = node.value.get(step)
    inner = _replace(old.node if old else Node(None, "", 1, 1, source), path, at + 1, value, source)
    entry = Entry(old.line, old.column, old.source, inner) if old else Entry(1, 1, source, inner)
    changed.value = {**node.value, step: entry}
    return changed


def _index(node: Node, step: str, parent: str, source: Source) -> int:
    count = len(node.value)
    if step.isdecimal():
        if len(step) < 9 and int(step) < count:
            return int(step)
        message = f'"{visible(parent)}" has no item {visible(step, 20)}: its length is {count}'
        raise JobError([source.problem(None, None, visible(f"{parent}.{step}"), message, "the first item is 0")])
    if count == 1 and node.value[0].is_map:
        return 0
    message = f'"{visible(parent)}" is a list of {count} items: choose one of them'
    hint = (
        f"write {visible(parent)}.0.{visible(step)}" if count and node.value[0].is_map else f"write {visible(parent)}.0"
    )
    raise JobError([source.problem(None, None, visible(f"{parent}.{step}"), message, hint)])
