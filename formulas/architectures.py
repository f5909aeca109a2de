"""The weights a checkpoint of a given geometry must hold, before anybody quantised it.

Evidence of a lower grade than a header: used where only config.json was read. Shapes are (rows out, columns in) and
unsharded. Sources: vllm 0.33.0 model_executor/models and the checkpoints' own headers.
"""

from __future__ import annotations

from collections.abc import Iterator

from .families import FAMILIES, Family
from .geometry import Attention, Experts, Ffn, Geometry, Layer, State
from .schemes import Weight
from .towers import tower_weights, unknown_towers


class Unexpected(Exception):
    """A part of a model for which no weights are known; caught in `expected_weights` and kept as its reason."""


def expected_weights(geometry: Geometry) -> tuple[list[Weight], tuple[str, ...]]:
    """(weights in the order an engine builds them, reasons why some are not known). None is quantised."""
    family = FAMILIES.get(geometry.text_model_type or "")
    reasons = [*geometry.unmodelled, *unknown_towers(geometry)]
    if family is None:
        return [], (*reasons, f"model_type {geometry.text_model_type}: its tensors are not known without a header")
    weights: list[Weight] = []
    parts = (tower_weights(geometry), _main(geometry, family), _drafter(geometry, family))
    for part in parts:
        try:
            weights.extend(part)
        except Unexpected as reason:
            reasons.append(str(reason))
    return weights, tuple(dict.fromkeys(reasons))


def _need(value: int | None, what: str) -> int:
    if value is None:
        raise Unexpected(f"config.json: no {what}; the weights are unknown without a header")
    return value


def _main(g: Geometry, family: Family) -> Iterator[Weight]:
    hidden, vocab = _need(g.hidden_size, "hidden_size"), _need(g.vocab_size, "vocab_size")
    yield Weight("main", None, family.embed, (vocab, hidden))
    yield from _per_layer_table(g, hidden)
    for index, layer in enumerate(g.each_layer()):
        for name, shape, extra in _layer(g, family, layer, index):
            yield Weight("main", index, name, shape, **extra)  # type: ignore[arg-type]
    if family.final_norm:
        yield Weight("main", None, family.final_norm, (hidden,), bias=family.norm_bias)
    elif g.hyper_connections:
        yield from (Weight("main", None, *part) for part in _mixer(g, hidden))
    if not g.tie_word_embeddings:
        yield Weight("main", None, "lm_head", (vocab, hidden))


Part = tuple[str, tuple[int, ...], dict[str, object]]


def _plain(name: str, *shape: int, **extra: object) -> Part:
    return name, shape, extra


def _layer(g: Geometry, family: Family, layer: Layer, index: int) -> Iterator[Part]:
    """The weights of one decoder layer: (name below the layer, shape, what else is not the default)."""
    hidden = _need(g.hidden_size, "hidden_size")
    if g.hyper_connections:
        yield from _hyper(g, hidden)
    if g.ngram is not None and index + 1 in g.ngram.layers:
        yield from _ngram(g, hidden)
    if layer.attention in (Attention.MLA, Attention.DSA):
        yield from _latent_attention(g, layer, hidden)
    elif layer.attention is Attention.UNKNOWN:
        raise Unexpected("a layer's attention is not modelled; its weights are unknown without a header")
    elif layer.attention is not Attention.NONE:
        yield from _attention(g, family, layer, hidden)
    if layer.state is not State.NONE:
        yield from _state(g, layer, hidden)
    yield from _feed_forward(g, family, layer, hidden)
    if g.per_layer_dim:
        yield from _per_layer(g.per_layer_dim, hidden)
    for norm in family.norms:
        yield _plain(norm, hidden, bias=family.norm_bias)
    if g.text_model_type == "gemma4_text":
        yield _plain("layer_scalar", 1)
        if layer.ffn is Ffn.BOTH:
            for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
                yield _plain(norm, hidden)


