"""`@record`: a frozen dataclass that is cheap to define, for modules with dozens of them that every agent imports."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

Class = TypeVar("Class", bound=type)


def _define(cls: Class) -> Class:
    """`dataclass(frozen=True)` compiles six methods per class, which takes 0.5 ms whenever an agent starts. Here only
    `__init__` is compiled, which runs often; the others are the same for all records."""
    cls.__doc__ = cls.__doc__ or cls.__name__  # otherwise dataclass() imports inspect to write one
    dataclass(init=False, repr=False, eq=False)(cls)
    scope: dict[str, Any] = {}
    parameters, statements = ["self"], ["values = self.__dict__"]
    for each in fields(cls):
        value = each.name
        if each.default is not MISSING:
            scope[f"default_{each.name}"] = each.default
            parameters.append(f"{each.name}=default_{each.name}")
        elif each.default_factory is not MISSING:
            scope["missing"], scope[f"default_{each.name}"] = MISSING, each.default_factory
            parameters.append(f"{each.name}=missing")
            value = f"default_{each.name}() if {each.name} is missing else {each.name}"
        else:
            parameters.append(each.name)
        statements.append(f"values[{each.name!r}] = {value}")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(statements), scope)  # noqa: S102 (as dataclasses does)
    for method in (scope["__init__"], __repr__, __eq__, __hash__, __setattr__, __delattr__):
        if method.__name__ not in cls.__dict__:
            setattr(cls, method.__name__, method)
    return cls


def __repr__(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def __eq__(self: Any, other: object) -> bool:
    return bool(self.__dict__ == other.__dict__) if type(other) is type(self) else NotImplemented


def __hash__(self: Any) -> int:
    return hash((type(self), *self.__dict__.values()))


def __setattr__(self: Any, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True)
    def record(cls: Class) -> Class: ...
else:
    record = _define
