"""The packing problem: the numbers of one window, over all data-parallel ranks.

Takes arrays as they were gathered, checks them once and keeps them read-only as contiguous arrays of fixed dtypes.
Everything behind this border trusts its types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PackingProblem"]

NAMED_AT_MOST = 8
"""How many samples an error names before it says how many more there are."""


@dataclass(frozen=True, eq=False, init=False)
class PackingProblem:
    """Samples to be put into ``data_parallel_size * num_rounds * local_batch_size`` bins of ``seq_len`` tokens.

    Bins are numbered rank-major, then round, then slot: ``bin = (rank * num_rounds + round) * local_batch_size +
    slot``.

    Args:
        tokens: int64[N], tokens of each sample, at least 1.
        costs: float64[N], finite and at least 0, in any unit.
        reference: int32[N], the bin of each sample without balancing, or None when there is none. It also says which
            rank holds a sample now. A bin above ``seq_len`` or a budget is refused; an empty one only means that the
            reference itself cannot be used.
        data_parallel_size, num_rounds, local_batch_size, seq_len: ints of at least 1.
        keys: int64[N] or int64[N, 1 to 3], unique, compared column by column. With them the plan does not depend on
            the order of the samples; without them a sample's place in the arrays is its key.
        key_names: what errors call each column of ``keys``.
        sizes: int64[N], bytes of each sample, at least 0. Default: as many as it has tokens.
        budgets: float64[N, K], what each sample takes of K budgets of a bin; finite and at least 0.
        budget_limits: float64[K], or by name; a bin holds up to this much, the limit included. Sums of floats are
            rounded: 1e-9 of the limit counts as nothing.
        initial_loads: float64[data_parallel_size], what each rank already carries from earlier windows of the step; it
            counts for the objective ``makespan`` alone.
        allow_oversized: a sample of more than ``seq_len`` tokens takes a bin alone instead of being refused.
        padding_cost: float64[seq_len + 1], the cost of 0, 1, ... ``seq_len`` tokens of padding in one bin.
        features: named float64[N] columns for a user's algorithm.

    Raises:
        ValueError: an argument is out of range; where one sample is at fault it is named, by its key when keys are
        given.
    """

    tokens: NDArray[np.int64]
    costs: NDArray[np.float64]
    reference: NDArray[np.int32] | None
    data_parallel_size: int
    num_rounds: int
    local_batch_size: int
    seq_len: int
    keys: NDArray[np.int64] | None
    key_names: tuple[str, ...]
    sizes: NDArray[np.int64] | None
    budgets: NDArray[np.float64] | None
    budget_limits: NDArray[np.float64] | None
    budget_names: tuple[str, ...]
    """What errors call each budget: its name, or its number."""
    initial_loads: NDArray[np.float64] | None
    allow_oversized: bool
    padding_cost: NDArray[np.float64] | None
    features: Mapping[str, NDArray[np.float64]]

    def __init__(
        self,
        tokens: ArrayLike,
        costs: ArrayLike,
        reference: ArrayLike | None = None,
        *,
        data_parallel_size: int,
        num_rounds: int,
        local_batch_size: int,
        seq_len: int,
        keys: ArrayLike | None = None,
        key_names: Sequence[str] = (),
        sizes: ArrayLike | None = None,
        budgets: ArrayLike | None = None,
        budget_limits: ArrayLike | Mapping[str, float] | None = None,
        initial_loads: ArrayLike | None = None,
        allow_oversized: bool = False,
        padding_cost: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("data_parallel_size", _positive("data_parallel_size", data_parallel_size))
        put("num_rounds", _positive("num_rounds", num_rounds))
        put("local_batch_size", _positive("local_batch_size", local_batch_size))
        put("seq_len", _positive("seq_len", seq_len))
        if self.num_bins >= 2**31:
            raise ValueError(f"{self.num_bins} bins (ranks * rounds * slots); accepted: fewer than 2**31")
        put("allow_oversized", bool(allow_oversized))
        put("tokens", _integers("tokens", tokens))
        count = len(self.tokens)
        put("keys", None if keys is None else _keys(keys, count))
        put("key_names", tuple(key_names))
        put("costs", _numbers("costs", costs, (count,)))
        put("sizes", None if sizes is None else _integers("sizes", sizes, count))
        put("initial_loads", _optional("initial_loads", initial_loads, (self.data_parallel_size,)))
        put("padding_cost", _optional("padding_cost", padding_cost, (self.seq_len + 1,)))
        columns = {} if features is None else features
        put("features", {k: _readonly(_floats(f"feature {k!r}", v, (count,))) for k, v in columns.items()})
        self._take_budgets(budgets, budget_limits)
        self._refuse(self.tokens < 1, "tokens must be at least 1", self.tokens)
        self._refuse(~(np.isfinite(self.costs) & (self.costs >= 0)), "costs must be finite and at least 0", self.costs)
        if self.sizes is not None:
            self._refuse(self.sizes < 0, "sizes must be at least 0", self.sizes)
        self._check_single_samples()
        put("reference", None if reference is None else self._bins("reference", reference))
        if self.reference is not None:
            self._check_capacity("the reference", self.reference)

    @property
    def num_samples(self) -> int:
        return len(self.tokens)

    @property
    def num_bins(self) -> int:
        """Bins of the whole window, over all ranks."""
        return self.data_parallel_size * self.num_rounds * self.local_batch_size

    @property
    def feature_columns(self) -> Mapping[str, NDArray[np.float64]]:
        """The named numeric features, float64[N] each, in the order of ``tokens``."""
        return self.features

    def name(self, sample: int) -> str:
        """What an error calls a sample: its key, or its place when there are no keys."""
        if self.keys is None:
            return f"sample at place {sample}"
        key = self.keys[sample]
        if len(self.key_names) == key.size:
            return (
                f"sample ({', '.join(f'{name} {int(part)}' for name, part in zip(self.key_names, key, strict=True))})"
            )
        return f"sample {int(key)}" if key.ndim == 0 else f"sample {tuple(int(part) for part in key)}"

    def names(self, samples: Sequence[int] | NDArray[np.intp]) -> str:
        """Several samples for an error, the first few by name."""
        shown = ", ".join(self.name(int(sample)) for sample in samples[:NAMED_AT_MOST])
        return shown if len(samples) <= NAMED_AT_MOST else f"{shown} and {len(samples) - NAMED_AT_MOST} more"

    def check_bins(self, what: str, bins: ArrayLike) -> NDArray[np.int32]:
        """Returns ``bins`` as int32[N] after checking that it keeps every hard constraint.

        Raises:
            ValueError: a sample without a valid bin, a bin above ``seq_len`` or a budget, an oversized sample in
                company, or an empty bin; it names the samples.
        """
        checked = self._bins(what, bins)
        self._check_capacity(what, checked)
        empty = np.flatnonzero(np.bincount(checked, minlength=self.num_bins) == 0)
        if len(empty):
            raise ValueError(
                f"{what} leaves {len(empty)} of {self.num_bins} bins empty, the first is {self.place(empty[0])}"
            )
        return checked

    def place(self, bin_number: int | np.integer[Any]) -> str:
        """What an error calls a bin."""
        slot_of_rank, slot = divmod(int(bin_number), self.local_batch_size)
        rank, round_ = divmod(slot_of_rank, self.num_rounds)
        return f"bin {int(bin_number)} (rank {rank}, round {round_}, slot {slot})"

    def oversized_bins(self, bins: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool[num_bins]: True where a bin holds a sample of more than ``seq_len`` tokens."""
        flags = np.zeros(self.num_bins, np.bool_)
        flags[bins[self.tokens > self.seq_len]] = True
        return flags

    def _take_budgets(self, budgets: ArrayLike | None, limits: ArrayLike | Mapping[str, float] | None) -> None:
        if (budgets is None) != (limits is None):
            raise ValueError("budgets and budget_limits are given together or not at all")
        if budgets is None or limits is None:
            object.__setattr__(self, "budgets", None)
            object.__setattr__(self, "budget_limits", None)
            object.__setattr__(self, "budget_names", ())
            return
        names = [repr(name) for name in limits] if isinstance(limits, Mapping) else None
        limits = list(limits.values()) if isinstance(limits, Mapping) else limits
        ceiling = np.atleast_1d(np.asarray(limits, np.float64))
        if ceiling.ndim != 1 or not (np.isfinite(ceiling) & (ceiling >= 0)).all():
            raise ValueError(f"budget_limits is {ceiling.tolist()}; accepted: a list of finite numbers >= 0")
        taken = np.asarray(budgets, np.float64)
        if taken.shape != (self.num_samples, len(ceiling)):
            raise ValueError(
                f"budgets has shape {taken.shape}; accepted: {(self.num_samples, len(ceiling))}, one column a limit"
            )
        object.__setattr__(self, "budgets", _readonly(taken))
        object.__setattr__(self, "budget_limits", _readonly(ceiling))
        object.__setattr__(self, "budget_names", tuple(names or map(str, range(len(ceiling)))))
        for column, name in enumerate(self.budget_names):
            values = taken[:, column]
            self._refuse(~(np.isfinite(values) & (values >= 0)), f"budget {name} must be finite and at least 0", values)

    def _refuse(self, bad: NDArray[np.bool_], rule: str, values: NDArray[Any]) -> None:
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise ValueError(f"{rule}: {self.name(first)} has {values[first]} ({int(bad.sum())} such samples)")

    def _check_single_samples(self) -> None:
        if not self.allow_oversized:
            longer = np.flatnonzero(self.tokens > self.seq_len)
            if len(longer):
                shown = ", ".join(f"{self.name(i)} has {self.tokens[i]} tokens" for i in longer[:NAMED_AT_MOST])
                raise ValueError(
                    f"{len(longer)} samples are longer than seq_len {self.seq_len}: {shown}; "
                    "shorten them, raise seq_len, or allow oversized samples alone in a bin"
                )
        if self.budgets is None or self.budget_limits is None:
            return
        for column, (name, limit) in enumerate(zip(self.budget_names, self.budget_limits, strict=True)):
            values = self.budgets[:, column]
            self._refuse(values > tolerated(limit), f"a bin's budget {name} is limited to {limit}", values)

    def _bins(self, what: str, bins: ArrayLike) -> NDArray[np.int32]:
        given = np.asarray(bins)
        if given.shape != (self.num_samples,) or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(
                f"{what} has shape {given.shape} and dtype {given.dtype}; "
                f"accepted: one int a sample, shape {(self.num_samples,)}"
            )
        self._refuse((given < 0) | (given >= self.num_bins), f"{what} must name bins 0 to {self.num_bins - 1}", given)
        return _readonly(given.astype(np.int32))

    def _check_capacity(self, what: str, bins: NDArray[np.int32]) -> None:
        company = np.bincount(bins, minlength=self.num_bins)
        used = np.zeros(self.num_bins, np.int64)
        np.add.at(used, bins, self.tokens)
        alone = (company == 1) & self.allow_oversized
        self._refuse_bin(what, bins, (used > self.seq_len) & ~alone, used, f"tokens, seq_len is {self.seq_len}")
        if self.budgets is None or self.budget_limits is None:
            return
        for column, (name, limit) in enumerate(zip(self.budget_names, self.budget_limits, strict=True)):
            taken = np.bincount(bins, weights=self.budgets[:, column], minlength=self.num_bins)
            self._refuse_bin(what, bins, taken > tolerated(limit), taken, f"of budget {name}, its limit is {limit}")

    def _refuse_bin(
        self, what: str, bins: NDArray[np.int32], bad: NDArray[np.bool_], used: NDArray[Any], rule: str
    ) -> None:
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            inside = np.flatnonzero(bins == first)
            raise ValueError(f"{what} puts {used[first]} {rule}, into {self.place(first)}: {self.names(inside)}")


