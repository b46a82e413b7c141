"""What the comparison concludes from steps whose times are known, and what it predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphs.comparison import measure_costs, row_of, summarise
from graphs.transformer import Transformer, TransformerConfig
from hp_nodes.planning import PolynomialCostModel
from hp_nodes.types import BalanceReport
from tests.graphs.test_step_report import RESULT, plan_of

PLAN = plan_of([9, 9, 1, 1], [0, 0, 1, 1])


def test_each_step_is_compared_with_itself() -> None:
    report = BalanceReport(PLAN)
    sampled = [replace(RESULT, seconds=s, waited=(0.0, s / 2), loss=2.0, report=report) for s in (2.0, 4.0, 90.0)]
    balanced = [
        replace(RESULT, seconds=s, waited=(0.0, s / 10), loss=2.0 + 1e-7, report=report) for s in (1.0, 2.5, 75.0)
    ]
    # 10 tokens of padding or text a row and rank, at 0.1 s; the objective goes from 18 to 10, at 0.5 s.
    told = summarise(sampled, balanced, PolynomialCostModel(per_token=0.1, per_token_squared=0.5))
    assert told.steps == 3
    assert told.step_seconds == (4.0, 2.5)
    assert told.speedup == pytest.approx(1.6)
    assert told.predicted_seconds == pytest.approx((10.0, 6.0))
    assert told.predicted_speedup == pytest.approx(10 / 6)
    assert told.waiting_share == pytest.approx((0.25, 0.05))
    assert told.largest_loss_difference == pytest.approx(1e-7)
    table = told.table()
    for part in ("1.600 x", "1.667 x", "25.0%", "5.0%"):
        assert part in table


def test_rows_for_measuring_are_whole_documents() -> None:
    row = row_of([3, 2], vocabulary=4)
    assert row["cu_seq_lens"].tolist() == [0, 3, 5]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["input_ids"].shape == row["labels"].shape == (1, 5)
    assert row["input_ids"].max() < 4


@pytest.mark.usefixtures("single_rank")
def test_measured_costs_grow_with_tokens_and_leave_no_gradient_behind() -> None:
    model = Transformer(TransformerConfig(32, hidden=16, layers=1, heads=1))
    torch.set_num_threads(1)
    costs = measure_costs(model, 4096, 32)
    assert costs.per_token_squared > 0
    assert all(parameter.grad is None for parameter in model.parameters())
