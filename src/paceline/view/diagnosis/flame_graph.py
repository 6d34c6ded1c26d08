"""Samples of stacks as pictures: a flame graph (SVG), and a file for speedscope (https://www.speedscope.app)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax import saxutils

from paceline.agent.stack_messages import PER_SECOND, Frame
from paceline.agent.tasks.tracebacks import library_file
from paceline.view.diagnosis.stacks import ProcessStacks, ThreadStacks, frame_text

WIDTH, ROW, MARGIN, TOP = 1200.0, 18, 10, 40  # pixels
NARROWEST = 0.4  # pixels of a frame that is drawn
LETTER = 7.0  # pixels
MOST_TASKS = 16  # that are drawn side by side; if there are more, the tasks of a role are merged
DEEPEST = 200
_NOT_XML = re.compile("[^\\t\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


@dataclass
class _Node:
    frame: Frame | None
    samples: int = 0
    children: dict[object, _Node] = field(default_factory=dict)

    def child(self, key: object, frame: Frame | None = None) -> _Node:
        return self.children.setdefault(key, _Node(frame))


def is_shown(thread: ThreadStacks) -> bool:
    """The flame graph leaves out threads that only waited."""
    return thread.is_main or len(set(thread.samples)) > 1


def svg(processes: Sequence[ProcessStacks], title: str) -> str:
    """One file without scripts; browsers show the whole text of a frame as its tooltip."""
    root = _tree(processes)
    height = TOP + ROW * (_depth(root) + 1) + MARGIN
    boxes = "\n".join(_boxes(root, title, max(1, root.samples)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height}" '
        f'viewBox="0 0 {WIDTH:g} {height}" font-family="monospace" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fcfcfc"/>\n'
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>\n'
        f"{boxes}\n</svg>\n"
    )


def speedscope(processes: Sequence[ProcessStacks], name: str) -> dict[str, Any]:
    """https://www.speedscope.app/file-format-schema.json: a profile for each thread, main threads first."""
    numbers: dict[Frame, int] = {}
    pairs = [(process, thread) for process in processes for thread in process.threads]
    profiles = []
    for process, thread in sorted(pairs, key=lambda pair: not pair[1].is_main):
        weight = 1 / PER_SECOND
        samples = [
            [numbers.setdefault(frame, len(numbers)) for frame in reversed(stack)] for stack in thread.samples
        ]  # fmt: skip
        label = "main thread" if thread.is_main else f"thread {thread.native_id}"
        profiles.append(
            {
                "type": "sampled", "name": f"{process.task}, {label}", "unit": "seconds", "startValue": 0,
                "endValue": round(weight * len(samples), 3), "samples": samples, "weights": [weight] * len(samples),
            }
        )  # fmt: skip
    frames = [{"name": frame.function, "file": frame.file, "line": frame.line} for frame in numbers]
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "paceline",
        "activeProfileIndex": 0,
        "shared": {"frames": frames},
        "profiles": profiles,
    }


def _tree(processes: Sequence[ProcessStacks]) -> _Node:
    """Outermost frames first; equal functions are merged, whatever their lines."""
    by_role = len({process.task for process in processes}) > MOST_TASKS
    root = _Node(None)
    for process in processes:
        for thread in filter(is_shown, process.threads):
            label = process.task.rpartition("-")[0] if by_role else process.task
            top = root.child(label if thread.is_main else f"{label}, other threads")
            for stack in thread.samples:
                _add(root, top, stack)
    return root


def _add(root: _Node, top: _Node, stack: Iterable[Frame]) -> None:
    root.samples += 1
    top.samples += 1
    node = top
    for frame in list(reversed(list(stack)))[:DEEPEST]:
        node = node.child((frame.file, frame.function), frame)
        node.samples += 1


def _depth(node: _Node) -> int:
    """Without recursion: stacks can be deep."""
    depth, level = 0, [node]
    while level := [child for each in level for child in each.children.values()]:
        depth += 1
    return depth


def _boxes(root: _Node, title: str, total: int) -> Iterator[str]:
    scale = (WIDTH - 2 * MARGIN) / total
    waiting: list[tuple[_Node, str, float, int]] = [(root, title, float(MARGIN), 0)]
    while waiting:
        node, label, x, row = waiting.pop()
        width = node.samples * scale
        if width < NARROWEST:
            continue
        yield _box(node, label, x, TOP + ROW * row, width, total)
        for key, child in node.children.items():
            waiting.append((child, str(key) if child.frame is None else _label(child.frame), x, row + 1))
            x += child.samples * scale


def _box(node: _Node, label: str, x: float, y: int, width: float, total: int) -> str:
    share = f"{100 * node.samples / total:.1f}%"
    whole = escape(f"{label}: {share}" if node.frame is None else f"{frame_text(node.frame)}: {share}")
    letters = int((width - 6) / LETTER)
    shown = "" if letters < 3 else escape(label if len(label) <= letters else label[: letters - 2] + "..")
    text = f'<text x="{x + 3:.1f}" y="{y + 13}">{shown}</text>' if shown else ""
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 1}" fill="{_color(node.frame)}" rx="1"/>'
    return f"<g><title>{whole}</title>{box}{text}</g>"


def _label(frame: Frame) -> str:
    return f"{frame.function} ({(library_file(frame.file) or frame.file).rpartition('/')[2]})"


def _color(frame: Frame | None) -> str:
    """Warm colors for the user's code, cold ones for libraries; always the same for a function."""
    if frame is None:
        return "#d8d8d8"
    shade = zlib.crc32(f"{frame.file} {frame.function}".encode("utf-8", "replace")) % 20
    return f"hsl({205 + shade},45%,78%)" if library_file(frame.file) else f"hsl({18 + shade},85%,68%)"


def escape(text: str) -> str:
    """For XML, which cannot contain control characters: a program can give its functions any name."""
    return saxutils.escape(_NOT_XML.sub("?", text))
