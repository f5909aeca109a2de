"""The layers of a model as its config states them: how each mixes tokens, and what it keeps of the past.

What the rules do not know becomes a reason in `unmodelled`; it is never read as plain attention.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


@enum.unique
class Attention(enum.StrEnum):
    """What a layer attends with; decides what it caches for each token."""

    NONE = "none"
    UNKNOWN = "unknown"  # the rules do not know it; the geometry says why under `unmodelled`
    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"  # one latent for all heads
    DSA = "dsa"  # MLA over tokens picked by an indexer
    QSA = "qsa"  # grouped-query attention over tokens picked from compressed keys


@enum.unique
class State(enum.StrEnum):
    """What a layer keeps of the past in a state of fixed size."""

    NONE = "none"
    GDN = "gdn"
    KDA = "kda"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    LIGHTNING = "lightning"
    SHORT_CONV = "short_conv"


@enum.unique
class Ffn(enum.StrEnum):
    """What follows the token mixer."""

    NONE = "none"
    DENSE = "dense"
    MOE = "moe"
    BOTH = "both"  # a dense MLP beside the experts (Gemma 4)


class Layer(BaseModel):
    """A kind of layer. Sizes are of the whole model, not of a rank; None where the config is silent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attention: Attention = Attention.NONE
    state: State = State.NONE
    ffn: Ffn = Ffn.DENSE
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    window: int | None = None  # tokens a sliding or chunked layer looks back over
    intermediate_size: int | None = None  # of the dense MLP
    shares_kv: bool = False  # reads an earlier layer's cache and owns none
    owns_indexer: bool = False  # a DSA layer that scores tokens itself rather than reuse another layer's choice
    rope: bool = True


class Fields:
    """Typed reads of a config, text part first, then the outer part. A value of another type is as good as absent."""

    def __init__(self, *parts: Mapping[str, Any]):
        self._parts = parts

    def raw(self, *names: str) -> Any:
        """The first value present and not null under any of the names, or None."""
        for name in names:
            for part in self._parts:
                if part.get(name) is not None:
                    return part[name]
        return None

    def integer(self, *names: str) -> int | None:
        return whole(self.raw(*names))

    def number(self, *names: str) -> float | None:
        value = self.raw(*names)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if plain and math.isfinite(value) else None

    def text(self, *names: str) -> str | None:
        value = self.raw(*names)
        return value if isinstance(value, str) else None

    def flag(self, *names: str) -> bool | None:
        value = self.raw(*names)
        return value if isinstance(value, bool) else None

    def items(self, *names: str) -> list[Any]:
        value = self.raw(*names)
        return value if isinstance(value, list) else []

    def mapping(self, *names: str) -> Mapping[str, Any]:
        value = self.raw(*names)
        return value if isinstance(value, Mapping) else {}


def whole(value: Any) -> int | None:
    """A whole number from 0 up to 2**53, written as an int or as a float without a fraction; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and 0 <= value <= 2**53 else None


class Unmodelled(Exception):
    """A layer the rules do not know; caught where the geometry is put together and kept as its reason."""


_FULL, _SLIDING, _CHUNKED = Attention.FULL, Attention.SLIDING, Attention.CHUNKED

# Configs name layers in their own words; what `linear_attention` and its like mean is the family's to say.
_BY_NAME = {
    "full_attention": _FULL, "attention": _FULL, "global": _FULL, "full": _FULL, "hybrid": _FULL,
    "sliding_attention": _SLIDING, "sliding_window_attention": _SLIDING, "local": _SLIDING,
    "chunked_attention": _CHUNKED, "indexed_attention": Attention.DSA, "deepseek_sparse_attention": Attention.DSA,
}  # fmt: skip
_STATE_NAMES = {"linear_attention", "mamba", "mamba2", "conv", "kda", "gated_delta_net"}

_STATE_OF = {
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


def parse_layers(model_type: str | None, f: Fields, count: int) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """One record for each of `count` layers, and the reasons why any of them is not modelled."""
    reasons: dict[str, None] = {}
    layers = []
    if model_type not in GROUPED | LATENT | _STATE_OF.keys():
        unknown = Layer(attention=Attention.UNKNOWN)
        return (unknown,) * count, (f"model_type {model_type or 'missing'}: its attention is not modelled",)
    for index in range(count):
        try:
            layers.append(_layer(model_type or "", f, index, count))
        except Unmodelled as reason:
            reasons[str(reason)] = None
            layers.append(Layer(attention=Attention.UNKNOWN))
    return tuple(layers), tuple(reasons)


def _layer(model_type: str, f: Fields, index: int, count: int) -> Layer:
    attention, state = _mixer(model_type, f, index)
    special = _SPECIAL.get(model_type, _plain)
    return special(f, index, count, attention, state)


def _mixer(model_type: str, f: Fields, index: int) -> tuple[Attention, State]:
    """(attention, state) of one layer, before the family's own sizes."""
    name = _layer_name(model_type, f, index)
    family_state = _STATE_OF.get(model_type, State.NONE)
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
        return _nemotron_block(f, index)[0]
    if (rule := _BY_PERIOD.get(model_type)) and (name := rule(f, index)):
        return name
    if index < len(types := f.items("layer_types", "layers_block_type")):
        return types[index] if isinstance(types[index], str) else repr(types[index])
    if model_type in _STATE_OF and model_type not in {"mamba", "mamba2", "falcon_mamba"}:
        raise Unmodelled(f"model_type {model_type}: no layer_types, so which layers attend is not known")
    if model_type in _WINDOW_EVERYWHERE and f.integer("sliding_window"):
        asked = f.flag("use_sliding_window")
        if asked or (asked is None and not model_type.startswith("qwen")):
            return "sliding_attention"
    return "linear_attention" if model_type in _STATE_OF else "full_attention"


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
    block = _nas_block(f, index, "attention")
    if block.raw("replace_with_linear") or block.raw("window_length"):
        raise Unmodelled("model_type nemotron-nas: replaced attention blocks are not modelled")
    return "none" if block.flag("no_op") else "full_attention"


