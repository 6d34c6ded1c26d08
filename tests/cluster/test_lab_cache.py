"""What the lab builds is built once, by one process at a time, and pinned; what it keeps is what is still of use."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from support.lab import components, images, pins
from support.lab.cluster import KEPT_LOGS, make_room_for_logs
from support.lab.places import Place, made_once


def test_a_folder_is_made_once_though_many_want_it(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "part").write_text("whole")

    threads = [threading.Thread(target=made_once, args=(tmp_path / "it", make)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (tmp_path / "it/part").read_text() == "whole"


def test_a_folder_whose_making_failed_is_not_there_and_is_made_the_next_time(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise components.BuildFailed("no network")

    with pytest.raises(components.BuildFailed):
        made_once(tmp_path / "it", fail)
    assert not (tmp_path / "it").exists()
    assert list(made_once(tmp_path / "it", lambda folder: None).iterdir()) == []


def test_what_a_component_is_built_from_is_part_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = components.versioned(components.PAUSE)
    (tmp_path / "pause").mkdir()
    (tmp_path / "pause/go.mod").write_text("module other\n")
    monkeypatch.setattr(components, "BUILD", tmp_path)
    assert components.versioned(components.PAUSE) != before


def test_what_plays_simulated_nodes_is_built_only_for_those_who_ask() -> None:
    assert components.KWOK not in components.COMPONENTS
    assert components.versioned(components.KWOK).startswith("kwok-")


def test_an_image_gets_its_packages_with_all_they_need_and_no_more() -> None:
    locked = pins.needed("jax")
    names = {line.split("==")[0] for line in locked.splitlines() if line[0] not in " #"}
    assert {"jax", "jaxlib", "numpy", "ml-dtypes", "scipy"} <= names
    assert not names & {"tensorflow-cpu", "torch", "pytest", "typer"}
    assert locked.count("--hash=sha256:") >= len(names)


def test_a_package_that_is_not_locked_is_no_package_for_an_image() -> None:
    with pytest.raises(ValueError, match=r"dev\.txt does not lock nonesuch"):
        pins.needed("jax", "nonesuch")


def test_images_share_the_layers_below() -> None:
    assert images.IMAGES["tensorflow"].layers[0] is images.IMAGES["plain"].layers[0]


def test_logs_are_kept_of_the_last_clusters_and_of_all_that_are_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(KEPT_LOGS + 3):
        place = Place(f"old{number}")
        place.logs.mkdir(parents=True)
        os.utime(place.logs, (number, number))
    up = Place("old0")
    up.folder.mkdir(parents=True)
    up.alive.touch()
    make_room_for_logs(Place("new"))
    kept = {path.name for path in up.logs.parent.iterdir()}
    assert {"old0", "new", f"old{KEPT_LOGS + 2}"} <= kept
    assert len(kept) == KEPT_LOGS + 1
