"""Differences between a snapshot and the program that restores it."""

from __future__ import annotations

from typing import Any

from paceline.runtime.report import warn

_MAX_LENGTH = 400  # characters of a pair of values in a message


class SnapshotRefused(RuntimeError):
    """The folder has no snapshot, an incomplete one, or one that cannot be read without running code (pickle)."""


class SnapshotMismatch(ValueError):
    """The snapshot does not match the model, and nothing was restored. `step`: that of the snapshot."""

    def __init__(self, text: str, step: int = 0, mismatches: Mismatches | None = None) -> None:
        super().__init__(text)
        mismatches = mismatches or Mismatches()
        self.step, self.missing, self.unexpected, self.different = (
            step, mismatches.missing, mismatches.unexpected, mismatches.different
        )  # fmt: skip


class Mismatches:
    """Collects all differences for one message."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    def compare(self, name: str, theirs: Any, ours: Any, label: str = "") -> bool:
        if theirs != ours:
            self.different.append(f"{name} ({label}{theirs} in the snapshot, {ours} here)")
        return bool(theirs == ours)

    def order(self, theirs: dict[str, Any] | None, order: Any) -> bool:
        """Whether the program can resume at that position in the data. If only one of the two has one, it cannot."""
        before, ours = len(self.different), {} if order is None else order.state()
        theirs = theirs or {}
        if ours.keys() - theirs.keys():
            self.missing.append("order")
        elif theirs.keys() - ours.keys():
            self.unexpected.append("order")
        else:
            for name in sorted({"size", "seed"} & ours.keys()):
                self.compare(f"order/{name}", theirs[name], ours[name])
            return bool(ours) and len(self.different) == before
        return False

    def settings(self, theirs: dict[str, Any] | None, ours: dict[str, Any]) -> None:
        """The message has both values, unless they are long, such as vocabularies."""
        for name in sorted(ours):
            if name not in (theirs or {}):
                self.missing.append(f"settings/{name}")
            elif theirs and theirs[name] != ours[name]:
                values = f" ({theirs[name]} in the snapshot, {ours[name]} here)"
                self.different.append(f"settings/{name}{values if len(values) < _MAX_LENGTH else ''}")

    def raise_or_warn(self, step: int, partial: bool, first: bool, hint: str = "") -> None:
        """Raises SnapshotMismatch, before anything is restored. With `partial`, the `first` task warns instead."""
        kinds = (
            ("not in the snapshot", self.missing),
            ("only in the snapshot", self.unexpected),
            ("different", self.different),
        )
        differences = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds if names)
        if differences and not partial:
            text = f"the snapshot of step {step} does not match the program: {differences}{hint}"
            raise SnapshotMismatch(text, step, self)
        if differences and first:
            warn(f"the snapshot of step {step} is restored partially; not restored: {differences}")
