"""`--set a.b=c`: one value of the tree replaced from the command line, with the checks that the file has."""

from __future__ import annotations

import copy
import re

from paceline.job.errors import JobError, Problem, visible
from paceline.job.tree import Entry, Node, Source, read


def apply(root: Node, override: str) -> tuple[Node, list[Problem]]:
    """The tree with the override in it; the tree that was given is left as it is."""
    source = Source.of_override(override)
    written, equals, text = override.partition("=")
    if not equals:
        return root, [source.problem(None, None, "", 'has no "="', "write --set roles.worker.replicas=4")]
    if re.search("[\x00\ud800-\udfff]", override):  # what the shell passes on of bytes that are not UTF-8
        return root, [source.problem(None, None, "", "holds a character that no program can be given")]
    path = _split(written.strip())
    if not all(path):
        return root, [source.problem(None, None, "", "has an empty name", "write --set roles.worker.replicas=4")]
    try:
        value, problems = (Node(text, text, 1, 1, source), []) if _is_text(path) else _read(source)
        return (root, problems) if problems else (_put(root, path, 0, value, source), [])
    except JobError as error:
        return root, error.problems


def _split(written: str) -> list[str]:
    """The steps of a path. The name of a variable or of a label is one step, whatever it holds."""
    steps = written.split(".")
    for start in range(len(steps)):
        if _names_text(steps[: start + 1]):
            return [*steps[: start + 1], ".".join(steps[start + 1 :])] if start + 1 < len(steps) else steps
    return steps


def _names_text(path: list[str]) -> bool:
    """Whether this is a mapping of names to text: variables, labels."""
    if path[0] == "kubernetes":
        return len(path) == 2 and path[1] in ("node_selector", "labels", "annotations")
    return path[-1] == "env" and (len(path) == 1 or (path[0] == "roles" and len(path) in (3, 4)))


def _is_text(path: list[str]) -> bool:
    """Variables, labels and words of a command are text, whatever they look like."""
    return len(path) > 1 and (_names_text(path[:-1]) or (path[-2] == "command" and path[-1].isdecimal()))


def _read(source: Source) -> tuple[Node, list[Problem]]:
    node, problems = read(source)
    return node if node is not None else Node(None, "", 1, 1, source), problems


def _put(node: Node, path: list[str], at: int, value: Node, source: Source) -> Node:
    """A copy of the node in which the rest of the path, from step `at` on, holds the value."""
    if at == len(path):
        return value
    step, shown = path[at], ".".join(path[:at])
    if node.value is None:
        node = Node({}, "", 1, 1, source)
    changed = copy.copy(node)
    if node.is_list:
        index = _index(node, step, shown, source)
        # Only one group: its index may be left out.
        inner = _put(node.value[index], path, at + 1 if step.isdecimal() else at, value, source)
        changed.value = [inner if position == index else item for position, item in enumerate(node.value)]
        return changed
    if not node.is_map:
        message = f'"{visible(shown)}" holds {visible(node.raw, 60)}: nothing within it can be set'
        raise JobError([source.problem(None, None, visible(".".join(path)), message)])
    if step.isdecimal() and at == 2 and path[0] == "roles":
        if int(step[:9]) > 0:
            message = f'"{visible(shown)}" is one group: there is no group {visible(step, 20)}'
            raise JobError([source.problem(None, None, visible(".".join(path)), message, "the first is 0")])
        return _put(node, path, at + 1, value, source)
    old = node.value.get(step)
    inner = _put(old.node if old else Node(None, "", 1, 1, source), path, at + 1, value, source)
    place = Entry(old.line, old.column, old.source, inner) if old else Entry(1, 1, source, inner)
    changed.value = {**node.value, step: place}
    return changed


def _index(node: Node, step: str, shown: str, source: Source) -> int:
    count = len(node.value)
    if step.isdecimal():
        if len(step) < 9 and int(step) < count:
            return int(step)
        message = f'"{visible(shown)}" has no item {visible(step, 20)}: it holds {count}'
        raise JobError([source.problem(None, None, visible(f"{shown}.{step}"), message, "the first is 0")])
    if count == 1 and node.value[0].is_map:
        return 0
    message = f'"{visible(shown)}" is a list of {count}: say which item is meant'
    hint = (
        f"write {visible(shown)}.0.{visible(step)}" if count and node.value[0].is_map else f"write {visible(shown)}.0"
    )
    raise JobError([source.problem(None, None, visible(f"{shown}.{step}"), message, hint)])
