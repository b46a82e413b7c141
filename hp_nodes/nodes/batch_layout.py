"""What a micro-batch looks like apart from what is in it, so that only contents travel from a constructor to its peers.

A layout is nested dicts, lists and tuples whose leaves say what stands there: a :class:`TensorFieldSpec`, the type
``int`` for a host value that may change, or a static value. It is what a user writes as ``model_batch_spec``, or what
:meth:`BatchLayout.of` reads off a micro-batch. With it a micro-batch is taken apart into tensors and numbers (sizes
that may change, and host values), and put together again from them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hp_nodes.types import TensorFieldSpec

__all__ = [
    "BatchLayout",
    "elsewhere",
    "names_on_host",
    "skeleton",
    "tensor_bytes",
    "tensor_nbytes",
    "tensor_of",
    "unnamed_on_host",
]

_INT64 = torch.iinfo(torch.int64)


class _Leaf(NamedTuple):
    path: str
    field: Any


class BatchLayout:
    """The layout of a micro-batch.

    Args:
        spec: nested dict, list or tuple (named ones included) of leaves.

    Raises:
        ValueError: a leaf is none of those above; the message names each.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        leaves = list(_leaves(spec, "batch"))
        problems = [problem for leaf in leaves if (problem := _problem(leaf)) is not None]
        if problems:
            raise ValueError("model_batch_spec: " + "; ".join(problems))
        self.fields: tuple[TensorFieldSpec, ...] = tuple(
            leaf.field for leaf in leaves if isinstance(leaf.field, TensorFieldSpec)
        )
        """Of the tensors, in the order in which they are taken out."""

    @classmethod
    def of(cls, data: Any, on_host: Collection[int] = ()) -> BatchLayout:
        """The layout of ``data``: every size may change, and so may every int; anything else is static.

        Args:
            on_host: which of its tensors stay on the host, by their place among them.
        """
        places = itertools.count()

        def leaf(value: Any) -> Any:
            if _is_plain_tensor(value):
                stays = next(places) in on_host
                return TensorFieldSpec((None,) * value.dim(), value.dtype, device="cpu" if stays else None)
            return int if type(value) is int else _Static(value)

        return cls(_mapped(data, leaf))

    def __str__(self) -> str:
        """Every leaf with its path; equal for equal layouts on different ranks."""
        return "; ".join(f"{path}: {_expected(field)}" for path, field in _leaves(self.spec, "batch"))

    def fits(self, data: Any) -> bool:
        """Whether ``data`` surely fits, wherever its tensors are. False: :meth:`take_apart` finds out, and says why.

        Asked of every micro-batch, and several times as fast.
        """
        return _surely_fits(self.spec, data)

    def take_apart(self, data: Any, device: torch.device | None = None) -> tuple[list[Tensor], list[int]]:
        """The tensors of a micro-batch, and its numbers.

        Args:
            device: where the tensors are that do not stay on the host; None: anywhere.

        Raises:
            ValueError: it does not fit the layout; the message names the field, what was expected and what was found.
        """
        tensors: list[Tensor] = []
        numbers: list[int] = []
        _take_apart(self.spec, data, "batch", tensors, numbers, device)
        return tensors, numbers

    def shapes(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        found: list[tuple[int, ...]] = []
        given = iter(numbers)
        for _, field in _leaves(self.spec, ""):
            if isinstance(field, TensorFieldSpec):
                found.append(tuple(next(given) if size is None else size for size in field.shape))
            elif field is int:
                next(given)
        return found

    def put_together(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
        """The micro-batch that :meth:`take_apart` took apart; static values are copies."""
        arrived, given = iter(tensors), iter(numbers)

        def filled(field: Any) -> Any:
            if isinstance(field, TensorFieldSpec):
                for size in field.shape:
                    if size is None:
                        next(given)
                return next(arrived)
            return next(given) if field is int else copy.deepcopy(field)

        return _mapped(self.spec, filled)


def skeleton(data: Any) -> Any:
    """``data`` without what changes: of the same layout, its tensors empty and its ints 0."""

    def emptied(value: Any) -> Any:
        if _is_plain_tensor(value):
            return torch.zeros((0,) * value.dim(), dtype=value.dtype)
        return 0 if type(value) is int else value

    return _mapped(data, emptied)


def elsewhere(data: Any, device: torch.device) -> list[int]:
    """Which tensors of a micro-batch are not on ``device``, by their place among them."""
    tensors: list[Tensor] = []
    _mapped(data, lambda value: tensors.append(value) if _is_plain_tensor(value) else None)
    return [place for place, tensor in enumerate(tensors) if tensor.device != device]


def names_on_host(spec: Any) -> set[str]:
    """Names of the entries and fields that stay on the host."""
    return {name for _, name in _on_host(spec, "batch", None) if name is not None}


def unnamed_on_host(spec: Any) -> list[str]:
    """Paths of what stays on the host and has no name by which staging could leave it there: items of lists."""
    return [path for path, name in _on_host(spec, "batch", None) if name is None]


def _on_host(spec: Any, path: str, name: str | None) -> Iterator[tuple[str, str | None]]:
    if _is_container(spec):
        names: Any = spec if type(spec) is dict else getattr(spec, "_fields", None)
        for key, (item, inner) in zip(names or [None] * len(spec), _items(spec, path), strict=True):
            yield from _on_host(item, inner, key if isinstance(key, str) else None)
    elif isinstance(spec, TensorFieldSpec) and spec.device == "cpu":
        yield path, name


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """uint8[n]: the contents of a CPU tensor, in the order of its dimensions."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor of the micro-batch is on {tensor.device}; accepted: tensors on the CPU, or on the device of a "
            "transport for tensors that carries them from there"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data: NDArray[np.uint8] = dense.reshape(-1).view(torch.uint8).numpy()
    return data


def tensor_of(data: Tensor, field: TensorFieldSpec, shape: tuple[int, ...]) -> Tensor:
    """What uint8[n] contains: a view of it."""
    if not len(data):
        return torch.empty(shape, dtype=field.dtype, device=data.device)
    return data.view(field.dtype).view(shape)


def tensor_nbytes(field: TensorFieldSpec, shape: tuple[int, ...]) -> int:
    size: int = field.dtype.itemsize
    for length in shape:
        size *= length
    return size


def _is_plain_tensor(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided


class _Static:
    """A value that a derived layout holds as it is, whatever its type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.value, memo)


def _is_container(value: Any) -> bool:
    return type(value) in (dict, list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _mapped(value: Any, leaf: Any) -> Any:
    """``value`` with ``leaf(x)`` for each leaf x, in order."""
    if type(value) is dict:
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    if _is_container(value):
        return type(value)(*(_mapped(item, leaf) for item in value))
    return leaf(value)


def _items(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if type(value) is dict:
        yield from ((item, f"{path}[{key!r}]") for key, item in value.items())
    elif hasattr(value, "_fields"):
        yield from ((getattr(value, name), f"{path}.{name}") for name in value._fields)
    else:
        yield from ((item, f"{path}[{place}]") for place, item in enumerate(value))


def _leaves(spec: Any, path: str) -> Iterator[_Leaf]:
    if not _is_container(spec):
        yield _Leaf(path, spec)
        return
    for item, inner in _items(spec, path):
        yield from _leaves(item, inner)


def _problem(leaf: _Leaf) -> str | None:
    path, field = leaf
    if isinstance(field, TensorFieldSpec):
        if isinstance(field.dtype, torch.dtype):
            return None
        return f"{path} has dtype {field.dtype!r}; accepted: a torch.dtype"
    if isinstance(field, type) and field is not int:
        return f"{path} is the type {field.__name__}; accepted: int for a host value that may change"
    if isinstance(field, (Tensor, np.ndarray)):
        return f"{path} is a {type(field).__name__}; accepted: a TensorFieldSpec, int, or a static value"
    return None


def _surely_fits(spec: Any, data: Any) -> bool:
    if type(spec) is dict:
        if type(data) is not dict or spec.keys() != data.keys():
            return False
        return all(_surely_fits(item, data[key]) for key, item in spec.items())
    if type(spec) is TensorFieldSpec:
        if not _is_plain_tensor(data) or data.dtype is not spec.dtype:
            return False
        shape = tuple(data.shape)
        if shape != spec.shape and (len(shape) != len(spec.shape) or not all(map(_is_size, spec.shape, shape))):
            return False
        return spec.device is None or data.device.type == spec.device
    return spec is int and type(data) is int and _INT64.min <= data <= _INT64.max


def _is_size(wanted: int | None, found: int) -> bool:
    return wanted is None or wanted == found


def _take_apart(
    spec: Any, data: Any, path: str, tensors: list[Tensor], numbers: list[int], device: torch.device | None
) -> None:
    if _is_container(spec):
        _check_container(spec, data, path)
        inside = [data[key] for key in spec] if type(spec) is dict else list(data)
        for (item, inner), value in zip(_items(spec, path), inside, strict=True):
            _take_apart(item, value, inner, tensors, numbers, device)
    elif isinstance(spec, TensorFieldSpec):
        if not _fits(spec, data, device):
            raise _misfit(path, spec, data, device)
        numbers.extend(found for size, found in zip(spec.shape, data.shape, strict=True) if size is None)
        tensors.append(data)
    elif spec is int:
        if type(data) is not int or not _INT64.min <= data <= _INT64.max:
            raise _misfit(path, spec, data)
        numbers.append(data)
    elif not isinstance(spec, _Static) and not _same(spec, data):
        raise _misfit(path, spec, data)


def _check_container(spec: Any, data: Any, path: str) -> None:
    if type(data) is not type(spec):
        raise ValueError(f"field {path}: expected a {type(spec).__name__}, found {_found(data)}")
    if type(spec) is dict and set(spec) != set(data):
        missing, more = [key for key in spec if key not in data], [key for key in data if key not in spec]
        raise ValueError(
            f"field {path}: expected keys {list(spec)}, found {list(data)} (missing {missing}, not in the spec {more})"
        )
    if len(spec) != len(data):
        raise ValueError(f"field {path}: expected {len(spec)} items, found {len(data)}")


def _fits(field: TensorFieldSpec, data: Any, device: torch.device | None) -> bool:
    return (
        _is_plain_tensor(data)
        and data.dtype == field.dtype
        and data.dim() == len(field.shape)
        and all(size in (None, found) for size, found in zip(field.shape, data.shape, strict=True))
        and (device in (None, data.device) if field.device is None else data.device.type == field.device)
    )


def _same(expected: Any, found: Any) -> bool:
    if expected is found:
        return True
    try:
        return type(expected) is type(found) and bool(expected == found)
    except Exception:  # what cannot be compared is not known to be the same
        return False


def _misfit(path: str, spec: Any, data: Any, device: torch.device | None = None) -> ValueError:
    return ValueError(f"field {path}: expected {_expected(spec, device)}, found {_found(data)}")


def _expected(field: Any, device: torch.device | None = None) -> str:
    if isinstance(field, TensorFieldSpec):
        sizes = ", ".join("any" if size is None else str(size) for size in field.shape)
        wanted = field.device or device
        place = "" if wanted is None else f" on {wanted}"
        return f"{_dtype_name(field.dtype)}[{sizes}]{place}"
    return "an int of 64 bits" if field is int else _found(field.value if isinstance(field, _Static) else field)


def _found(value: Any) -> str:
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        kind = "" if _is_plain_tensor(value) else f" ({type(value).__name__}, {value.layout})"
        return f"{_dtype_name(value.dtype)}{list(value.shape)}{place}{kind}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}"
    plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return f"{value!r:.80}" if plain else f"a {type(value).__name__}"


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
