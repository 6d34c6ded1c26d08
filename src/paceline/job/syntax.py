"""What the YAML parser says when text is not YAML, in words for the person who wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paceline.job.errors import Problem, visible

_COLON = 'text with ": " needs quotes; or the line above lacks a space after its ":", or is indented otherwise'


def explained(error: Exception, problem: Callable[..., Problem], text: str) -> Problem:
    """The problem that an exception of the parser stands for. `problem` makes one for a line and a column."""
    mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        message, hint = _worded(error)
        return problem(mark.line + 1, mark.column + 1, "", f"not YAML: {message}", hint)
    position = getattr(error, "position", None)
    if isinstance(position, int):
        position = min(position, len(text))
        character = getattr(error, "character", 0)
        code = character if isinstance(character, int) else ord(str(character)[:1] or "\0")
        line = len(re.split("\r\n|\n|\r", text[:position]))
        return problem(line, None, "", f"not YAML: the character U+{code:04X} may not stand in a text file")
    escape = _impossible_escape(text)
    if escape is not None:
        line = len(re.split("\r\n|\n|\r", text[: escape.start()]))
        return problem(line, None, "", f'not YAML: "{escape[0]}" stands for no character')
    return problem(1, None, "", f"not YAML: the parser gave up ({type(error).__name__})")


def _impossible_escape(text: str) -> re.Match[str] | None:
    return next((found for found in re.finditer(r"\\U[0-9a-fA-F]{8}", text) if int(found[0][2:], 16) > 0x10FFFF), None)


def _worded(error: Exception) -> tuple[str, str | None]:
    problem = str(getattr(error, "problem", None) or "")
    context = str(getattr(error, "context", None) or "")
    start: Any = getattr(error, "context_mark", None)
    opened = f" opened on line {start.line + 1}" if start is not None else ""
    character = re.search(r"found character '(\\?.)' that cannot start", problem)
    if "\\t" in problem or (character and character[1] == "\t"):
        return "a tab stands where YAML takes only spaces", "indent with spaces"
    if character:
        return f"text cannot start with {character[1]}", "put it in quotes"
    if "mapping values are not allowed" in problem:
        return (
            'a ":" that is not expected here',
            _COLON,
        )
    if "could not find expected ':'" in problem:
        return 'a line without ":" after its key', 'write "key: value"'
    if "quoted scalar" in context:
        if "end of stream" in problem or "document separator" in problem:
            return f"the quote{opened} is not closed", None
        return f"{visible(problem)} within quotes", "write \\\\ for a backslash, or use single quotes"
    if "flow node" in context and "<stream end>" in problem:
        return 'a "[" or "{" is not closed', None
    if "flow sequence" in context:
        return f'the list "["{opened} is not closed by "]", or lacks a ","', None
    if "flow mapping" in context:
        return f'the mapping "{{"{opened} is not closed by "}}", or lacks a ","', None
    if "expected <block end>" in problem or "block mapping" in context or "block collection" in context:
        return "the indentation does not fit the lines above", "keys of one mapping start in the same column"
    if "expected '<document start>'" in problem:
        return "something follows the end of the mapping", None
    return visible(problem.replace("\n", " ") or context or type(error).__name__), None
