"""Snapshots of TensorFlow programs: real processes, alone and as workers of one strategy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tensorflows import end, group, run, start, steps

pytestmark = pytest.mark.xdist_group("tensorflow_snapshots")

Results = dict[str, Any]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The result of each story, or how it failed."""
    folder = tmp_path_factory.mktemp("stories")
    results: Results = end(start("tf_stories.py", folder, env={}))
    return results


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Any], Path]]:
    """The results of two workers, and the folder that both used for snapshots."""
    folder = tmp_path_factory.mktemp("workers")
    yield run_workers(folder, folder), folder
    shutil.rmtree(folder)


def run_workers(*folders: Path, arguments: tuple[str, ...] = ()) -> list[Any]:
    return [end(process) for process in group("tf_snapshots.py", *arguments, folders=folders)]


# ---- one process


def test_the_values_are_those_of_the_step_however_long_writing_takes(stories: Results) -> None:
    result = stories["later_updates"]
    names = ["add", "rows", "slice", "adam", "function"]
    assert result == {"changed": names, "kept": names, "read by TensorFlow": names}


def test_metrics_and_versions_are_stored_with_a_snapshot(stories: Results) -> None:
    result = stories["about"]
    assert result["steps"] == ["step-2"]
    assert result["about"]["parts"] == 1
    assert result["about"]["stall_s"] > 0
    assert result["about"]["metrics"] == {"loss": 0.5, "accuracy": 0.25}
    assert sorted(result["about"]["versions"]) == ["keras", "numpy", "python", "tensorflow"]


def test_a_snapshot_that_cannot_be_written_is_a_warning_and_closing_raises(stories: Results) -> None:
    result = stories["disk"]
    messages = [message for message in result["told"] if message["_"] != "asks"]
    assert [message["_"] for message in messages] == ["warning", "saved", "warning"]
    assert messages[0]["text"].startswith("the snapshot of step 1 could not be written: ")
    assert result["steps"] == [[], ["step-2"], ["step-2"]]
    assert result["raised"]


def test_while_a_snapshot_is_written_the_next_is_postponed(stories: Results) -> None:
    result = stories["busy"]
    assert result["skipped"] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert result["values"] == {"step-2": 2.0, "step-6": 6.0, "step-8": 8.0}


def test_before_leaving_a_snapshot_is_taken_even_while_another_is_written(stories: Results) -> None:
    result = stories["leaving"]
    assert result == {"answers": [False] * 4 + [True], "steps": ["step-2", "step-5"]}


def test_a_snapshot_that_was_taken_for_another_reason_does_not_mean_that_the_group_is_leaving(stories: Results) -> None:
    assert stories["requested"] == {"answers": [False] * 6, "steps": ["step-3", "step-5"]}


def test_mismatches_are_listed_and_the_rest_is_restored_on_request(stories: Results) -> None:
    differences = (
        "not in the snapshot: new, order; only in the snapshot: gone; different: kind (float32[] in the snapshot, "
        "float64[] here), other (float32[2] in the snapshot, float32[3] here)"
    )
    assert stories["mismatch"] == {
        "error": f"the snapshot of step 1 does not match the program: {differences}"
        " (before restoring, build model and optimizer)",
        "strict": [[7.0], [7.0, 7.0, 7.0], 7.0, 7.0],
        "step": 1,
        "partial": [[1.0], [7.0, 7.0, 7.0], 7.0, 7.0],
        "said": f"paceline: the snapshot of step 1 is restored partially; not restored: {differences}\n",
    }


def test_variables_are_restored_in_batches_whatever_their_type(stories: Results) -> None:
    assert stories["batches"] == {"same": [True, True, True], "counter": 5, "new": 7.0}


def test_a_table_is_restored_unless_something_does_not_fit(stories: Results) -> None:
    assert stories["tables"] == {"whole": [[1, 1, -1], 1.0], "partial": [[2, -1, 2], 1.0]}


def test_another_learning_rate_is_reported_and_used_if_a_run_starts_from_another_run(stories: Results) -> None:
    message = (
        "paceline: settings differ; using those of the {}: optimizer/_learning_rate (0.5 in the snapshot, 0.25 here)\n"
    )
    assert stories["rates"] == [
        [0.125, ""],
        [0.125, message.format("snapshot")],
        [0.25, message.format("program")],
    ]


def test_settings_are_stored_and_must_match(stories: Results) -> None:
    error = (
        "the snapshot of step 1 does not match the program: "
        "not in the snapshot: settings/more; different: settings/sizes ({'width': "
        "8, 'depth': 2} in the snapshot, {'width': 9, 'depth': 2} here), settings/words"
    )
    hint = " (before restoring, build model and optimizer)"
    assert stories["settings"] == [None, True, 1, error + hint, 7.0, 1]


def test_another_position_in_the_data_is_a_mismatch(stories: Results) -> None:
    alone, other = stories["orders"]
    assert "only in the snapshot: order (" in alone
    assert "different: order/size (9 in the snapshot, 8 here)" in other


def test_a_snapshot_not_written_by_these_helpers_is_refused(stories: Results) -> None:
    error = ".../step-1: no valid state.json: the snapshot was not written by paceline.tensorflow"
    assert stories["foreign"] == [error, error]


def test_a_variable_created_too_late_to_be_restored_is_an_error(stories: Results) -> None:
    result = stories["late"]
    assert result["error"].startswith("variables were created or replaced after restore() or the first snapshot")
    assert ": y:0; build" in result["error"]
    assert result["steps"] == []


def test_outside_a_run_nothing_happens(stories: Results) -> None:
    result = stories["outside"]
    assert result == {"restored": 0, "answers": [False, False], "steps": []}


# ---- workers of one strategy


def test_the_first_worker_writes_for_all(workers: tuple[list[Any], Path]) -> None:
    results, folder = workers
    assert steps(folder)[-1] == 12
    # Each has its own value of the variable that is synchronized on read.
    assert results[0]["seen"] != results[1]["seen"]
    state = json.loads((folder / "step-12" / "state.json").read_text())
    assert len(state["random"]) == 2


def test_workers_skip_the_same_snapshots_and_only_the_first_has_files(
    workers: tuple[list[Any], Path], tmp_path: Path
) -> None:
    results = run_workers(tmp_path / "first", tmp_path / "second", arguments=("--hold",))
    assert [each["skipped"] for each in results] == [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]] * 2
    assert steps(tmp_path / "first") == [3, 12]
    assert not (tmp_path / "second").exists()
    assert [each["ended"] for each in results] == [each["ended"] for each in workers[0]]


def test_fewer_workers_resume_with_the_next_example(workers: tuple[list[Any], Path], tmp_path: Path) -> None:
    results, folder = workers
    first = steps(folder)[0]
    alone = run("tf_snapshots.py", folder=tmp_path, restore=folder / f"step-{first}")
    assert alone["begin"] == first
    assert alone["positions"] == results[0]["positions"][first:]
