"""Why an engine would not start this deployment, as far as its weights decide: known before a byte is downloaded."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from .layer import Ffn, State
from .place import Place


class Refusal(str):
    """Why an engine would not start; among reasons why a rank's bytes are not known it is the one that decides."""


@enum.unique
class Cut(enum.StrEnum):
    """Which side of a matrix the ranks divide."""

    NEITHER = "neither"
    ROWS = "rows"
    COLUMNS = "columns"


def refusals(place: Place) -> Iterator[str]:
    """Reasons why the layers cannot be divided over the ranks (Refusal), or built as asked.
    Source: vllm 0.33.0 model_executor/layers/linear.py QKVParallelLinear, vocab_parallel_embedding.py."""
    g, d = place.geometry, place.deployment
    for heads in sorted({layer.heads for layer in g.layer_kinds if layer.heads}):
        if heads % d.tp:
            yield Refusal(f"{heads} attention heads: not divisible by {d.tp} ranks; the engine refuses")
    for kv in sorted({layer.kv_heads for layer in g.layer_kinds if layer.kv_heads}):
        if max(kv, d.tp) % min(kv, d.tp):
            yield Refusal(f"{kv} key-value heads on {d.tp} ranks: neither divides the other; the engine refuses")
    for what, size, ranks in _divided(place):
        if size % ranks:
            yield Refusal(f"{what} {size}: not divisible by {ranks} ranks; the engine refuses")
    yield from _context_ranks(place)
    if len(g.layers) < d.pp:
        yield f"{len(g.layers)} layers in {d.pp} pipeline stages: a stage without a layer is not modelled"
    for name in ("linear_backend", "moe_backend"):
        if (backend := getattr(d, name)) is not None:
            yield f"{name} {backend}: what a forced kernel does to the weights is not modelled"


def _context_ranks(place: Place) -> Iterator[Refusal]:
    """What decode context parallelism asks of the heads: it shares out only copies that the ranks would keep anyway.
    Source: vllm config/parallel.py and config/model.py verify_with_parallel_config; latent caches have one head."""
    g, d = place.geometry, place.deployment
    if d.dcp == 1:
        return
    if d.tp % d.dcp:
        yield Refusal(f"{d.tp} tensor-parallel ranks: not divisible by the {d.dcp} of decode context parallelism; the "
                      "engine refuses")  # fmt: skip
    for kv, heads in sorted({(each.kv_heads, each.heads or 0) for each in g.layer_kinds if each.kv_heads}):
        if kv * d.dcp > d.tp:
            yield Refusal(f"decode context parallelism over {d.dcp} ranks: {kv} key-value heads need {kv * d.dcp} "
                          f"ranks or more, got {d.tp}; the engine refuses")  # fmt: skip
        elif heads // kv % d.dcp:
            yield Refusal(f"{heads // kv} query heads a key-value head: not divisible by the {d.dcp} ranks of decode "
                          "context parallelism; the engine refuses")  # fmt: skip


def _divided(place: Place) -> Iterator[tuple[str, int, int]]:
    """(what, size, ranks) of what ranks divide evenly or not at all, beside the heads of attention.
    Source: vllm 0.33.0 layers/linear.py:731, layers/fused_moe/config.py:1352, layers/mamba/gdn."""
    g, d = place.geometry, place.deployment
    for size in sorted({layer.intermediate_size or 0 for layer in g.layer_kinds if layer.ffn in (Ffn.DENSE, Ffn.BOTH)}):
        yield "a dense MLP of", size, d.tp
    if g.experts is not None and g.experts.intermediate_size and g.experts.count and not d.expert_parallel:
        yield "experts of", g.experts.intermediate_size, d.tp * d.dp
    if g.recurrent is not None and any(layer.state in (State.GDN, State.KDA) for layer in g.layer_kinds):
        for name, heads in (("key", g.recurrent.key_heads), ("value", g.recurrent.value_heads)):
            if heads:
                yield f"linear-attention {name} heads,", heads, d.tp


def block_refusal(name: str, block: tuple[int, int], outs: Sequence[int], inner: int, cut: Cut) -> Refusal | None:
    """Why a block-FP8 matrix with these rows and columns on a rank cannot be built, or None. Merged matrices may end in
    partial tiles. Source: vllm 0.33.0 layers/quantization/utils/fp8_utils.py validate_fp8_block_shape, and linear.py
    _maybe_allow_fp8_block_shape_mismatch."""
    tall, broad = block
    if cut is Cut.COLUMNS and inner % broad:
        return Refusal(f"{name}: {inner} columns on a rank are no multiple of the FP8 tiles' {broad}; it is refused")
    if cut is Cut.ROWS and len(outs) == 1 and outs[0] % tall:
        return Refusal(f"{name}: {outs[0]} rows on a rank are no multiple of the FP8 tiles' {tall}; it is refused")
    return None
