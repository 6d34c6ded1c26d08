"""What is wrong with a snapshot that is to be restored."""

from __future__ import annotations

from typing import Any


class SnapshotRefused(RuntimeError):
    """No snapshot, an incomplete one, or one that could only be read by running code (pickle)."""


class SnapshotMismatch(ValueError):
    """The snapshot is of another model; `step` is how far it was."""

    def __init__(self, step: int, missing: list[str], unexpected: list[str], different: list[str]) -> None:
        self.step, self.missing, self.unexpected, self.different = step, missing, unexpected, different
        kinds = (("not in the snapshot", missing), ("in the snapshot alone", unexpected), ("different", different))
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in kinds if names)
        super().__init__(f"the snapshot of step {step} does not fit: {told}")


class Misfits:
    """Collects them, so that all are told at once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []

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

    def raise_any(self, step: int) -> None:
        if self.missing or self.unexpected or self.different:
            raise SnapshotMismatch(step, self.missing, self.unexpected, self.different)
