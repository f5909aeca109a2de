"""Which layers a model has, from whatever way its config says so: layer types, periods, patterns, lists.

What the rules do not know becomes a reason in `unmodelled`; it is never read as plain attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .fields import Fields
from .layer import Attention, Ffn, State, Unmodelled

_FULL, _SLIDING, _CHUNKED = Attention.FULL, Attention.SLIDING, Attention.CHUNKED

# Configs name layers in their own words; what `linear_attention` and its like mean is the family's to say.
_BY_NAME = {
    "full_attention": _FULL, "attention": _FULL, "global": _FULL, "full": _FULL, "hybrid": _FULL,
    "sliding_attention": _SLIDING, "sliding_window_attention": _SLIDING, "local": _SLIDING,
    "chunked_attention": _CHUNKED, "indexed_attention": Attention.DSA, "deepseek_sparse_attention": Attention.DSA,
}  # fmt: skip
_STATE_NAMES = {"linear_attention", "mamba", "mamba2", "conv", "kda", "gated_delta_net"}

STATE_OF = {
    "qwen3_next": State.GDN, "qwen3_5_text": State.GDN, "qwen3_5_moe_text": State.GDN, "qwen4_exp_text": State.GDN,
    "kimi_linear": State.KDA, "lfm2": State.SHORT_CONV, "lfm2_moe": State.SHORT_CONV, "jamba": State.MAMBA1,
    "bamba": State.MAMBA2, "nemotron_h": State.MAMBA2, "granitemoehybrid": State.MAMBA2, "falcon_h1": State.MAMBA2,
    "mamba": State.MAMBA1, "mamba2": State.MAMBA2, "falcon_mamba": State.MAMBA1,
    "minimax": State.LIGHTNING, "minimax_text_01": State.LIGHTNING,
}  # fmt: skip

GROUPED = frozenset({
    "llama", "mistral", "ministral3", "mixtral", "qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl",
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "phi", "phi3",
    "phimoe", "granite", "granitemoe", "granitemoeshared", "falcon", "smollm3", "mimo", "glm", "glm4", "glm4_moe",
    "glm4_moe_text", "glm4v_text", "minimax_m2", "olmo", "olmo2", "olmo3", "starcoder2", "stablelm", "gpt_neox",
    "gpt2", "internlm2", "internlm3", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss",
    "cohere", "cohere2", "exaone", "exaone4", "seed_oss", "dots1", "arcee", "apertus", "ernie4_5", "ernie4_5_moe",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "mimo_v2_flash", "step3p5", "nemotron", "nemotron-nas",
    "pangu_embedded", "molmo", "baichuan", "qwen3_omni_moe_text", "opt", "dbrx",
})  # fmt: skip
LATENT = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "mistral4", "kimi_linear",
})  # fmt: skip
"""Text model types whose attention the rules below describe: grouped-query (or multi-head) and latent."""

# vLLM reads `sliding_window` without `layer_types` as a window on every layer for these (0.33 model files).
_WINDOW_EVERYWHERE = frozenset({
    "mistral", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip


def mixer(model_type: str, f: Fields, index: int) -> tuple[Attention, State]:
    """(attention, state) of one layer, before the family's own sizes."""
    name = _layer_name(model_type, f, index)
    family_state = STATE_OF.get(model_type, State.NONE)
    if model_type == "falcon_h1":
        return _FULL, State.MAMBA2
    if name == "none":
        return Attention.NONE, State.NONE
    if name in _STATE_NAMES:
        if family_state is State.NONE:
            raise Unmodelled(f"model_type {model_type}: layer type {name!r} is not modelled")
        return Attention.NONE, family_state
    if name not in _BY_NAME:
        raise Unmodelled(f"model_type {model_type}: layer type {name!r} is not modelled")
    kind = _BY_NAME[name]
    if model_type == "qwen4_exp_text":
        return Attention.QSA, State.NONE
    if kind is Attention.DSA and model_type not in LATENT:
        raise Unmodelled(f"model_type {model_type}: layer type {name!r} is not modelled")
    if model_type in LATENT:
        latent = f.integer("kv_lora_rank") and f.flag("use_mla") is not False
        if not latent:
            return _FULL, State.NONE
        return (Attention.DSA if f.integer("index_topk") else Attention.MLA), State.NONE
    return kind, State.NONE


def _layer_name(model_type: str, f: Fields, index: int) -> str:
    """What the config calls a layer, in the words of `layer_types`."""
    if model_type == "nemotron_h":
        return nemotron_block(f, index)[0]
    if (rule := _BY_PERIOD.get(model_type)) and (name := rule(f, index)):
        return name
    if index < len(types := f.items("layer_types", "layers_block_type")):
        return types[index] if isinstance(types[index], str) else repr(types[index])
    if model_type in STATE_OF and model_type not in {"mamba", "mamba2", "falcon_mamba"}:
        raise Unmodelled(f"model_type {model_type}: no layer_types, so which layers attend is not known")
    if model_type in _WINDOW_EVERYWHERE and f.integer("sliding_window"):
        asked = f.flag("use_sliding_window")
        if asked or (asked is None and not model_type.startswith("qwen")):
            return "sliding_attention"
    return "linear_attention" if model_type in STATE_OF else "full_attention"


