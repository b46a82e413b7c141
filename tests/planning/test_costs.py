"""CONTRACT 5: cost models: one by one, many at once, and fitted."""

from __future__ import annotations

import numpy as np
import pytest

from hp_nodes.planning import CausalAttentionCostModel, fit_cost_model
from hp_nodes.types import SampleMetadata


def test_attention_is_quadratic_and_padding_a_segment() -> None:
    model = CausalAttentionCostModel()
    assert model(SampleMetadata(7)).llm == 49
    assert model.costs([SampleMetadata(7), SampleMetadata(2)]).tolist() == [49, 4]
    assert model.padding_cost(3) == 9
    assert model.padding_cost(0) == 0


def test_a_fit_finds_the_coefficients_that_made_the_seconds() -> None:
    rng = np.random.default_rng(0)
    segments = [rng.integers(1, 4000, rng.integers(1, 8)) for _ in range(40)]
    seconds = [2e-3 + sum(3e-7 * t + 5e-11 * t * t for t in row) for row in segments]
    model = fit_cost_model(segments, seconds)
    assert model.per_token == pytest.approx(3e-7, rel=1e-4)
    assert model.per_token_squared == pytest.approx(5e-11, rel=1e-4)
    assert model(SampleMetadata(1000)).llm == pytest.approx(3e-4 + 5e-5, rel=1e-4)
    assert model.costs([SampleMetadata(1000)])[0] == model(SampleMetadata(1000)).llm == model.padding_cost(1000)


def test_a_fit_never_gives_negative_costs() -> None:
    """Measured noise that a plain least-squares fit answers with a negative coefficient."""
    segments = [[100], [200], [400], [800]]
    model = fit_cost_model(segments, [1.0, 2.2, 4.1, 7.9])
    assert model.per_token_squared == 0
    assert model.per_token == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    ("segments", "seconds", "message"),
    [
        ([[1]], [1.0], "at least 2"),
        ([[1], [2]], [1.0], "as many"),
        ([[1], []], [1.0, 2.0], "observation 1 has segments"),
        ([[1], [2]], [1.0, 0.0], "above 0"),
        ([[1], [2]], [1.0, float("nan")], "finite"),
        ([[5], [5]], [1.0, 1.0], "different sizes"),
    ],
)
def test_observations_that_tell_nothing_are_refused(
    segments: list[list[int]], seconds: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_cost_model(segments, seconds)
