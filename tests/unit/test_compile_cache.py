"""The variables and the folder for what frameworks compile: the user's own win, and nobody else can write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline import plan as plans
from paceline.agent.options import Options
from paceline.agent.tasks import compiled_folder
from paceline.frameworks import compile_cache
from paceline.frameworks.compile_cache import UnsafeFolder, make_own, make_private
from paceline.job import load_text, planning

MACHINE = compile_cache.machine_key()


def variables(tmp_path: Path, text: str, environ: dict[str, str] | None = None, **options: object) -> dict[str, str]:
    """Those of the first worker's host."""
    (tmp_path / "train.py").write_text("")
    plan = planning.make_plan(load_text(f"name: a\ncommand: [python, train.py]\n{text}", "job.yaml", tmp_path).job)
    fields = {"run": "a-1", "host": "worker-host-0", "plan": "", "folder": "", "tls": "", "captain": ""}
    chosen = Options(**{**fields, "compiled": str(tmp_path / "compiled"), **options})  # type: ignore[arg-type]
    notes: list[str] = []
    added = compiled_folder.variables(plan, chosen, environ or {}, notes.append)
    assert notes == []
    return added


def test_jax_keeps_everything_that_it_compiles(tmp_path: Path) -> None:
    folder = f"{tmp_path}/compiled/a/{MACHINE}/jax"
    assert variables(tmp_path, "framework: jax") == {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "PACELINE_COMPILE_CACHE": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def test_torch_keeps_what_inductor_and_triton_compile(tmp_path: Path) -> None:
    folder = f"{tmp_path}/compiled/a/{MACHINE}"
    expected = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    assert variables(tmp_path, "framework: torch") == expected


@pytest.mark.parametrize("value", ["/mine", ""])
def test_the_users_own_folder_is_kept(value: str, tmp_path: Path) -> None:
    assert variables(tmp_path, "framework: jax", {"JAX_COMPILATION_CACHE_DIR": value}) == {}
    assert variables(tmp_path, "framework: torch", {"TORCHINDUCTOR_CACHE_DIR": value}) == {}
    added = variables(tmp_path, "framework: torch", {"TRITON_CACHE_DIR": value})
    assert added.keys() == {"TORCHINDUCTOR_CACHE_DIR"}
    added = variables(tmp_path, "framework: jax", {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5"})
    assert added.keys() == {"JAX_COMPILATION_CACHE_DIR", "PACELINE_COMPILE_CACHE"}


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_the_job_can_turn_it_off(framework: str, tmp_path: Path) -> None:
    assert variables(tmp_path, f"framework: {framework}\nrestart: {{compile_cache: false}}") == {}
    assert not (tmp_path / "compiled").exists()


@pytest.mark.parametrize("framework", ["tensorflow", "none"])
def test_other_frameworks_get_no_folder(framework: str, tmp_path: Path) -> None:
    assert variables(tmp_path, f"framework: {framework}") == {}
    assert not (tmp_path / "compiled").exists()


def test_jax_on_gpus_of_several_machines_gets_no_folder(tmp_path: Path) -> None:
    """Some processes would find what others wait for."""
    text = "framework: jax\nroles: {worker: {replicas: 2, gpus: 1}}"
    assert variables(tmp_path, text, echo=True) == {}
    same_machine = {"worker-host-0": ("0",), "worker-host-1": ("1",)}
    assert variables(tmp_path, text, machine=same_machine)
    assert variables(tmp_path, "framework: jax\nroles: {worker: {gpus: 2}}", echo=True)


def test_a_plan_with_the_default_looks_as_it_always_has(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = "name: a\nframework: jax\ncommand: [python, train.py]\n"
    for more, written in (("", {}), ("restart: {compile_cache: false}\n", {"compile_cache": False})):
        plan = planning.make_plan(load_text(text + more, "job.yaml", tmp_path).job)
        restart = plans.to_data(plan)["restart"]
        assert {name: restart[name] for name in restart if name == "compile_cache"} == written
        assert plans.from_data(plans.to_data(plan)) == plan


# ---- the folder


def test_only_its_owner_can_use_the_folder(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = Path(make_private(f"{tmp_path}/compiled", "a", "b"))
    finally:
        os.umask(old)
    for each in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert make_private(f"{tmp_path}/compiled", "a", "b") == str(folder)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o750])
def test_a_folder_that_others_have_access_to_is_not_used(mode: int, tmp_path: Path) -> None:
    folder = Path(make_private(f"{tmp_path}/compiled", "a"))
    folder.chmod(mode)
    with pytest.raises(UnsafeFolder, match=r"^others have access to .*/compiled/a; remove it$"):
        make_private(f"{tmp_path}/compiled", "a")
    assert stat.S_IMODE(folder.stat().st_mode) == mode  # it is not repaired: others may have written to it


def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    if os.geteuid() == 0:
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 12345, 12345)
    else:
        foreign = Path("/usr")
    with pytest.raises(UnsafeFolder, match=r"belongs to another user$"):
        make_own(str(foreign))
    if os.geteuid() == 0:
        with pytest.raises(UnsafeFolder, match=r"/foreign belongs to another user$"):
            make_private(f"{foreign}/compiled")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "compiled").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolder, match=r"/compiled is not a folder$"):
        make_private(f"{tmp_path}/compiled")


def test_a_folder_that_others_could_replace_is_not_used(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(UnsafeFolder, match=r"^others can write to .*/shared$"):
        make_private(f"{parent}/home/compiled")
    (parent / "home").mkdir()
    (tmp_path / "link").symlink_to(parent / "home")
    with pytest.raises(UnsafeFolder, match=r"^others can write to .*/shared$"):
        make_private(f"{tmp_path}/link/compiled")
    parent.chmod(0o1777)  # as /tmp: only owners can rename their folders
    assert make_private(f"{parent}/home/compiled")


def test_an_unsafe_folder_is_reported_and_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("")
    (tmp_path / "train.py").write_text("")
    plan = planning.make_plan(
        load_text("name: a\nframework: jax\ncommand: [python, train.py]", "job.yaml", tmp_path).job
    )
    options = Options("a-1", "worker-host-0", "", "", "", "", compiled=str(tmp_path / "compiled"))
    notes: list[str] = []
    assert compiled_folder.variables(plan, options, {}, notes.append) == {}
    [note] = notes
    assert note.startswith("what jax compiles is not kept for later starts: cannot create ")
