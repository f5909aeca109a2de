"""What config.json says of a model's shape. Fields a config is silent about are None, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import BadInput
from .fields import Fields, whole
from .layer import Attention, Ffn, Layer, Part, State
from .layers import experts, parse_layers
from .ropes import Rope, parse_ropes
from .vision import Vision, parse_vision

__all__ = ["Attention", "Ffn", "Geometry", "Layer", "Rope", "State", "Vision", "overridden",
           "parse_geometry"]  # fmt: skip

MOST_LAYERS = 4096


class Latent(Part):
    """Multi-head latent attention: what is cached is kv_rank + rope_dim values a token, whatever the heads."""

    q_rank: int | None = None  # None: queries are not compressed
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class Indexer(Part):
    """The scorer of sparse attention: its heads, their size, how many tokens it keeps, tokens to one key."""

    heads: int | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    topk: int | None = None
    compress_ratio: int | None = None


class Recurrent(Part):
    """Sizes of the state layers; which of them apply follows from the kind of state."""

    key_heads: int | None = None
    value_heads: int | None = None
    key_dim: int | None = None  # of a head
    value_dim: int | None = None
    conv_kernel: int | None = None
    conv_states: int | None = None  # Qwen4Exp: number_of_conv_states
    inner: int | None = None  # Mamba: channels inside
    groups: int | None = None
    state_size: int | None = None
    dt_rank: int | None = None
    chunk_size: int | None = None  # tokens the scan kernel takes at once
    state_dtype: str | None = None  # of the recurrent state; None: the model's


class Experts(Part):
    count: int | None = None
    per_token: int | None = None
    intermediate_size: int | None = None
    shared: int | None = None  # shared experts; their width is shared_intermediate_size in all
    shared_intermediate_size: int | None = None
    latent_size: int | None = None  # Nemotron 3: experts work on a projection this wide
    groups: int | None = None


class Ngram(Part):
    """The n-gram table of a Qwen4Exp model: layers (counted from one), width, rows before padding."""

    layers: tuple[int, ...]
    embed_dim: int | None = None
    conv_kernel: int | None = None
    size: int | None = None
    heads: int | None = None
    vocab_base: int | None = None
    divisible_by: int | None = None
    split_parts: int | None = None
    dtype: str | None = None  # ple_embedding_dtype as declared


class Geometry(Part):
    """A model's shape, read from its config. `layers` is the order of the kinds in `layer_kinds`."""

    architecture: str | None = None
    model_type: str | None = None  # the outer one
    text_model_type: str | None = None  # equal to it where nothing is nested
    dtype: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: int | None = None
    layer_kinds: tuple[Layer, ...] = ()
    layers: tuple[int, ...] = ()
    latent: Latent | None = None
    indexer: Indexer | None = None
    recurrent: Recurrent | None = None
    experts: Experts | None = None
    ropes: tuple[Rope, ...] = ()
    mtp_layers: int | None = None  # 0: it declares none
    mtp_kinds: tuple[Layer, ...] = ()  # a record a layer of one MTP module
    ngram: Ngram | None = None
    per_layer_vocab: int | None = None  # Gemma 3n and 4: rows of embed_tokens_per_layer
    per_layer_dim: int | None = None  # and its width a layer
    hyper_connections: int | None = None
    hyper_lowrank: int | None = None
    attention_bias: bool | None = None
    output_gate: bool | None = None  # queries carry a gate as wide as themselves
    k_is_v: bool | None = None  # Gemma 4: one projection serves as key and value
    vision: Vision | None = None
    audio: bool = False
    encoder: bool = False  # an encoder-decoder
    unmodelled: tuple[str, ...] = ()

    def layer(self, index: int) -> Layer:
        """The record of decoder layer `index`."""
        return self.layer_kinds[self.layers[index]]

    def each_layer(self) -> tuple[Layer, ...]:
        """The records of all decoder layers, in order."""
        return tuple(self.layer_kinds[kind] for kind in self.layers)


