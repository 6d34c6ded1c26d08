"""Snapshots of torch: real groups on gloo that are killed, resized and delayed."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Shards
from paceline.torch import SnapshotMismatch, SnapshotRefused, Snapshots, SnapshotUnsafe, gpu_load
from support.snapshots import group, other_positions

PROGRAM = "torch_snapshots.py"


@pytest.mark.parametrize(("kind", "world"), [pytest.param("ddp", 3, marks=pytest.mark.long), ("fsdp", 2)])
def test_a_group_that_was_killed_ends_with_the_same_bits(kind: str, world: int, tmp_path: Path) -> None:
    """Dropout, momentum, a scheduler, and a loader with workers, killed in the middle of an epoch."""
    options: dict[str, Any] = {"kind": kind, "steps": 9, "every": 3, "workers": 2}
    whole = group(tmp_path / "whole", PROGRAM, world, **options)
    killed = group(tmp_path / "killed", PROGRAM, world, **options, kill=4)
    assert killed.results == [None] * world
    assert killed.steps() == [3]
    resumed = group(tmp_path / "resumed", PROGRAM, world, killed.merged(3), **options)
    for rank in range(world):
        undisturbed, after = whole.result(rank), resumed.result(rank)
        assert after["start"] == 3
        assert after["losses"] == {n: loss for n, loss in undisturbed["losses"].items() if int(n) > 3}
        assert after["seen"] == {n: seen for n, seen in undisturbed["seen"].items() if int(n) > 3}
        assert (after["state"], after["order"]) == (undisturbed["state"], undisturbed["order"])
    first_epoch = [index for rank in range(world) for n in range(1, 6) for index in whole.result(rank)["seen"][str(n)]]
    assert sorted(first_epoch) == list(range(60))


@pytest.mark.long
def test_the_very_first_step_can_be_resumed_too(tmp_path: Path) -> None:
    """DDP rebuilds its buckets after it."""
    whole = group(tmp_path / "whole", PROGRAM, 3, kind="ddp", steps=3, every=1)
    resumed = group(tmp_path / "resumed", PROGRAM, 3, whole.merged(1), kind="ddp", steps=3)
    assert resumed.result()["start"] == 1
    assert resumed.result()["state"] == whole.result()["state"]


def test_sharded_tensors_are_restored_by_groups_of_other_sizes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": "fsdp", "last": True}
    two = group(tmp_path / "two", PROGRAM, 2, **options, steps=3)
    assert [two.steps(rank) for rank in (0, 1)] == [[3], [3]]
    one = group(tmp_path / "one", PROGRAM, 1, two.merged(3), **options, steps=5)
    assert (one.result()["start"], one.result()["restored"]) == (3, two.result()["state"])
    three = group(tmp_path / "three", PROGRAM, 3, one.merged(5), **options, steps=6)
    for rank in range(3):
        assert (three.result(rank)["start"], three.result(rank)["restored"]) == (5, one.result()["state"])
    assert sorted(path.name for path in three.merged(6).iterdir()) == [
        "paceline.json",
        *(f"shard-{rank:05}-of-00003.pt" for rank in range(3)),
        "state.pt",
    ]
    # Any program can read it.
    saved = torch.load(tmp_path / "three/merged/step-6/state.pt", weights_only=True)
    assert saved["model"]["first.weight"] == {"paceline.sharded": "model/first.weight", "shape": [700, 24]}
    names = sorted((tmp_path / "three/merged/step-6").glob("shard-*"))
    parts = [torch.load(path, weights_only=True, mmap=True)["model/first.weight"] for path in names]
    assert [(offset, list(piece.shape)) for part in parts for offset, piece in part] == [
        ((0, 0), [234, 24]),
        ((234, 0), [234, 24]),
        ((468, 0), [232, 24]),
    ]


def test_a_task_without_examples_contributes_nothing() -> None:
    """The loader and the loss of docs/snapshots.md: 5 tasks, 4 examples per step, of which the last has one."""
    inputs = torch.arange(18.0).reshape(9, 2)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    weights = torch.ones(2, 1, requires_grad=True)
    gradients: dict[int, list[torch.Tensor]] = {}
    for world in (5, 1):
        gradients[world] = [torch.zeros(2, 1) for _ in range(3)]
        for rank in range(world):
            order = Shards(9, 4, rank=rank, world=world)
            loader = DataLoader(data, sampler=order.sampler(), batch_size=None)
            for mean, (x, y) in zip(gradients[world], order.through(loader), strict=True):
                loss = (x @ weights - y + 1).square().sum() * order.world / 4
                mean += torch.autograd.grad(loss, weights)[0] / world  # as DDP does
    torch.testing.assert_close(gradients[5], gradients[1])


@pytest.mark.parametrize("last", [6, 7])
def test_training_continues_while_a_snapshot_is_written(last: int, tmp_path: Path) -> None:
    """Writing is delayed in rank 0 from step 2 to 6: snapshots 4 and 6 are due meanwhile, and all ranks skip them. The
    next one is taken after step 7; if there is no step 7, that of step 6 is taken at the end."""
    finished = group(tmp_path / "held", PROGRAM, 2, kind="held", steps=last)
    assert [finished.result(rank)["skipped"] for rank in (0, 1)] == [2, 2]
    assert finished.steps() == [2, last]
    for step in finished.steps():
        saved = torch.load(finished.merged(step) / "state.pt", weights_only=True)["model"]
        assert [saved["weight"].tolist(), saved["bias"].tolist()] == finished.result()["states"][str(step)]


def test_training_continues_if_a_snapshot_cannot_be_written(tmp_path: Path) -> None:
    finished = group(tmp_path / "failing", PROGRAM, 1, kind="failing")
    assert finished.result() == {"kept": ["step-2"], "raised": "NotADirectoryError"}
    messages = [message for message in finished.told if message.get("_", "asks") != "asks"]  # without step reports
    assert [message["_"] for message in messages] == ["warning", "saved", "warning"]
    assert messages[0]["text"].startswith("the snapshot of step 1 could not be written: ")


# ---- alone, in this process


@pytest.fixture
def snapshot_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PACELINE_RESTORE", "PACELINE_TRUST", "PACELINE_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", str(tmp_path / "snapshots"))
    return tmp_path / "snapshots"


def save_snapshot(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch, step: int = 1, **items: Any) -> Path:
    """Saves a snapshot of these items, and makes it the one to restore."""
    with Snapshots(items) as snapshots:
        snapshots.save(step, loss=torch.tensor(0.5), accuracy=1)
    monkeypatch.setenv("PACELINE_RESTORE", str(snapshot_dir / f"step-{step}"))
    return snapshot_dir / f"step-{step}"


def test_metrics_and_versions_are_stored_with_a_snapshot(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = json.loads((save_snapshot(snapshot_dir, monkeypatch, model=nn.Linear(2, 2)) / "paceline.json").read_text())
    assert (about["parts"], about["metrics"]) == (1, {"loss": 0.5, "accuracy": 1.0})
    assert about["versions"]["torch"] == torch.__version__
    assert about["stall_s"] > 0


def test_mismatches_are_listed_and_the_rest_is_restored_on_request(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    save_snapshot(
        snapshot_dir,
        monkeypatch,
        7,
        model=old,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    new = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.Linear(3, 5), d=nn.Linear(5, 1)))
    new.a.bias = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    before = {name: value.clone() for name, value in new.state_dict().items()}
    snapshots = Snapshots({"model": new, "optimizer": torch.optim.SGD(new.parameters()), "scaler": old})
    with pytest.raises(SnapshotMismatch) as error:
        snapshots.restore()
    differences = (
        " not in the snapshot: model/d.weight, model/d.bias, scaler;"
        " only in the snapshot: scheduler, model/c.weight, model/c.bias;"
        " different: model/a.bias (float32[3] in the snapshot, float16[3] here),"
        " model/b.weight (float32[3, 3] in the snapshot, float32[5, 3] here),"
        " model/b.bias (float32[3] in the snapshot, float32[5] here),"
        " optimizer/group 0/parameter 2 (shape [3, 3] in the snapshot, [5, 3] here),"
        " optimizer/group 0/parameter 3 (shape [3] in the snapshot, [5] here),"
        " optimizer/group 0/parameter 4 (shape [1, 3] in the snapshot, [1, 5] here)"
    )
    assert str(error.value) == f"the snapshot of step 7 does not match the program:{differences}"
    assert error.value.step == 7
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
    assert snapshots.restore(partial=True) == 7
    assert (
        capsys.readouterr().err
        == f"paceline: the snapshot of step 7 is restored partially; not restored:{differences}\n"
    )
    assert [name for name, value in new.state_dict().items() if not torch.equal(value, before[name])] == ["a.weight"]
    assert torch.equal(new.a.weight, old.a.weight)


def test_another_optimizer_is_a_mismatch(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    save_snapshot(snapshot_dir, monkeypatch, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(SnapshotMismatch, match=r"optimizer \(SGD in the snapshot, AdamW here\)"):
        Snapshots({"optimizer": torch.optim.AdamW(model.parameters())}).restore()


@pytest.mark.parametrize(
    ("folder", "lr", "rate", "used"),
    [
        ("step-3-g1", 0.1, 0.025, ""),  # the schedule has reduced it to a quarter, which is not a difference
        ("step-3-g1", 0.2, 0.025, "those of the snapshot"),
        ("step-3-g0", 0.2, 0.05, "those of the program"),
    ],
)
def test_other_settings_are_reported_and_used_if_a_run_starts_from_another_run(
    folder: str,
    lr: float,
    rate: float,
    used: str,
    snapshot_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def items(lr: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    first, schedule = items(0.1)
    with Snapshots({"optimizer": first, "schedule": schedule}) as snapshots:
        snapshots.restore()
        for _ in range(2):
            first.step()
            schedule.step()
        snapshots.save(3)
    (snapshot_dir / "step-3").rename(snapshot_dir / folder)
    monkeypatch.setenv("PACELINE_RESTORE", str(snapshot_dir / folder))
    optimizer, schedule = items(lr)
    assert Snapshots({"optimizer": optimizer, "schedule": schedule}).restore() == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert capsys.readouterr().err == (
        used and f"paceline: settings differ; using {used}: optimizer/group 0/lr (0.1 in the snapshot, 0.2 here)\n"
    )
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 2)


class Foreign:
    """An object that only pickle can restore."""


class Keeper:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["kept"]


@other_positions
def test_another_position_in_the_data_is_a_mismatch(
    theirs: Shards | None, ours: Shards | None, said: str, snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Snapshots({}, order=theirs) as snapshots:
        snapshots.save(1)
    monkeypatch.setenv("PACELINE_RESTORE", str(snapshot_dir / "step-1"))
    with pytest.raises(SnapshotMismatch, match=said):
        Snapshots({}, order=ours).restore()


def test_a_file_that_needs_pickle_is_refused(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot_dir / "step-4"
    folder.mkdir(parents=True)
    torch.save({"item": {"kept": Foreign()}}, folder / "state.pt")
    monkeypatch.setenv("PACELINE_RESTORE", str(folder))
    item = Keeper()
    with pytest.raises(SnapshotRefused, match=r"state\.pt: reading it would run code .* set snapshots\.trust: true"):
        Snapshots({"item": item}).restore()
    assert item.value is None
    monkeypatch.setenv("PACELINE_TRUST", "1")
    assert Snapshots({"item": item}).restore() == 4
    assert isinstance(item.value, Foreign)


def test_a_state_that_would_need_pickle_is_refused_when_it_is_saved(snapshot_dir: Path) -> None:
    with pytest.raises(SnapshotUnsafe, match=r"item/kept: a .*Foreign cannot be restored without pickle"):
        Snapshots({"item": Keeper(Foreign())}).save(1)


def test_plain_values_and_all_kinds_of_tensors_are_restored(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = torch.randn(3, 4)
    values: dict[str, Any] = {
        "plain": [None, True, 1, 0.1, "text", b"bytes", (1, 2), {3}, float("inf")],
        "of torch": [torch.float16, torch.device("cpu"), torch.Size([1, 2])],
        "tensors": [
            torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)
        ],
        "shapes": [torch.tensor(1.5), torch.empty(0, 3), torch.randn(2, 3).T, torch.randn(6)[::2], tied, tied],
        1: OrderedDict(x=1),
    }
    folder = save_snapshot(snapshot_dir, monkeypatch, item=Keeper(values))
    assert (folder / "state.pt").stat().st_size < 60_000
    item = Keeper()
    assert Snapshots({"item": item}).restore() == 1
    assert item.value["plain"] == values["plain"]
    assert item.value["of torch"] == values["of torch"]
    for name in ("tensors", "shapes"):
        for ours, theirs in zip(values[name], item.value[name], strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(ours.float(), theirs.float())
    assert item.value["shapes"][2].stride() == values["shapes"][2].stride()


def test_a_loss_tensor_can_be_a_metric(snapshot_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Snapshots({"model": nn.Linear(1, 1)}) as snapshots:
            snapshots.save(1, loss=torch.ones(1, requires_grad=True).sum())
    assert json.loads((snapshot_dir / "step-1/paceline.json").read_text())["metrics"] == {"loss": 1.0}


def test_a_snapshot_is_taken_when_the_group_is_leaving(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch.should_save", lambda _: True)
    monkeypatch.setattr("paceline.torch.is_stopping", lambda: True)
    with Snapshots({"model": nn.Linear(1, 1)}) as snapshots:
        assert snapshots.step(3) is True
    assert [path.name for path in snapshot_dir.iterdir()] == ["step-3"]


def test_a_snapshot_that_was_requested_for_another_reason_does_not_mean_that_the_group_is_leaving(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.torch.should_save", lambda _: True)
    monkeypatch.setattr("paceline.torch.is_stopping", lambda: False)
    with Snapshots({"model": nn.Linear(1, 1)}) as snapshots:
        assert snapshots.step(3) is False
    assert [path.name for path in snapshot_dir.iterdir()] == ["step-3"]


def test_a_task_that_saves_alone_takes_a_snapshot_as_soon_as_the_time_is_up(
    snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.torch.SaveSchedule.check_time", lambda _: True)
    with Snapshots({"model": nn.Linear(1, 1)}) as snapshots:
        assert snapshots.step(3) is False
    assert [path.name for path in snapshot_dir.iterdir()] == ["step-3"]


def test_an_uninitialized_process_group_is_an_error(snapshot_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"2 tasks train together, but torch\.distributed is not initialized"):
        Snapshots({"model": nn.Linear(1, 1)}).save(1)


def test_outside_a_run_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_RESTORE", "PACELINE_SNAPSHOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with Snapshots({"model": nn.Linear(1, 1)}, every=1) as snapshots:
        assert (snapshots.restore(), snapshots.step(1)) == (0, False)
        snapshots.save(1)


def test_mistakes_are_reported_immediately() -> None:
    with pytest.raises(TypeError, match="model has no state_dict and load_state_dict: its type is int"):
        Snapshots({"model": 3})
    with pytest.raises(ValueError, match="the name 'paceline' is reserved"):
        Snapshots({"paceline": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="every=0: must be at least 1"):
        Snapshots({}, every=0)


def test_values_are_copied_in_pieces_by_several_threads() -> None:
    """To host memory: this machine may have no GPU."""
    sources = [torch.randn(3), torch.arange(5_000_003), torch.randn(7, 1_000_001).to(torch.bfloat16), torch.randn(())]
    targets = [torch.zeros_like(source) for source in sources]
    gpu_load.copy_in_threads(list(zip(targets, sources, strict=True)), torch.device("cpu"))
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize("name", ["as it was", "removed", "replaced"])
def test_values_in_a_mapped_file_are_copied_by_several_threads(tmp_path: Path, name: str) -> None:
    """Threads read the file, if it is still the one that was mapped."""
    path = tmp_path / "state.pt"
    torch.save([torch.arange(5_000_003), torch.randn(1000)], path)
    sources = torch.load(path, mmap=True, weights_only=True)
    files = gpu_load.MappedFiles()
    if name != "as it was":
        path.rename(tmp_path / "old.pt")
    if name == "replaced":
        path.write_bytes(bytes(50_000_000))
    targets = [torch.zeros_like(source) for source in sources]
    gpu_load.copy_in_threads(list(zip(targets, sources, strict=True)), torch.device("cpu"))
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    try:
        assert (files.source(sources[0].data_ptr()).fd >= 0) == (name == "as it was")
        assert files.source(targets[0].data_ptr()).fd == -1
    finally:
        files.close()


def test_views_whose_bytes_are_not_their_values_are_not_copied_by_threads() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    assert gpu_load.is_plain(values) and gpu_load.is_plain(values.conj().resolve_conj())
    for view in (values.conj(), torch.view_as_real(values.conj().resolve_conj())[..., 1]._neg_view(), values[::2]):
        assert not gpu_load.is_plain(view)


def test_what_threads_cannot_copy_is_copied_plainly() -> None:
    target, source = torch.zeros(3, 2, dtype=torch.float64), torch.randn(2, 3).T
    gpu_load.copy_all([(target, source)])
    assert torch.equal(target, source.to(torch.float64))
