"""The lab builds components once, by one process at a time, from pinned versions; it keeps only recent logs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from support.lab import components, images, pins
from support.lab.cluster import KEPT_LOGS, make_room_for_logs
from support.lab.places import Place, made_once


def test_a_folder_is_built_once_by_concurrent_callers(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "part").write_text("whole")

    threads = [threading.Thread(target=made_once, args=(tmp_path / "it", build)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "it/part").read_text() == "whole"


def test_a_folder_whose_build_failed_does_not_exist_and_is_built_the_next_time(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise components.BuildFailed("no network")

    with pytest.raises(components.BuildFailed):
        made_once(tmp_path / "it", fail)
    assert not (tmp_path / "it").exists()
    assert list(made_once(tmp_path / "it", lambda folder: None).iterdir()) == []


def test_the_name_of_a_component_depends_on_its_build_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = components.versioned(components.PAUSE)
    (tmp_path / "pause").mkdir()
    (tmp_path / "pause/go.mod").write_text("module other\n")
    monkeypatch.setattr(components, "BUILD", tmp_path)
    assert components.versioned(components.PAUSE) != before


def test_kwok_is_built_only_on_request() -> None:
    assert components.KWOK not in components.COMPONENTS
    assert components.versioned(components.KWOK).startswith("kwok-")


def test_an_image_gets_its_packages_with_their_dependencies_only() -> None:
    locked = pins.needed("jax")
    names = {line.split("==")[0] for line in locked.splitlines() if line[0] not in " #"}
    assert {"jax", "jaxlib", "numpy", "ml-dtypes", "scipy"} <= names
    assert not names & {"tensorflow-cpu", "torch", "pytest", "typer"}
    assert locked.count("--hash=sha256:") >= len(names)


def test_a_package_that_is_not_locked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dev\.txt does not lock nonesuch"):
        pins.needed("jax", "nonesuch")


def test_images_share_their_base_layers() -> None:
    assert images.IMAGES["tensorflow"].layers[0] is images.IMAGES["plain"].layers[0]


def test_logs_of_the_last_clusters_and_of_all_running_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(KEPT_LOGS + 3):
        old = Place(f"old{number}")
        old.logs.mkdir(parents=True)
        os.utime(old.logs, (number, number))
    running = Place("old0")
    running.folder.mkdir(parents=True)
    running.alive.touch()
    make_room_for_logs(Place("new"))
    names = {path.name for path in running.logs.parent.iterdir()}
    assert {"old0", "new", f"old{KEPT_LOGS + 2}"} <= names
    assert len(names) == KEPT_LOGS + 1
