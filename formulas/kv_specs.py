"""What each layer caches, as the engine specifies it: one Spec a cache, in layer order, with its block and page.

Source: vllm 0.33.0 v1/kv_cache_interface.py (AttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec,
CircularBufferSpec), model_executor/layers/attention/{attention,mla_attention}.py get_kv_cache_spec,
platforms/interface.py _align_hybrid_block_size, models/qwen4_exp/common/qsa_cache.py; 0.25.1's for what differs (see
releases.py).
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from .deployment import Deployment
from .facts import Quantization
from .geometry import Attention, Geometry, Layer, State
from .kv_dtypes import CacheDtype, cache_dtype, side_bytes
from .kv_states import Unstated, ngram_state_bytes, state_bytes
from .releases import rules

DEFAULT_BLOCK = 16
INDEXER_SCALE_BYTES = 4
DS_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes a token of the two packed latent layouts (mla_attention.py)."""
RING_POSITION_VALUES = 12  # three int64 rope positions beside a raw key, counted in bf16 values


@enum.unique
class SpecKind(enum.StrEnum):
    FULL = "full"
    MLA = "mla"  # latents, indexer keys and compressed keys: one vector a token, on every rank
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    RING = "ring"


class Spec(NamedTuple):
    """The cache of one layer on one rank. Two layers share a group only if their specs are equal."""

    kind: SpecKind
    block_size: int  # tokens a block covers; of a state: the tokens between two kept states
    page_bytes: int  # bytes of a block, padding included
    content_bytes: int  # and without
    shape: tuple[int, ...] = ()
    window: int = 0
    speculative: int = 0  # draft slots a state keeps
    replicated: bool = False  # a state every rank holds whole


class Cached(NamedTuple):
    """A spec and whose it is: decoder layer `layer`, or MTP layer counted on from the last one."""

    layer: int
    spec: Spec


class Layout(NamedTuple):
    """Everything a rank caches, and how the engine lays it out."""

    caches: tuple[Cached, ...]
    layers: int  # of the decoder; MTP layers count on from here
    block_size: int
    dtype: CacheDtype | None
    block_outermost: bool
    mode: str  # of state layers: none | align | all
    unmodelled: tuple[str, ...] = ()


def kv_specs(geometry: Geometry, deployment: Deployment, quantization: Quantization | None = None) -> Layout:
    """What one rank caches for this model under this deployment. Never raises: unknowns are listed in `unmodelled`."""
    mode = state_mode(geometry, deployment)
    reasons = list(geometry.unmodelled)
    dtype = None
    try:
        dtype = cache_dtype(geometry, deployment, quantization)
        if reason := dtype.reason or _refusal(geometry, deployment, dtype):
            raise Unstated(reason)
        return _layout(geometry, deployment, dtype, mode, tuple(reasons))
    except Unstated as unknown:
        return Layout((), 0, DEFAULT_BLOCK, dtype, False, mode, (*reasons, str(unknown)))


def _refusal(geometry: Geometry, deployment: Deployment, dtype: CacheDtype) -> str | None:
    """Why the engine refuses this cache, if it does (config/vllm.py, models/qwen4_exp/nvidia/qsa.py)."""
    kinds = {layer.attention for layer in geometry.layer_kinds}
    latent = bool(kinds & {Attention.MLA, Attention.DSA})
    if latent and (dtype.name == "nvfp4" or dtype.name.endswith("_per_token_head")):
        return f"KV cache dtype {dtype.name}: the engine refuses it for latent attention"
    if Attention.QSA in kinds and dtype.name not in ("bfloat16", "fp8", "fp8_e4m3"):
        return f"KV cache dtype {dtype.name}: the engine's QSA takes bfloat16, fp8 or fp8_e4m3"
    if deployment.dcp > 1 and kinds & {Attention.SLIDING, Attention.CHUNKED}:
        return "decode context parallel: the engine refuses it with sliding windows"
    return None


def state_mode(geometry: Geometry, deployment: Deployment) -> str:
    """How state layers are cached: `align` keeps one per block for prefix caching, `none` one per request."""
    if not _has_state(geometry):
        return "none"
    rule = rules(deployment.release)
    caching = deployment.enable_prefix_caching
    if caching is None:
        caching = rule.hybrid_prefix_caching
    if not caching:
        return "none"
    keeps_all = {layer.state for layer in geometry.layer_kinds} & {State.MAMBA1, State.MAMBA2}
    return "all" if rule.mamba_all_mode and keeps_all else "align"


def _has_state(geometry: Geometry) -> bool:
    return any(layer.state is not State.NONE for layer in geometry.layer_kinds)


