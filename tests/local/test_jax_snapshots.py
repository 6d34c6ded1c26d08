"""Snapshots of JAX: real processes on CPU with arrays that are sharded over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paceline import Shards
from paceline.jax import SnapshotMismatch, SnapshotRefused, Snapshots
from support.ports import free_port
from support.snapshots import Group, other_positions
from support.snapshots import group as any_group


def group(folder: Path, world: int, restore: Path | None = None, **options: Any) -> Group:
    return any_group(folder, "jax_snapshots.py", world, restore, port=free_port(), **options)


def test_sharded_arrays_are_restored_by_groups_of_other_sizes(tmp_path: Path) -> None:
    two = group(tmp_path / "two", 2, steps=2, last=True)
    one = group(tmp_path / "one", 1, two.merged(2), steps=3, last=True)
    assert (one.result()["restored"], one.result()["shards"]) == (two.result()["states"]["2"], [[12, 4]])
    three = group(tmp_path / "three", 3, one.merged(3), steps=3)
    for rank in range(3):
        assert (three.result(rank)["start"], three.result(rank)["shards"]) == (3, [[4, 4]])
        assert three.result(rank)["restored"] == one.result()["states"]["3"]


def test_training_continues_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """Process 0 blocks in the write from step 2 on, and its memory is donated: 4 and 6 are due meanwhile."""
    first = group(tmp_path / "held", 2, steps=7, every=2, hold=2, go=6)
    assert [first.result(rank)["skipped"] for rank in (0, 1)] == [2, 2]
    assert [first.steps(rank) for rank in (0, 1)] == [[2, 7], [2, 7]]
    second = group(tmp_path / "again", 2, first.merged(2), steps=2)
    assert second.result()["restored"] == first.result()["states"]["2"]
    about = json.loads((tmp_path / "held/merged/step-2/paceline.json").read_text())
    assert (about["parts"], about["metrics"]) == (2, {"loss": 2.0})
    assert about["versions"]["jax"] == jax.__version__
    assert about["stall_s"] > 0


# ---- alone, in this process


@pytest.fixture
def snapshot_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PACELINE_RESTORE", raising=False)
    monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", str(tmp_path / "snapshots"))
    return tmp_path / "snapshots"


def saved(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch, state: Any, step: int = 1) -> Path:
    with Snapshots() as snapshots:
        snapshots.save(step, state)
    monkeypatch.setenv("PACELINE_RESTORE", str(snapshot_dir / f"step-{step}"))
    return snapshot_dir / f"step-{step}"


def test_mismatches_are_named_and_the_rest_is_restored_on_request(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = jax.random.key(1)
    state = {"same": jnp.ones(2), "gone": 1, "list": [jnp.ones((2, 3)), jnp.ones(2)], "key": key, "plain": 1}
    saved(snapshot_dir, monkeypatch, state, 7)
    other = [jnp.ones((2, 4)), jnp.ones(2, jnp.bfloat16)]
    ours = {"same": jnp.zeros(2), "new": 2, "list": other, "key": jnp.ones(2), "plain": jnp.ones(1)}
    with pytest.raises(SnapshotMismatch) as error:
        Snapshots().restore(ours)
    differences = (
        " not in the snapshot: new;"
        " only in the snapshot: gone;"
        " different: key (key<fry>[] in the snapshot, float32[2] here),"
        " list/0 (float32[2, 3] in the snapshot, float32[2, 4] here),"
        " list/1 (float32[2] in the snapshot, bfloat16[2] here),"
        " plain (a plain value in the snapshot, float32[1] here)"
    )
    assert str(error.value) == f"the snapshot of step 7 does not match the program:{differences}"
    restored, step = Snapshots().restore(ours, partial=True)
    assert (step, restored["same"].tolist()) == (7, [1, 1])
    assert all(restored[name] is ours[name] for name in ("new", "key", "plain")) and restored["list"][0] is other[0]
    assert capsys.readouterr().err == (
        f"paceline: the snapshot of step 7 is restored partially; not restored:{differences}\n"
    )


def test_shapes_are_enough_to_restore(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And JAX may still move the restored arrays to another device."""
    state = {"array": jnp.arange(6.0).reshape(2, 3), "empty": jnp.zeros((0, 3)), "scalar": jnp.asarray(2)}
    saved(snapshot_dir, monkeypatch, state)
    restored, step = Snapshots().restore(jax.eval_shape(lambda: state))
    assert step == 1
    assert jax.tree_util.tree_map(lambda x: x.tolist(), restored) == {
        "array": [[0, 1, 2], [3, 4, 5]], "empty": [], "scalar": 2,
    }  # fmt: skip
    again, _ = Snapshots().restore(state)
    assert not again["array"].committed


