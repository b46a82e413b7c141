"""CONTRACT 5: FLOPs of a decoder from its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hp_nodes.planning import BackboneCostModel
from hp_nodes.types import SampleMetadata

LATENT: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "kv_lora_rank": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
GROUPED: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
PREFIX = SampleMetadata(4, features={"P": 2, "D": 2})


def test_latent_attention_matches_the_worked_example() -> None:
    assert BackboneCostModel(LATENT, training_multiplier=1)(PREFIX).llm == 5184
    assert BackboneCostModel(LATENT)(PREFIX).llm == 15552


def test_grouped_heads_by_hand() -> None:
    """Per layer and token: query and output 64*64 each, key and value 64*16 each, three matrices of 64*128."""
    model = BackboneCostModel(GROUPED, training_multiplier=1)
    per_token = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 128)
    per_pair = 2 * 64 + 2 * 64
    assert model(SampleMetadata(10)).llm == 3 * (per_token * 10 + per_pair * 50)


def test_experts_count_as_often_as_tokens_visit_them() -> None:
    sparse = GROUPED | {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
    }
    difference = BackboneCostModel(sparse, 1).per_token - BackboneCostModel(GROUPED, 1).per_token
    expert_layer = 5 * 6 * 64 * 32 + 2 * 64 * 16
    assert difference == 2 * (expert_layer - 6 * 64 * 128)


@pytest.mark.parametrize(
    ("names", "sparse", "shared"),
    [
        ({"n_routed_experts": 16, "first_k_dense_replace": 1, "n_shared_experts": 1}, 2, 32),  # DeepSeek-V3, GLM-4.5
        ({"num_experts": 16, "decoder_sparse_step": 2, "mlp_only_layers": []}, 1, 0),  # Qwen3-MoE
        ({"num_experts": 16, "mlp_only_layers": [0], "shared_expert_intermediate_size": 48}, 2, 48),  # Qwen2-MoE
        ({"num_local_experts": 16}, 3, 0),  # gpt-oss
        ({"n_routed_experts": None, "first_k_dense_replace": 1}, 0, 0),
    ],
    ids=["first layers dense", "every second", "listed layers dense", "all", "none"],
)
def test_layers_with_experts_are_found_by_the_names_of_several_models(
    names: dict[str, Any], sparse: int, shared: int
) -> None:
    experts = GROUPED | {"moe_intermediate_size": 32, "num_experts_per_tok": 4} | names
    difference = BackboneCostModel(experts, 1).per_token - BackboneCostModel(GROUPED, 1).per_token
    expert_layer = 6 * 64 * (4 * 32 + shared) + 2 * 64 * 16
    assert difference == sparse * (expert_layer - 6 * 64 * 128)


def test_experts_without_a_size_of_their_own_have_that_of_dense_layers() -> None:
    """Mixtral."""
    experts = GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2}
    difference = BackboneCostModel(experts, 1).per_token - BackboneCostModel(GROUPED, 1).per_token
    assert difference == 3 * (6 * 64 * 128 + 2 * 64 * 8)


@pytest.mark.parametrize("name", ["num_experts_per_tok", "n_routed_experts", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -1])
def test_a_bad_dimension_of_experts_is_refused_by_name(name: str, value: Any) -> None:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(ValueError, match=f"'{name}' is {value}; accepted: an int >= 1"):
        BackboneCostModel(GROUPED | {"mlp_layer_types": ["sparse"] * 3} | sizes | {name: value})


@pytest.mark.parametrize(
    "name", ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"]
)
def test_a_bad_dimension_of_latent_attention_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is 0; accepted: an int >= 1"):
        BackboneCostModel(LATENT | {name: 0})


def test_a_query_rank_of_its_own_changes_the_projections() -> None:
    ranked = BackboneCostModel(LATENT | {"q_lora_rank": 3}, 1)
    assert ranked.per_token - BackboneCostModel(LATENT, 1).per_token == 2 * (8 * 3 + 3 * 8 - 8 * 8)


def test_configurations_are_read_in_every_form() -> None:
    plain = BackboneCostModel(GROUPED)(SampleMetadata(9))
    assert BackboneCostModel({"text_config": GROUPED})(SampleMetadata(9)) == plain
    assert BackboneCostModel(SimpleNamespace(to_dict=lambda: {"text_config": GROUPED}))(SampleMetadata(9)) == plain


def test_many_at_once_and_padding_agree_with_one_by_one() -> None:
    model = BackboneCostModel(GROUPED)
    samples = [SampleMetadata(5), SampleMetadata(4, features={"P": 1, "D": 3}), SampleMetadata(4, features={"D": 3})]
    assert model.costs(samples).tolist() == [model(sample).llm for sample in samples]
    assert model.costs(samples)[1] == model.costs(samples)[2]
    assert model.padding_cost(5) == model(samples[0]).llm


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -3, 2.5, True])
def test_a_bad_dimension_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is {value}; accepted: an int >= 1"):
        BackboneCostModel(GROUPED | {name: value})


def test_other_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="training_multiplier"):
        BackboneCostModel(GROUPED, 0)
    with pytest.raises(ValueError, match="model_config is a int"):
        BackboneCostModel(3)
    with pytest.raises(ValueError, match="mlp_layer_types"):
        BackboneCostModel(GROUPED | {"mlp_layer_types": ["dense"]})
    with pytest.raises(ValueError, match=r"sample 'a' .* P=1 and D=1; .* pack_tokens 4"):
        BackboneCostModel(GROUPED)(SampleMetadata(4, features={"P": 1, "D": 1}, sample_id="a"))
