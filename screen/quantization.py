"""What a config says of its quantisation: method, format, what is left out, and the KV cache it asks for.

Every writer spells it differently, some nest it, some put it in a file of its own. Values come from strangers: any
type may stand anywhere, and what is not understood is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from formulas.formats import compact_layers

_IGNORE = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "exclude")
_LARGE = (*_IGNORE, "quantized_layers", "dynamic", "layer_quant_config", "extra_config")  # lists of every layer
_MODELOPT = {
    "FP8": "fp8_tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel", "FP8_PB_WO": "fp8_block128", "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4", "W4A16_NVFP4": "nvfp4a16", "MXFP8": "mxfp8", "MXFP4": "mxfp4", "W4A16_AWQ": "int4_g128",
    "W4A8_AWQ": "int4_g128", "INT8_SQ": "int8_channel", "MIXED_PRECISION": "mixed",
}  # fmt: skip


def quantization_config(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> dict[str, Any]:
    """The quantisation config: config.json's own, that of its text part, MLX's, or hf_quant_config.json's; or {}."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            found = place.get(key)
            if isinstance(found, Mapping) and found:
                return dict(found)
    found = (hf_quant or {}).get("quantization")
    return dict(found) if isinstance(found, Mapping) else {}


def method(config: Mapping[str, Any], quant: Mapping[str, Any]) -> str | None:
    """The quant_method in lower case; None for a checkpoint that declares none."""
    if not quant:
        return None
    if isinstance(named := quant.get("quant_method"), str):
        return named.lower()
    if "quant_algo" in quant:
        return "modelopt"
    return "mlx" if isinstance(config.get("quantization"), Mapping) else None


def declared_format(how: str | None, quant: Mapping[str, Any]) -> str | None:
    """The format as the config declares it, in the words the headers' formats have; None where it is not clear."""
    algo = quant.get("quant_algo")
    if isinstance(algo, str) and algo.upper() in _MODELOPT:
        return _MODELOPT[algo.upper()]
    if how == "mxfp4":
        return "mxfp4"
    if how == "fp8":
        block = quant.get("weight_block_size")
        return f"fp8_block{block[-1]}" if isinstance(block, list) and block else "fp8_tensor"
    if how == "bitsandbytes":
        kind = quant.get("bnb_4bit_quant_type")
        return kind if isinstance(kind, str) and quant.get("load_in_4bit") else "int8_bnb"
    formats = {_scheme(*scheme) for scheme in schemes(quant)} or {_scheme(quant, quant)}
    return formats.pop() if len(formats) == 1 else "mixed"


def schemes(quant: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(weights, group) of each of the config_groups that quantises weights."""
    groups = quant.get("config_groups")
    each = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    return [(group["weights"], group) for group in each if isinstance(group.get("weights"), Mapping)]


def weight_bits(quant: Mapping[str, Any]) -> int | None:
    """Bits of a weight where the config states one number for all; else None."""
    stated = {_number(weights.get("num_bits")) for weights, _ in schemes(quant)} or {_number(quant.get("bits"))}
    bits = stated.pop() if len(stated) == 1 else None
    return bits if bits is not None and 1 <= bits <= 16 else None


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _scheme(weights: Mapping[str, Any], group: Mapping[str, Any]) -> str | None:
    """The format of one scheme: bits, number type and what a scale covers."""
    bits, size = _number(weights.get("num_bits", weights.get("bits"))), _number(weights.get("group_size"))
    strategy, number = weights.get("strategy"), weights.get("type", "int")
    if bits is None:
        return None
    grouped = size is not None and size > 0
    if number == "float" and bits == 4:
        if size == 32:
            return "mxfp4"
        return "nvfp4" if isinstance(group.get("input_activations"), Mapping) else "nvfp4a16"
    if number == "float" and bits == 8:
        block = weights.get("block_structure")
        if strategy == "block" or (strategy is None and grouped):
            return f"fp8_block{block[-1] if isinstance(block, list) and block else size or 128}"
        return "mxfp8" if size == 32 else "fp8_channel" if strategy == "channel" else "fp8_tensor"
    return f"int{bits}_g{size}" if grouped else f"int{bits}_channel"


def ignore_list(quant: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Modules left as they were, sorted; the patterns as written."""
    second = (hf_quant or {}).get("quantization")
    for place in (quant, second if isinstance(second, Mapping) else {}):
        for key in _IGNORE:
            found = place.get(key)
            if isinstance(found, list) and found:
                return tuple(sorted({item for item in found if isinstance(item, str)}))
    return ()


def kv_cache_dtype(quant: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> str | None:
    """The KV cache dtype the checkpoint asks for, such as `fp8`; None where it asks for none."""
    second = (hf_quant or {}).get("quantization")
    for place in (quant, second if isinstance(second, Mapping) else {}):
        for key in ("kv_cache_quant_algo", "kv_cache_scheme", "kv_cache_dtype"):
            found = place.get(key)
            if isinstance(found, str) and found.lower() not in ("", "auto", "none"):
                return found.lower()
            if isinstance(found, Mapping) and (bits := _number(found.get("num_bits"))) is not None:
                return f"{'fp' if found.get('type') == 'float' else 'int'}{bits}"
    return None


def without_lists(quant: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its lists of layers, which are as long as the model, and without numbers JSON cannot hold."""
    short = {key: _finite(value) for key, value in quant.items() if key not in _LARGE}
    if isinstance(layers := quant.get("quantized_layers"), Mapping):
        short["quantized_layers"] = compact_layers(layers)  # folded to patterns: it decides what each layer is
    return short


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return {key: _finite(item) for key, item in value.items()} if isinstance(value, dict) else value
