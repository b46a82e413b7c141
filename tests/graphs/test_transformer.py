"""The model: a packed document is treated as if it were alone, and nobody sees the future."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.transformer import Transformer, TransformerConfig, attend_within_documents, rotary_angles, rotate

VOCABULARY = 29


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(VOCABULARY, hidden=16, layers=2, heads=2)).double()


def batch_of(documents: list[Tensor]) -> dict[str, Tensor]:
    """One row of documents, labels shifted within each."""
    lengths = [len(document) for document in documents]
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat([torch.cat((d[1:], torch.tensor([-100]))) for d in documents])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
    }


def some_documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in (5, 2, 9, 1, 7)]


def gradients(model: Transformer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    model.zero_grad()
    for batch in batches:
        model(**batch).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_packed_row_has_the_loss_and_gradient_of_its_documents_one_by_one() -> None:
    model, documents = make_model(), some_documents()
    alone = [batch_of([document]) for document in documents]
    packed = batch_of(documents)
    torch.testing.assert_close(model(**packed), sum(model(**batch) for batch in alone), rtol=1e-12, atol=0)
    for one, other in zip(gradients(model, [packed]), gradients(model, alone), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_rows_are_told_apart_by_flat_offsets() -> None:
    model, documents = make_model(), [document.repeat(4)[:4] for document in some_documents()[:4]]
    rows = [batch_of(documents[:2]), batch_of(documents[2:])]
    both = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels", "position_ids")}
    both["cu_seq_lens"] = torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)
    torch.testing.assert_close(model(**both), model(**rows[0]) + model(**rows[1]), rtol=1e-12, atol=0)


def test_attention_is_the_textbook_formula_within_each_document() -> None:
    query, key, value = torch.randn(3, 2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    lengths = [4, 5]
    of_document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    visible = (of_document[:, None] == of_document[None]) & torch.ones(9, 9, dtype=torch.bool).tril()
    scores = (query @ key.transpose(1, 2) / 2).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(attend_within_documents(query, key, value, lengths), scores.softmax(-1) @ value)


def test_a_later_token_changes_no_earlier_prediction() -> None:
    model, document = make_model(), some_documents()[2]
    changed = document.clone()
    changed[-1] = (changed[-1] + 1) % VOCABULARY
    one, other = batch_of([document]), batch_of([changed])
    for batch in (one, other):
        batch["labels"][0, -2:] = -100
    assert model(**one).item() == model(**other).item()


def test_rotation_depends_on_the_distance_alone() -> None:
    states = torch.randn(1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def product(first: int, second: int) -> float:
        turned = [
            rotate(states, *rotary_angles(torch.tensor([p]), 8, 10_000.0, torch.float64)) for p in (first, second)
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(3, 10) == pytest.approx(product(103, 110), rel=1e-9)
    assert product(3, 10) != pytest.approx(product(3, 11), rel=1e-3)


def test_labels_of_minus_100_count_nothing_and_the_loss_is_a_sum() -> None:
    model, batch = make_model(), batch_of(some_documents())
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    assert model(**nothing).item() == 0
    labelled = int((batch["labels"] != -100).sum())
    uniform = F.cross_entropy(torch.zeros(1, VOCABULARY), torch.tensor([0])).item() * labelled
    assert model(**batch).item() == pytest.approx(uniform, rel=0.3)


@pytest.mark.parametrize(
    ("sizes", "wrong"), [({"hidden": 18, "heads": 2}, "hidden is 18"), ({"layers": 0}, "layers is 0")]
)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, int], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        TransformerConfig(VOCABULARY, **sizes)
