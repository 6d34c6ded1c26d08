"""How much memory the tasks of a host use, and may use."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.agent import memory_limits

GiB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container with 3 GiB of the 12 GiB that it may use, of which 1 GiB are files in memory."""
    monkeypatch.setattr(memory_limits, "_cgroup", lambda: (str(tmp_path), False))
    monkeypatch.setattr(memory_limits, "_machine_memory", lambda: (64 * GiB, 32 * GiB))
    (tmp_path / "memory.usage_in_bytes").write_text(str(3 * GiB))
    (tmp_path / "memory.limit_in_bytes").write_text(str(12 * GiB))
    (tmp_path / "memory.stat").write_text(f"total_inactive_file 0\ntotal_shmem {GiB}\n")
    return tmp_path


def snapshots(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    """Simulates 8 GiB of memory for snapshots."""
    status = SimpleNamespace(f_blocks=8 * GiB // 4096, f_bfree=(8 * GiB - used) // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: status)


def test_what_snapshots_may_use_is_not_for_the_tasks(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare that is started while there are no snapshots yet would leave too little memory for them."""
    assert memory_limits.Memory().used_and_limit() == (3 * GiB, 12 * GiB)
    snapshots(monkeypatch, used=GiB)
    memory = memory_limits.Memory("/paceline/memory")
    assert (memory.used_and_limit(), memory.free(), memory.share()) == ((2 * GiB, 4 * GiB), 2 * GiB, 0.5)


def test_snapshots_of_an_earlier_container_do_not_count_as_memory_of_this_one(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots(monkeypatch, used=5 * GiB)
    assert memory_limits.Memory("/paceline/memory").used_and_limit() == (2 * GiB, 4 * GiB)


def test_a_container_without_a_limit(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cgroup / "memory.limit_in_bytes").write_text(str(1 << 62))
    snapshots(monkeypatch, used=5 * GiB)
    assert memory_limits.Memory("/paceline/memory").used_and_limit() == (27 * GiB, 56 * GiB)


def test_a_folder_that_cannot_be_read(cgroup: Path, tmp_path: Path) -> None:
    assert memory_limits.Memory(str(tmp_path / "missing")).used_and_limit() == (3 * GiB, 12 * GiB)
