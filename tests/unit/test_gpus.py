"""What the GPUs of a host do: which of the machine's GPUs are measured, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import job
from paceline.agent.captain import events as ev
from paceline.agent.tasks import gpus
from paceline.agent.tasks.gpus import HostGpus, ListedGpu, Nvml, parse_smi
from paceline.backends.local import host_shares
from paceline.job import planning
from support.nvml import GIB, FakeNvml

FIRST = ev.GpuResources(0.85, GIB, 16 * GIB)
SECOND = ev.GpuResources(0.0, 2 * GIB, 16 * GIB)
PART = ev.GpuResources(0.0, GIB, 2 * GIB)
SMI = "GPU-50a, NVIDIA H200, 85, 1024, 16384\nGPU-60b, NVIDIA H200, [N/A], 2048, 16384\n"
JOB = "name: a\nframework: torch\ncommand: [python, train.py]\nroles: {worker: {replicas: 2, gpus: 1}, evaluator: {}}\n"


def test_gpus_are_measured_by_the_library_of_the_driver() -> None:
    assert Nvml(HostGpus(("0", "1")), FakeNvml()).measure() == (FIRST, SECOND)


@pytest.mark.parametrize("devices", ["0,1", "1,0", "GPU-6,GPU-50a"])
def test_each_host_on_a_machine_measures_only_its_own_gpus(
    devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(host_shares, "gpus", lambda: tuple(devices.split(",")))
    shares = host_shares.assign(planning.make_plan(job.load_text(JOB, "job.yaml", tmp_path).job))
    hosts = [HostGpus(shares[f"{name}-host-{index}"].devices) for name, index in (("worker", 0), ("worker", 1))]
    expected = [(FIRST,), (SECOND,)] if devices == "0,1" else [(SECOND,), (FIRST,)]
    assert [Nvml(host, FakeNvml()).measure() for host in hosts] == expected
    assert [parse_smi(SMI, host) for host in hosts] == expected
    assert shares["evaluator-host-0"].devices == ()


@pytest.mark.parametrize(
    ("names", "order", "positions"),
    [
        ("0", "PCI_BUS_ID", [0]),
        ("2,0", "PCI_BUS_ID", [2, 0]),
        ("0", "", []),  # it may be any of them: CUDA begins with the fastest
        ("0", "FASTEST_FIRST", []),
        ("2,1,0", "", [2, 1, 0]),  # all of them, in whatever order
        ("GPU-51", "", [1]),
        ("GPU-5", "", []),  # two begin with it
        ("GPU-60,GPU-7,GPU-51", "", [2]),  # as for CUDA, the list ends before the one that does not exist
        ("0,3,1", "PCI_BUS_ID", [0]),
        ("", "", []),
    ],
)
def test_gpus_are_found_as_cuda_finds_them(names: str, order: str, positions: list[int]) -> None:
    machine = [ListedGpu("GPU-50", "T400"), ListedGpu("GPU-51", "A100"), ListedGpu("GPU-60", "A100")]
    assert HostGpus(tuple(filter(None, names.split(","))), order).find(machine) == positions


def test_gpus_of_one_model_are_numbered_by_their_addresses() -> None:
    machine = [ListedGpu(f"GPU-{number}", "H200") for number in range(4)]
    assert HostGpus(("3", "1")).find(machine) == [3, 1]
    failed = [ListedGpu("", ""), *machine[1:]]
    assert HostGpus(("3", "1")).find(failed) == [3, 1]


def test_parts_of_gpus_are_found_by_their_uuids() -> None:
    library = FakeNvml(parts=["MIG-1", "MIG-2"])
    assert Nvml(HostGpus(("MIG-2",)), library).measure() == (PART,)
    assert Nvml(HostGpus(("MIG-3", "MIG-1")), library).measure() == ()


def test_a_failed_gpu_of_another_host_changes_nothing() -> None:
    assert Nvml(HostGpus(("1",)), FakeNvml(lost=[0])).measure() == (SECOND,)
    with pytest.raises(OSError, match="NVML error 15"):
        Nvml(HostGpus(("0",)), FakeNvml(lost=[0])).measure()


def test_a_library_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvml, "nvmlInit_v2", lambda self: 9)
    with pytest.raises(OSError, match="nvmlInit_v2: NVML error 9"):
        Nvml(HostGpus(("0",)), FakeNvml())
    monkeypatch.setattr(gpus, "LIBRARY", "libnone.so.1")
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert gpus.choose(HostGpus(("0",))) is None


@pytest.mark.parametrize("text", ["", "No devices were found\n", "1, 2\n", "x, y, z, u, v\n", ", , , ,\n" * 1000])
def test_what_nvidia_smi_prints_may_be_anything(text: str) -> None:
    assert parse_smi(text, HostGpus(("0",))) == ()


@pytest.mark.parametrize(("names", "driver"), [(("0",), "/dev/none"), ((), "/dev/null")])
def test_without_a_driver_or_gpus_of_its_own_a_host_starts_nothing(
    names: tuple[str, ...], driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "DEVICES", (driver,))
    monkeypatch.setattr("threading.Thread.start", lambda *_: pytest.fail("a thread was started"))
    assert gpus.GpuMonitor(HostGpus(names)).last() == ()
