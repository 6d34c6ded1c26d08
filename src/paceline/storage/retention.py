"""Which snapshots may go: all but the newest few, and the best. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.storage.manifest import Id


def to_delete(
    counted: Sequence[Id], committed: Sequence[Id], keep: int, metrics: Mapping[Id, float], lowest: bool, best: int = 1
) -> list[Id]:
    """`counted`: newest first. Those that do not count any more go too, unless their generation may still be writing:
    that is for the caller to know.

    >>> ids = [Id(30, 1), Id(20, 1), Id(10, 1)]
    >>> to_delete(ids, ids, 1, {Id(30, 1): 0.5, Id(20, 1): 0.9, Id(10, 1): 0.2}, lowest=True)
    [Id(step=20, generation=1)]
    """
    kept = set(counted[:keep])
    ranked = sorted((each for each in counted if each in metrics), key=lambda each: (metrics[each], -each.step))
    kept |= set((ranked if lowest else ranked[::-1])[:best] if metrics else ())
    return [each for each in committed if each not in kept]
