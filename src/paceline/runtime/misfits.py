"""What is wrong with a snapshot that is to be restored."""

from __future__ import annotations

from typing import Any

from paceline.runtime.report import say

_LONG = 400  # of what is told


class SnapshotRefused(RuntimeError):
    """No snapshot, an incomplete one, or one that could only be read by running code (pickle)."""


class SnapshotMismatch(ValueError):
    """The snapshot is of another model, and nothing was restored; `step` is how far it was."""

    def __init__(self, text: str, step: int = 0, misfits: Misfits | None = None) -> None:
        super().__init__(text)
        misfits = misfits or Misfits()
        self.step, self.missing, self.unexpected, self.different = (
            step, misfits.missing, misfits.unexpected, misfits.different
        )  # fmt: skip


class Misfits:
    """Collects them, so that all are told at once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    def compare(self, name: str, theirs: Any, ours: Any, what: str = "") -> bool:
        if theirs != ours:
            self.different.append(f"{name} ({what}{theirs} in the snapshot, {ours} here)")
        return bool(theirs == ours)

    def order(self, theirs: dict[str, Any] | None, order: Any) -> bool:
        """Whether the program can go on at that position in the data. Only one of them has one: that does not fit."""
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
        """Both values are told, unless they are long, as vocabularies are."""
        for name in sorted(ours):
            if name not in (theirs or {}):
                self.missing.append(f"settings/{name}")
            elif theirs and theirs[name] != ours[name]:
                words = f" ({theirs[name]} in the snapshot, {ours[name]} here)"
                self.different.append(f"settings/{name}{words if len(words) < _LONG else ''}")

    def tell(self, step: int, partial: bool, first: bool, hint: str = "") -> None:
        """Before anything is changed: raises; or, where only what fits is wanted, the first task says what is left."""
        kinds = (
            ("not in the snapshot", self.missing),
            ("in the snapshot alone", self.unexpected),
            ("different", self.different),
        )
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in kinds if names)
        if told and not partial:
            raise SnapshotMismatch(f"the snapshot of step {step} does not fit: {told}{hint}", step, self)
        if told and first:
            say(f"the snapshot of step {step} is restored in part; left as it is: {told}")
