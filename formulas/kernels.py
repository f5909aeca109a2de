"""What a kernel does to the bytes of a matrix: padding at creation, repacking and scale layouts after loading.

Two functions give the tensors of one module on one rank, as created and as they stay: `linear_tensors` and
`expert_tensors`. Which kernel runs is chosen in formulas/choices.py; here is what each keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from .choices import Backend, Runtime, expert_backend, linear_backend
from .schemes import Kind, Scheme

Sizes = tuple[int, ...]


class Tensors(NamedTuple):
    """Bytes of a module's tensors on a rank, one by one: as created, and after the kernel's post-processing."""

    created: Sizes
    loaded: Sizes


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def linear_tensors(scheme: Scheme, outs: Sequence[int], inner: int, biased: bool, runtime: Runtime) -> Tensors:
    """Tensors of a linear layer of merged outputs `outs` (rows on this rank) over `inner` columns on this rank."""
    rows, wide = sum(outs), runtime.float_bytes
    bias = (rows * wide,) if biased else ()
    backend = linear_backend(scheme, runtime)
    created: Sizes
    loaded: Sizes
    match scheme.kind:
        case Kind.PLAIN:
            created = loaded = (rows * inner * wide,)
        case Kind.FP8_BLOCK:
            created, loaded = _fp8_block(scheme, outs, inner, backend, runtime)
        case Kind.FP8_TENSOR:
            each = 4 * len(outs)
            created = (rows * inner, each) + ((each,) if scheme.inputs else ())
            if backend is Backend.MARLIN:
                loaded = (rows * inner, rows * wide)
            else:
                loaded = (rows * inner, 4) + ((4,) if scheme.inputs else ())
        case Kind.FP8_CHANNEL | Kind.INT8_CHANNEL:
            created = (rows * inner, 4 * rows) + ((4 * len(outs),) if scheme.inputs else ())
            loaded = (rows * inner, rows * wide) if backend is Backend.MARLIN else created
        case Kind.NVFP4:
            created, loaded = _nvfp4(scheme, outs, inner, backend)
        case Kind.MXFP4:
            created = loaded = (rows * inner // 2, rows * inner // 32)
            if backend is Backend.HUMMING:
                loaded = (*_humming(rows, inner, 4, 32, 8), 4, HUMMING_LOCKS)
        case Kind.MXFP8:
            created = loaded = (rows * inner, rows * inner // 32)
            if backend is Backend.HUMMING:
                loaded = (*_humming(rows, inner, 8, 32, 8), HUMMING_LOCKS)
        case Kind.INT:
            created, loaded = _packed_int(scheme, rows, inner, wide, backend)
    return Tensors(created + bias, loaded + bias)


def _fp8_block(
    scheme: Scheme, outs: Sequence[int], inner: int, backend: Backend, runtime: Runtime
) -> tuple[Sizes, Sizes]:
    rows, (tall, broad) = sum(outs), scheme.block
    scales = 4 * sum(cdiv(out, tall) for out in outs) * cdiv(inner, broad)
    created = (rows * inner, scales)
    if backend is Backend.MARLIN:  # a scale a row and group, in the model dtype
        padded_rows, padded_inner = marlin_tile(rows, inner)
        return created, (padded_rows * padded_inner, runtime.float_bytes * padded_rows * cdiv(padded_inner, broad))
    if backend is Backend.DEEP_GEMM and runtime.sm >= 100 and rows % 64 == 0 and inner % 128 == 0:
        return created, (rows * inner, packed_scales(rows, inner, broad))
    return created, created


def packed_scales(rows: int, inner: int, group: int = 128) -> int:
    """DeepGEMM's UE8M0 layout on Blackwell: four scales of a row in one I32, rows aligned to 16 bytes."""
    return 4 * up(rows, 4) * cdiv(cdiv(inner, group), 4)


