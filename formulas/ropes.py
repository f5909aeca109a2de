"""Rotary embeddings as a config states them, a table for each kind of attention that has its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from .fields import Fields, whole
from .layer import Attention, Layer, Part

_UNSCALED = "original_max_position_embeddings"


class Rope(Part):
    """One rotary table: which attention reads it, how many dimensions rotate, up to which position, and scaling."""

    reads: Attention
    dims: int | None = None
    positions: int | None = None  # max_position_embeddings
    theta: float | None = None
    scaling: dict[str, Any] = Field(default_factory=dict)


def parse_ropes(f: Fields, kinds: tuple[Layer, ...]) -> tuple[Rope, ...]:
    """Rotary tables by the attention that reads them: one for all, or one for each kind where the config says so."""
    stated = f.mapping("rope_parameters", "rope_scaling")
    positions = f.integer("max_position_embeddings", "model_max_length", "seq_length")
    ropes = []
    for layer in kinds:
        if layer.attention is Attention.NONE:
            continue
        name = {"sliding": "sliding_attention", "chunked": "chunked_attention"}.get(layer.attention, "full_attention")
        own = stated.get(name)
        scaling = _plain_values(own if isinstance(own, Mapping) else stated)
        theta, share = Fields(scaling), Fields(scaling, {})
        base = theta.number("rope_theta") or f.number("rope_theta", "rotary_emb_base")
        local = f.number("rope_local_base_freq", "swa_rope_theta") if layer.attention is Attention.SLIDING else None
        if local and not isinstance(own, Mapping):
            base, scaling = local, {}
        part = share.number("partial_rotary_factor") or f.number("partial_rotary_factor", "rotary_pct")
        width = f.integer("qk_rope_head_dim") if layer.kv_heads is None else layer.head_dim
        dims = f.integer("rotary_dim") or (int(width * (part or 1.0)) if width else None)
        if scaling.get("rope_type", scaling.get("type")) == "longrope" and (short := f.integer(_UNSCALED)):
            scaling = {_UNSCALED: short} | scaling  # as the engine does where it reads a config
        rope = Rope(reads=layer.attention, dims=dims, positions=positions, theta=base, scaling=scaling)
        if rope not in ropes:
            ropes.append(rope)
    return tuple(ropes)


def _plain_values(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The strings, finite numbers and lists of whole numbers of a mapping."""

    def keeps(value: Any) -> bool:
        if isinstance(value, list):
            return all(whole(v) is not None for v in value)
        return isinstance(value, str | bool) or (isinstance(value, int | float) and math.isfinite(value))

    return {str(k): v for k, v in stated.items() if keeps(v)}