def _nas_block(f: Fields, index: int, part: str) -> Fields:
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


def _nemotron_block(f: Fields, index: int) -> tuple[str, Ffn]:
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


def _plain(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    """A layer whose sizes are the config's plain fields."""
    heads = f.integer("num_attention_heads", "n_head")
    head_dim = f.integer("head_dim", "kv_channels")
    if head_dim is None and (hidden := f.integer("hidden_size", "n_embd")) and heads:
        head_dim = hidden // heads
    window = None
    if attention is _SLIDING:
        window = f.integer("sliding_window", "sliding_window_size")
    elif attention is _CHUNKED:
        window = f.integer("attention_chunk_size")
    attends = attention is not Attention.NONE
    latent = attention in (Attention.MLA, Attention.DSA)
    return Layer(
        attention=attention,
        state=state,
        ffn=ffn(f, index),
        heads=heads if attends else None,
        kv_heads=kv_heads(f) if attends and not latent else None,
        head_dim=head_dim if attends and not latent else None,
        value_head_dim=(f.integer("v_head_dim") or head_dim) if attends and not latent else None,
        window=window,
        intermediate_size=f.integer("intermediate_size", "ffn_hidden_size", "n_inner"),
        owns_indexer=attention is Attention.DSA and _owns_indexer(f, index),
        rope=_rotates(f, index),
    )


def _rotates(f: Fields, index: int) -> bool:
    flags = f.items("no_rope_layers")
    return not (index < len(flags) and flags[index] in (0, False))


def kv_heads(f: Fields) -> int | None:
    """Key-value heads in the names configs use; multi-query and plain multi-head families say so by a flag."""
    if (stated := f.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")) is not None:
        if f.text("model_type") != "falcon" or f.flag("new_decoder_architecture"):
            return stated
        return 1 if f.flag("multi_query") else stated
    if f.text("model_type") == "falcon":
        return 1 if f.flag("multi_query") else f.integer("num_attention_heads")
    # These classes have no such field, or read its absence as one key-value head for every head.
    every_head = {"llama", "gpt2", "gpt_neox", "opt", "qwen", "phi", "mistral", "stablelm", "baichuan", "olmo"}
    return f.integer("num_attention_heads", "n_head") if f.text("model_type") in every_head else None


def _owns_indexer(f: Fields, index: int) -> bool:
    """Layers marked `full` score tokens; `shared` ones reuse the choice (vllm 0.33.0 models/deepseek_v2.py:1142)."""
    types, pattern = f.items("indexer_types"), f.text("index_topk_pattern")
    if index < len(types):
        return bool(types[index] != "shared")
    if pattern is not None:
        return not (index < len(pattern) and pattern[index] == "S")
    offset = f.integer("index_skip_topk_offset")
    return max(index - (2 if offset is None else offset) + 1, 0) % (f.integer("index_topk_freq") or 1) == 0


def ffn(f: Fields, index: int) -> Ffn:
    """Dense or mixture of experts, by whichever of the ways to say it the config uses."""
    if not experts(f):
        return Ffn.DENSE
    marks = f.items("mlp_layer_types")
    if index < len(marks):
        return Ffn.DENSE if marks[index] == "dense" else Ffn.MOE
    if index in f.items("mlp_only_layers"):
        return Ffn.DENSE
    if (chosen := f.items("moe_layers")) and f.text("model_type") == "llama4_text":
        return Ffn.MOE if index in chosen else Ffn.DENSE
    if index < (f.integer("first_k_dense_replace", "num_dense_layers") or 0):
        return Ffn.DENSE
    frequency = f.raw("moe_layer_freq")
    if isinstance(frequency, list):
        return Ffn.MOE if index < len(frequency) and frequency[index] == 1 else Ffn.DENSE
    if (every := f.integer("moe_layer_freq")) and every > 1 and index % every:
        return Ffn.DENSE
    step = f.integer("decoder_sparse_step", "interleave_moe_layer_step") or 1
    if (index + 1) % step:
        return Ffn.DENSE
    if period := f.integer("expert_layer_period"):
        return Ffn.MOE if index % period == (f.integer("expert_layer_offset") or 0) else Ffn.DENSE
    return Ffn.MOE


def experts(f: Fields) -> int | None:
    """Routed experts of a layer; 0 where the config says there are none, None where it does not say."""
    if f.flag("enable_moe_block") is False:
        return 0
    return f.integer("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def _nemotron(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    return _plain(f, index, count, attention, state).model_copy(update={"ffn": _nemotron_block(f, index)[1]})


def _gemma_n(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    """Gemma 3n and 4: the last layers read earlier caches; Gemma 4's global layers have their own heads."""
    layer = _plain(f, index, count, attention, state)
    shares = index >= count - (f.integer("num_kv_shared_layers") or 0)
    sizes = f.items("intermediate_size")
    update: dict[str, Any] = {"shares_kv": shares, "intermediate_size": layer.intermediate_size}
    if index < len(sizes):
        update["intermediate_size"] = whole(sizes[index])
    if shares and f.flag("use_double_wide_mlp") and layer.intermediate_size:
        update["intermediate_size"] = 2 * layer.intermediate_size
    if attention is _FULL and (wide := f.integer("global_head_dim") or _own_head_dim(f, index)):
        update |= {"head_dim": wide, "value_head_dim": wide}
    if attention is _FULL and f.flag("attention_k_eq_v") and (heads := f.integer("num_global_key_value_heads")):
        update["kv_heads"] = heads
    if layer.ffn is Ffn.MOE and f.flag("enable_moe_block"):
        update["ffn"] = Ffn.BOTH
    return layer.model_copy(update=update)


def _own_head_dim(f: Fields, index: int) -> int | None:
    own = f.mapping("per_layer_config").get(f"{index:02d}")
    return whole(own.get("head_dim")) if isinstance(own, Mapping) else None


def _mimo_layer(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    layer = _plain(f, index, count, attention, state)
    if attention is not _SLIDING:
        return layer
    own = {
        "heads": f.integer("swa_num_attention_heads"), "kv_heads": f.integer("swa_num_key_value_heads"),
        "head_dim": f.integer("swa_head_dim"), "value_head_dim": f.integer("swa_v_head_dim"),
    }  # fmt: skip
    return layer.model_copy(update={name: size for name, size in own.items() if size})


def _nas_layer(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    layer, feed = _plain(f, index, count, attention, state), _nas_block(f, index, "ffn")
    group = _nas_block(f, index, "attention").integer("n_heads_in_group")
    update: dict[str, Any] = {"ffn": Ffn.NONE if feed.flag("no_op") else Ffn.DENSE, "intermediate_size": None}
    if layer.heads and group:
        update["kv_heads"] = layer.heads // group
    multiple, hidden = feed.number("ffn_mult"), f.integer("hidden_size")
    if multiple and hidden:
        # vllm 0.33.0 model_executor/models/nemotron_nas.py: two thirds of the multiple, rounded up to 256.
        update["intermediate_size"] = -(-int(2 * multiple * hidden / 3) // 256) * 256
    return layer.model_copy(update=update)


def _llama4_layer(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    layer = _plain(f, index, count, attention, state)
    size = f.integer("intermediate_size_mlp" if layer.ffn is Ffn.DENSE else "intermediate_size")
    return layer.model_copy(update={"intermediate_size": size, "rope": attention is _CHUNKED})


def _lfm2_layer(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    """LFM2 states its MLP's width before the cut to two thirds (vllm 0.33.0 model_executor/models/lfm2.py)."""
    layer, size = _plain(f, index, count, attention, state), f.integer("block_ff_dim", "intermediate_size")
    if size and f.flag("block_auto_adjust_ff_dim"):
        multiple = f.integer("block_multiple_of") or 1
        size = int((f.number("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return layer.model_copy(update={"intermediate_size": size})


_SPECIAL: dict[str, Callable[[Fields, int, int, Attention, State], Layer]] = {
    "nemotron_h": _nemotron, "gemma3n_text": _gemma_n, "gemma4_text": _gemma_n, "mimo_v2_flash": _mimo_layer,
    "nemotron-nas": _nas_layer, "llama4_text": _llama4_layer, "lfm2": _lfm2_layer,
}  # fmt: skip
