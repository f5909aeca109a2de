"""What a KV cache dtype means in bytes, and what `auto` means for a checkpoint on a card.

Source: vllm 0.33.0 utils/torch_utils.py resolve_kv_cache_dtype_string, model_executor/layers/attention/attention.py
(compressed-tensors kv_cache_scheme), mla_attention.py _canonicalize_sparse_mla_kv_cache_dtype,
v1/attention/backends/{flashinfer,triton_attn}.py customize_spec.
"""

from __future__ import annotations

from typing import NamedTuple

from .deployment import Deployment
from .facts import Quantization
from .geometry import Attention, Geometry
from .releases import rules


class CacheDtype(NamedTuple):
    """A resolved KV cache dtype: the engine's name for it, and bytes of one plain element."""

    name: str
    element_bytes: float
    quantized: bool
    reason: str | None = None  # why it is not known


_PLAIN = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
_BYTE = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})
_PER_HEAD = {"int8_per_token_head": 1.0, "fp8_per_token_head": 1.0, "int4_per_token_head": 0.5}
_SCALE_BYTES = 4  # of one token and head, in the per-token-head forms
_DS_MLA = frozenset({"fp8_ds_mla", "nvfp4_ds_mla"})


def cache_dtype(geometry: Geometry, deployment: Deployment, quantization: Quantization | None = None) -> CacheDtype:
    """The dtype the engine caches in. `auto` is the checkpoint's own request, else the model's dtype."""
    name = deployment.kv_cache_dtype
    if name == "auto" and quantization is not None and quantization.kv_cache_dtype:
        name = quantization.kv_cache_dtype
    sparse = any(layer.attention is Attention.DSA for layer in geometry.layer_kinds)
    if sparse:
        packed = _sparse_name(name, geometry, deployment)
        if packed is None:
            return CacheDtype(name, 0.0, False, "the KV cache of sparse MLA depends on the card: pass its capability")
        name = packed
    if name == "auto":
        name = model_dtype(geometry, deployment)
    if name in _PLAIN:
        return CacheDtype(name, _PLAIN[name], False)
    if name in _BYTE or name in _DS_MLA:
        return CacheDtype(name, 1.0, True)
    if name in _PER_HEAD:
        return CacheDtype(name, _PER_HEAD[name], True)
    if name == "nvfp4":
        return CacheDtype(name, 0.5 + 1 / 16, True)
    return CacheDtype(name, 0.0, True, f"KV cache dtype {name!r} is not modelled")


def _sparse_name(name: str, geometry: Geometry, deployment: Deployment) -> str | None:
    """Sparse MLA kernels have their own packed form of fp8; which of them runs follows from the card."""
    family = None if deployment.sm is None else deployment.sm // 10
    quantized = name in _BYTE
    if deployment.release < (0, 12, 0) and (quantized or name == "auto"):
        return "fp8_ds_mla"
    if family is None:
        return name if name in _DS_MLA else None
    if family == 10:
        glm = geometry.text_model_type == "glm_moe_dsa" and rules(deployment.release).glm_dsa_fp8
        if name == "auto" and glm:
            return "fp8_e4m3"
        trtllm = "flashinfer" not in deployment.without and deployment.release >= (0, 18, 0)
        return name if trtllm or not quantized else "fp8_ds_mla"
    if family == 12 and name == "auto":
        return "fp8_ds_mla"
    return "fp8_ds_mla" if quantized else name


def side_bytes(dtype: CacheDtype, head_dim: int) -> int:
    """Bytes of one head's key (or value) of one token."""
    if dtype.name == "nvfp4":
        return head_dim // 2 + head_dim // 16
    if dtype.name in _PER_HEAD:
        return int(head_dim * dtype.element_bytes) + _SCALE_BYTES
    return int(head_dim * dtype.element_bytes)


def model_dtype(geometry: Geometry, deployment: Deployment) -> str:
    """The dtype the model computes in: --dtype, else the config's (fp32 is run as bf16), else bf16."""
    known = {"half": "float16", "float": "float32"}
    asked = known.get(deployment.dtype, deployment.dtype)
    if asked != "auto":
        return asked
    stated = (geometry.dtype or "bfloat16").removeprefix("torch.")
    return "bfloat16" if stated == "float32" else stated


def model_dtype_bytes(geometry: Geometry, deployment: Deployment) -> int:
    return int(_PLAIN.get(model_dtype(geometry, deployment), 2.0))
