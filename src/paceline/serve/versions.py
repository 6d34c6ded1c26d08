"""Loads the newest model of a folder with one subfolder per version, as TensorFlow Serving does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

from paceline.serve.metrics import Metrics
from paceline.serve.model_loading import CannotLoad, Model, load, warm_up

POLL_S = 1.0
RETRY_S = 60.0  # before loading a failed version again


class Versions:
    def __init__(self, base: Path, metrics: Metrics, notify: Callable[[str], None]) -> None:
        self._base, self._metrics, self._notify = base, metrics, notify
        self.model: Model | None = None
        self.failed: dict[int, str] = {}  # version -> reason
        self._retry_at: dict[int, float] = {}
        self._problem = ""  # why the folder cannot be read

    def newest(self) -> int | None:
        try:
            names = [each.name for each in self._base.iterdir() if each.name.isdecimal()]
        except FileNotFoundError:
            return None
        return max(map(int, names), default=None)

    async def update(self) -> None:
        """Loads the newest version, if it is newer. In the meantime, the previous one is served."""
        newest = self.newest()
        self.failed = {
            version: reason for version, reason in self.failed.items() if (self._base / str(version)).is_dir()
        }
        if newest is None or (self.model is not None and newest <= self.model.version):
            return
        now = asyncio.get_running_loop().time()
        if now < self._retry_at.get(newest, 0.0):
            return
        try:
            model = await asyncio.to_thread(_load, self._base / str(newest), newest)
        except Exception as error:
            first_line = str(error).strip().split("\n")[0] or repr(error)
            reason = first_line if isinstance(error, CannotLoad) else f"{type(error).__name__}: {first_line}"
            self._retry_at[newest] = now + RETRY_S
            self._metrics.load_failures += 1
            if self.failed.get(newest) != reason:
                self._notify(f"cannot load version {newest}: {reason}")
            self.failed[newest] = reason
            return
        self.failed.pop(newest, None)
        previous, self.model = self.model, model
        self._metrics.loads += 1
        self._notify(f"serving version {newest}" + (f" instead of {previous.version}" if previous is not None else ""))
        del previous
        gc.collect()  # models contain reference cycles: free the previous one now

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.update()
            except OSError as error:  # for example, a network share that is unavailable for a moment
                problem = f"cannot read {self._base}: {error.strerror}"
                if problem != self._problem:
                    self._notify(f"{problem}; looking for newer versions again every second")
                self._problem = problem
            else:
                self._problem = ""


def _load(folder: Path, version: int) -> Model:
    model = load(folder, version)
    warm_up(model)
    return model
