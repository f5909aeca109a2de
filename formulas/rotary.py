"""The rotary cos/sin caches an engine keeps: one for each distinct set of parameters, replicated on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .deployment import Deployment
from .geometry import Attention, Geometry, Rope

_F32_TYPES = frozenset({"gpt_oss"})  # model files that ask for an F32 cache (vllm 0.33.0 models/gpt_oss.py)
_POSITIONS = {"falcon": 2048}  # max_position_embeddings of config classes whose files are silent
_YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")


class RopeCache(NamedTuple):
    """One cache, and the F32 tables it is computed from: freed before it is cast, and after."""

    size: int
    before: tuple[int, ...]
    after: int


def rope_caches(geometry: Geometry, deployment: Deployment) -> Iterator[RopeCache]:
    """Each cache: positions x rotary dimensions x dtype.
    Linear, dynamic and yarn factors lengthen it; multimodal positions were kept fourfold before vLLM 0.33.
    Source: vllm 0.33.0 model_executor/layers/rotary_embedding/."""
    seen = set()
    for rope in geometry.ropes:
        stated = rope.positions or _POSITIONS.get(geometry.text_model_type or "")
        if rope.dims is None or stated is None or not _is_used(rope, geometry):
            continue
        local = _is_local(rope, geometry)
        scaling = {} if local else rope.scaling
        key = (rope.dims, rope.positions, "local" if local else rope.theta, str(sorted(scaling.items())))
        if key not in seen:
            seen.add(key)
            positions = _positions(stated, scaling, deployment)
            values = positions * _dims(rope, scaling, geometry)
            half = 2 * values  # bytes of angles, cosines or sines in F32; scaled variants pass through one more
            scaled = (half,) if scaling.get("rope_type", scaling.get("type")) in _YARN else ()
            size = values * _value_bytes(scaling, geometry, deployment)
            cache = RopeCache(size, (4 * positions, half, half, half, *scaled), 4 * values)
            # DeepSeek V3.2's indexer rotates in the other layout, with a cache of its own; GLM 5's shares the model's.
            yield from (cache,) * (2 if geometry.text_model_type == "deepseek_v32" else 1)


def _is_local(rope: Rope, geometry: Geometry) -> bool:
    """Gemma 3's sliding layers rotate with their own base and no scaling (default base where the config is silent)."""
    own = rope.scaling.get("rope_type") == "default"
    return (geometry.text_model_type or "").startswith("gemma3") and rope.reads is Attention.SLIDING and not own


def _dims(rope: Rope, scaling: Mapping[str, Any], geometry: Geometry) -> int:
    """Rotary dimensions of the cache; `proportional` scaling (Gemma 4) keeps the whole head's, zero past its share."""
    if scaling.get("rope_type") == "proportional":
        sizes = [layer.head_dim for layer in geometry.layer_kinds if layer.attention is rope.reads and layer.head_dim]
        return max(sizes, default=rope.dims or 0)
    return rope.dims or 0


def _value_bytes(scaling: Mapping[str, Any], geometry: Geometry, deployment: Deployment) -> int:
    """Bytes of a cached value. FlashInfer rotates by F32 tables: in the newest DeepSeek V3.2 class, and in DeepSeek's
    yarn where the engine's own operators run, which compilation turns off (vllm 0.25.1 and 0.33.0
    rotary_embedding/deepseek_scaling_rope.py, config/compilation.py custom_ops)."""
    newest = deployment.release >= (0, 33, 0)
    wide = newest and geometry.text_model_type in _F32_TYPES
    if "flashinfer" not in deployment.without:
        yarn = geometry.latent is not None and scaling.get("rope_type", scaling.get("type")) in _YARN
        wide |= (newest and geometry.text_model_type == "deepseek_v32") or (yarn and deployment.enforce_eager)
    stated = deployment.dtype if deployment.dtype != "auto" else geometry.dtype
    return 4 if wide or stated == "float32" else 2


def _is_used(rope: Rope, geometry: Geometry) -> bool:
    if geometry.text_model_type == "nemotron_h":  # its attention has no position encoding
        return False
    return any(layer.rope and layer.attention is rope.reads for layer in geometry.layer_kinds)


def _positions(positions: int, scaling: Mapping[str, Any], deployment: Deployment) -> int:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if "mrope_section" in scaling:
        return positions * (4 if deployment.release < (0, 33, 0) else 1)
    if not isinstance(factor, int | float):
        return positions
    if kind in _YARN and isinstance(original, int):
        return int(original * factor)
    return int(positions * factor) if kind in ("linear", "dynamic") else positions
