"""Variables for programs if AMX instructions are announced but not allowed; the probe itself: tests/local."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.frameworks import amx_probe

BOOT = Path("/proc/sys/kernel/random/boot_id")


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str | None]:
    """A CPU that announces AMX, and a separate cache folder. The list takes the probe's results, in order."""
    answers: list[str | None] = []
    monkeypatch.delenv(amx_probe.OVERRIDE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(amx_probe, "_is_reported", lambda: True)
    monkeypatch.setattr(amx_probe, "probe", lambda: answers.pop(0))
    return answers


def test_a_cpu_that_traps_gets_a_limit_that_avoids_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(amx_probe.OVERRIDE, amx_probe.TRAPS)
    assert amx_probe.environment({}) == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


@pytest.mark.parametrize("state", [amx_probe.WORKS, amx_probe.ABSENT])
def test_any_other_cpu_gets_no_limit(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(amx_probe.OVERRIDE, state)
    assert amx_probe.environment({}) == {}


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_limit_that_the_user_has_set_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(amx_probe.OVERRIDE, amx_probe.TRAPS)
    assert amx_probe.environment({name: "AVX2"}) == {}


def test_an_inconclusive_probe_sets_no_limit_and_runs_again(announced: list[str | None]) -> None:
    announced += [None, amx_probe.TRAPS]
    assert [amx_probe.state(), amx_probe.state()] == [amx_probe.ABSENT, amx_probe.TRAPS]


def test_a_cache_file_of_another_user_is_not_trusted(
    announced: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "paceline"
    folder.mkdir()
    planted = json.dumps({"boot": BOOT.read_text().strip(), "probe": 2, "amx": "works"})
    (tmp_path / "theirs").write_text(planted)
    (folder / "amx.json").symlink_to(tmp_path / "theirs")
    announced.append(amx_probe.TRAPS)
    assert amx_probe.state() == amx_probe.TRAPS
    assert (tmp_path / "theirs").read_text() == planted, "written through a link"
    (folder / "amx.json").unlink()
    os.mkfifo(folder / "amx.json")  # with no writer at the other end
    announced.append(amx_probe.TRAPS)
    assert amx_probe.state() == amx_probe.TRAPS
    (folder / "amx.json").write_text(planted)
    other_user = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other_user)
    announced.append(amx_probe.TRAPS)
    assert amx_probe.state() == amx_probe.TRAPS


def test_the_probe_runs_once_and_its_answer_is_cached(announced: list[str | None], tmp_path: Path) -> None:
    announced.append(amx_probe.TRAPS)
    assert [amx_probe.state(), amx_probe.state()] == [amx_probe.TRAPS, amx_probe.TRAPS]
    assert announced == []
    assert [path.name for path in (tmp_path / "paceline").iterdir()] == ["amx.json"]


@pytest.mark.parametrize(
    "cached",
    [
        json.dumps({"boot": "another", "probe": 2, "amx": "works"}),
        json.dumps({"boot": BOOT.read_text().strip(), "probe": 2, "amx": "perhaps"}),
        json.dumps({"boot": BOOT.read_text().strip(), "amx": "works"}),  # by an earlier probe
        "[]",
        "{",
        "",
    ],
)
def test_a_stale_or_invalid_cache_file_is_not_trusted(cached: str, announced: list[str | None], tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "amx.json").write_text(cached)
    announced.append(amx_probe.TRAPS)
    assert amx_probe.state() == amx_probe.TRAPS


def test_the_probe_runs_again_if_its_answer_cannot_be_cached(
    announced: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline").write_text("a file, not a folder")
    announced += [amx_probe.TRAPS, amx_probe.WORKS, amx_probe.TRAPS]
    assert [amx_probe.state(), amx_probe.state()] == [amx_probe.TRAPS, amx_probe.WORKS]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as if there were no home folder
    monkeypatch.chdir(tmp_path)
    assert amx_probe.state() == amx_probe.TRAPS
    assert [path.name for path in tmp_path.iterdir()] == ["paceline"]


def test_nothing_is_probed_if_amx_is_not_announced(
    announced: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx_probe, "_is_reported", lambda: False)
    assert amx_probe.state() == amx_probe.ABSENT


@pytest.mark.parametrize(
    ("state", "variables", "reason"),
    [
        (amx_probe.TRAPS, {}, f"{amx_probe.FINDING}; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 to avoid them"),
        (
            amx_probe.TRAPS,
            {"ONEDNN_MAX_CPU_ISA": "ALL"},
            f"{amx_probe.FINDING}; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
        ),
        (amx_probe.TRAPS, {"DNNL_MAX_CPU_ISA": "avx512_core_amx"}, f"{amx_probe.FINDING}; set ONEDNN_MAX_CPU_ISA="),
        (
            amx_probe.TRAPS,
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"},
            "limited to AVX512_CORE_FP16, but another library may",
        ),
        (amx_probe.TRAPS, {"DNNL_MAX_CPU_ISA": "AVX2"}, "limited to AVX2, but another library may use them"),
        (amx_probe.WORKS, {}, "it used an instruction that this CPU does not have"),
        (amx_probe.ABSENT, {}, "it used an instruction that this CPU does not have"),
    ],
)
def test_a_death_by_sigill_has_a_likely_reason(
    state: str, variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(amx_probe.OVERRIDE, state)
    assert reason in amx_probe.likely_reason(variables)
