"""CONTRACT 6: packed is what was split, padding is told from text, documents attend to themselves alone."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hp_nodes.text import collate_text, pack_text, split_packed_text, text_metadata, to_flash_attention
from hp_nodes.types import SampleMetadata


def document(*tokens: int) -> dict[str, Any]:
    """A sequence whose labels are its next tokens."""
    return {"input_ids": torch.tensor(tokens), "labels": torch.tensor([*tokens[1:], -100])}


def record(tokens: Sequence[int], labels: Sequence[int], cu_seq_lens: Sequence[int]) -> dict[str, Any]:
    return {"input_ids": list(tokens), "labels": list(labels), "cu_seq_lens": list(cu_seq_lens)}


def plain(sequences: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(sequence["input_ids"].tolist(), sequence["labels"].tolist()) for sequence in sequences]


class TestSplit:
    def test_one_sequence_a_segment_in_order(self) -> None:
        sequences = split_packed_text(record([1, 2, 3, 4, 5], [2, -100, 4, 5, -100], [0, 2, 5]))
        assert plain(sequences) == [([1, 2], [2, -100]), ([3, 4, 5], [4, 5, -100])]
        assert {sequence[field].dtype for sequence in sequences for field in sequence} == {torch.int64}

    def test_only_a_trailing_run_that_is_padding_and_unlabelled_is_removed(self) -> None:
        padded = record([0, 7, 0, 0, 0], [7, 0, -100, -100, -100], [0, 3, 4, 5])
        assert plain(split_packed_text(padded, 0)) == [([0, 7], [7, 0])]
        # Without the id nothing is removed, nor with another.
        everything = [([0, 7, 0], [7, 0, -100]), ([0], [-100]), ([0], [-100])]
        assert plain(split_packed_text(padded)) == everything
        assert plain(split_packed_text(padded, 7)) == everything

    def test_a_labelled_token_ends_the_padding_though_it_has_the_id(self) -> None:
        sequences = split_packed_text(record([1, 0, 0, 0], [0, 0, 0, -100], [0, 4]), 0)
        assert plain(sequences) == [([1, 0, 0], [0, 0, 0])]

    def test_an_unlabelled_token_of_another_id_ends_the_padding(self) -> None:
        sequences = split_packed_text(record([1, 2, 3, 0], [-100] * 4, [0, 2, 4]), 0)
        assert plain(sequences) == [([1, 2], [-100, -100]), ([3], [-100])]

    def test_padding_within_the_record_stays(self) -> None:
        sequences = split_packed_text(record([1, 0, 0, 2], [-100, -100, -100, 5], [0, 3, 4]), 0)
        assert plain(sequences) == [([1, 0, 0], [-100, -100, -100]), ([2], [5])]

    @pytest.mark.parametrize("text", [record([], [], [0]), record([9, 9], [-100, -100], [0, 1, 2])])
    def test_a_record_without_text_has_no_sequence(self, text: dict[str, Any]) -> None:
        assert split_packed_text(text, 9) == []

    @pytest.mark.parametrize(
        "convert",
        [
            torch.tensor,
            np.array,
            tuple,
            lambda values: np.array(values, np.int16),
            lambda values: np.array(values, ">i4"),
            lambda values: torch.tensor(values, dtype=torch.int32),
            lambda values: np.array(values[::-1])[::-1],
        ],
    )
    def test_fields_may_be_tensors_arrays_or_sequences_of_any_integer_type(self, convert: Callable[[Any], Any]) -> None:
        fields = record([1, 2, 3], [2, -100, 4], [0, 2, 3])
        sequences = split_packed_text({name: convert(values) for name, values in fields.items()})
        assert plain(sequences) == [([1, 2], [2, -100]), ([3], [4])]

    def test_a_memory_map_is_read_without_a_warning_and_never_written(self, tmp_path: Any) -> None:
        np.arange(6, dtype=np.int64).tofile(tmp_path / "tokens")
        mapped = np.memmap(tmp_path / "tokens", np.int64, "r")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sequence = split_packed_text({"input_ids": mapped, "labels": mapped, "cu_seq_lens": [0, 6]})[0]
        sequence["input_ids"] += 1
        assert mapped.tolist() == list(range(6))

    @pytest.mark.parametrize("field", ["input_ids", "labels", "cu_seq_lens"])
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (None, "accepted: 1-D integers"),
            (3, "accepted: 1-D integers"),
            ([0.0, 1.0, 2.0], "accepted: 1-D integers"),
            ([True, False, True], "accepted: 1-D integers"),
            ([[0, 1, 2]], "accepted: 1-D integers"),
            ([[0], [1, 2]], "accepted: 1-D integers"),
            (torch.zeros(3), "accepted: 1-D integers"),
            (torch.zeros(3, dtype=torch.bool), "accepted: 1-D integers"),
            (torch.zeros((3, 1), dtype=torch.int64), "accepted: 1-D integers"),
            ("abc", "accepted: 1-D integers"),
        ],
        ids=str,
    )
    def test_a_field_of_anything_else_is_named(self, field: str, value: object, message: str) -> None:
        with pytest.raises(ValueError, match=f"record: field '{field}' is .*{message}"):
            split_packed_text({**record([1, 2, 3], [2, 3, 4], [0, 3]), field: value})

    @pytest.mark.parametrize("field", ["input_ids", "labels", "cu_seq_lens"])
    def test_a_missing_field_is_named_with_those_that_are_there(self, field: str) -> None:
        fields = record([1, 2, 3], [2, 3, 4], [0, 3])
        del fields[field]
        with pytest.raises(
            ValueError, match=f"record: field '{field}' is missing; it has {sorted(fields)}".replace("[", r"\[")
        ):
            split_packed_text(fields)

    def test_a_record_is_a_mapping(self) -> None:
        with pytest.raises(ValueError, match="record is a list; accepted: a mapping"):
            split_packed_text([1, 2])  # type: ignore[arg-type]

    def test_labels_are_as_many_as_tokens(self) -> None:
        with pytest.raises(ValueError, match="field 'labels' has 2 values; accepted: as many as input_ids, 3"):
            split_packed_text(record([1, 2, 3], [1, 2], [0, 3]))

    @pytest.mark.parametrize("bounds", [[], [0], [1, 3], [0, 2], [0, 4], [0, 2, 2, 3], [0, 2, 1, 3], [3], [-1, 3]])
    def test_boundaries_rise_strictly_from_0_to_the_number_of_tokens(self, bounds: list[int]) -> None:
        with pytest.raises(ValueError, match=r"field 'cu_seq_lens' is \[.*\]; accepted: from 0, strictly .*, 3"):
            split_packed_text(record([1, 2, 3], [2, 3, 4], bounds))

    def test_a_long_list_of_boundaries_is_shown_in_short(self) -> None:
        with pytest.raises(ValueError, match=r"is \[0, 1, 2, 3, 4, ..., 96, 97, 98, 99\]; accepted"):
            split_packed_text(record(range(100), range(100), range(100)))


class TestPack:
    def test_samples_follow_each_other_and_padding_is_unlabelled_and_a_segment_of_its_own(self) -> None:
        packed = pack_text([document(1, 2), document(3)], 5, pad_token_id=9)
        assert packed["input_ids"].tolist() == [1, 2, 3, 9, 9]
        assert packed["labels"].tolist() == [2, -100, -100, -100, -100]
        assert packed["cu_seq_lens"].tolist() == [0, 2, 3, 5]
        assert [packed[name].dtype for name in packed] == [torch.int64, torch.int64, torch.int32]

    def test_padding_is_0_unless_told(self) -> None:
        assert pack_text([document(5)], 3)["input_ids"].tolist() == [5, 0, 0]

    def test_a_full_bin_has_no_padding(self) -> None:
        assert pack_text([document(5, 6), document(7)], 3)["cu_seq_lens"].tolist() == [0, 2, 3]

    @given(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(0, 20))
    @settings(max_examples=60, deadline=None)
    def test_splitting_a_bin_gives_what_was_packed(self, documents: list[list[int]], padding: int) -> None:
        samples = [document(*tokens) for tokens in documents]
        packed = pack_text(samples, sum(map(len, documents)) + padding, pad_token_id=0)
        assert plain(split_packed_text(packed, 0)) == plain(samples)

    def test_samples_are_not_changed_and_share_no_memory_with_the_bin(self) -> None:
        sample = document(1, 2)
        pack_text([sample], 2)["input_ids"] += 1
        assert sample["input_ids"].tolist() == [1, 2]

    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            ([], "a bin got no sample"),
            ([document(1, 2, 3), document(4, 5, 6)], r"samples of \[3, 3\] tokens, 6 together, .* a bin of 5"),
            ([document(1), {"input_ids": [], "labels": []}], "sample 1 of the bin has no token"),
            ([document(1), {"input_ids": [1]}], "sample 1 of the bin: field 'labels' is missing"),
            ([{"input_ids": [1], "labels": [1, 2]}], "sample 0 of the bin: field 'labels' has 2 values"),
        ],
    )
    def test_what_cannot_be_packed_is_named(self, samples: list[dict[str, Any]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            pack_text(samples, 5)

    def test_it_can_be_bound_and_sent_to_a_worker_process(self) -> None:
        pack = pickle.loads(pickle.dumps(functools.partial(pack_text, pad_token_id=3)))
        assert pack([document(1)], 2)["input_ids"].tolist() == [1, 3]


class TestCollate:
    def test_the_rows_and_boundaries_of_two_bins(self) -> None:
        batch = collate_text([pack_text([document(1, 2), document(3)], 5), pack_text([document(4, 5, 6, 7, 8)], 5)])
        assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
        assert batch["cu_seq_lens"].tolist() == [0, 2, 3, 5, 10]
        assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
        assert batch["labels"].tolist() == [[2, -100, -100, -100, -100], [5, 6, 7, 8, -100]]
        assert batch["max_seq_len"] == 5
        assert batch["num_label_tokens"] == 5

    def test_padding_does_not_join_the_last_document(self) -> None:
        batch = collate_text([pack_text([document(*range(1, 4)), document(*range(1, 6))], 10)])
        assert batch["cu_seq_lens"].tolist() == [0, 3, 8, 10]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
        assert batch["labels"][0, 8:].tolist() == [-100, -100]

    def test_the_longest_segment_may_be_padding(self) -> None:
        # An attention over cu_seq_lens computes the padding's segment too, so its bound has to cover it.
        assert collate_text([pack_text([document(1)], 8)])["max_seq_len"] == 7

    def test_the_types_of_what_the_trainer_gets(self) -> None:
        batch = collate_text([pack_text([document(1, 2)], 4)] * 3)
        types = {name: value.dtype if isinstance(value, torch.Tensor) else type(value) for name, value in batch.items()}
        assert types == {
            "input_ids": torch.int64,
            "labels": torch.int64,
            "cu_seq_lens": torch.int32,
            "position_ids": torch.int64,
            "max_seq_len": int,
            "num_label_tokens": int,
        }
        assert {batch[name].shape for name in ("input_ids", "labels", "position_ids")} == {(3, 4)}

    @given(
        st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=5),
        st.integers(0, 7),
    )
    @settings(max_examples=60, deadline=None)
    def test_each_row_is_its_bin_and_its_boundaries_are_the_rows_own(
        self, lengths: list[list[int]], extra: int
    ) -> None:
        seq_len = max(map(sum, lengths)) + extra
        bins = [pack_text([document(*range(1, n + 1)) for n in row], seq_len) for row in lengths]
        batch = collate_text(bins)
        bounds = batch["cu_seq_lens"].tolist()
        for row, packed in enumerate(bins):
            inside = [bound - row * seq_len for bound in bounds if row * seq_len <= bound <= (row + 1) * seq_len]
            assert inside == packed["cu_seq_lens"].tolist()
            assert torch.equal(batch["input_ids"][row], packed["input_ids"])
            assert torch.equal(batch["labels"][row], packed["labels"])
        positions = [place for start, end in pairwise(bounds) for place in range(end - start)]
        assert batch["position_ids"].flatten().tolist() == positions
        assert batch["num_label_tokens"] == sum(n - 1 for row in lengths for n in row)

    @pytest.mark.parametrize(
        ("bins", "message"),
        [
            ([], "a micro-batch got no bin"),
            ([pack_text([document(1)], 4), pack_text([document(1)], 5)], "bin 1 has 5 tokens and bin 0 has 4"),
            ([{**pack_text([document(1)], 4), "cu_seq_lens": [0, 1]}], "bin 0: field 'cu_seq_lens' is"),
            ([{"input_ids": [1]}], "bin 0: field 'labels' is missing"),
        ],
    )
    def test_what_makes_no_batch_is_named(self, bins: list[dict[str, Any]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            collate_text(bins)


class TestMetadata:
    def test_a_sample_has_as_many_tokens_as_input_ids(self) -> None:
        assert text_metadata(document(1, 2, 3)) == SampleMetadata(pack_tokens=3)

    def test_metadata_that_counts_right_is_kept(self) -> None:
        metadata = SampleMetadata(pack_tokens=3, features={"P": 1, "D": 2})
        assert text_metadata(document(1, 2, 3), lambda sample: metadata) is metadata

    def test_metadata_that_counts_wrong_is_told_both_numbers(self) -> None:
        with pytest.raises(ValueError, match="pack_tokens is 4, but the sample has 3 input_ids"):
            text_metadata(document(1, 2, 3), lambda sample: SampleMetadata(pack_tokens=4))


class TestFlashAttention:
    def test_the_names_are_those_of_each_library(self) -> None:
        batch = collate_text([pack_text([document(1, 2, 3), document(4)], 6)])
        flash = to_flash_attention(batch)
        assert list(flash) == ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
        assert flash["cu_seqlens_q"].dtype == torch.int32
        assert flash["max_seqlen_k"] == 3
        hugging_face = to_flash_attention(batch, "transformers")
        assert list(hugging_face) == ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
        assert all(one is other for one, other in zip(flash.values(), hugging_face.values(), strict=True))

    def test_another_library_is_refused(self) -> None:
        with pytest.raises(ValueError, match="library is 'xformers'; accepted: 'flash_attn' or 'transformers'"):
            to_flash_attention({}, "xformers")

    def test_attention_within_its_boundaries_is_that_of_each_document_alone(self) -> None:
        rows = [[3, 5, 1], [8, 4], [2]]
        seq_len, heads, width = 13, 2, 4
        batch = collate_text([pack_text([document(*range(1, n + 1)) for n in row], seq_len) for row in rows])
        generator = torch.Generator().manual_seed(0)
        # q, k and v depend on token and position only, as in a model: the same document gives the same wherever it is.
        table = torch.randn(3, 20, seq_len, heads, width, generator=generator, dtype=torch.float64)
        q, k, v = table[:, batch["input_ids"].flatten(), batch["position_ids"].flatten()]
        found = variable_length_attention(q, k, v, **to_flash_attention(batch))
        start = 0
        for row in rows:
            place = start
            for length in row:
                alone = table[:, torch.arange(1, length + 1), torch.arange(length)].transpose(1, 2)
                expected = scaled_dot_product_attention(*alone, is_causal=True).transpose(0, 1)
                torch.testing.assert_close(found[place : place + length], expected, rtol=1e-12, atol=1e-12)
                place += length
            start += seq_len


def variable_length_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> torch.Tensor:
    """What flash_attn_varlen_func(causal=True) computes, over ``[tokens, heads, width]``, on the CPU: it gathers each
    segment into a row of max_seqlen places, attends with a mask, and scatters the rows back."""
    starts, lengths = cu_seqlens_k[:-1].long(), cu_seqlens_k.diff()
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k
    places = torch.arange(max_seqlen_k)
    inside = places < lengths[:, None]
    gathered = torch.where(inside, starts[:, None] + places, 0)
    mask = (inside[:, None, :] & (places[:, None] >= places)).unsqueeze(1)
    rows = scaled_dot_product_attention(*(x[gathered].transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    out = torch.full_like(q, torch.nan)
    out[gathered[inside]] = rows.transpose(1, 2)[inside]
    return out
