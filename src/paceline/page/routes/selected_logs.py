"""The output that a client has chosen: that of one task, or of several, interleaved by time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.view.output import log_blocks, log_windows, merged_windows
from paceline.view.output.log_windows import Query


@dataclass(frozen=True)
class SelectedLogs:
    folder: Path  # of the logs
    task: str
    tasks: tuple[str, ...] | None  # None: only one task

    @property
    def path(self) -> Path:
        """Of the log, if it is only one."""
        return self.folder / f"{self.task}.log"

    def read(self, query: Query) -> dict[str, Any]:
        if self.tasks is None:
            return log_windows.read(self.path, query).to_json()
        return merged_windows.read(self.folder, self.tasks, query).to_json()

    def around(self, position: int, query: Query) -> dict[str, Any]:
        if self.tasks is None:
            return log_windows.around(self.path, position, query).to_json()
        return merged_windows.around(self.folder, self.tasks, position, query).to_json()

    def position_at(self, at: str) -> int:
        return log_blocks.position_at(self.path, at) if self.tasks is None else merged_windows.position_of(at)
