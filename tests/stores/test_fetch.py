"""paceline.fetch outside a run: paths, files and folders of each kind of store, and what cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import fetch
from paceline.runtime import fetching
from paceline.runtime.fetching import FetchError
from paceline.storage.objects import Objects
from support.stores.servers import Store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Asked for behind a store, whose program is in the cache of this machine."""
    monkeypatch.delenv("PACELINE_FETCHED_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "fetched"


def put(store: Store, folder: Path, **files: bytes) -> None:
    for number, (name, data) in enumerate(files.items()):
        path = folder / f"source-{number}"
        path.write_bytes(data)
        Objects(store.url, **store.config).send_all([(str(path), name.replace("__", "/"))], lambda _: True, {})


def test_a_path_gives_itself(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == fetch(tmp_path) == tmp_path
    for wrong, why in {
        "/no/such": "there is no such file or folder",
        "http://a/b": "it is no path, and does not",
    }.items():
        with pytest.raises(FetchError, match=f"cannot fetch {wrong}: {why}"):
            fetch(wrong)


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
    with pytest.raises(FetchError, match="/nothing: there is nothing"):
        fetch(f"{store.url}/nothing")
    assert not list(cache.rglob("*.partial"))


def test_what_has_no_room_is_not_begun(s3: Store, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.options.items():
        monkeypatch.setenv(name, value)
    put(s3, tmp_path, large=b"x")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(FetchError, match=r"large: it has 0 MiB, and .* has room for 0 MiB"):
        fetch(f"{s3.url}/large")


def test_credentials_that_are_not_accepted(s3: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.stranger().options.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FetchError, match="the credentials are not accepted"):
        fetch(f"{s3.url}/large")


def test_without_a_library() -> None:
    words = "import paceline; paceline.fetch('s3://a/b')"
    source = str(Path(fetching.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-S", "-c", words], env={"PYTHONPATH": source}, capture_output=True, text=True, timeout=60
    )
    assert "cannot be loaded" in done.stderr and "install obstore where the program runs" in done.stderr
