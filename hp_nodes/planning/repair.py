"""Finds bins for samples that fit nowhere: free room is gathered in a few bins by moves and swaps until they fit.

Small rooms of many bins are worth nothing to a longer sample. So each bin with much room is paired with another, and of
all exchanges between the two (one or two samples each way) the one is taken that leaves the other bin fullest; the room
of both is then in one place. Repeated, it doubles like the rounds of a tournament.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance
from hp_nodes.planning.packing import Packing
from hp_nodes.planning.weigh import ExchangeSets, Pairs

__all__ = ["repair"]

ATTEMPTS = 60
IDLE = 8
"""Attempts without gain before it is given up; donors differ from one to the next."""
AT_ONCE = 512
"""Roomy bins in one attempt; bounds its time and memory."""
HOPELESS = 0.98
"""Samples that take more than this part of all free room are not tried: rooms would have to match exactly."""
DONORS = 8
"""Bins that each roomy bin looks at in one attempt."""


def repair(instance: Instance, bins: NDArray[np.int32], nowhere: NDArray[np.intp]) -> bool:
    """Places the samples of ``nowhere`` (their bin is -1), changing ``bins`` in place. False when some remain."""
    packing = Packing(instance, bins)
    free = int(packing.room(np.flatnonzero(packing.used <= instance.capacity)).sum())
    if int(packing.tokens[nowhere].sum()) > HOPELESS * free:
        return False
    idle = 0
    for attempt in range(ATTEMPTS):
        nowhere = _place_roomiest(packing, nowhere)
        if not len(nowhere):
            return True
        idle = 0 if _gather(packing, len(nowhere), attempt) else idle + 1
        if idle > IDLE:
            break
    return False


def _place_roomiest(packing: Packing, nowhere: NDArray[np.intp]) -> NDArray[np.intp]:
    """The longest sample to the bin with most room, and so on; returns those that did not fit."""
    nowhere = nowhere[np.argsort(-packing.tokens[nowhere], kind="stable")]
    while len(nowhere):
        bins = np.argsort(packing.used, kind="stable")[: len(nowhere)]
        batch = nowhere[: len(bins)]
        fits = packing.tokens[batch] <= packing.room(bins)
        if packing.taken.shape[1]:
            fits &= (packing.needs[batch] + packing.taken[bins] <= packing.instance.limits).all(axis=1)
        if not fits.any():
            break
        packing.add(batch[fits], bins[fits])
        nowhere = np.concatenate([batch[~fits], nowhere[len(bins) :]])
    return nowhere


def _gather(packing: Packing, wanted: int, attempt: int) -> int:
    """One round of the tournament; returns how many bins gained room."""
    packing.index()
    order = np.argsort(packing.used, kind="stable")
    order = order[packing.room(order) >= 0]
    half = min(wanted, len(order) // 2, AT_ONCE)
    if not half:
        return 0
    roomy, rest = order[:half, None], order[half:]
    donors = min(DONORS, len(rest) // half)
    place = np.arange(half)[:, None] + half * np.arange(donors)[None, :] + attempt * donors * half
    giving = rest[place % len(rest)]
    sets = ExchangeSets(packing, thorough=True)
    pairs = Pairs(packing, sets, roomy, giving)
    value = -pairs.moved(packing.tokens)
    pairs.forbid(value)
    flat = value.reshape(half, -1)
    best = flat.argmin(axis=1)
    row = np.flatnonzero(flat[np.arange(half), best] < 0)
    donor, chosen = np.divmod(best[row], sets.num * sets.num)
    given, taken = pairs.samples(row, donor, chosen)
    packing.swap(given, roomy[row, 0], taken, giving[row, donor])
    return len(row)