def marlin_tile(rows: int, inner: int) -> tuple[int, int]:
    """Rows and columns after Marlin's tile padding: (64, 128) or (128, 64), whichever is smaller."""
    a, b = (up(rows, 64), up(inner, 128)), (up(rows, 128), up(inner, 64))
    return min(a, b, key=lambda size: size[0] * size[1])


HUMMING_LOCKS = 132 * 8 * 4
"""Bytes of the semaphores a Humming kernel keeps for each of its layers: eight for each processor of an H100 or H200
(vllm 0.33.0 utils/humming.py create_humming_locks)."""


def _humming(rows: int, inner: int, bits: int, group: int, scale_bits: int, count: int = 1) -> Sizes:
    """Values and scales of `count` matrices after Humming's padding, to 256 rows and 128 columns.
    Source: vllm 0.33.0 quantization/utils/humming/{linear,moe}.py; engine modules built for sm90, to the byte."""
    values = count * up(rows, 256) * up(inner, 128)
    return values * bits // 8, values // group * scale_bits // 8


def _nvfp4(scheme: Scheme, outs: Sequence[int], inner: int, backend: Backend) -> tuple[Sizes, Sizes]:
    rows, each = sum(outs), 4 * len(outs)
    created = (rows * inner // 2, rows * inner // 16, each) + ((each,) if scheme.inputs else ())
    if backend is Backend.HUMMING:
        return created, (*_humming(rows, inner, 4, 16, 8), 4, HUMMING_LOCKS)
    if backend is Backend.MARLIN:
        padded_rows, padded_inner = marlin_tile(rows, inner)
        values = padded_rows * padded_inner
        return created, (values // 2, values // 16, 4) + ((4, 4, 4) if scheme.inputs else ())
    swizzled = up(rows, 128) * up(inner // 16, 4)
    return created, (up(rows, 32) * up(inner, 32) // 2, swizzled, 4, 4, 4, 4)


def _packed_int(scheme: Scheme, rows: int, inner: int, wide: int, backend: Backend) -> tuple[Sizes, Sizes]:
    """Machete keeps GPTQ's unused zero points, and AWQ's in the model dtype; Marlin drops those, repacks these."""
    groups = cdiv(inner, scheme.group) if scheme.group else 1
    weight, scales = rows * inner * scheme.bits // 8, rows * groups * wide
    zeros = rows * groups * scheme.bits // 8
    if backend is Backend.HUMMING:
        stored = (weight, scales, 16) + ((zeros,) if scheme.zeros else ())
        own = _humming(rows, inner, scheme.bits, scheme.group or inner, 8 * wide)
        return stored, (*own, HUMMING_LOCKS) + ((zeros,) if scheme.zeros else ())
    if scheme.method == "gptq":  # symmetric and unordered as a rule: the zero points are dropped after loading
        return (weight, zeros, scales), (weight, zeros, scales) if backend is Backend.MACHETE else (weight, scales)
    if scheme.method == "awq":
        kept = rows * groups * wide if backend is Backend.MACHETE else zeros
        return (weight, zeros, scales), (weight, kept, scales)
    stored = (weight, scales, 16) + ((zeros,) if scheme.zeros else ())
    return stored, stored


class ExpertShape(NamedTuple):
    """Routed experts on a rank: how many, and their sizes there. Gated experts have two up projections."""

    number: int
    inter: int
    hidden: int
    gated: bool = True
    biased: bool = False


def expert_tensors(scheme: Scheme, shape: ExpertShape, runtime: Runtime) -> Tensors:
    """Tensors of one layer's routed experts on a rank: all experts in one tensor for each of the two steps."""
    backend = expert_backend(scheme, runtime, biased=shape.biased)
    wide = runtime.float_bytes
    ups = 2 if shape.gated else 1
    n, inter, hidden = shape.number, shape.inter, shape.hidden
    created: Sizes
    loaded: Sizes
    match scheme.kind:
        case Kind.PLAIN:
            padded = up(inter, 128) if backend is Backend.FLASHINFER_TRTLLM and shape.gated else inter
            created = _pair(n, ups, inter, hidden, wide)
            loaded = _pair(n, ups, padded, hidden, wide)
        case Kind.FP8_BLOCK:
            return _fp8_block_experts(scheme, shape, backend, runtime)
        case Kind.FP8_TENSOR:
            scales = (4 * ups * n, 4 * n)
            created = _pair(n, ups, inter, hidden, 1) + scales + ((4 * n, 4 * n) if scheme.inputs else ())
            loaded = _pair(n, ups, inter, hidden, 1) + (4 * n, 4 * n) + ((4, 4) if scheme.inputs else ())
            if backend is Backend.FLASHINFER_CUTLASS:  # products of both scales an expert, and both inputs' inverses
                loaded += (4 * n, 4 * n, 4, 4)
            if backend is Backend.FLASHINFER_TRTLLM:
                loaded += (4 * n, 4 * n, 4 * n)
            if backend is Backend.MARLIN:
                loaded = (*_pair(n, ups, inter, hidden, 1), n * ups * inter * wide, n * hidden * wide)
        case Kind.FP8_CHANNEL | Kind.INT8_CHANNEL:
            created = loaded = (*_pair(n, ups, inter, hidden, 1), 4 * n * ups * inter, 4 * n * hidden)
            if backend is Backend.CUTLASS:  # strides an expert
                loaded += (8 * n, 8 * n, 8 * n)
        case Kind.NVFP4:
            return _nvfp4_experts(scheme, shape, backend)
        case Kind.MXFP4:
            return _mxfp4_experts(scheme, shape, backend, wide, runtime)
        case Kind.MXFP8:
            created = loaded = _pair(n, ups, inter, hidden, 1) + _pair(n, ups, inter, hidden, 1 / 32)
            if backend is Backend.HUMMING:
                loaded = _humming_experts(shape, 8, 32, 8)
            if backend is Backend.FLASHINFER_TRTLLM:
                wide, tall = up(inter, 128), up(hidden, 256)
                loaded = _pair(n, ups, wide, tall, 1) + _pair(n, ups, wide, tall, 1 / 32)
        case Kind.INT:
            created, loaded = _int_experts(scheme, shape, wide, backend)
    bias = (n * ups * inter * wide, n * hidden * wide) if shape.biased else ()
    return Tensors(created + bias, loaded + bias)


def expert_refusal(scheme: Scheme, shape: ExpertShape, runtime: Runtime) -> str | None:
    """Why the engine fails to prepare these experts, or None. CUTLASS kernels take gated NVFP4 experts only where both
    up projections together are a multiple of 128 rows.
    Source: vllm 0.33.0 layers/quantization/utils/flashinfer_fp4_moe.py; met at load, after the backend was chosen."""
    backend = expert_backend(scheme, runtime, biased=shape.biased)
    cutlass = backend in (Backend.FLASHINFER_CUTLASS, Backend.CUTLASS)
    if scheme.kind is Kind.NVFP4 and cutlass and shape.gated and 2 * shape.inter % 128:
        return (
            f"experts of {shape.inter} on a rank: this engine cannot pad them for {backend.value} on sm{runtime.sm}; "
            "it fails while loading (pass --enable-expert-parallel or a smaller --tensor-parallel-size)"
        )
    return None


def _pair(count: int, ups: int, inter: int, hidden: int, each: float) -> tuple[int, ...]:
    """Bytes of the two expert tensors at `each` bytes a value."""
    return int(count * ups * inter * hidden * each), int(count * hidden * inter * each)


def _humming_experts(shape: ExpertShape, bits: int, group: int, scale_bits: int) -> Sizes:
    """Values and scales of both expert tensors as Humming keeps them, and its locks."""
    ups = 2 if shape.gated else 1
    first = _humming(ups * shape.inter, shape.hidden, bits, group or shape.hidden, scale_bits, shape.number)
    second = _humming(shape.hidden, shape.inter, bits, group or shape.inter, scale_bits, shape.number)
    return (*first, *second, HUMMING_LOCKS)


def refined_block(block: tuple[int, int], inter: int, hidden: int, tensor_parallel: int) -> tuple[int, int]:
    """The tile FP8 expert scales are refined to where a rank's slice cuts the checkpoint's tiles.
    Source: vllm 0.33.0 fused_moe/oracle/fp8.py refine_fp8_moe_block_shape."""
    if inter % block[0] == 0 and (tensor_parallel == 1 or inter % block[1] == 0):
        return block
    finer = gcd(*block, inter, hidden)
    return (finer, finer) if finer >= 32 else block


def _fp8_block_experts(scheme: Scheme, shape: ExpertShape, backend: Backend, runtime: Runtime) -> Tensors:
    n, inter, hidden, ups = shape.number, shape.inter, shape.hidden, 2 if shape.gated else 1
    tall, broad = refined_block(scheme.block, inter, hidden, runtime.tensor_parallel)
    weights = _pair(n, ups, inter, hidden, 1)
    scales = (4 * n * ups * cdiv(inter, tall) * cdiv(hidden, broad), 4 * n * cdiv(hidden, tall) * cdiv(inter, broad))
    created = weights + scales
    if (tall, broad) != scheme.block:
        return Tensors(created, created)  # only Triton takes the finer tiles
    if backend is Backend.MARLIN:
        wide = runtime.float_bytes
        by_group = (n * ups * inter * cdiv(hidden, broad), n * hidden * cdiv(inter, broad))
        return Tensors(created, (*weights, *(wide * values for values in by_group)))
    if backend is Backend.DEEP_GEMM and runtime.sm >= 100:
        return Tensors(created, (*weights, n * packed_scales(ups * inter, hidden), n * packed_scales(hidden, inter)))
    return Tensors(created, created)


def _nvfp4_experts(scheme: Scheme, shape: ExpertShape, backend: Backend) -> Tensors:
    """Per expert two packed tensors, two of block scales, and scalars the kernels fuse in their own ways."""
    n, inter, hidden, ups = shape.number, shape.inter, shape.hidden, 2 if shape.gated else 1
    created = _pair(n, ups, inter, hidden, 1 / 2) + _pair(n, ups, inter, hidden, 1 / 16) + (4 * n * ups, 4 * n)
    if scheme.inputs or scheme.method == "compressed-tensors":
        created += (4 * n * ups, 4 * n)
    if backend is Backend.HUMMING:
        return Tensors(created, (*_humming_experts(shape, 4, 16, 8), 4 * n, 4 * n))
    wide, tall = inter, hidden
    if backend is Backend.MARLIN:
        wide = up(inter, 64 if hidden % 128 == 0 else 128)
        scalars: tuple[int, ...] = (4 * n, 4 * n)
        if scheme.method == "compressed-tensors" and not scheme.inputs:
            scalars += (4 * n * ups, 4 * n) * 2  # weight-only: the checkpoint's own are left beside them
    elif backend is Backend.FLASHINFER_TRTLLM:
        wide, tall = up(inter, 64 if shape.gated else 128), up(hidden, 256)
        scalars = (4 * n,) * 7
    else:
        wide = inter if shape.gated else up(inter, 128)
        scalars = (4 * n,) * 6
    scales = _pair(n, ups, wide, tall, 1 / 16)
    if backend in (Backend.FLASHINFER_CUTLASS, Backend.CUTLASS):
        scales = (n * up(ups * wide, 128) * up(hidden // 16, 4), n * up(hidden, 128) * up(wide // 16, 4))
    return Tensors(created, _pair(n, ups, wide, tall, 1 / 2) + scales + scalars)


def _mxfp4_experts(
    scheme: Scheme, shape: ExpertShape, backend: Backend, wide: int, runtime: Runtime
) -> Tensors:
    """Padded when created, by backend, except by compressed-tensors; FlashInfer and Triton keep biases in F32, Triton
    swizzles the scales, and before 0.21 on Hopper padded the packed values of a row to 128 bytes (read off two public
    logs: gpt-oss-120b 64.38 GiB on vLLM 0.11, gpt-oss-20b 13.47 on 0.11 and 13.64 on 0.19)."""
    n, ups = shape.number, 2 if shape.gated else 1
    inter, hidden = shape.inter, shape.hidden
    if scheme.method != "compressed-tensors":
        inter, hidden = mxfp4_padding(backend, inter, hidden)
    weights, scales = _pair(n, ups, inter, hidden, 1 / 2), _pair(n, ups, inter, hidden, 1 / 32)
    bias = (n * ups * inter * wide, n * hidden * wide) if shape.biased else ()
    created = weights + scales + bias
    if backend is Backend.TRITON:
        scales = (
            n * up(ups * inter, 256) * up(hidden // 32, 4),
            n * up(hidden, 256) * up(inter // 32, 4),
        )
        if runtime.release < (0, 21, 0) and runtime.sm // 10 == 9:
            weights = (n * ups * inter * up(hidden // 2, 128), n * hidden * up(inter // 2, 128))
        return Tensors(created, weights + scales + tuple(2 * b for b in bias))
    if backend is Backend.FLASHINFER_TRTLLM and shape.biased:
        # Row permutations of every distinct tensor shape are kept, and three F32 constants an expert.
        shapes = {(rows, k) for rows, k in ((ups * inter, hidden), (hidden, inter)) for k in (k // 2, k // 32, 1)}
        kept = (*(8 * rows for rows, _ in sorted(shapes)), 4 * n, 4 * n, 4 * n)
        return Tensors(created, weights + scales + tuple(2 * b for b in bias) + kept)
    return Tensors(created, created)


def mxfp4_padding(backend: Backend, inter: int, hidden: int) -> tuple[int, int]:
    """(intermediate, hidden) a backend creates MXFP4 experts with.
    Source: vllm 0.33.0 fused_moe/oracle/mxfp4.py mxfp4_round_up_hidden_size_and_intermediate_size."""
    if backend in (Backend.MARLIN, Backend.FLASHINFER_TRTLLM):
        return up(inter, 128), up(hidden, 256)
    if backend in (Backend.DEEP_GEMM, Backend.FLASHINFER_CUTLASS):
        return up(inter, 128), up(hidden, 128)
    return up(inter, 64), hidden


def _int_experts(scheme: Scheme, shape: ExpertShape, wide: int, backend: Backend) -> tuple[Sizes, Sizes]:
    n, inter, hidden, ups = shape.number, shape.inter, shape.hidden, 2 if shape.gated else 1
    weights = _pair(n, ups, inter, hidden, scheme.bits / 8)
    group_up, group_down = scheme.group or hidden, scheme.group or inter
    values = (n * ups * inter * cdiv(hidden, group_up), n * hidden * cdiv(inter, group_down))
    scales = tuple(v * wide for v in values)
    zeros = tuple(v * scheme.bits // 8 for v in values) if scheme.zeros else ()
    stored = weights + scales + (zeros if scheme.method in ("gptq", "awq") else (2 * wide * n, 2 * wide * n))
    if scheme.method == "gptq" and not shape.biased:  # biases are made for every model, and go where it has none
        stored += (n * ups * inter * wide, n * hidden * wide)
    if backend is not Backend.HUMMING:
        return stored, weights + scales + (zeros or (2 * wide * n, 2 * wide * n))
    own = _humming_experts(shape, scheme.bits, scheme.group, 8 * wide)
    if not scheme.zeros or scheme.method == "gptq":  # GPTQ is symmetric as a rule
        return stored, own
    padded = _humming_experts(shape, scheme.bits, scheme.group, scheme.bits)
    return stored, (*own, padded[1], padded[3])
