"""Uncaught exceptions as Python prints them: their type, text and place. Pure functions without I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
_ERROR = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_CAPITAL = re.compile("[A-Z]")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix of each line
_TRACEBACK = "Traceback (most recent call last):"
_REPLACED = (  # between an exception and the one that followed from it
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Frames of installed packages, of the standard library, and of generated code; `<string>` is the code of `python -c`.
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?P<package>.*)|"
    r"/lib(?:64)?/python\d+(?:\.\d+)?/(?!(?:site|dist)-packages/)(?P<module>.*)|"
    r"(?:/src|\.pyz)/(?P<helper>paceline/.*)|"
    r"^<(?!string>|stdin>)|__autograph_generated_file"
)
LONGEST_LINE = 1000  # characters of a line that are searched: some expressions take quadratic time


@dataclass(frozen=True)
class Raised:
    """An uncaught exception."""

    type: str
    text: str
    place: str  # file:line of the innermost frame in the user's code; if it has none, of the innermost frame
    library: str = ""  # file:line of the innermost frame, if it is in a library; relative to the folder of libraries

    def __str__(self) -> str:
        first_line = self.text.splitlines()[0] if self.text else ""
        error = f"{self.type}: {first_line[:300]}" if first_line else self.type
        return f"{error} at {self.place}" + (f" (raised in {self.library})" if self.library else "")


def traceback(tail: Sequence[str]) -> Raised | None:
    """The last exception in these lines; all lines that follow it are part of its text."""
    lines = [_RANK.sub("", line[:LONGEST_LINE]) for line in tail]
    starts = [number for number, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    return next(filter(None, (_exception(lines[start + 1 :]) for start in reversed(starts))), None)


def tracebacks(tail: Sequence[str]) -> list[Raised]:
    """All exceptions in these lines, oldest first, without those that another one followed or replaced. Lines with
    different ranks of torch are told apart."""
    lines = [line[:LONGEST_LINE] for line in tail]
    ranks = [match[0] if (match := _RANK.match(line)) else "" for line in lines]
    exceptions = []
    for start, line in enumerate(lines):
        if line.strip().endswith(_TRACEBACK):
            rank = ranks[start]
            following = zip(lines[start + 1 :], ranks[start + 1 :])
            own = [each[len(rank) :] for each, its_rank in following if its_rank == rank]
            end = next((number for number, each in enumerate(own) if each.strip().endswith(_TRACEBACK)), len(own))
            if not any(each.strip() in _REPLACED for each in own[:end]):
                exceptions.append(_exception(own[:end]))
    return [each for each in exceptions if each is not None]


def _exception(lines: Sequence[str]) -> Raised | None:
    """The exception whose frames these lines begin with; all lines that follow it are part of its text."""
    frames: list[tuple[str, str]] = []
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame:
            frames.append((frame["file"], frame["line"]))
        elif frames and line[:1].strip():
            error = _ERROR.match(line)
            if error is None or not _is_class(error["type"]):
                return None
            return Raised(error["type"], "\n".join([error["text"] or "", *lines[number + 1 :]]), *places(frames))
    return None


def _is_class(name: str) -> bool:
    """Whether it may be the class of an exception. All without a module are Python's own: a single word, such as
    `Loss`, is other output."""
    module, _, last = name.rpartition(".")
    return name == "Exception" or _CAPITAL.search(last, 0 if module else 1) is not None


def library_file(file: str) -> str:
    """The file of a library, relative to the folder of libraries; empty: the file belongs to the user's code.

    >>> library_file("/usr/lib/python3.11/threading.py"), library_file("/home/me/train.py")
    ('threading.py', '')
    """
    library = _LIBRARY.search(file)
    return "" if library is None else library["package"] or library["module"] or library["helper"] or file


def places(frames: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Where an exception was raised, from its frames (file and line), outermost first: the innermost frame in the
    user's code, and the innermost frame of all if that is in a library."""
    frames = [frame for frame in frames if not frame[0].startswith("<frozen ")] or frames  # the import system
    file, line = frames[-1]
    library = _LIBRARY.search(file)
    own = next((frame for frame in reversed(frames) if not _LIBRARY.search(frame[0])), None)
    if library is None or own is None:
        return f"{file}:{line}", ""
    return f"{own[0]}:{own[1]}", f"{library_file(file)}:{line}"
