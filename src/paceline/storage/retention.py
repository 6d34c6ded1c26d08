"""Which snapshots may go: all but the newest few, the best, and those that are still needed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.storage.manifest import Id


def to_delete(
    counted: Sequence[Id], committed: Sequence[Id], keep: int, metrics: Mapping[Id, float], lowest: bool,
    needed: Collection[Id] = (),
) -> list[Id]:  # fmt: skip
    """`counted`: newest first. Those that do not count any more go too, unless their generation may still be writing:
    that is for the caller to know. `needed`: what an evaluator has not judged yet; it is not among the best before.

    >>> ids = [Id(30, 1), Id(20, 1), Id(10, 1)]
    >>> to_delete(ids, ids, 1, {Id(30, 1): 0.5, Id(20, 1): 0.9, Id(10, 1): 0.2}, lowest=True)
    [Id(step=20, generation=1)]
    """
    kept = {*counted[:keep], *needed}
    known = best([each for each in counted if each not in needed], metrics, lowest)
    return [each for each in committed if each not in kept and each != known]


def best(counted: Sequence[Id], metrics: Mapping[Id, float], lowest: bool) -> Id | None:
    """The best of these; of equal ones, the newest where the lowest is the best, else the oldest."""
    ranked = sorted((each for each in counted if each in metrics), key=lambda each: (metrics[each], -each.step))
    return next(iter(ranked if lowest else ranked[::-1]), None)