def _attention(g: Geometry, family: Family, layer: Layer, hidden: int) -> Iterator[Part]:
    at, heads, kv = family.attention, _need(layer.heads, "attention heads"), _need(layer.kv_heads, "key-value heads")
    size = _need(layer.head_dim, "head_dim")
    value = layer.value_head_dim or size
    gate = 2 if g.output_gate or g.text_model_type in ("qwen3_next", "qwen4_exp_text") else 1
    bias = family.bias or bool(g.attention_bias)
    output_bias = family.output_bias or (bool(g.attention_bias) and g.text_model_type not in _QKV_BIAS_ONLY)
    if family.fused_qkv:
        yield _plain(f"{at}.{family.fused_qkv}", heads * size + kv * (size + value), hidden, bias=bias)
    else:
        yield _plain(f"{at}.q_proj", gate * heads * size, hidden, bias=bias)
        if not layer.shares_kv:
            yield _plain(f"{at}.k_proj", kv * size, hidden, bias=bias)
            if not (g.k_is_v and layer.attention is Attention.FULL):
                yield _plain(f"{at}.v_proj", kv * value, hidden, bias=bias)
    yield _plain(f"{at}.{family.output}", hidden, heads * value, bias=output_bias)
    if family.sinks:
        yield _plain(f"{at}.sinks", heads)
    if layer.attention is Attention.QSA and g.indexer is not None:
        size_i = _need(g.indexer.head_dim, "indexer_head_dim")
        rows = (_need(g.indexer.heads, "indexer_n_heads") + (g.indexer.kv_heads or 1)) * size_i
        yield _plain(f"{at}.indexer.index_qk_proj", rows, hidden)
        yield _plain(f"{at}.indexer.q_layernorm", size_i)
        yield _plain(f"{at}.indexer.k_layernorm", size_i)
    if family.qk_norm:
        q, k = (heads * size, kv * size) if family.qk_norm == "full" else (size, size)
        yield _plain(f"{at}.{family.qk_names[0]}", q)
        if not layer.shares_kv:
            yield _plain(f"{at}.{family.qk_names[1]}", k)


_QKV_BIAS_ONLY = frozenset({"glm4", "glm4_moe", "glm4_moe_text", "mimo", "mimo_v2_flash"})


def _latent_attention(g: Geometry, layer: Layer, hidden: int) -> Iterator[Part]:
    if g.latent is None:
        raise Unexpected("config.json: latent attention without its sizes; the weights are unknown without a header")
    m, heads = g.latent, _need(layer.heads, "num_attention_heads")
    key = m.nope_dim + m.rope_dim
    if m.q_rank:
        yield _plain("self_attn.q_a_proj", m.q_rank, hidden)
        yield _plain("self_attn.kv_a_proj_with_mqa", m.kv_rank + m.rope_dim, hidden)
        yield _plain("self_attn.q_a_layernorm", m.q_rank)
        yield _plain("self_attn.q_b_proj", heads * key, m.q_rank)
    else:
        yield _plain("self_attn.q_proj", heads * key, hidden)
        yield _plain("self_attn.kv_a_proj_with_mqa", m.kv_rank + m.rope_dim, hidden)
    yield _plain("self_attn.kv_a_layernorm", m.kv_rank)
    yield _plain("self_attn.kv_b_proj", heads * (m.nope_dim + m.value_dim), m.kv_rank)
    yield _plain("self_attn.o_proj", hidden, heads * m.value_dim)
    if layer.owns_indexer and g.indexer is not None:
        size, count = _need(g.indexer.head_dim, "index_head_dim"), _need(g.indexer.heads, "index_n_heads")
        yield _plain("self_attn.indexer.wq_b", count * size, m.q_rank or hidden)
        yield _plain("self_attn.indexer.wk", size, hidden)
        yield _plain("self_attn.indexer.weights_proj", count, hidden)
        yield _plain("self_attn.indexer.k_norm", size, dtype="F32", bias=True)


def _state(g: Geometry, layer: Layer, hidden: int) -> Iterator[Part]:
    r = g.recurrent
    if r is None:
        raise Unexpected("config.json: state layers without their sizes; the weights are unknown without a header")
    if layer.state is State.GDN:
        keys = _need(r.key_heads, "linear_num_key_heads") * _need(r.key_dim, "linear_key_head_dim")
        heads, size = _need(r.value_heads, "linear_num_value_heads"), _need(r.value_dim, "linear_value_head_dim")
        values, kernel = heads * size, _need(r.conv_kernel, "linear_conv_kernel_dim")
        yield _plain("linear_attn.conv1d", 2 * keys + values, 1, kernel)
        yield _plain("linear_attn.in_proj_qkv", 2 * keys + values, hidden)
        yield _plain("linear_attn.in_proj_z", values, hidden)
        yield _plain("linear_attn.in_proj_b", heads, hidden)
        yield _plain("linear_attn.in_proj_a", heads, hidden)
        yield _plain("linear_attn.dt_bias", heads)
        yield _plain("linear_attn.A_log", heads, dtype="F32")
        yield _plain("linear_attn.norm", size)
        yield _plain("linear_attn.out_proj", hidden, values)
    elif layer.state is State.MAMBA2:
        at = "mamba" if g.text_model_type in ("granitemoehybrid", "bamba", "falcon_h1") else "mixer"
        inner, heads = _need(r.inner, "mamba sizes"), _need(r.value_heads, "mamba heads")
        conv = inner + 2 * _need(r.groups, "n_groups") * _need(r.state_size, "ssm_state_size")
        yield _plain(f"{at}.conv1d", conv, 1, _need(r.conv_kernel, "conv_kernel"), bias=True)
        yield _plain(f"{at}.in_proj", inner + conv + heads, hidden)
        yield _plain(f"{at}.A_log", heads, dtype="F32")
        yield _plain(f"{at}.D", heads)
        yield _plain(f"{at}.dt_bias", heads)
        yield _plain(f"{at}.norm", inner)
        yield _plain(f"{at}.out_proj", hidden, inner)
    elif layer.state is State.SHORT_CONV:
        yield _plain("conv.conv", hidden, 1, _need(r.conv_kernel, "conv_L_cache"))
        yield _plain("conv.in_proj", 3 * hidden, hidden)
        yield _plain("conv.out_proj", hidden, hidden)
    else:
        raise Unexpected(f"{layer.state.value} layers: their tensors are not known without a header")


