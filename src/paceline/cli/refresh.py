"""A run on a cluster is looked up before it is shown; where the cluster is away, it is shown as last seen."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.say import tell


def refresh(folder: Path) -> None:
    from paceline.view import runs

    if not runs.on_cluster(folder) or (folder / "report.json").exists():
        return
    from paceline.backends.kubernetes import known
    from paceline.backends.kubernetes.cluster import Refused, Unreachable

    try:
        known.refresh(folder)
    except (Refused, Unreachable) as error:
        tell(f"note: {folder.name} is shown as it was last seen: {error}")
