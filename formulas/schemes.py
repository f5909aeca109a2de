"""Weights as a checkpoint stores them: one matrix with its scheme, whatever number of tensors it is spread over.

    model.layers.3.mlp.experts.{0-511}.up_proj.weight          U8       [640, 1280]
    model.layers.3.mlp.experts.{0-511}.up_proj.weight_scale    F8_E4M3  [640, 160]  one Weight: NVFP4, 512 x (640, 2560)
    model.layers.3.mlp.experts.{0-511}.up_proj.weight_scale_2  F32      []
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from .tensors import TensorGroup

Shape = tuple[int, ...]


@enum.unique
class Kind(enum.StrEnum):
    """How the values of a matrix are stored."""

    PLAIN = "plain"  # one floating-point tensor
    FP8_TENSOR = "fp8_tensor"  # one scale a matrix
    FP8_CHANNEL = "fp8_channel"  # one scale a row
    FP8_BLOCK = "fp8_block"  # one scale a tile, 128 x 128 as a rule
    NVFP4 = "nvfp4"  # 4 bits, E4M3 scale per 16, F32 scale a matrix
    MXFP4 = "mxfp4"  # 4 bits, E8M0 scale per 32
    MXFP8 = "mxfp8"  # 8 bits, E8M0 scale per 32
    INT = "int"  # 2, 4 or 8 bits packed in I32, a scale per group
    INT8_CHANNEL = "int8_channel"  # one scale a row


class Scheme(NamedTuple):
    """A kind with what else decides its bytes."""

    kind: Kind = Kind.PLAIN
    block: tuple[int, int] = (128, 128)  # FP8_BLOCK: rows, columns of a tile
    bits: int = 4  # INT
    group: int = 0  # INT: input values a scale covers; 0 = the whole row
    inputs: bool = False  # a static activation scale is stored
    zeros: bool = False  # INT: zero points are stored
    method: str = ""  # who wrote it: modelopt, compressed-tensors, gptq, awq, fp8, mxfp4


PLAIN = Scheme()


class Weight(NamedTuple):
    """One weight of one layer. `shape` is (rows out, columns in) for a matrix, unpacked, and as stored otherwise."""

    stack: str  # main | mtp | vision | audio
    layer: int | None
    name: str  # below the layer (or the stack), without the expert's number: mlp.experts.up_proj
    shape: Shape
    dtype: str = "BF16"
    scheme: Scheme = PLAIN
    bias: bool = False
    experts: int = 0  # copies, for routed experts; else 0


_PREFIX = re.compile(
    r"^(model\.language_model\.model\.|model\.language_model\.|language_model\.model\.|language_model\.|"
    r"model\.model\.|model\.|backbone\.|transformer\.|text_model\.)"
)
_VISION = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision_adapter|multi_modal_projector|mm_projector|"
    r"embed_vision|patch_merger|vision_language_adapter|vision_projector|sam_model|qwen2_model|mm_input_projection|vit)\."
)
_AUDIO = re.compile(r"(^|\.)(audio_tower|embed_audio|audio_model|audio_encoder|audio_projector|sound_encoder)\.")
_MTP = re.compile(r"^(?:model\.|language_model\.)*(?:mtp|nextn)\.")
_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|blocks|block|h|encoder\.layers)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"(?<=experts\.)\d+\.")


def locate(name: str, layers: int | None) -> tuple[str, int | None, str]:
    """(stack, layer, rest) of a checkpoint name. Layers from number `layers` on are the drafter's."""
    if _AUDIO.search(name):
        return "audio", *_below_layer(name)
    if _VISION.search(name):
        return "vision", *_below_layer(name)
    if match := _MTP.match(name):
        return "mtp", *_below_layer(name[match.end() :])
    layer, rest = _below_layer(_PREFIX.sub("", name))
    if layer is not None and layers is not None and layer >= layers:
        return "mtp", layer - layers, rest
    return "main", layer, rest


