"""Named tuples and dataclasses: taken apart into their fields, and rebuilt from the class of the same name.

Takes objects of one class, gives its name and its fields' names; the other way round gives objects of that class. A
frame may name a class but never code: the class is looked up, without calling anything, in a module that this process
has already imported (or one inside a package that it has), and must itself be a named tuple or a dataclass with
exactly those fields. No ``__new__``, ``__init__`` or ``__post_init__`` runs on arrival: the fields are set to the
values that the sender had.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from hp_nodes.transport.codec_frame import CodecError


class RecordClass(NamedTuple):
    """A class whose objects are their fields and nothing else."""

    cls: type
    is_tuple: bool
    fields: tuple[str, ...]
    lazy: frozenset[str]
    """Attributes that an object may have computed from its fields (``functools.cached_property``)."""


@lru_cache(maxsize=256)
def record_class(cls: type) -> RecordClass | None:
    """What a class's objects are made of; None when it is neither a named tuple nor a plain dataclass."""
    lazy = frozenset(n for c in cls.__mro__ for n, v in vars(c).items() if isinstance(v, functools.cached_property))
    if issubclass(cls, tuple):
        fields = getattr(cls, "_fields", None)
        if isinstance(fields, tuple) and all(isinstance(name, str) for name in fields) and hasattr(cls, "_make"):
            return RecordClass(cls, True, fields, lazy)
        return None
    if "__dataclass_fields__" not in vars(cls) or cls.__new__ is not object.__new__:
        return None
    fields = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    slots = {name for c in cls.__mro__ for name in _slots(c)} - {"__dict__", "__weakref__"}
    return RecordClass(cls, False, fields, lazy) if slots <= set(fields) else None


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def class_refusal(record: RecordClass) -> str | None:
    """Why objects of a class cannot be rebuilt elsewhere; None when they can."""
    cls = record.cls
    try:
        found = _look_up(cls.__module__, cls.__qualname__)
    except CodecError:
        found = None
    if found is not cls:
        return "its class cannot be found by its name; accepted: classes defined at the top level of a module"
    return None


def object_flaw(record: RecordClass, value: Any) -> str | None:
    """What of an object would be lost or is missing, if it were rebuilt from its fields; None when nothing is."""
    held = set(getattr(value, "__dict__", ())) - record.lazy
    if record.is_tuple:
        return f"with attributes that are not fields: {sorted(held)}" if held else None
    missing = [name for name in record.fields if not hasattr(value, name)]
    if missing:
        return f"without values for its fields {missing}"
    surplus = held - set(record.fields)
    return f"with attributes that are not fields: {sorted(surplus)}" if surplus else None


def find_class(module: str, qualname: str, fields: tuple[str, ...], is_tuple: bool) -> RecordClass:
    """The class that a frame names.

    Raises:
        CodecError: it is not here, or is something else than the frame says.
    """
    cls = _look_up(module, qualname)
    record = record_class(cls) if isinstance(cls, type) else None
    if record is None or record.is_tuple != is_tuple or (cls.__module__, cls.__qualname__) != (module, qualname):
        raise CodecError(
            f"the frame names {module}.{qualname}, which is no {'named tuple' if is_tuple else 'dataclass'} here"
        )
    if record.fields != fields:
        raise CodecError(
            f"{module}.{qualname} has the fields {record.fields} here and {fields} where the frame was written"
        )
    return record


def _look_up(module: str, qualname: str) -> Any:
    holder: Any = _module(module)
    for name in qualname.split("."):
        # vars, not getattr: a module's __getattr__ or a descriptor would run code.
        holder = vars(holder).get(name) if isinstance(holder, (type, type(sys))) else None
    if holder is None:
        raise CodecError(f"the frame names {module}.{qualname}, which is not here")
    return holder


def _module(name: str) -> Any:
    if name not in sys.modules and name.partition(".")[0] in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise CodecError(f"the frame names module {name}, which cannot be imported here: {error}") from error
    if name not in sys.modules:
        raise CodecError(f"the frame names module {name}, which this rank has not imported; import it on every rank")
    return sys.modules[name]


def build_objects(record: RecordClass, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """One object for each tuple of field values."""
    if record.is_tuple:
        return list(map(partial(tuple.__new__, record.cls), rows))
    build: Callable[[tuple[Any, ...]], Any] = partial(_build_dataclass, record)
    return list(map(build, rows))


def _build_dataclass(record: RecordClass, values: tuple[Any, ...]) -> Any:
    made: Any = object.__new__(record.cls)
    for name, value in zip(record.fields, values, strict=True):
        object.__setattr__(made, name, value)
    return made
