"""The layers of a model with their sizes, family by family, as its config states them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .fields import Fields, whole
from .layer import Attention, Ffn, Layer, State, Unmodelled
from .layer_order import GROUPED, LATENT, STATE_OF, mixer, nas_block, nemotron_block


def parse_layers(model_type: str | None, f: Fields, count: int) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """One record for each of `count` layers, and the reasons why any of them is not modelled."""
    reasons: dict[str, None] = {}
    layers = []
    if model_type not in GROUPED | LATENT | STATE_OF.keys():
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
    attention, state = mixer(model_type, f, index)
    special = _SPECIAL.get(model_type, _plain)
    return special(f, index, count, attention, state)


def _plain(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    """A layer whose sizes are the config's plain fields."""
    heads = f.integer("num_attention_heads", "n_head")
    head_dim = f.integer("head_dim", "kv_channels")
    if head_dim is None and (hidden := f.integer("hidden_size", "n_embd")) and heads:
        head_dim = hidden // heads
    window = None
    if attention is Attention.SLIDING:
        window = f.integer("sliding_window", "sliding_window_size")
    elif attention is Attention.CHUNKED:
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
        intermediate_size=_width(f),
        owns_indexer=attention is Attention.DSA and _owns_indexer(f, index),
        rope=_rotates(f, index),
    )


def _width(f: Fields) -> int | None:
    """The dense feed-forward's width; Falcon's config class takes four times the hidden size where none is stated."""
    stated, hidden = f.integer("intermediate_size", "ffn_hidden_size", "n_inner"), f.integer("hidden_size")
    return 4 * hidden if stated is None and hidden and f.text("model_type") == "falcon" else stated


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
    return _plain(f, index, count, attention, state).model_copy(update={"ffn": nemotron_block(f, index)[1]})


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
    everywhere = attention is Attention.FULL
    if everywhere and (wide := f.integer("global_head_dim") or _own_head_dim(f, index)):
        update |= {"head_dim": wide, "value_head_dim": wide}
    if everywhere and f.flag("attention_k_eq_v") and (heads := f.integer("num_global_key_value_heads")):
        update["kv_heads"] = heads
    if layer.ffn is Ffn.MOE and f.flag("enable_moe_block"):
        update["ffn"] = Ffn.BOTH
    return layer.model_copy(update=update)


def _own_head_dim(f: Fields, index: int) -> int | None:
    own = f.mapping("per_layer_config").get(f"{index:02d}")
    return whole(own.get("head_dim")) if isinstance(own, Mapping) else None


def _mimo_layer(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    layer = _plain(f, index, count, attention, state)
    if attention is not Attention.SLIDING:
        return layer
    own = {
        "heads": f.integer("swa_num_attention_heads"), "kv_heads": f.integer("swa_num_key_value_heads"),
        "head_dim": f.integer("swa_head_dim"), "value_head_dim": f.integer("swa_v_head_dim"),
    }  # fmt: skip
    return layer.model_copy(update={name: size for name, size in own.items() if size})


def _nas_layer(f: Fields, index: int, count: int, attention: Attention, state: State) -> Layer:
    layer, feed = _plain(f, index, count, attention, state), nas_block(f, index, "ffn")
    group = nas_block(f, index, "attention").integer("n_heads_in_group")
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
    return layer.model_copy(update={"intermediate_size": size, "rope": attention is Attention.CHUNKED})


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
