"""What a sample costs the model, computed from its metadata.

A cost model is a callable ``SampleMetadata -> WorkloadCost``; what is balanced is its ``llm``. The models here also
price padding (``padding_cost``) and compute many samples at once (``costs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hp_nodes.types import SampleMetadata, WorkloadCost

__all__ = ["CausalAttentionCostModel", "PolynomialCostModel", "fit_cost_model"]


class CausalAttentionCostModel:
    """``tokens ** 2``: causal attention alone. A padding tail is a segment like any other."""

    def __call__(self, metadata: SampleMetadata) -> WorkloadCost:
        return WorkloadCost(llm=float(metadata.pack_tokens) ** 2)

    def costs(self, metadata: Sequence[SampleMetadata]) -> NDArray[np.float64]:
        """float64[n]: the ``llm`` cost of each sample."""
        tokens = pack_tokens(metadata)
        return tokens * tokens

    def padding_cost(self, tokens: int) -> float:
        return float(tokens) ** 2


@dataclass(frozen=True, slots=True)
class PolynomialCostModel:
    """``per_token * tokens + per_token_squared * tokens ** 2``, in seconds when fitted to seconds."""

    per_token: float
    per_token_squared: float

    def __call__(self, metadata: SampleMetadata) -> WorkloadCost:
        return WorkloadCost(llm=self.padding_cost(metadata.pack_tokens))

    def costs(self, metadata: Sequence[SampleMetadata]) -> NDArray[np.float64]:
        """float64[n]: the ``llm`` cost of each sample."""
        tokens = pack_tokens(metadata)
        return (self.per_token + self.per_token_squared * tokens) * tokens

    def padding_cost(self, tokens: int) -> float:
        return (self.per_token + self.per_token_squared * tokens) * tokens


def fit_cost_model(segments: Sequence[ArrayLike], seconds: ArrayLike) -> PolynomialCostModel:
    """Fits per-token and per-token-squared seconds to measured micro-batches, by non-negative least squares.

    Args:
        segments: for each observation the tokens of each of its segments (padding tails included).
        seconds: float64[observations], the measured time of each.

    A constant per observation (launch overheads) is fitted as well and dropped: it is the same for every plan.

    Raises:
        ValueError: there are fewer than two observations, or one is empty, not positive or not finite.
    """
    measured = np.asarray(seconds, np.float64)
    if measured.ndim != 1 or len(measured) != len(segments) or len(measured) < 2:
        raise ValueError(
            f"{len(segments)} observations and seconds of shape {measured.shape}; accepted: as many, at least 2"
        )
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError(f"seconds must be finite and above 0; given {measured.tolist()[:8]}")
    rows = [np.atleast_1d(np.asarray(tokens, np.float64)) for tokens in segments]
    for place, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not (np.isfinite(row) & (row >= 0)).all():
            raise ValueError(
                f"observation {place} has segments {row.tolist()}; accepted: at least one number of tokens >= 0"
            )
    design = np.array([[row.sum(), float((row * row).sum()), 1.0] for row in rows])
    per_token, per_token_squared = _non_negative(design, measured)[:2]
    if (per_token == 0 and per_token_squared == 0) or (design == design[0]).all():
        raise ValueError("the measured seconds do not grow with tokens; observe micro-batches of different sizes")
    return PolynomialCostModel(float(per_token), float(per_token_squared))


def _non_negative(design: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares over all subsets of columns; the best one whose coefficients are all >= 0."""
    best, least = np.zeros(design.shape[1]), float(target @ target)
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    for chosen in range(1, 2 ** design.shape[1]):
        columns = [column for column in range(design.shape[1]) if chosen >> column & 1]
        solved = np.linalg.lstsq((design / scale)[:, columns], target, rcond=None)[0] / scale[columns]
        if (solved < 0).any():
            continue
        error = target - design[:, columns] @ solved
        squared = float(error @ error)
        if squared < least:
            best, least = np.zeros(design.shape[1]), squared
            best[columns] = solved
    return best


def pack_tokens(metadata: Sequence[SampleMetadata]) -> NDArray[np.float64]:
    """float64[n]: the tokens of each sample."""
    return np.fromiter((sample.pack_tokens for sample in metadata), np.float64, len(metadata))
