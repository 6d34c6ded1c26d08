"""The snapshots of a run, as the client lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.client.json_form import versioned
from paceline.view.snapshots import snapshot_listing
from paceline.view.snapshots.snapshot_listing import SnapshotInfo
from paceline.view.snapshots.snapshot_locations import Source


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot."""

    name: str
    """Its name, such as `step-120-g1`."""
    step: int
    """The step at which it was saved."""
    generation: int
    """The generation that saved it."""
    is_current: bool
    """Whether a restart could start from it. False: a later generation has started from an older snapshot."""
    address: str
    """Where it is stored."""
    size: int | None
    """Bytes; None: it is damaged."""
    metrics: dict[str, float | None]
    """What was reported with it; the values of an evaluator take precedence. None: NaN or infinite."""
    _form: dict[str, Any] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The same as an item of `paceline snapshots ls -o json`."""
        return dict(self._form)


def listed(source: Source, include_superseded: bool = False) -> list[Snapshot]:
    """Newest first."""
    inventory = source.reader.inventory()
    ids = snapshot_listing.all_committed(inventory) if include_superseded else inventory.current()
    return [_snapshot(source, info) for info in snapshot_listing.look_up(source.reader, inventory, ids)]


def json_form(info: SnapshotInfo) -> dict[str, Any]:
    """An item of `paceline snapshots ls -o json`."""
    return versioned(snapshot_listing.data(info))


def _snapshot(source: Source, info: SnapshotInfo) -> Snapshot:
    form = json_form(info)
    return Snapshot(
        str(info.id), info.id.step, info.id.generation, info.is_current, f"{source.address}/{info.id}",
        None if info.manifest is None else info.manifest.size, form.get("metrics", {}), form,
    )  # fmt: skip
