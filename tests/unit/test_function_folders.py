"""The folders of submitted functions: one for all runs of a function, removed with the last of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import client
from paceline.client.functions import function_folders
from paceline.client.submission import submit as submission
from support import recorded
from support.recorded import REPORT, call


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(home: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in (home / "functions").iterdir() if path.is_dir()}


def a_run(home: Path, run: str, code: Path | str) -> client.Run:
    folder = recorded.write(home, run, report=REPORT)
    (folder / "plan.json").write_text(json.dumps({"tasks": [], "code": str(code)}))
    return client.get(run)


def test_a_function_is_removed_with_its_last_run(home: Path) -> None:
    first, second = (function_folders.write(name, {"function.py": name.encode()}) for name in ("first", "second"))
    runs = [a_run(home, f"first-{number}", first) for number in range(2)]
    link = home.with_name(f"{home.name}-link")
    link.symlink_to(home)  # PACELINE_HOME may have been another path to the same folder
    a_run(home, "second-1", link / second.relative_to(home))
    runs[0].delete()
    assert names(home) == {"first", "second"}
    runs[1].delete()
    assert names(home) == {"second"} and (second / "function.py").read_bytes() == b"second"


def test_functions_without_a_run_are_removed_by_the_next_deletion(home: Path) -> None:
    function_folders.write("first", {"function.py": b""})
    assert call(home, "delete", "--finished", "--yes").stderr == "nothing to delete\n"
    assert names(home) == set()


@pytest.mark.parametrize("name", ["api", "api-0123456789ab", "api-0123456789ab.old"])
def test_folders_of_the_user_stay(home: Path, name: str) -> None:
    """PACELINE_HOME may be the folder of a project that has functions of its own."""
    own = home / "functions" / name
    own.mkdir(parents=True)
    (own / "index.js").touch()
    function_folders.remove_unused(home)
    assert (own / "index.js").exists()


def test_nothing_is_removed_while_a_function_is_submitted(home: Path) -> None:
    run = a_run(home, "other-1", "/code")
    with function_folders.submitting():
        function_folders.write("first", {"function.py": b""})
        run.delete()
        assert names(home) == {"first"}
    function_folders.remove_unused(home)
    assert names(home) == set()


@pytest.mark.parametrize("plan", ["{", None], ids=["damaged", "missing"])
def test_nothing_is_removed_if_it_is_unknown_what_a_run_uses(home: Path, plan: str | None) -> None:
    folder = recorded.write(home, "other-1", report=REPORT)
    (folder / "plan.json").unlink(missing_ok=True) if plan is None else (folder / "plan.json").write_text(plan)
    function_folders.write("first", {"function.py": b""})
    function_folders.remove_unused(home)
    assert names(home) == {"first"}


@pytest.mark.parametrize("code", ["\0", 5, "x" * 100_000, None, "used"], ids=str)
def test_the_plan_of_another_user_does_not_matter(home: Path, code: Any) -> None:
    """It may contain anything: it neither stops a deletion nor keeps or removes a function."""
    used, unused = (function_folders.write(name, {"function.py": name.encode()}) for name in ("used", "unused"))
    run = a_run(home, "own-1", used)
    other = home / "runs" / "theirs-1"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"run": "theirs-1", "on": "kubernetes", "adopted": True}))
    (other / "plan.json").write_text(json.dumps({"tasks": [], "code": str(unused) if code == "used" else code}))
    function_folders.remove_unused(home)
    assert names(home) == {"used"}
    run.delete()
    assert names(home) == set()


def test_paths_of_plans_are_not_looked_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function_folders.write("first", {"function.py": b""})
    a_run(home, "own-1", "\0")
    monkeypatch.setattr(Path, "resolve", lambda *_, **__: pytest.fail("a path of a plan was looked up"))
    function_folders.remove_unused(home)
    assert names(home) == set()


def test_a_submission_that_fails_leaves_no_function(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        assert names(home) == {"train"}
        raise client.PacelineError("no memory")

    def train() -> None:
        pass

    monkeypatch.setattr(submission, "_start_here", fail)
    with pytest.raises(client.PacelineError, match="no memory"):
        client.submit(train)
    assert names(home) == set()
