"""Jobs of functions: sent as source if that does the same, otherwise as a pickle; what cannot work is refused."""

from __future__ import annotations

import builtins
import importlib
import importlib.metadata
import json
import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from paceline import client
from paceline.client.functions import function_jobs, missing_modules

RUN = "digits-3f9a"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def self_contained(epochs: int = 1) -> None:
    print(json.dumps({"epochs": epochs}))


def uses_a_constant() -> str:
    return RUN


def generates() -> Any:
    yield 1


def returns(value: object) -> object:
    return value


def note_of(function: Callable[..., object], **arguments: Any) -> str:
    return function_jobs.job_of(function, arguments, {})[1]


def script_of(function: Callable[..., object], **arguments: Any) -> Path:
    job, note = function_jobs.job_of(function, arguments, {})
    assert note == f"{function.__name__} is sent as source", note
    return Path(client.plan(job).to_dict()["code"]) / "function.py"


def imported(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user that is not installed."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


# ---- as source


def test_a_self_contained_function_is_sent_as_source(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, note = function_jobs.job_of(self_contained, {"epochs": 3}, {"workers": 2, "framework": "torch"})
    assert note == "self_contained is sent as source"
    plan = client.plan(job).to_dict()
    assert (plan["name"], plan["framework"], len(plan["tasks"])) == ("self-contained", "torch", 2)
    runpy.run_path(str(Path(plan["code"]) / "function.py"), run_name="__main__")
    assert capsys.readouterr().out == '{"epochs": 3}\n'


def test_processes_that_a_function_starts_do_not_call_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = function_jobs.job_of(uses_a_constant, {}, {})
    loader = Path(client.plan(job).to_dict()["code"]) / "function.py"
    (loader.parent / "function.pickle").write_bytes(b"damaged")
    for script in (script_of(self_contained), loader):
        runpy.run_path(str(script), run_name="__mp_main__")
    assert capsys.readouterr().out == ""


def test_a_function_runs_with_the_interpreter_of_the_kernel(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = home / "server" / "bin" / "python"  # Jupyter's server has an environment of its own
    server.parent.mkdir(parents=True)
    server.symlink_to(sys.executable)
    monkeypatch.setenv("VIRTUAL_ENV", str(home / "server"))
    for on_cluster, python in ((False, sys.executable), (True, "python")):
        job, _ = function_jobs.job_of(self_contained, {}, {}, on_cluster)
        assert client.plan(job).to_dict()["roles"][0]["command"] == [python, "function.py"]


def test_arguments_that_json_would_change_are_pickled(home: Path) -> None:
    for value in (1, 1.5, -0.0, True, None, "é", [1, [2.0]], {"a": {"b": [None]}}):
        assert note_of(returns, value=value) == "returns is sent as source"
    for value in ((1, 2), {1: "a"}, [{"a": (1,)}], os.PathLike, RUN.encode(), {"a", "b"}, float("nan")):
        assert "returns is sent with cloudpickle: " in note_of(returns, value=value)
    assert "JSON would change its arguments" in note_of(returns, value=(1, 2))


def test_a_string_of_several_lines_is_not_changed(home: Path) -> None:
    def text(into: list[str]) -> str:
        return """one
            two
        """

    assert note_of(text, into=[]) == "text is sent as source"
    script = script_of(text, into=[])
    assert runpy.run_path(str(script), run_name="other")["text"]([]) == text([])


def test_a_source_that_was_changed_afterwards_is_not_sent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(home, "edited", "def train():\n    return 1\n", monkeypatch)
    assert note_of(module.train) == "train is sent as source"
    (home / "edited.py").write_text("def train():\n    return 1.0\n")
    os.utime(home / "edited.py", (0, 0))
    assert note_of(module.train) == "train is sent with cloudpickle: its source is not what it was defined from"


def test_inner_functions_and_classes_are_compared(home: Path) -> None:
    def nested(steps: int) -> object:
        class Model:
            size: int = 3

            def call(self, value: float) -> list[float]:
                return [each * value for each in range(steps) if each not in {1, 2}]

        return Model().call(2.0)

    script = script_of(nested, steps=4)
    assert runpy.run_path(str(script), run_name="other")["nested"](4) == nested(4) == [0.0, 6.0]


# ---- builtins


def test_all_builtins_of_a_fresh_interpreter_are_known() -> None:
    assert set(dir(builtins)) - {"_", "__annotations__"} <= function_jobs.BUILTINS


def test_names_that_ipython_adds_are_not_builtins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "display", print, raising=False)

    def shows() -> None:
        display(1)  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(client.UsageError, match="shows uses display, which is not defined; display is IPython's"):
        note_of(shows)


def test_the_open_of_ipython_is_that_of_python(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def modified_open(*_: Any) -> None: ...

    modified_open.__module__ = "IPython.core.interactiveshell"
    monkeypatch.setitem(globals(), "open", modified_open)

    def reads() -> str:
        with open("file") as file:
            return file.read()

    assert note_of(reads) == "reads is sent as source"


# ---- as a pickle


def test_other_functions_are_sent_with_cloudpickle_and_the_reason_is_given(home: Path) -> None:
    limit = 3

    def nested() -> int:
        return limit

    for function, reason in ((uses_a_constant, "it uses RUN, which is defined outside of it"),
                             (nested, "it uses limit of the function around it"),
                             (lambda: None, "it is a lambda")):  # fmt: skip
        job, note = function_jobs.job_of(function, {}, {})
        assert note == f"{function.__name__} is sent with cloudpickle: {reason}"
        assert (Path(client.plan(job).to_dict()["code"]) / "function.pickle").exists()


def test_a_module_that_the_user_has_registered_stays_registered(home: Path) -> None:
    module = sys.modules[__name__]
    note_of(uses_a_constant)
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(module)
    try:
        note_of(uses_a_constant)
        assert __name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)


# ---- refused


def test_functions_that_cannot_be_sent_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def locks() -> None:
        with lock:
            pass

    local = ModuleType("mine")
    local.__file__ = str(home / "mine.py")
    monkeypatch.setitem(globals(), "mine", local)

    def uses_mine() -> object:
        return mine  # type: ignore[name-defined]  # noqa: F821

    def undefined() -> object:
        return not_defined_anywhere  # type: ignore[name-defined]  # noqa: F821

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (locks, {}, "cloudpickle cannot send that: cannot pickle"),
        (generates, {}, "is a generator or coroutine"),
        (self_contained, {"steps": 1}, "cannot be called with these arguments: got an unexpected keyword"),
        (print, {}, "print is a builtin_function_or_method, not a function"),
        (uses_mine, {}, r"it uses mine of .*mine\.py, which is not an installed module"),
        (undefined, {}, "uses not_defined_anywhere, which is not defined"),
    ]
    for function, arguments, reason in cases:
        with pytest.raises(client.UsageError, match=reason):
            client.submit(function, arguments=arguments)
    for field in ("command", "code"):
        with pytest.raises(client.UsageError, match=f"{field} cannot be used with a function"):
            client.submit(self_contained, **{field: "x"})
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(client.UsageError, match=r"uses RUN, .*or install cloudpickle"):
        client.submit(uses_a_constant)
    assert not (home / "runs").exists()


def test_modules_that_a_function_imports_must_be_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mymodel.py").write_text("")
    (elsewhere / "mypackage").mkdir()
    monkeypatch.syspath_prepend(elsewhere)

    def trains() -> None:
        def inner() -> None:
            import mymodel  # type: ignore[import-not-found]  # noqa: F401

    def imports_a_namespace() -> None:
        import mypackage.part  # type: ignore[import-not-found]  # noqa: F401

    def imports_others() -> None:
        import xml.etree.ElementTree

        import not_there_at_all  # type: ignore[import-not-found]
        import psutil

        import paceline

        print(xml, not_there_at_all, psutil, paceline)

    for function in (trains, imports_a_namespace):
        with pytest.raises(client.UsageError, match=r"it uses my.* of .*elsewhere/my.*, which is not an installed"):
            note_of(function)
    assert note_of(imports_others) == "imports_others is sent as source"
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    assert note_of(trains) == "trains is sent as source", "tasks of this machine have PYTHONPATH"
    with pytest.raises(client.UsageError, match="it uses mymodel"):
        function_jobs.job_of(trains, {}, {}, True)


def trains_elsewhere() -> None:
    import mymodel  # noqa: F401


def calls_another() -> None:
    trains_elsewhere()


def test_functions_that_are_sent_with_a_function_are_checked(home: Path) -> None:
    (home / "mymodel.py").write_text("")
    sys.path.insert(0, str(home))
    try:
        with pytest.raises(client.UsageError, match=r"calls_another cannot be sent: it uses mymodel of .*mymodel\.py"):
            note_of(calls_another)
    finally:
        sys.path.remove(str(home))


def test_modules_of_editable_installations_are_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(home, "developed", "", monkeypatch)
    monkeypatch.setitem(globals(), "developed", module)

    def uses() -> object:
        return developed  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(client.UsageError, match="which is not an installed module"):
        note_of(uses)
    with monkeypatch.context() as context:
        context.setattr(missing_modules, "_folders_of_pth_files", lambda: {home})
        assert note_of(uses) == "uses is sent as source"
    info = home / "packages" / "developed-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: developed\nVersion: 1\n")
    (info / "top_level.txt").write_text("developed\n")
    monkeypatch.syspath_prepend(info.parent)
    for is_editable in (False, True):
        url = {"url": f"file://{home}", "dir_info": {"editable": is_editable}}
        (info / "direct_url.json").write_text(json.dumps(url))
        if is_editable:
            assert note_of(uses) == "uses is sent as source"
        else:
            with pytest.raises(client.UsageError, match="which is not an installed module"):
                note_of(uses)


def test_folders_of_pth_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "project").mkdir()
    (home / "editable.pth").write_text(f"# a comment\nimport nothing\n{home / 'project'}\n{home / 'missing'}\n")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(home)])
    missing_modules._folders_of_pth_files.cache_clear()
    assert home / "project" in missing_modules._folders_of_pth_files()
    assert home / "missing" not in missing_modules._folders_of_pth_files()
    missing_modules._folders_of_pth_files.cache_clear()


def test_a_folder_that_cannot_be_written_is_an_error(home: Path) -> None:
    (home / "functions").write_text("a file")
    with pytest.raises(client.PacelineError, match=r"the function cannot be written to .*set PACELINE_HOME"):
        note_of(self_contained)
