"""The model that answers: the newest of a folder with a folder for each version, as TensorFlow Serving has it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

from paceline.serve.loading import CannotLoad, Model, load, warm
from paceline.serve.metrics import Metrics

LOOK_S = 1.0
AGAIN_S = 60.0  # until a version that could not be loaded is tried again


class Versions:
    def __init__(self, base: Path, metrics: Metrics, say: Callable[[str], None]) -> None:
        self._base, self._metrics, self._say = base, metrics, say
        self.model: Model | None = None
        self.failed: dict[int, str] = {}  # version -> why
        self._again: dict[int, float] = {}

    def newest(self) -> int | None:
        try:
            names = [each.name for each in self._base.iterdir() if each.name.isdecimal()]
        except FileNotFoundError:
            return None
        return max(map(int, names), default=None)

    async def look(self) -> None:
        """Takes the newest version over. Who asks meanwhile is answered by the one before."""
        newest = self.newest()
        self.failed = {version: why for version, why in self.failed.items() if (self._base / str(version)).is_dir()}
        if newest is None or (self.model is not None and newest <= self.model.version):
            return
        now = asyncio.get_running_loop().time()
        if now < self._again.get(newest, 0.0):
            return
        try:
            model = await asyncio.to_thread(_loaded, self._base / str(newest), newest)
        except Exception as error:
            first = str(error).strip().split("\n")[0] or repr(error)
            why = first if isinstance(error, CannotLoad) else f"{type(error).__name__}: {first}"
            self._again[newest] = now + AGAIN_S
            self._metrics.load_failures += 1
            if self.failed.get(newest) != why:
                self._say(f"version {newest} cannot be loaded: {why}")
            self.failed[newest] = why
            return
        self.failed.pop(newest, None)
        before, self.model = self.model, model
        self._metrics.loads += 1
        self._say(f"version {newest} answers" + (f", instead of {before.version}" if before is not None else ""))
        del before
        gc.collect()  # models are circles of objects: memory of the one before goes now

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()


def _loaded(folder: Path, version: int) -> Model:
    model = load(folder, version)
    warm(model)
    return model
