"""CONTRACT 11: the report says what happened, counted here once more from what was delivered."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hp_nodes.transport import run_ranks
from tests.graphs.mode_scene import SEQ_LEN, STEPS, Texts, chosen, loader_of

RANKS, SLOTS, ROUNDS = 2, 2, 4


def home(position: int) -> tuple[int, int]:
    """(rank, round) that the sampler gave an occurrence to."""
    place = position % (RANKS * SLOTS * ROUNDS)
    return place % (RANKS * SLOTS) // SLOTS, place // (RANKS * SLOTS)


def documents_in(batch: Any) -> list[tuple[int, int]]:
    """(record, tokens) of every document of a micro-batch."""
    ids, bounds = batch["input_ids"].flatten().tolist(), batch["cu_seq_lens"].tolist()
    return [(ids[start] - 1, end - start) for start, end in pairwise(bounds) if ids[start]]


def attention(tokens: list[int]) -> int:
    """Documents and padding tails of one bin, squared: what the built-in text mode balances."""
    return sum(length**2 for length in tokens)


def delivered(mesh: Any, window: int) -> list[Any]:
    """(step, round, batch's documents, segments' lengths, ends_window, report)."""
    with loader_of("repack", mesh, Texts(), window) as loader:
        found = []
        for batch in loader:
            last = loader.last
            segments = np.diff(batch["cu_seq_lens"].numpy()).tolist()
            found.append((last.step, last.round, documents_in(batch), segments, last.ends_window, last.report))
        return found


@pytest.mark.parametrize("window", [1, 2, 4])
def test_what_each_rank_had_in_each_round_before_and_after(window: int) -> None:
    results = run_ranks({"dp": RANKS}, lambda mesh: delivered(mesh, window))
    records = Texts().lengths
    for step in range(STEPS):
        order = chosen(step)
        came = np.zeros((3, RANKS, ROUNDS), dtype=np.int64)  # tokens, samples, cost, as the sampler chose
        got = np.zeros_like(came)
        for place, index in enumerate(order):
            rank, number = home(place)
            lengths = records[index]
            segments = [*lengths, SEQ_LEN - sum(lengths)]
            came[:, rank, number] += [sum(lengths), len(lengths), attention(segments)]
        for rank in range(RANKS):
            for at, number, documents, segments, _, _ in results[rank]:
                if at == step:
                    got[:, rank, number] = [sum(n for _, n in documents), len(documents), attention(segments)]
        for rank in range(RANKS):
            for at, number, _, _, ends_window, report in results[rank]:
                if at != step or not ends_window:
                    continue
                ends_step = number == ROUNDS - 1
                rounds = slice(0, ROUNDS) if ends_step else slice(number + 1 - window, number + 1)
                plan = report.plan
                for before, after, expected, carried_out in (
                    (plan.tokens_before, plan.tokens_after, came[0], got[0]),
                    (plan.samples_before, plan.samples_after, came[1], got[1]),
                    (plan.costs_before, plan.costs_after, came[2], got[2]),
                ):
                    assert before.tolist() == expected[:, rounds].tolist()
                    assert after.tolist() == carried_out[:, rounds].tolist()
                assert plan.padding == plan.costs_after.shape[1] * RANKS * SLOTS * SEQ_LEN - got[0][:, rounds].sum()
                assert (plan.objective, plan.threshold) == ("lockstep", 0.0)
                assert plan.before == came[2][:, rounds].max(axis=0).sum()
                assert plan.after == got[2][:, rounds].max(axis=0).sum()
                assert plan.lower_bound <= plan.after <= plan.before
                assert plan.gain == pytest.approx(1 - plan.after / plan.before)
                assert plan.seconds > 0


@pytest.mark.parametrize("window", [1, 2, 4])
def test_what_each_rank_sent_and_received(window: int) -> None:
    """A step's report is the sum of its windows'; what one rank sends another receives."""
    results = run_ranks({"dp": RANKS}, lambda mesh: delivered(mesh, window))
    for step in range(STEPS):
        order = chosen(step)
        of_step = [next(report for at, number, *_, report in rank if (at, number) == (step, 3)) for rank in results]
        foreign = [
            sum(
                home(order.index(index))[0] != rank
                for at, _, documents, *_ in results[rank]
                if at == step
                for index, _ in documents
            )
            for rank in range(RANKS)
        ]
        assert [report.samples_received for report in of_step] == foreign
        assert [report.samples_sent for report in of_step] == foreign[::-1]
        assert of_step[0].bytes_sent == of_step[1].bytes_received
        assert of_step[1].bytes_sent == of_step[0].bytes_received
        assert all((report.bytes_received > 0) == (report.samples_received > 0) for report in of_step)
    assert any(report.samples_sent for *_, report in results[0])


def test_every_micro_batch_of_a_constructor_has_a_report_and_none_of_a_peer() -> None:
    def run(mesh: Any) -> list[bool]:
        with loader_of("online", mesh, Texts(), 2) as loader:
            return [loader.last.report is not None for _ in loader]

    results = run_ranks({"dp": 2, "tp": 2}, run)
    assert [set(told) for told in results] == [{True}, {False}, {True}, {False}]