def _layout(
    geometry: Geometry, deployment: Deployment, dtype: CacheDtype, mode: str, reasons: tuple[str, ...]
) -> Layout:
    block = deployment.block_size or kernel_block(geometry, deployment, dtype)
    padded = None
    if _has_state(geometry):
        block, padded = _aligned_block(geometry, deployment, dtype, mode, block)
    caches: list[Cached] = []
    for index, layer in enumerate(geometry.each_layer()):
        if layer.attention is Attention.UNKNOWN:
            return Layout((), 0, block, dtype, False, mode, reasons)
        specs = _layer_specs(geometry, layer, deployment, dtype, block)
        specs += _state_specs(geometry, layer, index, deployment, block, padded, mode)
        caches += [Cached(index, spec) for spec in specs]
    if deployment.mtp:
        if not geometry.mtp_layers:
            reasons += ("the config declares no MTP layers, so there is no drafter to speculate with",)
        drafters = geometry.mtp_kinds * (geometry.mtp_layers or 0)
        for index, layer in enumerate(drafters, start=len(geometry.layers)):
            caches += [Cached(index, spec) for spec in _layer_specs(geometry, layer, deployment, dtype, block)]
    packed = rules(deployment.release).block_outermost and any(c.spec.kind is SpecKind.RING for c in caches)
    return Layout(tuple(caches), len(geometry.layers), block, dtype, packed, mode, reasons)


def kernel_block(geometry: Geometry, deployment: Deployment, dtype: CacheDtype) -> int:
    """Tokens a block covers before hybrid alignment: the least every attention backend in use accepts."""
    kinds = {layer.attention for layer in geometry.layer_kinds}
    if Attention.DSA in kinds:
        return 64  # the indexer's kernel, and every sparse MLA backend
    if Attention.MLA not in kinds:
        return _grouped_block(geometry, deployment)
    if deployment.attention_backend:
        asked = {"FLASHMLA": 64, "FLASHINFER_MLA": 32, "CUTLASS_MLA": 128}
        return asked.get(deployment.attention_backend, DEFAULT_BLOCK)
    family = (deployment.sm or 0) // 10
    if family == 9 and (rules(deployment.release).flashmla_default or dtype.quantized):
        return 64
    if family == 10:
        return 128 if "flashinfer" in deployment.without else 32
    return DEFAULT_BLOCK


def _grouped_block(geometry: Geometry, deployment: Deployment) -> int:
    """FlashAttention 4 serves heads of 256 on sm100 in pages of 128 tokens; all other kernels take 16."""
    flash = deployment.attention_backend == "FLASH_ATTN" or (
        deployment.attention_backend is None and "flashinfer" in deployment.without
    )
    wide = any(layer.head_dim == 256 and layer.value_head_dim == 256 for layer in geometry.layer_kinds)
    large = flash and wide and (deployment.sm or 0) // 10 in (10, 11) and deployment.release >= (0, 33, 0)
    qsa = any(layer.attention is Attention.QSA for layer in geometry.layer_kinds)
    return 128 if large and not qsa else DEFAULT_BLOCK


