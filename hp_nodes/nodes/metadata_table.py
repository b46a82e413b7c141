"""Precomputed metadata: whatever holds an entry for each dataset index, looked up for a whole window at once.

Takes a sequence, a numpy array or memory map, a torch tensor, an Arrow array or table, a Hugging Face dataset or one of
its columns, a pandas series or frame: anything with ``__len__`` and ``__getitem__``. Gives :class:`SampleMetadata`.

An entry is a :class:`SampleMetadata`, an int (its ``pack_tokens``), or named fields, which are those of SampleMetadata:
``pack_tokens`` (required), ``cost``, ``features``, ``packing_costs`` (each with named fields of its own) and
``sample_id``; a component of the cost (``llm``, ``io``, ...) may stand beside them. So a structured array of dtype
``[("pack_tokens", "i4"), ("llm", "f8"), ("packing_costs", [("images", "f4")])]`` says everything. Another name is
refused: a table that also holds the records would be read for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.types import SampleMetadata, WorkloadCost

__all__ = ["MetadataTable"]

_COMPONENTS = tuple(component.name for component in fields(WorkloadCost))
_NAMES = (*(named.name for named in fields(SampleMetadata)), *_COMPONENTS)


class MetadataTable:
    """Entries by dataset index.

    Args:
        table: see the module. One that can be asked for many indices is asked once a window.

    Raises:
        ValueError: it has no ``__getitem__`` or ``__len__``, is an array of something else than integers or named
            fields, or has a column that SampleMetadata does not have.
    """

    def __init__(self, table: Any) -> None:
        if not (hasattr(table, "__getitem__") and hasattr(table, "__len__")):
            raise ValueError(f"metadata is a {type(table).__name__}; accepted: anything with __getitem__ and __len__")
        _check_columns(table)
        self._table = table
        self._take = _LOOK_UPS.get(type(table).__module__.partition(".")[0], _one_by_one)
        if isinstance(table, np.ndarray):  # a memory map, or any other subclass, wherever it is defined
            self._take = _from_numpy

    def __len__(self) -> int:
        return len(self._table)

    def entries(self, indices: NDArray[np.int64]) -> Iterable[Any]:
        """The entry of each index, int64[n], all of them within the table."""
        return self._take(self._table, indices)

    @staticmethod
    def described(entry: Any) -> SampleMetadata:
        """An entry as metadata.

        Raises:
            TypeError: it is none of the kinds that an entry may be.
            ValueError: a field is unknown or out of range.
        """
        if isinstance(entry, SampleMetadata):
            return entry
        if isinstance(entry, (int, np.integer)) and not isinstance(entry, bool):
            return SampleMetadata(int(entry))
        if isinstance(entry, Mapping):
            return _from_fields(entry)
        raise TypeError(
            f"metadata[index] is {entry!r}; accepted: a SampleMetadata, an int (its pack_tokens), or named fields "
            f"{list(_NAMES)}"
        )


def _from_fields(given: Mapping[str, Any]) -> SampleMetadata:
    _check_names(given)
    cost = given.get("cost")
    components = {name: float(given[name]) for name in _COMPONENTS if name in given}
    if not isinstance(cost, WorkloadCost):
        cost = WorkloadCost(**{**(cost or {}), **components})
    elif components:
        raise ValueError(f"cost is given as a whole and by {sorted(components)}; accepted: one of the two")
    tokens = given["pack_tokens"]
    return SampleMetadata(
        pack_tokens=int(tokens) if isinstance(tokens, np.integer) else tokens,
        cost=cost,
        features=given.get("features") or {},
        packing_costs=given.get("packing_costs") or {},
        sample_id=given.get("sample_id"),
    )


def _check_names(names: Iterable[str]) -> None:
    names = list(names)
    unknown = [name for name in names if name not in _NAMES]
    if unknown or "pack_tokens" not in names:
        problem = f"unknown fields {unknown}" if unknown else "no field 'pack_tokens'"
        raise ValueError(f"metadata has {problem}; accepted: pack_tokens, and any of {list(_NAMES[1:])}")


def _check_columns(table: Any) -> None:
    """What can be known before anything is read."""
    if isinstance(table, np.ndarray):
        named = table.dtype.names is not None
        if table.ndim != 1 or not (named or table.dtype.kind in "iuO"):
            raise ValueError(
                f"metadata is an array {table.dtype}{list(table.shape)}; accepted: one dimension, of integers (the "
                "pack_tokens) or with named fields"
            )
        if named:
            _check_names(table.dtype.names or ())
        return
    columns = getattr(table, "column_names", None)  # Arrow tables, Hugging Face datasets
    if columns is None and getattr(table, "ndim", 1) == 2:
        columns = getattr(table, "columns", None)  # pandas frames
    if columns is not None and not callable(columns):
        try:
            _check_names(columns)
        except ValueError as error:
            raise ValueError(f"{error} (the table's columns are {list(columns)}: select those first)") from None


# ---- one look-up for many indices, where the table can do that


def _one_by_one(table: Any, indices: NDArray[np.int64]) -> Iterable[Any]:
    many = getattr(table, "__getitems__", None)  # torch's own name for it
    return many(indices.tolist()) if many is not None else (table[index] for index in indices.tolist())


def _from_numpy(table: NDArray[Any], indices: NDArray[np.int64]) -> Iterable[Any]:
    return _rows(np.asarray(table[indices]))


def _from_torch(table: Any, indices: NDArray[np.int64]) -> Iterable[Any]:
    return table[indices].tolist() if hasattr(table, "tolist") else _one_by_one(table, indices)


def _from_arrow(table: Any, indices: NDArray[np.int64]) -> Iterable[Any]:
    taken = table.take(indices)
    return _rows(taken.to_pydict() if hasattr(taken, "to_pydict") else taken.to_pylist())


def _from_pandas(table: Any, indices: NDArray[np.int64]) -> Iterable[Any]:
    taken = table.iloc[indices]
    return _rows(taken.to_dict("list") if hasattr(taken, "columns") else taken.tolist())


def _from_hugging_face(table: Any, indices: NDArray[np.int64]) -> Iterable[Any]:
    return _rows(table[indices.tolist()])


_LOOK_UPS: dict[str, Callable[[Any, NDArray[np.int64]], Iterable[Any]]] = {
    "torch": _from_torch,
    "pyarrow": _from_arrow,
    "pandas": _from_pandas,
    "datasets": _from_hugging_face,
}


def _rows(found: Any) -> Sequence[Any]:
    """Columns, at any depth, as one entry a row."""
    if isinstance(found, np.ndarray) and found.dtype.names is not None:
        found = {name: found[name] for name in found.dtype.names}
    if isinstance(found, Mapping):
        columns = {name: _rows(column) for name, column in found.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows: Sequence[Any] = found.tolist() if hasattr(found, "tolist") else found
    return rows