def tolerated(limit: float) -> float:
    """A budget's limit with the room that rounded sums of floats need."""
    return float(limit) * (1 + 1e-9)


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}; accepted: an int >= 1")
    return int(value)


def _readonly(array: NDArray[Any]) -> NDArray[Any]:
    view: NDArray[Any] = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _integers(name: str, values: ArrayLike, count: int | None = None) -> NDArray[np.int64]:
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu") or (count is not None and len(given) != count):
        wanted = "one int a sample" if count is None else f"one int for each of {count} samples"
        raise ValueError(f"{name} has shape {given.shape} and dtype {given.dtype}; accepted: {wanted}")
    return _readonly(given.astype(np.int64, copy=False))


def _floats(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    given = np.asarray(values, np.float64)
    if given.shape != shape:
        raise ValueError(f"{name} has shape {given.shape}; accepted: {shape}")
    return given


def _numbers(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _readonly(_floats(name, values, shape))


def _optional(name: str, values: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    if values is None:
        return None
    given = _numbers(name, values, shape)
    bad = given[~(np.isfinite(given) & (given >= 0))]
    if len(bad):
        raise ValueError(f"{name} holds {float(bad[0])}; accepted: finite numbers >= 0")
    return given


def _keys(keys: ArrayLike, count: int) -> NDArray[np.int64]:
    given = np.asarray(keys)
    fits = given.ndim in (1, 2) and len(given) == count and (given.ndim == 1 or 1 <= given.shape[1] <= 3)
    if not fits or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"keys has shape {given.shape} and dtype {given.dtype}; "
            f"accepted: ints, one or up to three for each of {count} samples"
        )
    columns = given.astype(np.int64, copy=False)
    rows = columns[:, None] if columns.ndim == 1 else columns
    order = np.lexsort(rows.T[::-1])
    same = np.flatnonzero((rows[order][1:] == rows[order][:-1]).all(axis=1))
    if len(same):
        raise ValueError(
            f"keys must be unique; {tuple(rows[order[same[0]]].tolist())} stands at places "
            f"{sorted(order[same[0] : same[0] + 2].tolist())}"
        )
    return _readonly(columns)