def _aligned_block(
    geometry: Geometry, deployment: Deployment, dtype: CacheDtype, mode: str, block: int
) -> tuple[int, int]:
    """(block size, page) at which an attention page holds a state: both are then the same number of bytes."""
    states = [
        spec.content_bytes
        for layer in dict.fromkeys(geometry.each_layer())
        for index in _first_indices(geometry, layer)
        for spec in _state_specs(geometry, layer, index, deployment, block, None, mode)
    ]
    attending = [layer for layer in geometry.each_layer() if layer.attention is not Attention.NONE]
    if not attending:
        return block, max(states)
    layer = attending[0]
    if layer.attention in (Attention.MLA, Attention.DSA):
        token = _latent_bytes(geometry, dtype)
        unit = max(block, rules(deployment.release).latent_alignment)
    else:
        token = _token_bytes(layer, deployment, dtype)
        unit = block
    need = max(states)
    if mode == "all":
        chunk = geometry.recurrent.chunk_size if geometry.recurrent else None
        if not chunk:
            raise Unstated("no chunk size of the state layers: the block size of mode all is unknown")
        unit = math.lcm(chunk, unit)
    aligned = unit * -(-need // (unit * token))
    block = max(block, aligned)
    return block, block * token


def _first_indices(geometry: Geometry, layer: Layer) -> list[int]:
    """An index of a layer of this kind, and the n-gram layers of that kind: their states differ."""
    indices = [i for i, kind in enumerate(geometry.layers) if geometry.layer_kinds[kind] == layer]
    table = {n - 1 for n in geometry.ngram.layers} if geometry.ngram else set()
    return indices[:1] + [i for i in indices[1:] if i in table]


def _layer_specs(
    geometry: Geometry, layer: Layer, deployment: Deployment, dtype: CacheDtype, block: int
) -> list[Spec]:
    """The attention caches of one layer; none where it attends nothing or reads another layer's."""
    if layer.attention is Attention.NONE or layer.shares_kv:
        return []
    if layer.attention in (Attention.MLA, Attention.DSA):
        bytes_ = _latent_bytes(geometry, dtype)
        specs = [Spec(SpecKind.MLA, block, block * bytes_, block * bytes_, (bytes_,))]
        if layer.attention is Attention.DSA and layer.owns_indexer:
            specs.append(_indexer_spec(geometry, block))
        return specs
    token = _token_bytes(layer, deployment, dtype)
    shape = (_kv_heads(layer, deployment), layer.head_dim or 0, layer.value_head_dim or 0)
    windowed = {Attention.SLIDING: SpecKind.SLIDING, Attention.CHUNKED: SpecKind.CHUNKED}
    kind = windowed.get(layer.attention, SpecKind.FULL)
    if kind is not SpecKind.FULL and layer.window is None:
        raise Unstated(f"no window for a {layer.attention} layer: the KV cache is unknown")
    main = Spec(kind, block, block * token, block * token, shape, layer.window or 0)
    if layer.attention is not Attention.QSA:
        return [main]
    return [*_qsa_specs(geometry, deployment, block), main]


def _qsa_specs(geometry: Geometry, deployment: Deployment, block: int) -> list[Spec]:
    """Beside its keys and values a QSA layer keeps a ring of raw keys and one compressed key to a group of tokens."""
    indexer = geometry.indexer
    if indexer is None or not indexer.head_dim or not indexer.compress_ratio:
        raise Unstated("no indexer sizes: the compressed keys of its attention are unknown")
    ratio = indexer.compress_ratio
    # Multimodal rope keeps three int64 positions beside each raw key (qsa_cache.py QSAKeyStateCache).
    positions = RING_POSITION_VALUES if any("mrope_section" in rope.scaling for rope in geometry.ropes) else 0
    capacity = ratio * -(-(ratio + deployment.mtp) // ratio)
    ring = capacity * (indexer.head_dim + positions) * 2
    keys = block // ratio * indexer.head_dim * 2
    return [
        Spec(SpecKind.RING, capacity, ring, ring, (indexer.head_dim, positions)),
        Spec(SpecKind.MLA, block, keys, keys, (indexer.head_dim, ratio)),
    ]


def _indexer_spec(geometry: Geometry, block: int) -> Spec:
    """Keys of the sparse indexer: one fp8 vector a token and its fp32 scale (deepseek_v2.py Indexer)."""
    if geometry.indexer is None or geometry.indexer.head_dim is None:
        raise Unstated("no index_head_dim: the indexer's cache is unknown")
    bytes_ = geometry.indexer.head_dim + INDEXER_SCALE_BYTES
    return Spec(SpecKind.MLA, block, block * bytes_, block * bytes_, (bytes_, -1))


def _latent_bytes(geometry: Geometry, dtype: CacheDtype) -> int:
    if geometry.latent is None:
        raise Unstated("no kv_lora_rank or head sizes: the latent cache is unknown")
    if dtype.name in DS_MLA_BYTES:
        return DS_MLA_BYTES[dtype.name]
    return int((geometry.latent.kv_rank + geometry.latent.rope_dim) * dtype.element_bytes)


def _kv_heads(layer: Layer, deployment: Deployment) -> int:
    if layer.kv_heads is None:
        raise Unstated("no num_key_value_heads: the KV cache is unknown (pass --kv-heads)")
    heads, ranks = layer.kv_heads, deployment.tp
    if heads % ranks and ranks % max(heads, 1):
        raise Unstated(f"{heads} key-value heads on {ranks} ranks: one must divide the other; the engine refuses")
    return max(1, heads // ranks)


def _token_bytes(layer: Layer, deployment: Deployment, dtype: CacheDtype) -> int:
    """Bytes a token of keys and values on one rank: heads are divided, and replicated below one to a rank."""
    if layer.head_dim is None or layer.value_head_dim is None:
        raise Unstated("no head_dim: the KV cache is unknown")
    sides = side_bytes(dtype, layer.head_dim) + side_bytes(dtype, layer.value_head_dim)
    return _kv_heads(layer, deployment) * sides


def _state_specs(
    geometry: Geometry, layer: Layer, index: int, deployment: Deployment, block: int, padded: int | None, mode: str
) -> list[Spec]:
    """States a layer keeps: its own, and that of the n-gram convolution in front of it."""
    sizes: list[tuple[int, tuple[int, ...], bool]] = []
    if layer.state is not State.NONE:
        size, shape = state_bytes(geometry, layer.state, deployment)
        sizes.append((size, shape, False))
    if geometry.ngram and index + 1 in geometry.ngram.layers:
        size, shape = ngram_state_bytes(geometry, deployment)
        sizes.append((size, shape, True))
    span = block if mode != "none" else deployment.max_model_len or geometry.max_position_embeddings or block
    return [
        Spec(SpecKind.STATE, span, max(size, padded or 0), size, shape, 0, deployment.mtp, replicated)
        for size, shape, replicated in sizes
    ]
