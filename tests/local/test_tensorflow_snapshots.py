"""Snapshots of TensorFlow programs: real processes, alone and as workers of one strategy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tensorflows import end, group, run, start, steps

Told = dict[str, Any]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each of them saw, or how it failed."""
    folder = tmp_path_factory.mktemp("stories")
    seen: Told = end(start("tf_stories.py", folder, env={}))
    return seen


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Any], Path]]:
    """What two workers ended with, and the folder that both had for snapshots."""
    folder = tmp_path_factory.mktemp("workers")
    yield together(folder, folder), folder
    shutil.rmtree(folder)


def together(*folders: Path, words: tuple[str, ...] = ()) -> list[Any]:
    return [end(process) for process in group("tf_snapshots.py", *words, folders=folders)]


# ---- one process


def test_the_values_are_those_of_the_step_however_long_the_writing_takes(stories: Told) -> None:
    seen = stories["later_updates"]
    names = ["add", "rows", "slice", "adam", "function"]
    assert seen == {"changed": names, "kept": names, "read by TensorFlow": names}


def test_metrics_and_versions_lie_beside_it(stories: Told) -> None:
    seen = stories["about"]
    assert seen["steps"] == ["step-2"]
    assert seen["about"]["parts"] == 1
    assert seen["about"]["metrics"] == {"loss": 0.5, "accuracy": 0.25}
    assert sorted(seen["about"]["versions"]) == ["keras", "numpy", "python", "tensorflow"]


def test_what_cannot_be_written_is_a_warning_and_closing_raises(stories: Told) -> None:
    seen = stories["disk"]
    told = [words for words in seen["told"] if words["_"] != "asks"]
    assert [words["_"] for words in told] == ["warning", "saved", "warning"]
    assert told[0]["text"].startswith("the snapshot of step 1 could not be written: ")
    assert seen["steps"] == [[], ["step-2"], ["step-2"]]
    assert seen["raised"]


def test_while_one_is_written_the_next_is_put_off(stories: Told) -> None:
    seen = stories["busy"]
    assert seen["skipped"] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert seen["values"] == {"step-2": 2.0, "step-6": 6.0, "step-8": 8.0}


def test_before_leaving_one_is_taken_whatever_is_still_written(stories: Told) -> None:
    seen = stories["leaving"]
    assert seen == {"answers": [False] * 4 + [True], "steps": ["step-2", "step-5"]}


def test_what_does_not_fit_is_listed_and_the_rest_is_restored_on_request(stories: Told) -> None:
    told = (
        "not in the snapshot: new, order; in the snapshot alone: gone; different: kind (float32[] in the snapshot, "
        "float64[] here), other (float32[2] in the snapshot, float32[3] here)"
    )
    assert stories["mismatch"] == {
        "error": f"the snapshot of step 1 does not fit: {told} (before restoring, build model and optimizer)",
        "strict": [[7.0], [7.0, 7.0, 7.0], 7.0, 7.0],
        "step": 1,
        "partial": [[1.0], [7.0, 7.0, 7.0], 7.0, 7.0],
        "said": f"paceline: the snapshot of step 1 is restored in part; left as it is: {told}\n",
    }


def test_another_learning_rate_is_told_and_counts_where_a_run_starts_from_another(stories: Told) -> None:
    told = "paceline: settings differ, and those {} count: optimizer/_learning_rate (0.5 in the snapshot, 0.25 here)\n"
    assert stories["rates"] == [
        [0.125, ""],
        [0.125, told.format("in the snapshot")],
        [0.25, told.format("of the program")],
    ]


def test_settings_are_in_it_and_with_others_it_does_not_fit(stories: Told) -> None:
    told = (
        "the snapshot of step 1 does not fit: not in the snapshot: settings/more; different: settings/sizes ({'width': "
        "8, 'depth': 2} in the snapshot, {'width': 9, 'depth': 2} here), settings/words"
    )
    hint = " (before restoring, build model and optimizer)"
    assert stories["settings"] == [None, True, 1, told + hint, 7.0, 1]


def test_another_position_in_the_data_does_not_fit(stories: Told) -> None:
    alone, other = stories["orders"]
    assert "in the snapshot alone: order (" in alone
    assert "different: order/size (9 in the snapshot, 8 here)" in other


def test_what_was_not_written_by_these_helpers_is_refused(stories: Told) -> None:
    said = ".../step-1 holds no state.json of ours: it was not written by paceline.tensorflow"
    assert stories["foreign"] == [said, said]


def test_a_variable_that_comes_too_late_to_be_restored_is_said_at_once(stories: Told) -> None:
    seen = stories["late"]
    assert seen["error"].startswith("made or replaced after restore() or the first snapshot")
    assert ": y:0 (build" in seen["error"]
    assert seen["steps"] == []


def test_outside_a_run_nothing_happens(stories: Told) -> None:
    seen = stories["outside"]
    assert seen == {"restored": 0, "answers": [False, False], "steps": []}


# ---- workers of one strategy


def test_the_first_of_the_workers_writes_for_all(workers: tuple[list[Any], Path]) -> None:
    ended, folder = workers
    assert steps(folder)[-1] == 12
    assert ended[0]["seen"] != ended[1]["seen"]  # each has its own value of the variable that is synchronized on read
    kept = json.loads((folder / "step-12" / "state.json").read_text())
    assert len(kept["random"]) == 2


def test_workers_skip_the_same_ones_and_only_the_first_has_files(
    workers: tuple[list[Any], Path], tmp_path: Path
) -> None:
    ended = together(tmp_path / "first", tmp_path / "second", words=("--hold",))
    assert [each["skipped"] for each in ended] == [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]] * 2
    assert steps(tmp_path / "first") == [3, 12]
    assert not (tmp_path / "second").exists()
    assert [each["ended"] for each in ended] == [each["ended"] for each in workers[0]]


def test_fewer_workers_go_on_with_the_next_example(workers: tuple[list[Any], Path], tmp_path: Path) -> None:
    ended, folder = workers
    first = steps(folder)[0]
    alone = run("tf_snapshots.py", folder=tmp_path, restore=folder / f"step-{first}")
    assert alone["begin"] == first
    assert alone["positions"] == ended[0]["positions"][first:]
