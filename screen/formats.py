"""How a checkpoint's weights are stored, decided by the scale tensors beside them.

A dtype alone says little: U8 may be NVFP4, MXFP4 or bytes; I32 may hold 2, 3, 4 or 8 bits a value. What decides is the
company a weight keeps: its scales' dtype and how many there are. The config is asked only for what no tensor shows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from formulas.facts import Role, Stack
from formulas.roles import classify_family
from formulas.tensors import Form, tensor_bytes

from .quantization import weight_bits

PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
_FP8 = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_POWER = {"F8_E8M0", "U8"}  # a scale that is a power of two; written as bytes by those who lack the dtype

# What a tensor is to its module, by the end of its name without digits; the longest ending wins.
_PART = re.compile(
    r"^(?P<module>.*?)(?:[._](?P<part>"
    r"weight_packed|weight_scale_inv|weight_global_scale|weight_scale_|weight_scale|weight_shape|weight_zero_point|"
    r"input_global_scale|input_scale|pre_quant_scale|qweight|qzeros|scales|biases|g_idx|blocks|scale_inv|scale_|scale|"
    r"SCB|bias|weight\.(?:absmax|quant_map|nested_\w+|quant_state\.\w+)|weight))?$"
)


class Module(NamedTuple):
    """One family of modules: their format and the bytes of weights and scales in all of them."""

    stack: Stack
    role: Role
    family: str
    format: str
    bytes: int


def modules(counts: Mapping[tuple[str, Form], int], config: Mapping[str, Any]) -> list[Module]:
    """The modules among (family, form) -> number of tensors. `config` is the quantisation config, or empty."""
    parts: dict[str, dict[str, Form]] = defaultdict(dict)
    sizes: dict[str, int] = defaultdict(int)
    places: dict[str, tuple[Stack, Role]] = {}
    for (family, form), copies in counts.items():
        match = _PART.match(family)
        module, part = (match["module"], match["part"] or "weight") if match else (family, "weight")
        places.setdefault(module, classify_family(family))
        before = parts[module].get(part)
        if before is None or tensor_bytes(*form) > tensor_bytes(*before):  # of unequal siblings the largest speaks
            parts[module][part] = form
        sizes[module] += copies * tensor_bytes(*form)
    found = []
    for module, forms in parts.items():
        above = parts.get(module.rpartition(".")[0], {})
        shared = above if "weight" not in above else {}  # one scale for all parts of a table
        found.append(Module(*places[module], module, _format({**shared, **forms}, config), sizes[module]))
    return found


def by_role(found: Iterable[Module]) -> dict[str, str]:
    """ "stack/role" -> format of its weights; `mixed` where a second packed format has over a tenth of the bytes."""
    bytes_of: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module in found:
        bytes_of[f"{module.stack}/{module.role}"][module.format] += module.bytes
    return {key: leading(formats) for key, formats in sorted(bytes_of.items())}


def leading(bytes_of: Mapping[str, int]) -> str:
    """The format with the most bytes; `mixed` where two packed ones share them."""
    ranked = sorted(bytes_of, key=lambda name: (-bytes_of[name], name))
    packed = [name for name in ranked if name not in PLAIN.values() and bytes_of[name] * 10 > sum(bytes_of.values())]
    return "mixed" if len(packed) > 1 else ranked[0]


def _format(forms: Mapping[str, Form], config: Mapping[str, Any]) -> str:
    """The format of one module from its parts' dtypes and shapes."""
    if "qweight" in forms and "scales" in forms:
        return _gptq_or_awq(forms, config)
    if "blocks" in forms and "scales" in forms:
        return "mxfp4"  # gpt-oss: [.., groups, 16] bytes and a byte a group
    if any(part.startswith("weight.quant_state") for part in forms):
        state = next(part for part in forms if part.startswith("weight.quant_state"))
        return "fp4_bnb" if state.endswith("fp") else "nf4"
    dtype, shape = forms.get("weight_packed") or forms.get("weight") or next(iter(forms.values()))
    scale = next((forms[part] for part in _SCALES if part in forms), None)
    if dtype in _FP8:
        return "fp8" if scale is None else _fp8(shape, *scale)
    if dtype in ("F4", "U8", "I8") and scale is not None and scale[0] in ("F8_E4M3", "F8_E8M0", "U8"):
        if scale[0] == "F8_E4M3":
            quantised_inputs = "input_scale" in forms or "input_global_scale" in forms
            return "nvfp4" if quantised_inputs else "nvfp4a16"
        return "mxfp4" if _columns(scale[1]) * 16 == _columns(shape) or dtype == "F4" else "mxfp6"
    if dtype == "I8":
        if "SCB" in forms:
            return "int8_bnb"
        return "int8" if scale is None else f"int8_{_granularity(shape, scale[1])}"
    if dtype in ("I32", "U32") and scale is not None:
        bits = weight_bits(config)
        if bits is None:
            return "int"
        values = _columns(shape) * 32 // bits
        return f"int{bits}_{_granularity((*shape[:-1], values), scale[1])}"
    return PLAIN.get(dtype, dtype.lower())


_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scales", "scale")


def _columns(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _fp8(shape: tuple[int, ...], scale_dtype: str, scale: tuple[int, ...]) -> str:
    """fp8_tensor, fp8_channel, fp8_block128 or mxfp8, by the number of scales."""
    if scale_dtype in _POWER and len(scale) == len(shape) and _columns(scale) * 32 == _columns(shape):
        return "mxfp8"
    return f"fp8_{_granularity(shape, scale)}"


def _granularity(shape: tuple[int, ...], scale: tuple[int, ...]) -> str:
    """What one scale covers: tensor, channel, block128 (a tile) or g128 (so many inputs of a row)."""
    if prod(scale) <= 1 or (len(shape) == 3 and prod(scale) in (shape[0], 2 * shape[0])):
        return "tensor"
    if len(scale) < 2 or _columns(scale) == 1:
        return "channel"
    columns = -(-_columns(shape) // _columns(scale))
    if len(shape) < 2 or scale[-2] == shape[-2]:
        return f"g{columns}"
    return f"block{1 << (columns - 1).bit_length()}"  # the last tile may be cut: 2 of 128 over 160 columns


def _gptq_or_awq(forms: Mapping[str, Form], config: Mapping[str, Any]) -> str:
    """GPTQ packs inputs (rows), AWQ outputs (columns); the zero points, [groups, out x bits / 32], tell the bits."""
    weight, scales = forms["qweight"][1], forms["scales"][1]
    zeros = forms["qzeros"][1] if "qzeros" in forms else ()
    if len(weight) != 2 or len(scales) != 2 or not prod(scales):
        return "int"
    groups, outputs = scales
    bits = zeros[-1] * 32 // outputs if len(zeros) == 2 else weight_bits(config)
    if not bits:
        return "int"
    inputs = weight[0] * 32 // bits if weight[1] == outputs else weight[0]
    return f"int{bits}_channel" if groups == 1 else f"int{bits}_g{-(-inputs // groups)}"