def parse_geometry(config: Mapping[str, Any]) -> Geometry:
    """The geometry a config.json states. Raises BadInput only where the config is no object or absurdly deep."""
    if not isinstance(config, Mapping):
        raise BadInput(f"config.json: expected an object, got {type(config).__name__}; the geometry is unknown")
    text = _text_part(config)
    f = Fields(text, config) if text is not config else Fields(config)
    stated = Fields(text).text("model_type") or f.text("model_type")
    model_type = _ALIASES.get(stated or "", stated)
    count = _layer_count(f)
    layers, reasons = parse_layers(model_type, f, count)
    kinds = tuple(dict.fromkeys(layers))
    if not count:
        reasons = (*reasons, "no num_hidden_layers: which layers there are is unknown")
    mtp, mtp_kinds = _mtp(model_type, f, layers)
    return Geometry(
        architecture=next((a for a in Fields(config, text).items("architectures") if isinstance(a, str)), None),
        model_type=Fields(config).text("model_type"),
        text_model_type=model_type,
        dtype=f.text("dtype", "torch_dtype"),
        hidden_size=f.integer("hidden_size", "n_embd"),
        vocab_size=f.integer("padded_vocab_size", "vocab_size"),
        tie_word_embeddings=_tied(model_type, f),
        max_position_embeddings=f.integer(
            "model_max_length", "max_position_embeddings", "seq_length", "max_sequence_length", "n_positions"
        ) or _POSITIONS.get(model_type or ""),
        layer_kinds=kinds,
        layers=tuple(kinds.index(layer) for layer in layers),
        latent=_latent(f),
        indexer=_indexer(model_type, f),
        recurrent=_recurrent(f) if any(layer.state is not State.NONE for layer in kinds) else None,
        experts=_experts(model_type, f),
        ropes=parse_ropes(f, kinds),
        mtp_layers=mtp,
        mtp_kinds=mtp_kinds,
        ngram=_ngram(f),
        per_layer_vocab=f.integer("vocab_size_per_layer_input"),
        per_layer_dim=f.integer("hidden_size_per_layer_input"),
        hyper_connections=f.integer("hc_count", "hc_mult"),
        hyper_lowrank=f.integer("hc_lowrank"),
        attention_bias=f.flag("attention_bias", "qkv_bias"),
        output_gate=f.flag("attn_output_gate"),
        k_is_v=f.flag("attention_k_eq_v"),
        vision=parse_vision(f),
        audio=bool(f.mapping("audio_config")),
        encoder=bool(f.flag("is_encoder_decoder")),
        unmodelled=tuple(reasons),
    )


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with `--hf-overrides` applied as the engine does: objects are merged key by key, the rest replaced."""
    merged = dict(config)
    for name, value in overrides.items():
        own = merged.get(name)
        merged[name] = overridden(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return merged


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = config.get(name)
        if isinstance(part, Mapping):
            return _text_part(part)
    return config


# Other spellings of a text model type: remote-code names, outer names of configs whose text part is not nested.
_ALIASES = {
    "PanguEmbedded": "pangu_embedded", "step3p7": "step3p5", "gemma3": "gemma3_text", "qwen4_exp": "qwen4_exp_text",
}  # fmt: skip


_POSITIONS = {"falcon": 2048}  # what config classes fill in where the file is silent


def _layer_count(f: Fields) -> int:
    count = f.integer("num_hidden_layers", "n_layer", "num_layers")
    if count is None:
        count = len(f.items("layers_block_type")) or len(f.text("hybrid_override_pattern") or "")
    if count > MOST_LAYERS:
        raise BadInput(f"config.json: num_hidden_layers: expected at most {MOST_LAYERS}, got {count}")
    return count


def _tied(model_type: str | None, f: Fields) -> bool | None:
    if (stated := f.flag("tie_word_embeddings", "weight_tying")) is not None:
        return stated
    # These config classes tie the head to the embedding unless told otherwise.
    return True if (model_type or "").startswith(("gemma", "falcon", "lfm2", "cohere")) else None


def _latent(f: Fields) -> Latent | None:
    kv_rank = f.integer("kv_lora_rank")
    sizes = [f.integer(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if not kv_rank or f.flag("use_mla") is False or None in sizes:
        return None
    nope, rope, value = (size or 0 for size in sizes)
    return Latent(q_rank=f.integer("q_lora_rank"), kv_rank=kv_rank, nope_dim=nope, rope_dim=rope, value_dim=value)


def _indexer(model_type: str | None, f: Fields) -> Indexer | None:
    if model_type == "qwen4_exp_text":
        # vllm 0.33.0 reads the same defaults from transformers' Qwen4ExpTextConfig.
        return Indexer(
            heads=f.integer("indexer_n_heads"),
            head_dim=f.integer("indexer_head_dim"),
            kv_heads=f.integer("indexer_kv_heads"),
            topk=f.integer("indexer_budget"),
            compress_ratio=f.integer("indexer_compress_ratio"),
        )
    topk = f.integer("index_topk")
    return Indexer(heads=f.integer("index_n_heads"), head_dim=f.integer("index_head_dim"), topk=topk) if topk else None


def _recurrent(f: Fields) -> Recurrent:
    linear = f.mapping("linear_attn_config")
    own = Fields(linear) if linear else Fields()
    heads = f.integer("mamba_num_heads", "mamba_n_heads")
    head_dim = f.integer("mamba_head_dim", "mamba_d_head")
    inner = f.integer("mamba_d_ssm")
    if inner is None and heads and head_dim:
        inner = heads * head_dim
    if inner is None and (expand := f.integer("mamba_expand", "expand")) and (hidden := f.integer("hidden_size")):
        inner = expand * hidden
    return Recurrent(
        key_heads=f.integer("linear_num_key_heads", "linear_num_heads") or own.integer("num_heads"),
        value_heads=f.integer("linear_num_value_heads", "linear_num_heads") or heads or own.integer("num_heads"),
        key_dim=f.integer("linear_key_head_dim", "linear_head_dim") or own.integer("head_dim"),
        value_dim=f.integer("linear_value_head_dim", "linear_head_dim") or head_dim or own.integer("head_dim"),
        conv_kernel=f.integer("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache")
        or own.integer("short_conv_kernel_size"),
        conv_states=f.integer("number_of_conv_states"),
        inner=inner,
        groups=f.integer("n_groups", "mamba_n_groups"),
        state_size=f.integer("ssm_state_size", "mamba_d_state", "state_size"),
        dt_rank=f.integer("mamba_dt_rank", "time_step_rank"),
        chunk_size=f.integer("chunk_size", "mamba_chunk_size"),
        state_dtype=f.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
    )


def _experts(model_type: str | None, f: Fields) -> Experts | None:
    count = experts(f)
    if not count:
        return None
    size = f.integer("moe_intermediate_size", "expert_ffn_hidden_size")
    if size is None:
        size = f.integer("intermediate_size")
    shared = f.integer("n_shared_experts", "num_shared_experts")
    width = f.integer(
        "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "share_expert_dim",
        "shared_intermediate_size",
    )  # fmt: skip
    if width is None and shared and size:
        width = shared * size
    if model_type == "llama4_text":
        shared, width = 1, size
    return Experts(
        count=count,
        per_token=f.integer(
            "num_experts_per_tok", "top_k_experts", "num_experts_per_token", "experts_per_token", "moe_topk"
        ),
        intermediate_size=size,
        shared=shared,
        shared_intermediate_size=width,
        latent_size=f.integer("moe_latent_size"),
        groups=f.integer("n_group", "num_expert_group"),
    )


def _mtp(model_type: str | None, f: Fields, layers: tuple[Layer, ...]) -> tuple[int | None, tuple[Layer, ...]]:
    """(declared MTP modules, the layers of one). A module repeats the last attending layer with its feed-forward."""
    count = f.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
    if count is None:
        count = whole(f.mapping("mtp").get("num_hidden_layers"))
    attending = [layer for layer in layers if layer.attention is not Attention.NONE]
    if not count or not attending:
        return count, ()
    last = attending[-1]
    if model_type == "nemotron_h":
        return count, (last, Layer(ffn=Ffn.MOE))
    fed = layers[-1].ffn
    return count, (last.model_copy(update={"ffn": fed, "owns_indexer": last.attention is Attention.DSA}),)


def _ngram(f: Fields) -> Ngram | None:
    layers = tuple(n for n in map(whole, f.items("ple_layer_ids")) if n is not None)
    if not layers:
        return None
    return Ngram(
        layers=layers,
        embed_dim=f.integer("ple_embed_dim"),
        conv_kernel=f.integer("ple_conv_kernel_size"),
        size=f.integer("ngram_size"),
        heads=f.integer("heads_per_ngram"),
        vocab_base=f.integer("ngram_vocab_size_base"),
        divisible_by=f.integer("make_ngram_vocab_size_divisible_by"),
        split_parts=f.integer("split_ngram_parts"),
        dtype=f.text("ple_embedding_dtype"),
    )
