"""Garbage collection is paused while a program imports its framework, unless the program has settings of its own."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.spares.import_recorder import ImportHook, pause_collection

BEFORE = (700, 10, 10)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(*BEFORE)
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    if not enabled:
        gc.disable()


def test_no_collection_runs_during_the_import_of_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = tmp_path / "some_framework.py"
    framework.write_text(
        "import gc\nbefore = gc.get_stats()\nkept = [[] for _ in range(100_000)]\nafter = gc.get_stats()"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Register:
        modules: list[Any] = []

        @classmethod
        def register(cls, module: Any) -> None:
            cls.modules.append(module)

    hook = ImportHook({"some_framework": ["its_file.py"]}, lambda *_: Register)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    some_framework = importlib.import_module("some_framework")
    monkeypatch.delitem(sys.modules, "some_framework")
    assert some_framework.before == some_framework.after
    assert Register.modules == [some_framework]
    assert (gc.isenabled(), gc.get_threshold()) == (True, BEFORE)
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects(generation=2)) > 100_000


def test_what_the_program_had_before_can_still_be_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    cycle = Cycle()
    reference = weakref.ref(cycle)
    pause_collection()()
    del cycle
    gc.collect()
    assert reference() is None


def test_a_spare_freezes_what_it_has_imported() -> None:
    kept = [[] for _ in range(1000)]
    pause_collection(freeze=True)()
    assert gc.get_freeze_count() > len(kept)


def test_what_the_program_has_frozen_stays_frozen() -> None:
    kept = [[] for _ in range(1000)]
    gc.freeze()
    pause_collection()()
    assert gc.get_freeze_count() > len(kept)  # other objects may have been freed meanwhile


def test_a_framework_that_imports_another_is_one_pause() -> None:
    outer = pause_collection()
    inner = pause_collection()
    inner()
    assert gc.get_threshold() != BEFORE
    outer()
    assert gc.get_threshold() == BEFORE


def test_a_program_that_has_turned_collection_off_keeps_it_off() -> None:
    gc.disable()
    pause_collection()()
    assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)
    gc.enable()
    gc.set_threshold(0)
    pause_collection()()
    assert (gc.get_threshold()[0], gc.get_freeze_count()) == (0, 0)


def test_settings_that_the_framework_itself_makes_are_kept() -> None:
    resume = pause_collection()
    gc.set_threshold(50_000, 20, 20)
    resume()
    assert (gc.get_threshold(), gc.get_freeze_count()) == ((50_000, 20, 20), 0)
