"""State as text: plain values, and the few types that generators keep their state in, written as JSON and read back
equal.

JSON alone would turn tuples into lists and int keys into strings; those, bytes, numpy arrays and scalars, and CPU
tensors are written with a tag. Anything else is refused with its path.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import torch

__all__ = ["Unsaveable", "from_text", "to_text"]

_TAG = "__hp_nodes__"


class Unsaveable:
    """Stands in a state for something that cannot be saved; writing it as text raises ``why`` as a ValueError."""

    def __init__(self, why: str) -> None:
        self.why = why


def to_text(value: Any) -> str:
    """JSON text of ``value``.

    Raises:
        ValueError: a value inside is of a type that a state may not hold; the message gives its path.
    """
    return json.dumps(_encoded(value, "state"), separators=(",", ":"), allow_nan=False)


def from_text(text: str) -> Any:
    """The value that :func:`to_text` wrote.

    Raises:
        ValueError: the text is not one of its.
    """
    return _decoded(json.loads(text))


def _encoded(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if kind is list:
        return [_encoded(item, f"{path}[{place}]") for place, item in enumerate(value)]
    if kind is tuple:
        return {_TAG: "tuple", "items": [_encoded(item, f"{path}[{place}]") for place, item in enumerate(value)]}
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _encoded(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [[_encoded(key, path), _encoded(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict", "items": pairs}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "value": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {_TAG: "scalar", "dtype": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        data = base64.b64encode(value.tobytes()).decode()
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": data}
    if kind is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided and value.dtype in _DTYPES:
        return {_TAG: "tensor", "array": _encoded(value.detach().contiguous().numpy(), path)}
    if kind is Unsaveable:
        raise ValueError(value.why)
    raise ValueError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; a node's state may hold None, bool, int, float, str, "
        "bytes, list, tuple, dict, numpy numbers and arrays, and CPU tensors of integers or floats"
    )


_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decoded(item) for key, item in value.items()}
    if tag == "float":
        return float(value["value"])
    if tag == "tuple":
        return tuple(_decoded(item) for item in value["items"])
    if tag == "dict":
        return {_decoded(key): _decoded(item) for key, item in value["items"]}
    if tag == "tensor":
        return torch.from_numpy(_decoded(value["array"]))
    if tag not in ("bytes", "bytearray", "scalar", "array"):
        raise ValueError(f"the state's text has an unknown tag {tag!r}")
    data = base64.b64decode(value["value"])
    if tag in ("bytes", "bytearray"):
        return data if tag == "bytes" else bytearray(data)
    array = np.frombuffer(data, dtype=np.dtype(value["dtype"]))
    return array[0] if tag == "scalar" else array.reshape(value["shape"]).copy()