def _feed_forward(g: Geometry, family: Family, layer: Layer, hidden: int) -> Iterator[Part]:
    if layer.ffn in (Ffn.MOE, Ffn.BOTH):
        if g.experts is None:
            raise Unexpected("config.json: layers of experts without their count; unknown without a header")
        yield from _moe(g, family, g.experts, hidden)
    if layer.ffn in (Ffn.DENSE, Ffn.BOTH):
        # Falcon's feed-forward is four times its hidden size where the config says nothing.
        default = 4 * hidden if g.text_model_type == "falcon" else None
        size = _need(layer.intermediate_size or default, "intermediate_size")
        yield from _mlp(family.mlp, family.mlp_names, size, hidden, bias=family.mlp_bias)


def _mlp(at: str, names: tuple[str, ...], size: int, hidden: int, **extra: object) -> Iterator[Part]:
    *ups, down = names
    for up in ups:
        yield _plain(f"{at}.{up}", size * (2 if up in ("gate_up_proj", "input_linear") else 1), hidden, **extra)
    yield _plain(f"{at}.{down}", hidden, size, **extra)


def _moe(g: Geometry, family: Family, experts: Experts, hidden: int) -> Iterator[Part]:
    count, size = _need(experts.count, "number of experts"), _need(experts.intermediate_size, "moe_intermediate_size")
    width = experts.latent_size or hidden
    yield _plain(family.router, count, hidden, bias=family.router_bias)
    if family.correction and _is_corrected(g):
        yield _plain(family.correction, count, dtype="F32")
    if g.text_model_type == "gemma4_text":
        yield _plain("router.scale", hidden)
        yield _plain("router.per_expert_scale", count)
    if experts.latent_size:
        yield _plain("mixer.fc1_latent_proj", width, hidden)
        yield _plain("mixer.fc2_latent_proj", hidden, width)
    for name, shape, extra in _mlp(family.experts, family.expert_names, size, width, bias=family.expert_bias):
        yield name, shape, {**extra, "experts": count}
    if experts.shared_intermediate_size:
        names = family.mlp_names if family.shared != "shared_mlp" else ("input_linear", "output_linear")
        yield from _mlp(family.shared, names, experts.shared_intermediate_size, hidden)
        if family.shared_gate:
            yield _plain(family.shared_gate, 1, hidden)


def _is_corrected(g: Geometry) -> bool:
    """DeepSeek V2 routes without a correction bias; its successors have one."""
    return g.text_model_type != "deepseek_v2"


def _hyper(g: Geometry, hidden: int) -> Iterator[Part]:
    wide, rank = hidden * (g.hyper_connections or 0), _need(g.hyper_lowrank, "hc_lowrank")
    for at in ("attn_hyper_connection", "mlp_hyper_connection"):
        yield _plain(f"{at}.hc_norm", wide)
        yield _plain(f"{at}.input_mix_weight_down", rank, wide)
        yield _plain(f"{at}.block_inject_weight", g.hyper_connections or 0, wide)
        yield _plain(f"{at}.input_mix_weight_up", wide, rank)


