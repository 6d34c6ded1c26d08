"""paceline.fetch outside a run: paths, files and folders of each kind of store, and what cannot be fetched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import fetch
from paceline.runtime import data_fetch
from paceline.runtime.data_fetch import FetchError
from paceline.storage.stores.bucket import BucketStore
from support.stores.servers import Store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Requested after a store fixture, whose server program is in the cache of this machine."""
    monkeypatch.delenv("PACELINE_FETCHED_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "fetched"


def put(store: Store, folder: Path, **files: bytes) -> None:
    for number, (name, data) in enumerate(files.items()):
        path = folder / f"source-{number}"
        path.write_bytes(data)
        BucketStore(store.url, **store.config).send_all([(str(path), name.replace("__", "/"))], lambda _: True, {})


def test_a_path_is_returned_unchanged(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == fetch(tmp_path) == tmp_path
    for location, reason in {
        "/no/such": "no such file or folder",
        "http://a/b": "it must be a path",
    }.items():
        with pytest.raises(FetchError, match=f"cannot fetch {location}: {reason}"):
            fetch(location)


def test_files_and_folders(store: Store, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.options.items():
        monkeypatch.setenv(name, value)
    put(store, tmp_path, raw__one=b"1", raw__deep__two=b"2" * 9_000_000, rawer=b"beside")
    folder = fetch(f"{store.url}/raw/")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {"one", "deep/two"}
    assert ((folder / "one").read_bytes(), (folder / "deep/two").stat().st_size) == (b"1", 9_000_000)
    assert fetch(f"{store.url}/raw") == folder
    file = fetch(f"{store.url}/raw/one")
    assert (file.name, file.read_bytes()) == ("one", b"1")
    put(store, tmp_path, raw__one=b"11")
    assert (fetch(f"{store.url}/raw/one").read_bytes(), file.read_bytes()) == (b"11", b"1")
    with pytest.raises(FetchError, match="/nothing: it does not exist or is empty"):
        fetch(f"{store.url}/nothing")
    assert not list(cache.rglob("*.partial"))


def test_a_fetch_without_enough_space_is_not_started(
    s3: Store, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.options.items():
        monkeypatch.setenv(name, value)
    put(s3, tmp_path, large=b"x")
    monkeypatch.setattr(data_fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(FetchError, match=r"large: not enough space in .*: 0 MiB needed, 0 MiB free"):
        fetch(f"{s3.url}/large")


def test_wrong_credentials(s3: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.stranger().options.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FetchError, match="the credentials are not accepted"):
        fetch(f"{s3.url}/large")


def test_without_obstore() -> None:
    code = "import paceline; paceline.fetch('s3://a/b')"
    source = str(Path(data_fetch.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, timeout=180
    )
    assert "cannot load obstore" in result.stderr and "install obstore in the environment" in result.stderr
