"""Where the members of a group meet: a part of torch.distributed's store that nobody else uses."""

from __future__ import annotations

import datetime
import threading
import time
import uuid
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from hp_nodes.errors import some_of

__all__ = ["meet"]

_RENDEZVOUS_POLL_S = 0.005
_made: dict[str, int] = {}
_made_lock = threading.Lock()


def meet(global_ranks: tuple[int, ...], place: int, timeout_s: float) -> Any:
    """A store that only this group uses, whatever earlier attempts of the same ranks left behind, or earlier processes:
    torchrun keeps its store when it restarts a job.

    Each member brings a token of its own, and the first one answers each token with the name of the group until every
    member has come. So neither a token nor an answer of the past is taken for one of now.
    """
    store = c10d._get_default_store()
    members = (
        "-".join(map(str, global_ranks))
        if len(global_ranks) <= 16
        else uuid.uuid5(uuid.NAMESPACE_OID, str(global_ranks)).hex
    )
    with _made_lock:
        number = _made.get(members, 0)
    base = f"hp_nodes/{members}/{number}/"
    try:
        name = (
            _name_to_all(store, base, len(global_ranks), timeout_s)
            if place == 0
            else _name_from_first(store, base, place, timeout_s)
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"not all of ranks {some_of(global_ranks)} came to make their group within {timeout_s} s: {error}"
        ) from error
    with _made_lock:
        _made[members] = number + 1
    return PrefixStore(f"hp_nodes/{name}", store)


def _name_to_all(store: Any, base: str, size: int, timeout_s: float) -> str:
    """The first member: names the group and tells every other, again where another token stands meanwhile."""
    name = uuid.uuid4().hex
    answered: dict[int, str] = dict.fromkeys(range(1, size), "")
    deadline = time.monotonic() + timeout_s
    while answered:
        for place, token in list(answered.items()):
            if token and store.check([f"{base}{token}/came"]):
                del answered[place]
                for key in (f"{base}{token}/came", f"{base}{token}/name", f"{base}{place}"):
                    store.delete_key(key)
            elif store.check([f"{base}{place}"]):
                found = store.get(f"{base}{place}").decode()
                if found != token:
                    store.set(f"{base}{found}/name", name)
                    answered[place] = found
        if answered and time.monotonic() > deadline:
            raise RuntimeError(f"places {some_of(sorted(answered))} of {size} are missing")
        time.sleep(_RENDEZVOUS_POLL_S if answered else 0)
    return name


def _name_from_first(store: Any, base: str, place: int, timeout_s: float) -> str:
    token = uuid.uuid4().hex
    store.set(f"{base}{place}", token)
    try:
        store.wait([f"{base}{token}/name"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        store.delete_key(f"{base}{place}")
        raise
    name: str = store.get(f"{base}{token}/name").decode()
    store.set(f"{base}{token}/came", "")
    return name
