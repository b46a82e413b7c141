"""Built-in text: split packed records into their documents, pack documents into bins, collate bins into a batch.

A record, and a packed bin, is a mapping with ``input_ids`` and ``labels`` (already shifted; -100 is ignored by the
loss) of equal length, and ``cu_seq_lens``, the boundaries of its documents: 1-D, from 0, strictly increasing, to the
number of tokens. A sequence, what is planned and moved, has ``input_ids`` and ``labels`` only. Tensors, numpy arrays
and lists of ints are accepted; what comes out are tensors on the CPU.

Splitting a bin again gives the sequences that were packed into it: padding is a segment of its own, and is told from
text by being both ``pad_token_id`` and unlabelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import lt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hp_nodes.types import SampleMetadata

__all__ = ["IGNORED_LABEL", "collate_text", "pack_text", "split_packed_text", "text_metadata", "to_flash_attention"]

IGNORED_LABEL = -100
"""The label of a token that the loss does not count, as in torch's cross_entropy."""

# What each library calls the boundaries and the longest segment; queries and keys have the same here.
_ATTENTION_NAMES = {
    "flash_attn": ("cu_seqlens", "max_seqlen"),
    "transformers": ("cu_seq_lens", "max_length"),
}


def split_packed_text(record: Mapping[str, Any], pad_token_id: int | None = None) -> list[dict[str, Tensor]]:
    """The record's sequences in order, one a segment: ``input_ids`` and ``labels``, int64[n] each, n >= 1.

    With ``pad_token_id`` the trailing run of tokens that are both that id and label -100 is removed first, and with it
    every segment that was nothing else; without it nothing is. The sequences are views of the record's memory where its
    tokens are int64 already.

    Raises:
        ValueError: a field is missing or malformed; the message names it.
    """
    tokens, labels = _tokens(record, "record")
    bounds = _bounds(record, tokens.numel(), "record")
    if pad_token_id is not None:
        end = _end_of_text(tokens, labels, pad_token_id)
        bounds = [*(bound for bound in bounds if bound < end), end]
        tokens, labels = tokens[:end], labels[:end]
    lengths = [end - start for start, end in pairwise(bounds)]
    # the method, not torch.split: that is Python, and as slow again as the cutting
    token_parts, label_parts = tokens.split_with_sizes(lengths), labels.split_with_sizes(lengths)
    return [{"input_ids": ids, "labels": own} for ids, own in zip(token_parts, label_parts, strict=True)]


def pack_text(samples: Sequence[Mapping[str, Any]], seq_len: int, pad_token_id: int | None = None) -> dict[str, Tensor]:
    """One bin: the samples one behind the other, padded to ``seq_len`` with ``pad_token_id`` (0 when None), label -100.

    Returns:
        ``input_ids`` and ``labels`` int64[seq_len], ``cu_seq_lens`` int32[k + 1]: a segment for each sample, and one
        for the padding where there is any.

    Raises:
        ValueError: there is no sample, one is malformed or empty, or together they are longer than ``seq_len``.
    """
    if not samples:
        raise ValueError("a bin got no sample; accepted: at least one")
    sequences = [
        _usual_tokens(sample) or _tokens(sample, f"sample {number} of the bin") for number, sample in enumerate(samples)
    ]
    lengths = [tokens.numel() for tokens, _ in sequences]
    if 0 in lengths:
        raise ValueError(f"sample {lengths.index(0)} of the bin has no token; accepted: at least one")
    padding = seq_len - sum(lengths)
    if padding < 0:
        raise ValueError(
            f"samples of {lengths} tokens, {sum(lengths)} together, are packed into a bin of {seq_len}; accepted: at "
            "most as many as it has"
        )
    tokens, labels = [tokens for tokens, _ in sequences], [labels for _, labels in sequences]
    if padding:
        tokens.append(torch.full((padding,), 0 if pad_token_id is None else pad_token_id))
        labels.append(torch.full((padding,), IGNORED_LABEL))
        lengths.append(padding)
    return {
        "input_ids": torch.cat(tokens),
        "labels": torch.cat(labels),
        "cu_seq_lens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
    }


