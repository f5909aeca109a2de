"""What one step's memory depends on: a rank's share of a model's sizes, in elements a token."""

from __future__ import annotations

from typing import NamedTuple

from .deployment import Deployment
from .facts import Quantization
from .geometry import Geometry
from .kv_states import Unstated
from .schemes import Kind

# Families whose norms return new tensors (GemmaRMSNorm) and write attention into a buffer of its own.
_BUFFERED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"})

_FORMATS = (
    ("nvfp4", Kind.NVFP4), ("mxfp4", Kind.MXFP4), ("mxfp8", Kind.MXFP8), ("fp8_block", Kind.FP8_BLOCK),
    ("fp8_channel", Kind.FP8_CHANNEL), ("fp8", Kind.FP8_TENSOR), ("int", Kind.INT), ("w4a16", Kind.INT),
)  # fmt: skip


class Shapes(NamedTuple):
    """What every phase asks for: a rank's share of the sizes, in elements a token."""

    geometry: Geometry
    deployment: Deployment
    linear: Kind
    expert: Kind
    hidden: int
    tokens: int

    @property
    def tp(self) -> int:
        return self.deployment.tp

    @property
    def reduced(self) -> int:
        """The output of an all-reduce is a tensor of its own."""
        return self.hidden if self.tp > 1 else 0

    @property
    def buffered(self) -> bool:
        return self.geometry.text_model_type in _BUFFERED

    def held(self, in_attention: int, buffered: int) -> int:
        """Hidden-wide tensors alive around a block: the caller's, the residual, and what the norms left."""
        return (buffered if self.buffered else in_attention) * self.hidden

    def quantised(self, width: int) -> int:
        """A copy of an activation in the weights' format, with its scales, in model-dtype elements."""
        if self.linear is Kind.FP8_BLOCK and (self.deployment.sm or 90) >= 89:
            return width // 2 + width // 64
        if self.linear in (Kind.FP8_TENSOR, Kind.FP8_CHANNEL, Kind.MXFP8) and (self.deployment.sm or 90) >= 89:
            return width // 2
        if self.linear in (Kind.NVFP4, Kind.MXFP4) and (self.deployment.sm or 90) >= 100:
            return width // 4 + width // 32
        return 0


def kinds(quantization: Quantization | None) -> tuple[Kind, Kind]:
    """(kind of the attention and MLP matrices, kind of the routed experts)."""
    if quantization is None:
        return Kind.PLAIN, Kind.PLAIN
    roles = quantization.by_role
    linear = roles.get("main/attention") or roles.get("main/mlp") or (None if roles else quantization.format)
    expert = roles.get("main/expert") or quantization.format
    return _kind(linear), _kind(expert)


def _kind(name: str | None) -> Kind:
    text = (name or "").lower()
    return next((kind for prefix, kind in _FORMATS if text.startswith(prefix)), Kind.PLAIN)


def need(value: int | None, name: str) -> int:
    """The value, or Unstated naming what the config does not say."""
    if value is None:
        raise Unstated(f"no {name}")
    return value
