"""Versions of a served model: a folder that cannot be read for a moment ends nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from paceline.runtime import model_folder
from paceline.serve import versions
from paceline.serve.metrics import Metrics


def test_a_folder_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    watched = versions.Versions(tmp_path / "models", Metrics(), texts.append)
    monkeypatch.setattr(versions, "POLL_S", 0.001)

    async def until(text: str) -> None:
        while not any(text in each for each in texts):
            await asyncio.sleep(0.001)

    async def run() -> None:
        watcher = asyncio.create_task(watched.watch())
        (tmp_path / "models").write_text("not a folder")
        await asyncio.wait_for(until("cannot read"), 60)
        (tmp_path / "models").unlink()
        (tmp_path / "models" / "1").mkdir(parents=True)
        await asyncio.wait_for(until("cannot load version 1"), 60)
        assert not watcher.done()
        watcher.cancel()

    asyncio.run(run())
    assert len([text for text in texts if "cannot read" in text]) == 1


def test_a_full_disk_below_a_private_copy_says_what_to_do() -> None:
    text = r"no space for a private copy of the model in .*; set TMPDIR"
    with pytest.raises(OSError, match=text), model_folder.private_folder() as folder:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not folder.exists()
