"""Refuses a function that needs modules which its tasks do not have: files of the user that are not installed."""

from __future__ import annotations

import dis
import importlib.metadata
import importlib.util
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from urllib.parse import unquote, urlsplit

from paceline.errors import UsageError

_INSTALLED = {"site-packages", "dist-packages"}


def refuse_missing_modules(function: FunctionType, on_cluster: bool) -> None:
    """UsageError: the function uses a module that is not sent and not installed. Tasks on this machine also have the
    modules of PYTHONPATH."""
    for name, module, file in _used_modules(function, set()):
        if not _is_installed(module, file) and (on_cluster or not _is_in_python_path(file)):
            raise UsageError(
                f"{function.__name__} cannot be sent: it uses {name} of {file}, which is not an installed module",
                remedy="write a job file, whose `code` folder is sent",
            )


def globals_of(code: CodeType) -> Iterator[str]:
    """The names that this code, and the functions in it, look up outside of themselves."""
    stored = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval not in stored:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_of(constant)


def imports_of(code: CodeType) -> Iterator[tuple[str, int]]:
    """The modules that this code, and the functions in it, import: the name as written, and the number of dots before
    it."""
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":  # it follows the number of dots and the names to import
            yield instruction.argval, instructions[at - 2].argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from imports_of(constant)


def _used_modules(function: FunctionType, seen: set[CodeType]) -> Iterator[tuple[str, str, Path]]:
    """The name that the function uses, its module, and the file or folder of that; also for the functions that are
    sent with it."""
    seen.add(function.__code__)
    package = function.__globals__.get("__package__") or ""
    for name, dots in sorted(set(imports_of(function.__code__))):
        imported = package if dots else name
        yield from ((name or package, imported, file) for file in _files_of(imported.partition(".")[0]))
    for name in sorted(set(globals_of(function.__code__))):
        value = function.__globals__.get(name)
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and module.__name__ not in ("__main__", function.__module__):
            yield from ((name, module.__name__, file) for file in _files_of_module(module))
        elif isinstance(value, FunctionType) and value.__code__ not in seen:
            yield from _used_modules(value, seen)


def _files_of(name: str) -> list[Path]:
    """The files of a module that may not be imported yet. A module that is not there is an error in the task, if it is
    needed there."""
    if name in sys.modules:
        return _files_of_module(sys.modules[name])
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.has_location and spec.origin:
        return [Path(spec.origin).absolute()]
    return [Path(folder).absolute() for folder in spec.submodule_search_locations or ()]


def _files_of_module(module: ModuleType) -> list[Path]:
    file = getattr(module, "__file__", None)
    files = [file] if isinstance(file, str) else list(getattr(module, "__path__", ()))
    return [Path(each).absolute() for each in files]


def _is_installed(module: str, file: Path) -> bool:
    """Whether other processes of this interpreter can import it, wherever they run."""
    top_level = module.partition(".")[0]
    if top_level == "paceline" or _INSTALLED.intersection(file.parts):  # tasks always have paceline
        return True
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    if any(file.is_relative_to(folder) for folder in library | _folders_of_pth_files()):
        return True
    distributions = importlib.metadata.packages_distributions().get(top_level, [])
    return any(file.is_relative_to(folder) for folder in filter(None, map(_editable_folder, distributions)))


@cache
def _folders_of_pth_files() -> frozenset[Path]:
    """The folders that are in sys.path because of an editable installation."""
    folders = set()
    for packages in {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}:
        for file in sorted(Path(packages).glob("*.pth")):
            try:
                lines = file.read_text(errors="replace").splitlines()
            except OSError:
                continue
            folders |= {Path(packages, line.strip()) for line in lines if line.strip() and line[:1] != "#"}
    return frozenset(folder for folder in folders if folder.is_dir())


def _editable_folder(distribution: str) -> Path | None:
    """The folder of the project, for a distribution that is installed from it without a copy."""
    text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
    try:
        fields = json.loads(text or "{}")
        is_editable = fields["dir_info"]["editable"] is True
        return Path(unquote(urlsplit(fields["url"]).path)) if is_editable else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_in_python_path(file: Path) -> bool:
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return any(file.is_relative_to(Path(folder).absolute()) for folder in folders)
