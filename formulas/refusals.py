"""Why an engine would not start this deployment, as far as its weights decide: known before a byte is downloaded."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from .place import Place


@enum.unique
class Cut(enum.StrEnum):
    """Which side of a matrix the ranks divide."""

    NEITHER = "neither"
    ROWS = "rows"
    COLUMNS = "columns"


def refusals(place: Place) -> Iterator[str]:
    """Reasons why the layers cannot be divided over the ranks, or built as asked.
    Source: vllm 0.33.0 model_executor/layers/linear.py QKVParallelLinear, vocab_parallel_embedding.py."""
    g, d = place.geometry, place.deployment
    for heads in sorted({layer.heads for layer in g.layer_kinds if layer.heads}):
        if heads % d.tp:
            yield f"{heads} attention heads: not divisible by --tensor-parallel-size {d.tp}; the engine refuses"
    for kv in sorted({layer.kv_heads for layer in g.layer_kinds if layer.kv_heads}):
        if max(kv, d.tp) % min(kv, d.tp):
            yield f"{kv} key-value heads on {d.tp} ranks: neither divides the other; the engine refuses"
    for name in ("linear_backend", "moe_backend"):
        if (backend := getattr(d, name)) is not None:
            yield f"{name} {backend}: what a forced kernel does to the weights is not modelled"


def block_refusal(name: str, block: tuple[int, int], outs: Sequence[int], inner: int, cut: Cut) -> str | None:
    """Why a block-FP8 matrix with these rows and columns on a rank cannot be built, or None. Merged matrices may end in
    partial tiles. Source: vllm 0.33.0 layers/quantization/utils/fp8_utils.py validate_fp8_block_shape, and linear.py
    _maybe_allow_fp8_block_shape_mismatch."""
    tall, broad = block
    if cut is Cut.COLUMNS and inner % broad:
        return f"{name}: {inner} columns on a rank are not a multiple of its FP8 tiles' {broad}; the engine refuses"
    if cut is Cut.ROWS and len(outs) == 1 and outs[0] % tall:
        return f"{name}: {outs[0]} rows on a rank are not a multiple of its FP8 tiles' {tall}; the engine refuses"
    return None
