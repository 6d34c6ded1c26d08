"""Makes a job of a function, such as one of a notebook: its source if it is self-contained, otherwise a pickle."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from paceline.client.functions import function_folders
from paceline.client.functions.missing_modules import globals_of, imports_of, refuse_missing_modules
from paceline.client.jobs import Job
from paceline.errors import UsageError
from paceline.job.values import slug

_BY_VALUE = threading.Lock()  # cloudpickle has one list of such modules
SCRIPT, PICKLE = "function.py", "function.pickle"
# What every program has, although a kernel may have added to `builtins` or replaced it.
_FUNCTIONS = frozenset({
    "abs", "aiter", "all", "anext", "any", "ascii", "bin", "breakpoint", "callable", "chr", "compile", "delattr", "dir",
    "divmod", "eval", "exec", "format", "getattr", "globals", "hasattr", "hash", "hex", "id", "input", "isinstance",
    "issubclass", "iter", "len", "locals", "max", "min", "next", "oct", "open", "ord", "pow", "print", "repr", "round",
    "setattr", "sorted", "sum", "vars", "None", "True", "False", "Ellipsis", "NotImplemented", "copyright", "credits",
    "exit", "help", "license", "quit", "__build_class__", "__debug__", "__doc__", "__import__", "__loader__",
    "__name__", "__package__", "__spec__",
})  # fmt: skip
_TYPES = {name for name, value in vars(builtins).items() if isinstance(value, type) and value.__module__ == "builtins"}
BUILTINS = _FUNCTIONS | _TYPES
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
if __name__ == "__main__":  # not in processes that the function starts
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


def job_of(
    function: Callable[..., object], arguments: Mapping[str, Any], fields: Mapping[str, Any], on_cluster: bool = False
) -> tuple[Job, str]:
    """The job, and how the function is sent. Raises UsageError if it cannot be sent."""
    for field in ("command", "code"):
        if field in fields:
            raise UsageError(f"{field} cannot be used with a function", remedy="submit a client.Job to run a command")
    files = _files_of(function, arguments, on_cluster)
    others = dict(fields)
    workers = others.pop("workers", None)
    if workers is not None and "roles" in others:
        raise UsageError("workers and roles cannot be used together", remedy="set the number of workers in roles")
    roles = {"roles": {"worker": {"replicas": 1 if workers is None else workers}}}
    others.setdefault("name", slug(getattr(function, "__name__", "")) or "function")
    others.setdefault("framework", "none")
    folder = function_folders.write(str(others["name"]), files.contents)
    # `python` is that of the active environment, which for a kernel may be the environment of Jupyter's server.
    python = "python" if on_cluster or not sys.executable else sys.executable
    return Job(**{**roles, **others, "command": [python, SCRIPT], "code": str(folder)}), files.note


def _files_of(function: Callable[..., object], arguments: Mapping[str, Any], on_cluster: bool) -> _Files:
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
    refuse_missing_modules(function, on_cluster)
    try:
        script = _script(function, arguments)
    except _NotSelfContained as reason:
        return _pickled(function, name, arguments, str(reason))
    return _Files({SCRIPT: script.encode()}, f"{name} is sent as source")


# ---- as source


def _script(function: FunctionType, arguments: Mapping[str, Any]) -> str:
    """A program that defines the function and calls it."""
    name = function.__code__.co_name
    if name == "<lambda>":
        raise _NotSelfContained("it is a lambda")
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise _NotSelfContained(f"it uses {names} of the function around it")
    text = _as_json(arguments)
    header, source, code = _source_of(function)
    outside = {each for each in globals_of(code) if each not in (name, "__name__", "__annotations__")}
    imports = sorted(_imports(function, outside, code))
    call = [
        'if __name__ == "__main__":  # not in processes that the function starts',
        "    from json import loads as _loads",
        "",
        f"    {name}(**_loads({text!r}))",
    ]
    return "\n".join([*header, "", *imports, "", source, "", *call, ""])


def _as_json(arguments: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(arguments), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _NotSelfContained("its arguments are not JSON") from None
    if not _are_same(json.loads(text), dict(arguments)):
        raise _NotSelfContained("JSON would change its arguments, such as tuples to lists")
    return text


def _are_same(first: object, second: object) -> bool:
    """Whether two values that JSON can have are equal and of the same types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(_are_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_are_same, first, second))
    return first == second