def read_weights(groups: Iterable[TensorGroup], layers: int | None) -> list[Weight]:
    """The weights the tensor groups stand for, one a layer; the copies of a routed expert are counted in `experts`."""
    found: dict[tuple[str, int | None, str], dict[str, tuple[str, Shape, int]]] = {}
    for group in groups:
        for name, experts in _spelled(group):
            stack, layer, rest = locate(name, layers)
            rest = _EXPERT.sub("", rest)
            module, leaf = _split(rest)
            params = found.setdefault((stack, layer, module), {})
            before = params.get(leaf)
            count = experts + (before[2] if before else 0)
            params[leaf] = (group.dtype, group.shape, count)
    return [weight for key, params in found.items() for weight in _weights(*key, params)]


def _spelled(group: TensorGroup) -> Iterator[tuple[str, int]]:
    """(name, routed experts it stands for): every number spelled out but the experts', of which the first is kept."""
    literals = group.literals()
    ranges = [group.numbers(i) for i in range(len(literals) - 1)]
    experts = 0
    for i, numbers in enumerate(ranges):
        if literals[i].endswith("experts."):
            experts, ranges[i] = len(numbers), numbers[:1]
    for chosen in product(*ranges):
        yield literals[0] + "".join(f"{n}{text}" for n, text in zip(chosen, literals[1:], strict=True)), experts


def _below_layer(name: str) -> tuple[int | None, str]:
    match = _LAYER.match(name)
    return (int(match[1]), match[2]) if match else (None, name)


_LEAF = re.compile(
    r"^(?P<module>.*?)(?:(?<=\w)\.|(?<=_proj)_(?=blocks$|scales$|bias$)|$)"
    r"(?P<leaf>weight|weight_packed|weight_scale|weight_scale_inv|weight_scale_2|weight_global_scale|weight_shape|"
    r"weight_zero_point|weight_g_idx|input_scale|input_global_scale|qweight|qzeros|scales|g_idx|bias|blocks|scale|"
    r"k_scale|v_scale|k_proj\.output_scale|pre_quant_scale)$"
)


def _split(rest: str) -> tuple[str, str]:
    """(module, parameter) of a name below its layer; a bare tensor (A_log, sinks) has the parameter ''."""
    match = _LEAF.match(rest)
    return (match["module"], match["leaf"]) if match else (rest, "")


def _weights(
    stack: str, layer: int | None, module: str, params: Mapping[str, tuple[str, Shape, int]]
) -> Iterator[Weight]:
    """One weight as a rule; its parameters one by one where they form no scheme known here."""
    shapes = {leaf: shape for leaf, (_, shape, _) in params.items()}
    dtypes = {leaf: dtype for leaf, (dtype, _, _) in params.items()}
    experts = max(count for _, _, count in params.values())
    bias = "bias" in shapes
    known = recognise(shapes, dtypes)
    if known is not None:
        shape, scheme, dtype = known
        if "experts" in module.split(".") and experts == 0 and len(shape) == 3:  # packed: all experts in one tensor
            experts, shape = shape[0], shape[1:]
        yield Weight(stack, layer, module, shape, dtype, scheme, bias, experts)
        return
    for leaf in shapes:
        yield Weight(stack, layer, f"{module}.{leaf}".strip("."), shapes[leaf], dtypes[leaf], experts=experts)