@other_positions
def test_another_position_in_the_data_is_a_mismatch(
    theirs: Shards | None, ours: Shards | None, said: str, snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Snapshots(order=theirs) as snapshots:
        snapshots.save(1, {"a": 1})
    monkeypatch.setenv("PACELINE_RESTORE", str(snapshot_dir / "step-1"))
    with pytest.raises(SnapshotMismatch, match=said):
        Snapshots(order=ours).restore({"a": 1})


def test_a_file_that_needs_pickle_is_refused(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(snapshot_dir, monkeypatch, {"a": jnp.ones(2)})
    np.save(folder / "00000-00000-0.npy", np.array([{"any": "object"}], dtype=object), allow_pickle=True)
    with pytest.raises(SnapshotRefused, match="cannot be read without running code"):
        Snapshots().restore({"a": jnp.ones(2)})
    with (folder / "00000-00000-0.npy").open("wb") as file:
        np.savez(file, a=np.ones(2))
    with pytest.raises(SnapshotRefused, match=r"00000-00000-0\.npy: not an array"):
        Snapshots().restore({"a": jnp.ones(2)})


def test_a_missing_part_is_reported(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(snapshot_dir, monkeypatch, {"a": jnp.ones(2)})
    (folder / "index-00000-of-00001.json").rename(folder / "index-00000-of-00002.json")
    with pytest.raises(SnapshotRefused, match="2 processes wrote it, but the parts of only 1 exist"):
        Snapshots().restore({"a": jnp.ones(2)})


def test_a_write_error_is_raised_by_close(snapshot_dir: Path) -> None:
    snapshot_dir.write_text("in the way")
    snapshots = Snapshots(every=1)
    assert snapshots.step(1, {"a": jnp.ones(2)}) is False
    with pytest.raises(OSError, match="step-1"):
        snapshots.close()


def test_mistakes_are_reported_immediately(snapshot_dir: Path) -> None:
    with pytest.raises(TypeError, match="a/b is a set: a state may only contain arrays, random keys and plain values"):
        Snapshots().save(1, {"a": {"b": {1}}})
    with pytest.raises(ValueError, match="every=0: must be at least 1"):
        Snapshots(every=0)


def test_a_snapshot_is_taken_when_the_group_is_leaving(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.jax.should_save", lambda _: True)
    monkeypatch.setattr("paceline.jax.is_stopping", lambda: True)
    with Snapshots() as snapshots:
        assert snapshots.step(3, {"a": 1}) is True
    assert [path.name for path in snapshot_dir.iterdir()] == ["step-3"]


def test_a_snapshot_that_was_requested_for_another_reason_does_not_mean_that_the_group_is_leaving(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.jax.should_save", lambda _: True)
    monkeypatch.setattr("paceline.jax.is_stopping", lambda: False)
    with Snapshots() as snapshots:
        assert snapshots.step(3, {"a": 1}) is False
    assert [path.name for path in snapshot_dir.iterdir()] == ["step-3"]


def test_a_task_that_saves_alone_takes_a_snapshot_as_soon_as_the_time_is_up(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.jax.SaveSchedule.check_time", lambda _: True)
    with Snapshots() as snapshots:
        assert snapshots.step(3, {"a": 1}) is False
    assert [path.name for path in snapshot_dir.iterdir()] == ["step-3"]


def test_outside_a_run_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_RESTORE", "PACELINE_SNAPSHOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with Snapshots(every=1) as snapshots:
        assert snapshots.restore({"a": 1}) == ({"a": 1}, 0)
        assert snapshots.step(1, {"a": 1}) is False
        snapshots.save(1, {"a": 1})
