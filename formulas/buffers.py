"""What an engine keeps on the card beside the checkpoint's weights: rotary caches, scales, index and batch buffers."""

from __future__ import annotations

from collections.abc import Iterator

from .geometry import Attention, Ffn, Layer
from .kernels import Tensors
from .kv_dtypes import cache_dtype
from .ngram import table_is_pinned
from .place import Built, Place
from .rotary import rope_caches
from .sharding import Part

_DEFAULT_TOKENS = 2048  # max_num_batched_tokens where nobody says; some buffers are as long as a batch


def _tokens(place: Place) -> int:
    return place.deployment.max_num_batched_tokens or _DEFAULT_TOKENS


def tower_buffers(place: Place) -> Iterator[Built]:
    """The rotary cache of Qwen's vision towers: 8192 positions, half a head wide (vllm 0.33.0 models/qwen3_vl.py)."""
    v = place.geometry.vision
    qwen = ((v.model_type if v else None) or place.geometry.model_type or "").startswith("qwen")
    if v is not None and v.hidden_size and v.heads and qwen:
        size = (8192 * (v.hidden_size // v.heads // 2) * place.runtime.float_bytes,)
        yield Built("vision", Part.VISION, Tensors(size, size), buffer=True)


def sees(place: Place) -> bool:
    """Whether images are served, and so the vision tower loaded."""
    d = place.deployment
    off = d.limit_mm_per_prompt and all(d.limit_mm_per_prompt.get(kind) == 0 for kind in ("image", "video"))
    return not (d.language_model_only or off)


def model_buffers(place: Place) -> Iterator[Built]:
    """Buffers of the whole model: an indexer's choice, Gemma 4's per-layer inputs (models/gemma4.py), a counter."""
    g = place.geometry
    if any(layer.owns_indexer for layer in g.layer_kinds) and g.indexer and g.indexer.topk:
        choice = (_tokens(place) * g.indexer.topk * 4,)  # tokens the indexer picks, shared by all layers
        yield Built("main", Part.OTHER, Tensors(choice, choice), buffer=True)
    if g.hyper_connections and place.deployment.mtp:
        hidden = (_tokens(place) * (g.hidden_size or 0) * g.hyper_connections * place.runtime.float_bytes,)
        yield Built("mtp", Part.OTHER, Tensors(hidden, hidden), buffer=True)  # the target's, kept for its drafter
    if g.vision is not None and g.vision.deepstack and sees(place):
        size = (_tokens(place) * (g.hidden_size or 0) * place.runtime.float_bytes,) * len(g.vision.deepstack)
        yield Built("main", Part.OTHER, Tensors(size, size), buffer=True)
    if g.text_model_type == "gemma4_text" and g.per_layer_dim:
        size = (_tokens(place) * len(g.layers) * g.per_layer_dim * place.runtime.float_bytes, 2, 2, 2)
        yield Built("main", Part.PLE, Tensors(size, size), buffer=True)
    heads = max((layer.heads or 0 for layer in g.layer_kinds), default=0)
    if heads and _attends_by_flashinfer(place):
        counter = (_tokens(place) * max(1, heads // place.tp) * 4,)
        yield Built("main", Part.ATTENTION, Tensors(counter, counter), buffer=True)


def _attends_by_flashinfer(place: Place) -> bool:
    """Whether grouped-query attention runs on FlashInfer, which brings a counter buffer.
    Source: vllm 0.33.0 platforms/cuda.py priorities and the backends' own checks, run per capability."""
    family = place.runtime.sm // 10 * 10
    g, kinds = place.geometry, {layer.attention for layer in place.geometry.layer_kinds}
    if (g.text_model_type or "").startswith("gemma4"):  # image tokens attend both ways, which FlashInfer does not do
        return False
    if not place.runtime.has("flashinfer") or not kinds & {Attention.FULL, Attention.SLIDING, Attention.CHUNKED}:
        return False
    if family in (100, 110):
        return True
    if family == 90:
        return False
    if g.text_model_type == "gpt_oss":
        return family == 120
    return cache_dtype(g, place.deployment, place.quantization).quantized


def _scaled_attention(place: Place) -> bool:
    """Whether attention layers load KV scales: they are parameters until loading has copied them."""
    method = (place.quantization.method or "").lower() if place.quantization else ""
    return method == "fp8" or method.startswith("modelopt")


def attention_buffers(place: Place, stack: str, layer: Layer, index: int, *, first: bool) -> Iterator[Built]:
    """What the engine adds to a layer beside the checkpoint's weights: KV scales, index buffers, rotary caches."""
    g, d = place.geometry, place.deployment
    if first:
        for cache in rope_caches(g, d):
            size = (cache.size,)
            scratch = (cache.before, (cache.after,))
            yield Built("main", Part.ROPE_CACHE, Tensors(size, size), buffer=True, scratch=scratch)
    if stack == "main" and g.ngram and index + 1 in g.ngram.layers and table_is_pinned(d):
        ids = (_tokens(place) * ((g.ngram.size or 1) - 1) * (g.ngram.heads or 0) * 8,)
        yield Built("main", Part.PLE, Tensors(ids, ids), buffer=True)
    if layer.attention is Attention.NONE:
        return
    scales: tuple[int, ...] = (4,) * (6 if d.release >= (0, 33, 0) else 4)
    if layer.attention is Attention.QSA and g.indexer and g.indexer.topk:
        scales += (_tokens(place) * (g.indexer.topk + (g.indexer.compress_ratio or 1)) * 4,)
    if g.text_model_type == "gemma4_text":  # norms without a weight keep one of ones: of values, and of the router
        ones = () if layer.shares_kv else ((layer.head_dim or 0) * place.runtime.float_bytes,)
        yield Built(stack, Part.ATTENTION, Tensors(ones, ones), buffer=True)
        if layer.ffn is Ffn.BOTH:
            router = ((g.hidden_size or 0) * place.runtime.float_bytes, place.runtime.float_bytes)
            yield Built(stack, Part.ROUTER, Tensors(router, router), buffer=True)
    if layer.attention is Attention.DSA and g.indexer and g.indexer.topk and d.release >= (0, 33, 0):
        # Measured on the engine's own modules, whatever the batch: the sparse kernel keeps 129 rows of chosen tokens.
        scales += (129 * g.indexer.topk * 4, 129 * 4)
        scales += (4 * (_tokens(place) + 1),) if place.runtime.sm // 10 == 9 else ()
    grouped = layer.attention in (Attention.FULL, Attention.SLIDING, Attention.CHUNKED)
    extra = (4, 4) if grouped and _scaled_attention(place) else ()
    yield Built(stack, Part.ATTENTION, Tensors(scales + extra, scales), buffer=True)