def recognise(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> tuple[Shape, Scheme, str] | None:
    """(unpacked shape, scheme, dtype) of a module's tensors; None where they form no scheme known here."""
    if "blocks" in shapes and "scales" in shapes:  # gpt-oss: [experts, rows, columns / 32, 16]
        *lead, columns, half = shapes["blocks"]
        return (*lead, columns * half * 2), Scheme(Kind.MXFP4, group=32, method="mxfp4"), "U8"
    if "qweight" in shapes:
        return _recognise_packed_int(shapes)
    if "weight_packed" in shapes:
        return _recognise_compressed(shapes, dtypes)
    if "weight" not in shapes:
        return (shapes[""], PLAIN, dtypes[""]) if "" in shapes else None
    shape, dtype = shapes["weight"], dtypes["weight"]
    inputs = "input_scale" in shapes or "input_global_scale" in shapes
    scale = shapes.get("weight_scale_inv", shapes.get("weight_scale", shapes.get("scale")))
    if scale is None:
        return shape, PLAIN, dtype
    if dtype in ("U8", "F4") and "weight_scale_2" in shapes:
        return (*shape[:-1], shape[-1] * 2), Scheme(Kind.NVFP4, group=16, inputs=inputs, method="modelopt"), dtype
    if dtype in ("U8", "I8", "F4") and scale[-1:] and scale[-1] * 16 == shape[-1]:
        return (*shape[:-1], shape[-1] * 2), Scheme(Kind.MXFP4, group=32, inputs=inputs), dtype
    if dtype.startswith("F8"):
        return shape, _recognise_fp8(shape, scale, inputs), dtype
    if dtype == "I8":
        return shape, Scheme(Kind.INT8_CHANNEL, inputs=inputs), dtype
    return None


def _recognise_fp8(shape: Shape, scale: Shape, inputs: bool) -> Scheme:
    if scale in ((), (1,)) or len(shape) < 2:
        return Scheme(Kind.FP8_TENSOR, inputs=inputs)
    if scale in ((shape[-2],), (shape[-2], 1), (*shape[:-1], 1), shape[:-1]):
        return Scheme(Kind.FP8_CHANNEL, inputs=inputs)
    if scale[-1] * 32 == shape[-1] and scale[-2] == shape[-2]:
        return Scheme(Kind.MXFP8, group=32, inputs=inputs)
    return Scheme(Kind.FP8_BLOCK, block=(_tile(shape[-2], scale[-2]), _tile(shape[-1], scale[-1])), inputs=inputs)


def _tile(size: int, tiles: int) -> int:
    """The power of two that cuts `size` into `tiles`, the last one partial; 128 where several do."""
    fits = [b for b in (128, 64, 32, 16, 256, 512) if -(-size // b) == tiles]
    return fits[0] if fits else -(-size // tiles)


def _recognise_packed_int(shapes: Mapping[str, Shape]) -> tuple[Shape, Scheme, str] | None:
    """GPTQ packs the input side ([in x bits / 32, out]), AWQ the output side ([in, out x bits / 32])."""
    if "scales" not in shapes:
        return None
    (rows, columns), (groups, out) = shapes["qweight"][-2:], shapes["scales"][-2:]
    gptq = columns == out
    zeros = shapes.get("qzeros")
    bits = 32 * zeros[-1] // out if zeros else 4
    inner = rows * 32 // bits if gptq else rows
    method = "gptq" if gptq else "awq"
    group = 0 if groups == 1 else inner // groups
    lead = shapes["qweight"][:-2]
    return (*lead, out, inner), Scheme(Kind.INT, bits=bits, group=group, zeros=zeros is not None, method=method), "I32"


def _recognise_compressed(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> tuple[Shape, Scheme, str] | None:
    packed, dtype = shapes["weight_packed"], dtypes["weight_packed"]
    scale = shapes.get("weight_scale")
    if scale is None:
        return None
    inputs = "input_global_scale" in shapes or "input_scale" in shapes
    if dtype == "U8":
        inner = packed[-1] * 2
        kind = Kind.NVFP4 if "weight_global_scale" in shapes else Kind.MXFP4
        scheme = Scheme(kind, group=inner // scale[-1], inputs=inputs, method="compressed-tensors")
        return (*packed[:-1], inner), scheme, dtype
    if dtype != "I32":
        return None
    # The width is not stored: take the one whose group is one of the usual sizes, 4 bits before 8.
    for bits in (4, 8, 2):
        inner = packed[-1] * 32 // bits
        group = 0 if scale[-1] == 1 else inner // scale[-1]
        if group in (0, 32, 64, 128, 256):
            zeros = "weight_zero_point" in shapes
            scheme = Scheme(Kind.INT, bits=bits, group=group, zeros=zeros, method="compressed-tensors")
            return (*packed[:-1], inner), scheme, dtype
    return None
