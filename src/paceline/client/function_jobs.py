"""Makes a job of a function, such as one of a notebook: its source if it is self-contained, otherwise a pickle."""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from paceline.client.jobs import Job
from paceline.errors import UsageError
from paceline.job.values import slug
from paceline.view import run_folders

_BY_VALUE = threading.Lock()  # cloudpickle has one list of such modules
SCRIPT, PICKLE = "function.py", "function.pickle"
_FUTURE = "from __future__ import annotations"
_LOAD = '''"""Calls a function that cloudpickle has written."""

import pickle
import sys

if sys.version_info[:2] != {version}:
    sys.exit("this function was pickled with Python {python}: use the same version, or send it as source")
try:
    import cloudpickle  # noqa: F401
except ImportError:
    sys.exit("this function was pickled with cloudpickle, which is not installed here")
with open(__file__.replace("{script}", "{pickle}"), "rb") as file:
    function, arguments = pickle.load(file)
function(**arguments)
'''


class _NotSelfContained(Exception):
    """The function cannot be sent as source; the text says why."""


@dataclass(frozen=True)
class _Files:
    contents: dict[str, bytes]
    note: str  # says how the function is sent


def job_of(function: Callable[..., object], arguments: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[Job, str]:
    """The job, and how the function is sent. Raises UsageError if it cannot be sent."""
    files = _files_of(function, arguments)
    others = dict(fields)
    workers = others.pop("workers", None)
    if workers is not None and "roles" in others:
        raise UsageError("workers and roles cannot be used together", remedy="set the number of workers in roles")
    roles = {"roles": {"worker": {"replicas": 1 if workers is None else workers}}}
    others.setdefault("name", slug(getattr(function, "__name__", "")) or "function")
    others.setdefault("framework", "none")
    folder = _write(str(others["name"]), files.contents)
    command = ["python", SCRIPT]
    return Job(**{**roles, **others, "command": command, "code": str(folder)}), files.note


def _files_of(function: Callable[..., object], arguments: Mapping[str, Any]) -> _Files:
    name = getattr(function, "__name__", repr(function))
    if not isinstance(function, FunctionType):
        kind = type(function).__name__
        raise UsageError(f"{name} is a {kind}, not a function", remedy="define a function with `def`, and submit that")
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise UsageError(f"{name} is a generator or coroutine: calling it would run nothing")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UsageError(f"{name} cannot be called with these arguments: {error}") from None
    _refuse_local_modules(function)
    try:
        script = _script(function, arguments)
    except _NotSelfContained as reason:
        return _pickled(function, name, arguments, str(reason))
    return _Files({SCRIPT: script.encode()}, f"{name} is sent as source")


# ---- as source


def _script(function: FunctionType, arguments: Mapping[str, Any]) -> str:
    """A program that defines the function and calls it."""
    name = function.__name__
    if name == "<lambda>":
        raise _NotSelfContained("it is a lambda")
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise _NotSelfContained(f"it uses {names} of the function around it")
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise _NotSelfContained("its source is not available") from None
    if not source.startswith("def "):
        raise _NotSelfContained("it has a decorator")
    try:
        code = compile(f"{_FUTURE}\n{source}", "<function>", "exec")
        text = json.dumps(dict(arguments), allow_nan=False)
    except SyntaxError:
        raise _NotSelfContained("its source is not a complete function") from None
    except (TypeError, ValueError):
        raise _NotSelfContained("its arguments are not JSON") from None
    outside = {each for each in _globals_of(code) if each not in (name, "__name__")}
    imports = sorted(_imports(function, outside, code))
    call = f"import json\n\n{name}(**json.loads({text!r}))"
    return "\n".join([_FUTURE, "", *imports, "", source, "", call, ""])


def _globals_of(code: CodeType) -> Iterator[str]:
    """The names that this code, and the functions in it, look up outside of themselves."""
    stored = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval not in stored:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _imports(function: FunctionType, names: set[str], code: CodeType) -> Iterator[str]:
    attributes = set(_attributes_of(code))
    for name in names:
        if name not in function.__globals__:
            if not hasattr(builtins, name):
                raise UsageError(
                    f"{function.__name__} uses {name}, which is not defined", remedy="define or import it first"
                )
            continue
        value = function.__globals__[name]
        if not isinstance(value, ModuleType) or value.__name__ == "__main__":
            raise _NotSelfContained(f"it uses {name}, which is defined outside of it")
        module = value.__name__
        yield f"import {name}" if module == name else f"import {module} as {name}"
        for submodule in list(sys.modules):  # `import xml.etree` makes `xml` known, but `import xml` not `xml.etree`
            prefix, _, parts = submodule.partition(f"{module}.")
            if not prefix and parts and attributes.issuperset(parts.split(".")):
                yield f"import {submodule}"


def _attributes_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes_of(constant)


def _refuse_local_modules(function: FunctionType) -> None:
    """Modules of the current folder are not sent. UsageError: the function uses one."""
    for name in sorted(set(_globals_of(function.__code__))):
        value = function.__globals__.get(name)
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if module is None or module.__name__ in ("__main__", function.__module__) or not file:
            continue
        path = Path(file).absolute()
        if path.is_relative_to(Path.cwd()) and not path.is_relative_to(Path(sys.prefix).absolute()):
            raise UsageError(
                f"{function.__name__} cannot be sent: it uses {name} of {path}, which is not an installed module",
                remedy="write a job file, whose `code` folder is sent",
            )


# ---- as a pickle


def _pickled(function: FunctionType, name: str, arguments: Mapping[str, Any], reason: str) -> _Files:
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(
            f"{name} cannot be sent: {reason}",
            remedy="put everything it needs into the function, or install cloudpickle",
        ) from None
    try:
        data = _dumps(cloudpickle, function, (function, dict(arguments)))
    except Exception as error:  # objects define how they are pickled
        raise UsageError(
            f"{name} cannot be sent: {reason}, and cloudpickle cannot send that: {error}",
            remedy="create such objects inside of the function",
        ) from None
    version = sys.version_info[:2]
    loader = _LOAD.format(version=tuple(version), python=".".join(map(str, version)), script=SCRIPT, pickle=PICKLE)
    return _Files({SCRIPT: loader.encode(), PICKLE: data}, f"{name} is sent with cloudpickle: {reason}")


def _dumps(cloudpickle: Any, function: FunctionType, value: object) -> bytes:
    """The module of the function is not sent: what the function needs of it is in the pickle."""
    module = sys.modules.get(function.__module__)
    if module is None or function.__module__ == "__main__":
        return bytes(cloudpickle.dumps(value))
    with _BY_VALUE:
        cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(value))
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _write(name: str, contents: Mapping[str, bytes]) -> Path:
    """The folder with these files, which all runs of the same function share."""
    digest = hashlib.sha256(b"".join(b"%d:%s" % (len(data), data) for data in contents.values())).hexdigest()[:12]
    folder = run_folders.home() / "functions" / f"{slug(name) or 'function'}-{digest}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file, data in contents.items():
        partial = folder / f".{file}.{os.urandom(6).hex()}"
        partial.write_bytes(data)
        partial.replace(folder / file)
    return folder
