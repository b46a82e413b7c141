"""FLOPs of a decoder: attention, mixture-of-experts or dense layers, from the fields of a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.costs import pack_tokens
from hp_nodes.types import SampleMetadata, WorkloadCost

__all__ = ["BackboneCostModel"]


class BackboneCostModel:
    """Training FLOPs of one sequence: ``training_multiplier * (per token * tokens + per pair * query-key pairs)``.

    A multiply and an add are two FLOPs; a matrix of ``m * n`` weights is ``2 * m * n`` a token. Of P prefix and D
    further tokens (``features["P"]``, ``features["D"]``; absent: all are P) there are ``P**2 / 2 + D * (P + D)`` pairs.
    The backward pass takes twice the forward (Kaplan et al., Scaling laws for neural language models, section 2.1),
    hence the default multiplier of 3.

    Args:
        model_config: a mapping, or anything with ``to_dict()``, with the field names of transformers' configurations;
            ``text_config`` inside it is used where present.
        training_multiplier: finite and above 0.

    Raises:
        ValueError: a dimension is missing or not a positive int; it is named.
    """

    def __init__(self, model_config: Any, training_multiplier: float = 3.0) -> None:
        multiplier = float(training_multiplier)
        if not (np.isfinite(multiplier) and multiplier > 0):
            raise ValueError(f"training_multiplier is {training_multiplier!r}; accepted: a finite number > 0")
        fields = _fields(model_config)
        layers = _dimension(fields, "num_hidden_layers")
        projections, pairs = _latent(fields) if fields.get("kv_lora_rank") is not None else _grouped(fields)
        self.per_token = multiplier * (layers * projections + _feed_forward(fields, layers))
        self.per_pair = multiplier * layers * pairs

    def __call__(self, metadata: SampleMetadata) -> WorkloadCost:
        return WorkloadCost(llm=float(self.costs([metadata])[0]))

    def costs(self, metadata: Sequence[SampleMetadata]) -> NDArray[np.float64]:
        """float64[n]: the ``llm`` cost of each sample.

        Raises:
            ValueError: P and D of a sample do not add up to its ``pack_tokens``.
        """
        tokens = pack_tokens(metadata)
        further = np.fromiter((sample.features.get("D", 0) for sample in metadata), np.float64, len(metadata))
        prefix = np.fromiter((_prefix(sample) for sample in metadata), np.float64, len(metadata))
        wrong = np.flatnonzero((prefix + further != tokens) | (prefix < 0) | (further < 0))
        if len(wrong):
            sample = metadata[int(wrong[0])]
            raise ValueError(
                f"sample {sample.sample_id!r} (place {int(wrong[0])}) has features P={sample.features.get('P')} and "
                f"D={sample.features.get('D')}; accepted: ints >= 0 that add up to its pack_tokens {sample.pack_tokens}"
            )
        return self.per_token * tokens + self.per_pair * (prefix * prefix / 2 + further * tokens)

    def padding_cost(self, tokens: int) -> float:
        """FLOPs of a padding tail: a segment like any other."""
        return self.per_token * tokens + self.per_pair * (float(tokens) ** 2 / 2)


def _prefix(sample: SampleMetadata) -> float:
    prefix = sample.features.get("P")
    return sample.pack_tokens - sample.features.get("D", 0) if prefix is None else prefix


def _fields(config: Any) -> Mapping[str, Any]:
    fields = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else None
    if not isinstance(fields, Mapping):
        raise ValueError(f"model_config is a {type(config).__name__}; accepted: a mapping, or anything with to_dict()")
    text = fields.get("text_config")
    return _fields(text) if text is not None else fields


def _dimension(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"model_config field {name!r} is {value!r}; accepted: an int >= 1")
    return int(value)


def _grouped(fields: Mapping[str, Any]) -> tuple[int, int]:
    """FLOPs a token of the four projections, and a pair of scores and values, in one layer."""
    hidden, heads = _dimension(fields, "hidden_size"), _dimension(fields, "num_attention_heads")
    head = _dimension(fields, "head_dim", hidden // heads)
    key_heads = _dimension(fields, "num_key_value_heads", heads)
    return 2 * hidden * head * (2 * heads + 2 * key_heads), 4 * heads * head


def _latent(fields: Mapping[str, Any]) -> tuple[int, int]:
    """The same for latent attention (DeepSeek-V2, section 2.1), keys and values decompressed."""
    hidden, heads = _dimension(fields, "hidden_size"), _dimension(fields, "num_attention_heads")
    latent, rope = _dimension(fields, "kv_lora_rank"), _dimension(fields, "qk_rope_head_dim")
    nope, value = _dimension(fields, "qk_nope_head_dim"), _dimension(fields, "v_head_dim")
    query = heads * (nope + rope)
    if fields.get("q_lora_rank") is None:
        weights = hidden * query
    else:
        rank = _dimension(fields, "q_lora_rank")
        weights = hidden * rank + rank * query
    weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return 2 * weights, 2 * heads * (nope + rope + value)


def _feed_forward(fields: Mapping[str, Any], layers: int) -> int:
    """FLOPs a token of all layers' gated feed-forward parts: three matrices for each expert a token visits."""
    hidden = _dimension(fields, "hidden_size")
    kinds = _kinds_of_layers(fields, layers)
    dense, sparse = kinds.count("dense"), kinds.count("sparse")
    total = dense * 6 * hidden * _dimension(fields, "intermediate_size") if dense else 0
    if sparse:
        routed = _experts(fields) or "n_routed_experts"
        # Mixtral and gpt-oss have no other feed-forward part than experts, and call their size as that of dense layers.
        of_dense = routed == "num_local_experts" and fields.get("moe_intermediate_size") is None
        expert = _dimension(fields, "intermediate_size" if of_dense else "moe_intermediate_size")
        width = expert * _dimension(fields, "num_experts_per_tok")
        if _given(fields, "n_shared_experts"):
            width += expert * _dimension(fields, "n_shared_experts")
        if _given(fields, "shared_expert_intermediate_size"):
            width += _dimension(fields, "shared_expert_intermediate_size")
        total += sparse * (6 * hidden * width + 2 * hidden * _dimension(fields, routed))
    return total


def _kinds_of_layers(fields: Mapping[str, Any], layers: int) -> list[str]:
    """Of each layer, "dense" or "sparse". Where ``mlp_layer_types`` does not say, the first ``first_k_dense_replace``
    layers (DeepSeek-V3), those in ``mlp_only_layers`` and all but every ``decoder_sparse_step``-th (Qwen) are dense.
    """
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise ValueError(
                f"model_config field 'mlp_layer_types' is {kinds!r}; accepted: {layers} of 'dense' and 'sparse'"
            )
        return list(kinds)
    if _experts(fields) is None:
        return ["dense"] * layers
    first, listed = fields.get("first_k_dense_replace") or 0, fields.get("mlp_only_layers") or ()
    every = _dimension(fields, "decoder_sparse_step", 1)
    sparse = [layer >= first and layer not in listed and (layer + 1) % every == 0 for layer in range(layers)]
    return ["sparse" if has_experts else "dense" for has_experts in sparse]


def _experts(fields: Mapping[str, Any]) -> str | None:
    """The field that counts routed experts; None where there are none."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((name for name in names if _given(fields, name)), None)


def _given(fields: Mapping[str, Any], name: str) -> bool:
    return fields.get(name) not in (None, 0)
