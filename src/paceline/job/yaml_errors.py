"""Turns errors of the YAML parser into problems for the user."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paceline.job.errors import Problem, visible

_COLON = 'put text that contains ": " in quotes; or add a space after ":" in the line above, or fix its indentation'


def explain(error: Exception, problem: Callable[..., Problem], text: str) -> Problem:
    """The problem for an exception of the parser. `problem` creates one for a line and a column."""
    mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        message, hint = _message_and_hint(error)
        return problem(mark.line + 1, mark.column + 1, "", f"not YAML: {message}", hint)
    position = getattr(error, "position", None)
    if isinstance(position, int):
        position = min(position, len(text))
        character = getattr(error, "character", 0)
        code = character if isinstance(character, int) else ord(str(character)[:1] or "\0")
        line = len(re.split("\r\n|\n|\r", text[:position]))
        return problem(line, None, "", f"not YAML: the character U+{code:04X} is not allowed in a text file")
    escape = _invalid_escape(text)
    if escape is not None:
        line = len(re.split("\r\n|\n|\r", text[: escape.start()]))
        return problem(line, None, "", f'not YAML: "{escape[0]}" is not a valid character')
    return problem(1, None, "", f"not YAML: the parser failed ({type(error).__name__})")


def _invalid_escape(text: str) -> re.Match[str] | None:
    escapes = re.finditer(r"\\U[0-9a-fA-F]{8}", text)
    return next((escape for escape in escapes if int(escape[0][2:], 16) > 0x10FFFF), None)


def _message_and_hint(error: Exception) -> tuple[str, str | None]:
    problem = str(getattr(error, "problem", None) or "")
    context = str(getattr(error, "context", None) or "")
    start: Any = getattr(error, "context_mark", None)
    opened = f" opened on line {start.line + 1}" if start is not None else ""
    character = re.search(r"found character '(\\?.)' that cannot start", problem)
    if "\\t" in problem or (character and character[1] == "\t"):
        return "a tab where YAML allows only spaces", "indent with spaces"
    if character:
        return f"text cannot start with {character[1]}", "put it in quotes"
    if "mapping values are not allowed" in problem:
        return 'unexpected ":"', _COLON
    if "could not find expected ':'" in problem:
        return 'a line has no ":" after its key', 'write "key: value"'
    if "quoted scalar" in context:
        if "end of stream" in problem or "document separator" in problem:
            return f"the quote{opened} is not closed", None
        return f"{visible(problem)} in a quoted string", "write \\\\ for a backslash, or use single quotes"
    if "flow node" in context and "<stream end>" in problem:
        return 'a "[" or "{" is not closed', None
    if "flow sequence" in context:
        return f'the list "["{opened} is not closed with "]", or a "," is missing', None
    if "flow mapping" in context:
        return f'the mapping "{{"{opened} is not closed with "}}", or a "," is missing', None
    if "expected <block end>" in problem or "block mapping" in context or "block collection" in context:
        return "the indentation does not match the lines above", "start all keys of a mapping in the same column"
    if "expected '<document start>'" in problem:
        return "unexpected text after the end of the mapping", None
    return visible(problem.replace("\n", " ") or context or type(error).__name__), None
