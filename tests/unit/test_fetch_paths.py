"""Names of objects that would lead out of the folder of a copy: a bucket allows any name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.runtime import data_fetch
from paceline.storage.stores import locations


class Bucket:
    """A bucket with one good and one odd object below `data/`."""

    def __init__(self, odd: str) -> None:
        self._names = ("good", odd)

    def listing(self, name: str) -> list[tuple[str, int, str]]:
        return [(path, 1, "tag") for path in self._names]

    def read(self, name: str, most: int) -> None:
        return None

    def at_once(self, size: int) -> int:
        return 1

    def fetch(self, name: str, path: str, is_wanted: Any) -> tuple[int, str]:
        Path(path).write_text("x")
        return 1, ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_FETCHED_DIR", str(tmp_path / "fetched"))
    monkeypatch.setattr(data_fetch, "_load_obstore", lambda: None)
    return tmp_path


@pytest.mark.parametrize("odd", ["../../out", "..", "a/../../../out", "/tmp/out", "a//b", "./a", "a/.", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(locations, "open_bucket", lambda bucket: Bucket(odd))
    with pytest.raises(data_fetch.FetchError, match="cannot be the path of a file"):
        data_fetch.fetch("s3://bucket/data/")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("address", ["s3://bucket/data/..", "s3://bucket/../data/", "s3://bucket/a//b", "s3://b/."])
def test_such_an_address_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(locations, "open_bucket", lambda bucket: Bucket("also-good"))
    with pytest.raises(data_fetch.FetchError, match="cannot be the path of a file"):
        data_fetch.fetch(address)
    assert not list(folder.iterdir())


def test_usual_names_are_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "open_bucket", lambda bucket: Bucket("deep/..hidden/a b.txt"))
    copy = data_fetch.fetch("s3://bucket/data/")
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        "deep/..hidden/a b.txt",
        "good",
    ]
