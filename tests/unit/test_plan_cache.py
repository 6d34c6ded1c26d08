"""The cache of plans: what it contains is run, so only this user's own entries are used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.client.submission import plan_cache
from paceline.client.submission.plan_cache import plan_of_file

JOB = "name: a\nframework: none\ncommand: [sh, -c, 'true']\nroles: {worker: {replicas: 1}}\n"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "paceline" / "plans").iterdir())


def command_of(job: Path) -> str:
    return plan_of_file(job, ()).plan.roles[0].command[-1]


def change_command(entry: Path) -> None:
    entry.write_text(entry.read_text().replace('"true"', '"false"'))


def test_an_unchanged_job_file_is_not_loaded_again(job: Path, tmp_path: Path) -> None:
    assert command_of(job) == "true"
    [entry] = entries(tmp_path)
    assert entry.stat().st_mode & 0o777 == 0o600  # `env` of a job may contain what others must not read
    change_command(entry)
    assert command_of(job) == "false"


def test_an_entry_of_another_user_is_ignored(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command_of(job)
    [entry] = entries(tmp_path)
    change_command(entry)
    user = os.geteuid()
    monkeypatch.setattr(plan_cache.os, "geteuid", lambda: user + 1)
    assert command_of(job) == "true"


def test_an_entry_of_another_job_or_a_damaged_one_is_ignored(job: Path, tmp_path: Path) -> None:
    command_of(job)
    [entry] = entries(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text(JOB.replace("true", "false"))
    command_of(other)
    [another] = set(entries(tmp_path)) - {entry}
    another.rename(entry)
    assert command_of(job) == "true"
    for text in ("", "[]", "{", "[" * 100_000, json.dumps({"key": entry.stem, "text": "", "notes": []})):
        entry.write_text(text)
        assert command_of(job) == "true"


def test_links_in_the_folder_are_not_followed(job: Path, tmp_path: Path) -> None:
    command_of(job)
    [entry] = entries(tmp_path)
    entry.rename(tmp_path / "elsewhere")
    change_command(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert command_of(job) == "true"
    assert not entry.is_symlink() and "false" in (tmp_path / "elsewhere").read_text()
