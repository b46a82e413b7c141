"""The one agreement of construction: what each rank found wrong or has, told to all before anything else is made.

Takes a rank's offer, gives that of its constructor; or every rank raises the same ValueError, with every problem and
the ranks that have it, or every value that differs and who has which.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_nodes.errors import some_of
from hp_nodes.transport import DataTopology, Transport
from hp_nodes.transport.agreement import gather_texts

__all__ = ["Offer", "agree"]


@dataclass(frozen=True)
class Offer:
    """What a rank says at construction: its problems, else what it has. Plain values, since it travels as JSON."""

    problems: list[str]
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Values that all ranks which have them must agree on."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    """The state that the constructor's graph starts with."""
    length: int | None = None


def agree(control: Transport, topology: DataTopology, mine: Offer) -> Offer:
    """What this rank's constructor offers, after all ranks have heard each other.

    Raises:
        ValueError: a rank has a problem, or ranks differ.
    """
    text = json.dumps(dataclasses.asdict(mine)).encode()
    texts = gather_texts(control, text, "construction")
    offers = {said: Offer(**json.loads(said)) for said in set(texts)}  # thousands of ranks say few different things
    told = [offers[said] for said in texts]
    ranks = control.global_ranks
    found: dict[str, list[int]] = {}
    for rank, said in zip(ranks, told, strict=True):
        for problem in said.problems:
            found.setdefault(problem, []).append(rank)
    if not found:
        found = _differences({rank: said.shared for rank, said in zip(ranks, told, strict=True)})
    if found:
        raise ValueError("; ".join(_with_ranks(problem, who, ranks) for problem, who in found.items()))
    return told[ranks.index(topology.model_parallel_ranks[0])]


def _differences(shared: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Each value that ranks should share and do not, with what each has."""
    different = list({id(values): values for values in shared.values()}.values())
    names = sorted({name for values in different for name in values})
    problems: dict[str, list[int]] = {}
    for name in names:
        if len({json.dumps(values[name]) for values in different if name in values}) < 2:
            continue
        seen: dict[str, list[int]] = {}
        for rank, values in shared.items():
            if name in values:
                seen.setdefault(json.dumps(values[name]), []).append(rank)
        shown = ", ".join(f"{value} on ranks {some_of(who)}" for value, who in seen.items())
        problems[f"{name} differs: {shown}; accepted: the same on every rank"] = []
    return problems


def _with_ranks(problem: str, who: list[int], ranks: Sequence[int]) -> str:
    if len(who) == len(ranks) or not who:
        return problem
    return f"rank {who[0]}: {problem}" if len(who) == 1 else f"ranks {some_of(who)}: {problem}"
