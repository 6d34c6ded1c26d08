"""Suggests the name that was probably meant by a misspelled one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from paceline.job.errors import MAX_QUOTED


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that the word was probably meant to be, or None if no name is similar.

    >>> nearest("replics", ["replicas", "gpus"])
    'replicas'
    >>> nearest("Worker_", ["worker", "chief"])
    'worker'
    >>> nearest("zebra", ["worker", "chief"]) is None
    True
    """
    by_folded = {name.lower().replace("_", "-"): name for name in names}
    folded = word[:MAX_QUOTED].lower().replace("_", "-")
    matches = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.66)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    name = nearest(word, names)
    return None if name is None else f'did you mean "{name}"?'