def _source_of(function: FunctionType) -> tuple[list[str], str, CodeType]:
    """Lines for the start of a program, the source of the function, and their code, if it is that of the function: its
    file may have changed, and lines of a string may be indented."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        raise _NotSelfContained("its source is not available") from None
    dedented = textwrap.dedent(text)
    if not dedented.startswith("def "):
        raise _NotSelfContained("it has a decorator")
    if any(dots for _, dots in imports_of(function.__code__)):
        raise _NotSelfContained("it imports from its own package")
    own = function.__code__
    indented = [] if dedented == text else [f"if True:\n{text}"]
    for source in (dedented, *indented):
        # Annotations should not be evaluated; but those of inner functions and classes may be read.
        for header, flags in (([_FUTURE], annotations.compiler_flag), ([], 0)):
            try:
                tree = ast.parse(source)
                line = next(each.lineno for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
                ast.increment_lineno(tree, own.co_firstlineno - line)
                code = compile(tree, "<function>", "exec", flags=flags, dont_inherit=True)
            except (SyntaxError, StopIteration):
                raise _NotSelfContained("its source is not a complete function") from None
            defined = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == own.co_name]
            if len(defined) == 1 and _is_same_code(defined[0], own, f"{own.co_qualname}.<locals>."):
                return header, source, code
    raise _NotSelfContained("its source is not what it was defined from")


def _is_same_code(first: CodeType, second: CodeType, prefix: str) -> bool:
    """Whether both do the same, wherever they are. `prefix`: of names of classes in the second, which contain the name
    of the function around them."""
    for attribute in ("co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
                      "co_kwonlyargcount"):  # fmt: skip
        if getattr(first, attribute) != getattr(second, attribute):
            return False
    one, other = _instructions(first), _instructions(second)
    return len(one) == len(other) and all(
        name == other_name and _is_same_value(value, other_value, prefix)
        for (name, value), (other_name, other_value) in zip(one, other, strict=True)
    )


def _is_same_value(value: object, other: object, prefix: str) -> bool:
    if isinstance(value, CodeType) and isinstance(other, CodeType):
        return _is_same_code(value, other, prefix)
    if isinstance(other, str) and other.startswith(prefix):
        return value == f"{prefix.removesuffix('.<locals>.').rpartition('.')[2]}.<locals>.{other[len(prefix) :]}"
    if isinstance(value, frozenset):  # its elements have any order
        return value == other
    return repr(value) == repr(other)  # 1, 1.0 and True are equal


def _instructions(code: CodeType) -> list[tuple[str, Any]]:
    """Names and operands, without what depends on the file around: Python compiles the call of a name that is imported
    at the top of the same file in another way."""
    kept = [each for each in dis.get_instructions(code) if each.opname not in ("PUSH_NULL", "EXTENDED_ARG", "CACHE")]
    position = {each.offset: at for at, each in enumerate(kept)}
    return [
        (
            "LOAD_ATTR" if each.opname == "LOAD_METHOD" else each.opname,
            position.get(each.argval) if each.opcode in (*dis.hasjrel, *dis.hasjabs) else each.argval,
        )
        for each in kept
    ]


def _imports(function: FunctionType, names: set[str], code: CodeType) -> Iterator[str]:
    attributes = set(_attributes_of(code))
    for name in names:
        value = function.__globals__.get(name)
        if name in BUILTINS and (name not in function.__globals__ or _is_of_ipython(value)):
            continue
        if name not in function.__globals__:
            raise UsageError(
                f"{function.__name__} uses {name}, which is not defined",
                remedy=f"{name} is IPython's: import it in the function"
                if hasattr(builtins, name)
                else "define or import it first",
            )
        if not isinstance(value, ModuleType) or value.__name__ == "__main__":
            raise _NotSelfContained(f"it uses {name}, which is defined outside of it")
        module = value.__name__
        yield f"import {name}" if module == name else f"import {module} as {name}"
        for submodule in list(sys.modules):  # `import xml.etree` makes `xml` known, but `import xml` not `xml.etree`
            prefix, _, parts = submodule.partition(f"{module}.")
            if not prefix and parts and attributes.issuperset(parts.split(".")):
                yield f"import {submodule}"


def _is_of_ipython(value: object) -> bool:
    """IPython defines its own `open` in the namespace of a notebook."""
    return str(getattr(value, "__module__", "")).partition(".")[0] == "IPython"


def _attributes_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes_of(constant)


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
        if module.__name__ in cloudpickle.list_registry_pickle_by_value():  # the user has registered it
            return bytes(cloudpickle.dumps(value))
        cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(value))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