def _every(names: tuple[str, ...], default: int, then: str, other: str) -> Callable[[Fields, int], str | None]:
    """Layers i with (i + 1) a multiple of a period are `then`, the rest `other`; None where layer_types decides."""

    def rule(f: Fields, index: int) -> str | None:
        if f.items("layer_types"):
            return None
        period = f.integer(*names) or default
        return then if (index + 1) % period == 0 else other

    return rule


def _jamba(f: Fields, index: int) -> str | None:
    period, offset = f.integer("attn_layer_period"), f.integer("attn_layer_offset")
    if not period or offset is None:
        return None
    return "full_attention" if index % period == offset else "mamba"


def _bamba(f: Fields, index: int) -> str | None:
    return ("full_attention" if index in at else "mamba") if (at := f.items("attn_layer_indices")) else None


def _lfm2(f: Fields, index: int) -> str | None:
    return ("full_attention" if index in at else "conv") if (at := f.items("full_attn_idxs")) else None


def _kimi_linear(f: Fields, index: int) -> str | None:
    # linear_attn_config counts layers from one (vllm 0.33.0 transformers_utils/configs/kimi_linear.py).
    at = f.mapping("linear_attn_config").get("full_attn_layers")
    return ("full_attention" if index + 1 in at else "linear_attention") if isinstance(at, list) else None


def _mimo_v2(f: Fields, index: int) -> str | None:
    pattern = f.items("hybrid_layer_pattern")
    if index >= len(pattern):
        return None
    return "sliding_attention" if pattern[index] == 1 else "full_attention"


def _llama4(f: Fields, index: int) -> str | None:
    if f.items("layer_types"):
        return None
    flags = f.items("no_rope_layers")
    period = f.integer("no_rope_layer_interval") or 4
    rotates = flags[index] if index < len(flags) else (index + 1) % period != 0
    return "chunked_attention" if rotates and f.integer("attention_chunk_size") else "full_attention"


def _nas(f: Fields, index: int) -> str | None:
    block = nas_block(f, index, "attention")
    if block.raw("replace_with_linear") or block.raw("window_length"):
        raise Unmodelled("model_type nemotron-nas: replaced attention blocks are not modelled")
    return "none" if block.flag("no_op") else "full_attention"


def nas_block(f: Fields, index: int, part: str) -> Fields:
    blocks = f.items("block_configs")
    block = blocks[index].get(part) if index < len(blocks) and isinstance(blocks[index], Mapping) else None
    if not isinstance(block, Mapping):
        raise Unmodelled(f"model_type nemotron-nas: no block_configs for the {part} of a layer")
    return Fields(block)


_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")

_BY_PERIOD: dict[str, Callable[[Fields, int], str | None]] = {
    "qwen3_next": _every(("full_attention_interval",), 4, "full_attention", "linear_attention"),
    "qwen3_5_text": _every(("full_attention_interval",), 4, "full_attention", "linear_attention"),
    "qwen3_5_moe_text": _every(("full_attention_interval",), 4, "full_attention", "linear_attention"),
    "qwen4_exp_text": _every(("full_attention_interval",), 4, "full_attention", "linear_attention"),
    "gemma2": _every((), 2, "full_attention", "sliding_attention"),
    "gemma3_text": _every(_PATTERN, 6, "full_attention", "sliding_attention"),
    "gpt_oss": _every((), 2, "full_attention", "sliding_attention"),
    "cohere2": _every(_PATTERN, 4, "full_attention", "sliding_attention"),
    "jamba": _jamba, "bamba": _bamba, "lfm2": _lfm2, "lfm2_moe": _lfm2, "kimi_linear": _kimi_linear,
    "mimo_v2_flash": _mimo_v2, "llama4_text": _llama4, "nemotron-nas": _nas,
}  # fmt: skip
"""Families that state their pattern by a period or a list of their own (defaults: transformers 5 config classes)."""


def nemotron_block(f: Fields, index: int) -> tuple[str, Ffn]:
    """(layer type, feed-forward) of one Nemotron-H block; each block is one thing only."""
    pattern, names = f.text("hybrid_override_pattern"), f.items("layers_block_type")
    mark = pattern[index] if pattern and index < len(pattern) else names[index] if index < len(names) else None
    known = {
        "M": ("mamba", Ffn.NONE), "mamba": ("mamba", Ffn.NONE), "linear_attention": ("mamba", Ffn.NONE),
        "*": ("full_attention", Ffn.NONE), "attention": ("full_attention", Ffn.NONE),
        "full_attention": ("full_attention", Ffn.NONE),
        "E": ("none", Ffn.MOE), "moe": ("none", Ffn.MOE), "-": ("none", Ffn.DENSE), "mlp": ("none", Ffn.DENSE),
    }  # fmt: skip
    if not isinstance(mark, str) or mark not in known:
        raise Unmodelled(f"model_type nemotron_h: block {mark!r} is not modelled")
    return known[mark]
