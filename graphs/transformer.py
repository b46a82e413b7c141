"""A small decoder-only transformer for packed sequences: what the demonstration trains.

Takes the batch that :func:`hp_nodes.text.collate_text` makes: several documents in a row, told apart by
``cu_seq_lens``. Positions restart in every document (``position_ids``) and attention stays within it, so a packed
document gets exactly the gradient it would get alone, and a row costs the sum of the *squares* of its documents'
lengths. That is the cost that balancing evens out, and why rows of equal length are not rows of equal work.

Attention runs document by document through torch's own causal kernel. On a GPU, put a variable-length kernel in
:func:`attend_within_documents` instead (``flash_attn_varlen_func`` takes the same ``cu_seq_lens`` and ``max_seq_len``).

The block is that of Llama (Touvron et al. 2023, section 2.2): pre-norm with RMSNorm (Zhang & Sennrich 2019), rotary
positions (Su et al. 2021, section 3.2.2) and SwiGLU (Shazeer 2020, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

__all__ = ["Transformer", "TransformerConfig", "attend_within_documents", "rotate", "split_over_peers"]

IGNORED_LABEL = -100


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the model. ``hidden`` is divided evenly among ``heads``; each head's size must be even."""

    vocabulary: int
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: an int >= 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden is {self.hidden}; accepted: a multiple of twice the heads ({2 * self.heads})")

    @property
    def feed_forward(self) -> int:
        """Width of the gated feed-forward layer: 8/3 of hidden, so that its three matrices cost what two of 4 would."""
        return max(8, 8 * round(self.hidden / 3))

    def undivided(self, peers: int) -> list[str]:
        """What cannot be divided evenly among ``peers`` ranks, with its size; empty when all can."""
        sizes = {"heads": self.heads, "feed-forward width": self.feed_forward}
        return [f"{name} {size}" for name, size in sizes.items() if size % peers]


def attend_within_documents(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention of each document to itself.

    Args:
        query, key, value: float ``[heads, tokens, head_size]``, the documents one after the other.
        lengths: tokens of each document; they add up to ``tokens``.

    Returns:
        float ``[heads, tokens, head_size]``.
    """
    # split and cat, not slices: a slice's backward writes a zero tensor of the whole length for every document
    parts = zip(*(torch.split(states, lengths, dim=1) for states in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0] for q, k, v in parts]
    return torch.cat(attended, dim=1)


def rotary_angles(position_ids: Tensor, head_size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[tokens, head_size / 2]`` of each position's rotation."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=position_ids.device) / head_size
    angles = position_ids.flatten()[:, None].double() * base**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the two halves of each head ``[heads, tokens, head_size]`` by its position's angles."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        # Three matrices, so that each can be split by heads.
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, config.hidden, bias=False)
        self.value = nn.Linear(config.hidden, config.hidden, bias=False)
        self.project_out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], lengths: list[int]) -> Tensor:
        # As many heads as this rank has: all of them, or its part.
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_size)).transpose(0, 1)
            for project in (self.query, self.key, self.value)
        )
        attended = attend_within_documents(rotate(query, *angles), rotate(key, *angles), value, lengths)
        projected: Tensor = self.project_out(attended.transpose(0, 1).flatten(1))
        return projected


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.up = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return projected


class Block(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_feed_forward = nn.RMSNorm(config.hidden)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], lengths: list[int]) -> Tensor:
        hidden = hidden + self.attention(self.norm_attention(hidden), angles, lengths)
        added: Tensor = hidden + self.feed_forward(self.norm_feed_forward(hidden))
        return added


class Transformer(nn.Module):
    """Next-token loss of packed rows.

    Called with ``input_ids``, ``labels`` and ``position_ids`` int64 ``[rows, seq_len]`` and ``cu_seq_lens`` int32
    ``[segments + 1]`` flat over the rows, it returns the *sum* of the cross entropies (nats) of all labelled tokens, a
    0-d tensor. A sum, because the number to divide by is that of the whole step over all ranks, known only at its end.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.unembedding = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.hidden**-0.5)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, cu_seq_lens: Tensor) -> Tensor:
        hidden = self.embedding(input_ids.flatten())
        head_size = self.config.hidden // self.config.heads
        angles = rotary_angles(position_ids, head_size, self.config.rotary_base, hidden.dtype)
        lengths: list[int] = cu_seq_lens.diff().tolist()
        for block in self.blocks:
            hidden = block(hidden, angles, lengths)
        logits = self.unembedding(self.norm(hidden))
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def split_over_peers(model: Transformer, mesh: DeviceMesh) -> None:
    """Give each rank of ``mesh``, which has one dimension, its part of every block's heads and feed-forward width.

    A matrix that widens is split by its rows, one that narrows by its columns, and the ranks add up what comes out
    (Shoeybi et al. 2019, section 3). Norms, embedding and unembedding stay whole on every rank.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
    """
    if model.config.heads % mesh.size():
        raise ValueError(
            f"{model.config.heads} heads on {mesh.size()} model peers; accepted: a number that divides them"
        )
    widening = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
    narrowing = ("attention.project_out", "feed_forward.down")
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in widening}
    parallelize_module(model, mesh, {**plan, **{f"blocks.*.{name}": RowwiseParallel() for name in narrowing}})
