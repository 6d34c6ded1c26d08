"""agent.pyz: always the same bytes, all that agents and programs import, in parts that `kubectl apply` accepts."""

from __future__ import annotations

import ast
import base64
import io
import json
import random
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import paceline
from paceline.backends.kubernetes.objects import run_objects
from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.job import load_text, planning
from support import served

PACKAGE = Path(paceline.__file__).parent
FOLDERS = ("agent", "frameworks", "jax", "runtime", "storage", "tensorflow", "torch")
MODULES = ("__init__.py", "errors.py", "keras.py", "plan.py")
MOST = 150_000  # bytes of an object; `kubectl apply` keeps a copy of it in an annotation, which has room for 262,144
JOB = "{name: digits, framework: none, command: [python], code: image, tensorboard: true, kubernetes: {image: any}}"


def sources() -> dict[str, str]:
    """The sources in the archive, by path."""
    with zipfile.ZipFile(io.BytesIO(agent_archive())) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


# ---- contents


def test_the_same_sources_give_the_same_bytes() -> None:
    assert agent_archive() == agent_archive()
    with zipfile.ZipFile(io.BytesIO(agent_archive())) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_the_archive_contains_only_what_agents_and_programs_need() -> None:
    paths = [
        *(PACKAGE / name for name in MODULES),
        *(path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")),
    ]
    archived = sources()
    del archived["__main__.py"]
    assert archived.keys() == {f"paceline/{path.relative_to(PACKAGE)}" for path in paths}
    for path in paths:
        source = archived[f"paceline/{path.relative_to(PACKAGE)}"]
        assert statements(source) == statements(path.read_text()), path


def test_a_new_subfolder_is_included_automatically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "paceline"
    for name in (
        *MODULES,
        *(f"{folder}/__init__.py" for folder in FOLDERS),
        "agent/net/tls.py",
        "view/state/run_state.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    monkeypatch.setattr(paceline, "__file__", str(package / "__init__.py"))
    assert "paceline/agent/net/tls.py" in sources() and "paceline/view/state/run_state.py" not in sources()


def statements(source: str) -> list[tuple[int, str]]:
    """All code except docstrings, with line numbers, so that tracebacks point to the right line."""
    module_code = compile(source, "", "exec", optimize=2, dont_inherit=True)
    entries, codes = [], [module_code]
    while codes:
        code = codes.pop()
        entries += [(line or 0, code.co_name) for *_, line in code.co_lines()]
        entries.append((code.co_firstlineno, code.co_code.hex()))
        codes += [each for each in code.co_consts if hasattr(each, "co_code")]
    return entries


# ---- imports


def test_the_archive_contains_every_paceline_module_that_it_imports() -> None:
    assert list(missing(sources())) == []


def test_a_missing_module_is_detected_however_it_is_imported() -> None:
    lines = {
        "import paceline.view.state.run_state": "paceline.view.state.run_state",
        "from paceline.view.state.run_state import fold": "paceline.view.state.run_state",
        "from paceline.view import state": "paceline.view",
        "from paceline import view": "paceline.view",
        "from .. import view": "paceline.view",
        "def later():\n    from ..view import state": "paceline.view",
        "from paceline.agent import captain": "paceline.agent.captain",
    }
    for line, absent in lines.items():
        archived = {"paceline/__init__.py": "", "paceline/agent/__init__.py": "", "paceline/agent/pod.py": line}
        assert f"paceline/agent/pod.py imports {absent}" in list(missing(archived)), line
    for line in ("import json", "from paceline import report", "if TYPE_CHECKING:\n    from paceline import view"):
        assert list(missing({"paceline/__init__.py": "def report(): pass", "paceline/plan.py": line})) == [], line


def missing(archived: Mapping[str, str]) -> Iterator[str]:
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in archived}
    for name, source in archived.items():
        for module in imported(name, source):
            if module not in modules:
                yield f"{name} imports {module}"


def imported(name: str, source: str) -> Iterator[str]:
    """The Paceline modules that a source imports at run time, anywhere in it."""
    package = name.split("/")[:-1]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "paceline")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            if module.split(".")[0] == "paceline":
                yield module
                # Other names are defined in the module.
                yield from filter(is_module, (f"{module}.{each.name}" for each in node.names))


def is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


# ---- ConfigMaps


def joined_parts(objects: list[served.Object]) -> bytes:
    """The parts in the agent's ConfigMaps, joined in the order of their names; checks that each is small enough."""
    maps = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ConfigMap"}
    assert max(len(json.dumps(each)) for each in maps.values()) < MOST
    agents = sorted(name for name in maps if "-agent-" in name)
    files = [file for name in agents for file in maps[name]["binaryData"].items()]
    assert [name for name, _ in files] == [f"agent-{number:02}" for number in range(len(files))]
    return b"".join(base64.b64decode(part) for _, part in files)


def volumes(pod: served.Object) -> list[str]:
    """The ConfigMaps in the agent volume of a pod."""
    (volume,) = [each for each in pod["volumes"] if each["name"] == "paceline-agent"]
    return [source["configMap"]["name"] for source in volume["projected"]["sources"]]


@pytest.mark.parametrize("archive", [agent_archive(), random.Random(1).randbytes(1 << 20)], ids=["own", "big"])
def test_kubectl_apply_can_keep_a_copy_of_each_part(archive: bytes, tmp_path: Path) -> None:
    plan = planning.make_plan(load_text(JOB, "job.yaml", tmp_path, cluster=True).job)
    run = run_objects.render(plan, "digits-3f9a", archive)
    serves = served.rendered("tensorflow-serving", tmp_path, agent=archive)
    for objects, name in ((run, "digits-3f9a-agent-"), (serves, "digits-3f9a-serve-agent-")):
        assert joined_parts(objects) == archive
        config_maps = [each["metadata"]["name"] for each in objects if each["metadata"]["name"].startswith(name)]
        assert len(config_maps) > (1 if len(archive) < 1 << 20 else 10)
        pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Job", "Deployment")]
        assert [volumes(pod) for pod in pods] == [config_maps] * len(pods)
