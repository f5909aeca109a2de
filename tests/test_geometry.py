"""Geometry from real configs: the layers a config states, and nothing it does not."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from formulas.errors import BadInput
from formulas.geometry import Attention, Ffn, Geometry, State, overridden, parse_geometry

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
CONFIGS = sorted(
    [*SHARED.glob("configs*/*/config.json"), *SHARED.glob("configs_transformers_defaults/*.json")]
)


def counts(geometry: Geometry) -> dict[str, int]:
    """Layers by what they keep of the past."""
    found: dict[str, int] = {}
    for layer in geometry.each_layer():
        name = layer.attention.value if layer.attention is not Attention.NONE else layer.state.value
        found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.parent.name if p.name == "config.json" else p.stem)
def test_every_config_is_read_or_refused_with_a_reason(path):
    geometry = parse_geometry(json.loads(path.read_text()))
    assert geometry.layers
    assert bool(geometry.unmodelled) == any(k.attention is Attention.UNKNOWN for k in geometry.layer_kinds)
    assert Geometry.model_validate_json(geometry.model_dump_json()) == geometry


def test_a_hybrid_counts_its_kinds_and_its_drafter():
    types = (["linear_attention"] * 3 + ["full_attention"]) * 4
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 16, "layer_types": types, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48,
            "mtp_num_hidden_layers": 1}  # fmt: skip
    geometry = parse_geometry({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text})
    assert counts(geometry) == {"gdn": 12, "full": 4}
    assert geometry.recurrent is not None
    assert geometry.recurrent.value_heads == 48
    assert geometry.mtp_layers == 1
    assert [k.attention for k in geometry.mtp_kinds] == [Attention.FULL]


def test_silence_stays_unknown():
    geometry = parse_geometry({"model_type": "qwen3", "num_hidden_layers": 2})
    layer = geometry.layer(0)
    assert (layer.heads, layer.kv_heads, layer.head_dim, geometry.vocab_size, geometry.mtp_layers) == (None,) * 5


def test_an_unknown_family_or_layer_is_never_plain_attention():
    for config in (
        {"model_type": "brand_new", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
        {"model_type": "qwen3", "num_hidden_layers": 4, "layer_types": ["warp_attention"] * 4},
        {"model_type": "jamba", "num_hidden_layers": 4},
    ):
        geometry = parse_geometry(config)
        assert geometry.unmodelled
        assert {k.attention for k in geometry.layer_kinds} == {Attention.UNKNOWN}


def test_moe_layers_follow_each_way_of_saying_so():
    deepseek = parse_geometry({"model_type": "deepseek_v3", "num_hidden_layers": 5, "n_routed_experts": 256,
                               "first_k_dense_replace": 3, "kv_lora_rank": 512})  # fmt: skip
    assert [k.ffn for k in deepseek.each_layer()] == [Ffn.DENSE] * 3 + [Ffn.MOE] * 2
    nemotron = parse_geometry({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4})
    assert [(k.state, k.ffn) for k in nemotron.each_layer()] == [
        (State.MAMBA2, Ffn.NONE), (State.NONE, Ffn.MOE), (State.NONE, Ffn.NONE), (State.NONE, Ffn.DENSE)
    ]  # fmt: skip


def test_overrides_merge_objects_key_by_key():
    config = {"model_type": "qwen4_exp", "text_config": {"head_dim": 256, "rope": {"a": 1}}, "dtype": "bfloat16"}
    asked = {"text_config": {"ple_embedding_dtype": "float8_e4m3fn", "rope": {"b": 2}}, "dtype": "float16"}
    text = {"head_dim": 256, "rope": {"a": 1, "b": 2}, "ple_embedding_dtype": "float8_e4m3fn"}
    assert overridden(config, asked) == {"model_type": "qwen4_exp", "text_config": text, "dtype": "float16"}
    assert config["text_config"] == {"head_dim": 256, "rope": {"a": 1}}
    assert overridden({"a": {"b": 1}}, {"a": 2}) == {"a": 2}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([
    "model_type", "num_hidden_layers", "layer_types", "text_config", "num_attention_heads", "head_dim",
    "hybrid_override_pattern", "block_configs", "rope_parameters", "vision_config", "mtp", "moe_layer_freq",
    "no_rope_layers", "num_experts", "intermediate_size", "full_attn_idxs", "linear_attn_config", "sliding_window",
    "per_layer_config", "num_kv_shared_layers", "kv_lora_rank",
])  # fmt: skip
TYPES = st.sampled_from(
    ["llama", "nemotron_h", "gemma4_text", "nemotron-nas", "deepseek_v32", "jamba", "lfm2", "llama4_text"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, JSON, max_size=8), TYPES, st.integers(0, 6))
def test_odd_types_never_raise_anything_but_bad_input(config, model_type, layers):
    try:
        geometry = parse_geometry({"model_type": model_type, "num_hidden_layers": layers, **config})
    except BadInput:
        return
    assert Geometry.model_validate(geometry.model_dump()) == geometry


@pytest.mark.parametrize("config", [[], None, "x", {"num_hidden_layers": 10**9}])
def test_absurd_configs_are_bad_input(config):
    with pytest.raises(BadInput):
        parse_geometry(config)