def collate_text(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The bins of one micro-batch, each a row, as the trainer gets them.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` int64[rows, seq_len], positions from 0 in each segment;
        ``cu_seq_lens`` int32, flat over all rows: 0, then each segment's end, offset by row * seq_len, padding being a
        segment of its own; the ints ``max_seq_len``, the longest of these segments, and ``num_label_tokens``.

    Raises:
        ValueError: there is no bin, one is malformed, or they differ in length.
    """
    if not bins:
        raise ValueError("a micro-batch got no bin; accepted: at least one")
    rows = [_tokens(packed, f"bin {row}") for row, packed in enumerate(bins)]
    seq_len = rows[0][0].numel()
    ends = [0]
    for row, ((tokens, _), packed) in enumerate(zip(rows, bins, strict=True)):
        if tokens.numel() != seq_len:
            raise ValueError(f"bin {row} has {len(tokens)} tokens and bin 0 has {seq_len}; accepted: equally long bins")
        ends += [row * seq_len + bound for bound in _bounds(packed, seq_len, f"bin {row}")[1:]]
    labels = torch.stack([labels for _, labels in rows])
    # numpy: repeating and counting take it a third of what they take torch
    bounds = np.array(ends)
    lengths = np.diff(bounds)
    positions = np.arange(labels.numel())
    positions -= np.repeat(bounds[:-1], lengths)
    return {
        "input_ids": torch.stack([tokens for tokens, _ in rows]),
        "labels": labels,
        "cu_seq_lens": torch.from_numpy(bounds.astype(np.int32)),
        "position_ids": torch.from_numpy(positions).view(labels.shape),
        "max_seq_len": int(lengths.max()),
        "num_label_tokens": int(np.count_nonzero(labels.cpu().numpy() != IGNORED_LABEL)),
    }


def text_metadata(
    sample: Mapping[str, Any], metadata_fn: Callable[[Mapping[str, Any]], SampleMetadata] | None = None
) -> SampleMetadata:
    """The metadata of a text sample: its number of ``input_ids``, or what ``metadata_fn`` says, checked against that.

    Raises:
        ValueError: the metadata counts other tokens than the packer will place.
    """
    number = (_usual_tokens(sample) or _tokens(sample, "sample"))[0].numel()
    if metadata_fn is None:
        return SampleMetadata(pack_tokens=number)
    metadata = metadata_fn(sample)
    if metadata.pack_tokens != number:
        raise ValueError(f"the metadata's pack_tokens is {metadata.pack_tokens}, but the sample has {number} input_ids")
    return metadata


def to_flash_attention(batch: Mapping[str, Any], library: str = "flash_attn") -> dict[str, Any]:
    """The document boundaries of a collated batch as keyword arguments of a variable-length attention.

    Every document, and every row's padding, attends to itself alone. The rows are one after the other: flatten
    ``[rows, seq_len, heads, head_dim]`` to ``[rows * seq_len, heads, head_dim]`` before.

    Args:
        batch: what :func:`collate_text` gave, on any device.
        library: "flash_attn": ``cu_seqlens_q``, ``cu_seqlens_k``, ``max_seqlen_q`` and ``max_seqlen_k`` of
            ``flash_attn_varlen_func``. "transformers": the same as ``cu_seq_lens_q``, ``cu_seq_lens_k``,
            ``max_length_q`` and ``max_length_k``, for a model whose inputs are ``[1, rows * seq_len]``.

    Raises:
        ValueError: another library.
    """
    if library not in _ATTENTION_NAMES:
        raise ValueError(f"library is {library!r}; accepted: {' or '.join(map(repr, _ATTENTION_NAMES))}")
    boundaries, longest = _ATTENTION_NAMES[library]
    return {
        f"{boundaries}_q": batch["cu_seq_lens"],
        f"{boundaries}_k": batch["cu_seq_lens"],
        f"{longest}_q": batch["max_seq_len"],
        f"{longest}_k": batch["max_seq_len"],
    }


def _usual_tokens(record: Any) -> tuple[Tensor, Tensor] | None:
    """``input_ids`` and ``labels`` of what most samples are, a dict of int64[n] tensors; None: look closer.

    Each sample of a window passes here several times, and this is a tenth of what looking closer takes.
    """
    if type(record) is not dict:
        return None
    tokens, labels = record.get("input_ids"), record.get("labels")
    if type(tokens) is not Tensor or type(labels) is not Tensor:
        return None
    usual = tokens.dtype is labels.dtype is torch.int64 and tokens.dim() == labels.dim() == 1
    return (tokens, labels) if usual and tokens.numel() == labels.numel() else None


def _tokens(record: Mapping[str, Any], what: str) -> tuple[Tensor, Tensor]:
    """Its ``input_ids`` and ``labels``, int64[n] each."""
    usual = _usual_tokens(record)
    if usual is not None:
        return usual
    tokens, labels = _vector(record, "input_ids", what), _vector(record, "labels", what)
    if len(tokens) != len(labels):
        raise ValueError(
            f"{what}: field 'labels' has {len(labels)} values; accepted: as many as input_ids, {len(tokens)}"
        )
    return tokens, labels


def _bounds(record: Mapping[str, Any], num_tokens: int, what: str) -> list[int]:
    bounds: list[int] = _vector(record, "cu_seq_lens", what).tolist()
    rising = all(map(lt, bounds, bounds[1:]))
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens or not rising:
        shown = str(bounds) if len(bounds) <= 10 else f"{str(bounds[:5])[:-1]}, ..., {str(bounds[-4:])[1:]}"
        raise ValueError(
            f"{what}: field 'cu_seq_lens' is {shown}; accepted: from 0, strictly increasing, to the number of tokens, "
            f"{num_tokens}"
        )
    return bounds


def _vector(record: Mapping[str, Any], field: str, what: str) -> Tensor:
    """The field as int64[n]."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{what} is a {type(record).__name__}; accepted: a mapping with 'input_ids' and 'labels'")
    if field not in record:
        raise ValueError(f"{what}: field {field!r} is missing; it has {sorted(map(str, record))}")
    value = record[field]
    if isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 1:
        return value
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise ValueError(f"{what}: field {field!r} is ragged; accepted: 1-D integers") from None
        if array.dtype.kind in "iu" or array.size == 0:
            # A copy where torch could not share the memory: read-only (a memory map), or backwards.
            array = np.require(array.astype(np.int64, copy=False), requirements=["C", "W"])
            value = torch.from_numpy(array)
        else:
            raise ValueError(f"{what}: field {field!r} is of type {array.dtype}; accepted: 1-D integers")
    if value.dim() != 1 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(
            f"{what}: field {field!r} is {value.dtype} of shape {tuple(value.shape)}; accepted: 1-D integers"
        )
    return value.to(torch.int64)


def _end_of_text(tokens: Tensor, labels: Tensor, pad_token_id: int) -> int:
    """Where the trailing run of unlabelled padding begins."""
    if not len(tokens) or tokens[-1] != pad_token_id or labels[-1] != IGNORED_LABEL:
        return len(tokens)
    text = torch.nonzero((tokens != pad_token_id) | (labels != IGNORED_LABEL))
    return int(text[-1]) + 1 if len(text) else 0
