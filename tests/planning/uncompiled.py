"""Plans as they are made where numba is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hp_nodes.planning import compiled


@contextmanager
def uncompiled() -> Iterator[None]:
    with mock.patch.object(compiled, "_compiler", return_value=None):
        compiled.kernel.cache_clear()
        yield
    compiled.kernel.cache_clear()