def _mixer(g: Geometry, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide, rank = hidden * (g.hyper_connections or 0), _need(g.hyper_lowrank, "hc_lowrank")
    yield "hyper_connection_mixer.hc_norm", (wide,)
    yield "hyper_connection_mixer.input_mix_weight_down", (rank, wide)
    yield "hyper_connection_mixer.input_mix_weight_up", (wide, rank)


def _ngram(g: Geometry, hidden: int) -> Iterator[Part]:
    n = g.ngram
    assert n is not None
    dim, kernel = _need(n.embed_dim, "ple_embed_dim"), _need(n.conv_kernel, "ple_conv_kernel_size")
    size, per = _need(n.size, "ngram_size"), _need(n.heads, "heads_per_ngram")
    heads, wide = (size - 1) * per, hidden * (g.hyper_connections or 1)
    yield _plain("ple.ple_embedding.layer_multipliers", size, dtype="I64")
    yield _plain("ple.ple_embedding.ngram_heads_vocab_sizes", heads, dtype="I64")
    yield _plain("ple.ple_embedding.ngram_heads_offsets", heads, dtype="I64")
    yield _plain("ple.ple_embedding.ngram_embedding", ngram_rows(g), dim // heads)
    yield _plain("ple.key_proj", wide, dim)
    yield _plain("ple.value_proj", hidden, dim)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield _plain(f"ple.{norm}", wide)
    yield _plain("ple.conv1d", wide, 1, kernel)


def ngram_rows(g: Geometry) -> int:
    """Rows of one layer's n-gram table: a prime for each head, from the base up, padded to the config's multiple.
    The k-th PLE layer continues with the next primes.
    Source: vllm 0.33.0 models/qwen4_exp/nvidia/ngram_embedding.py _make_vocab_layout; 320,001,536 for Flash-Next."""
    n = g.ngram
    assert n is not None
    heads = (_need(n.size, "ngram_size") - 1) * _need(n.heads, "heads_per_ngram")
    candidate = _need(n.vocab_base, "ngram_vocab_size_base") - 1
    primes: list[int] = []
    while len(primes) < heads:
        candidate += 1
        if _is_prime(candidate):
            primes.append(candidate)
    rows, multiple = sum(primes), n.divisible_by or 1
    return -(-rows // multiple) * multiple


def _is_prime(n: int) -> bool:
    if n < 4 or n % 2 == 0 or n % 3 == 0:
        return n in (2, 3)
    return all(n % d and n % (d + 2) for d in range(5, int(n**0.5) + 1, 6))


def _per_layer_table(g: Geometry, hidden: int) -> Iterator[Weight]:
    if not g.per_layer_dim:
        return
    wide = g.per_layer_dim * len(g.layers)
    yield Weight("main", None, "embed_tokens_per_layer", (_need(g.per_layer_vocab or g.vocab_size, "vocab"), wide))
    yield Weight("main", None, "per_layer_model_projection", (wide, hidden))
    yield Weight("main", None, "per_layer_projection_norm", (g.per_layer_dim,))


def _per_layer(dim: int, hidden: int) -> Iterator[Part]:
    yield _plain("per_layer_input_gate", dim, hidden)
    yield _plain("per_layer_projection", hidden, dim)
    yield _plain("post_per_layer_input_norm", hidden)


def _drafter(g: Geometry, family: Family) -> Iterator[Weight]:
    """The MTP module as it is stored; embedding and head are shared with the target and left out."""
    if not g.mtp_layers or not g.mtp_kinds:
        return
    hidden = _need(g.hidden_size, "hidden_size")
    deepseek = g.latent is not None or (g.text_model_type or "").startswith("glm4_moe")
    for module in range(g.mtp_layers):
        for index, layer in enumerate(g.mtp_kinds):
            plain = g.model_copy(update={"ngram": None})
            for name, shape, extra in _layer(plain, family, layer, -2):
                yield Weight("mtp", module * len(g.mtp_kinds) + index, name, shape, **extra)  # type: ignore[arg-type]
        if deepseek:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield Weight("mtp", module, name, (hidden,))
            yield Weight("mtp", module, "eh_proj", (hidden, 2 * hidden))
    if deepseek:
        return
    if g.hyper_connections:
        yield Weight("mtp", None, "fc_embedding", (hidden, hidden))
        yield Weight("mtp", None, "fc_hidden", (hidden, hidden))
        yield Weight("mtp", None, "pre_fc_norm_embedding", (hidden,))
        yield Weight("mtp", None, "pre_fc_norm_hidden", (hidden * g.hyper_connections,))
        yield from (Weight("mtp", None, *part) for part in _mixer(g, hidden))
        return
    yield Weight("mtp", None, "fc", (hidden, 2 * hidden))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield Weight("mtp", None, name, (hidden,))
