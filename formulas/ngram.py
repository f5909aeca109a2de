"""The n-gram table of a Qwen4Exp model: its format and where it lies. The config decides, not what is stored."""

from __future__ import annotations

from collections.abc import Mapping

from .deployment import Deployment
from .facts import Quantization
from .formats import layer_scheme, matcher
from .geometry import Geometry
from .schemes import Kind, Weight


def table_is_pinned(deployment: Deployment) -> bool:
    """Whether the n-gram table lies in pinned host memory: the default since engram offload exists (vLLM 0.33)."""
    return deployment.ple == "host" or (deployment.ple == "default" and deployment.release >= (0, 33, 0))


def table_format(geometry: Geometry, quantization: Quantization | None, deployment: Deployment) -> str:
    """fp8 | nvfp4 | bf16: how the engine builds the n-gram table. A checkpoint that stores FP8 without declaring it
    gets a BF16 table, twice the size. Source: vllm 0.33.0 models/qwen4_exp/common/ngram_embedding.py
    from_quant_config."""
    declared = _declared_table_dtype(geometry, deployment)
    if declared is not None:
        return {"float8_e4m3fn": "fp8", "nvfp4": "nvfp4"}.get(declared, "bf16")
    if quantization is None or quantization.method is None or geometry.ngram is None:
        return "bf16"
    layer = geometry.ngram.layers[0] - 1
    name = f"model.language_model.layers.{layer}.ple.ple_embedding.ngram_embedding"
    table = Weight("main", layer, "ple.ple_embedding.ngram_embedding", (1, 1))
    method = quantization.method.lower()
    ignored = matcher(quantization.ignore)(table) or any(e.startswith(f"{name}.shard_") for e in quantization.ignore)
    if method == "fp8" and not ignored:
        return "fp8"
    if method.startswith("modelopt") and not ignored:
        stated = layer_scheme(quantization.config, table)
        return {Kind.FP8_TENSOR: "fp8", Kind.NVFP4: "nvfp4"}.get(stated.kind, "bf16") if stated else "bf16"
    return "bf16"


def _declared_table_dtype(geometry: Geometry, deployment: Deployment) -> str | None:
    text = deployment.hf_overrides.get("text_config")
    for place in (text if isinstance(text, Mapping) else {}, deployment.hf_overrides):
        if isinstance(stated := place.get("ple_embedding_dtype"), str):
            return stated
    return geometry.ngram.dtype if geometry.ngram else None
