"""Which kernel an engine runs a matrix on. Where a release has a table of its own answers, the table decides; for
releases before the first, and where the tables were not asked, the rules below do.

A kernel is reduced to its `Backend`, the family that decides bytes (formulas/kernels.py).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .engines import picked_kernel
from .schemes import Kind, Scheme


@enum.unique
class Backend(enum.StrEnum):
    """Kernel families that differ in the bytes they keep."""

    NATIVE = "native"  # the tensors stay as created: cuBLAS, torch._scaled_mm
    MARLIN = "marlin"
    MACHETE = "machete"
    DEEP_GEMM = "deep_gemm"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    TRITON = "triton"
    CUTLASS = "cutlass"
    HUMMING = "humming"


class Runtime(NamedTuple):
    """What decides kernels: compute capability (sm120 = 120), engine version, libraries, and the model's type."""

    sm: int
    release: tuple[int, int, int] = (0, 33, 0)
    without: frozenset[str] = frozenset()
    expert_parallel: bool = False
    tensor_parallel: int = 1
    model_type: str = ""
    float_bytes: int = 2  # of the model dtype
    table: Mapping[str, Any] | None = None  # the release's own answers (formulas/engines.py), where it has any

    def has(self, library: str) -> bool:
        return library not in self.without


def linear_backend(scheme: Scheme, runtime: Runtime) -> Backend:
    """The kernel family a linear layer of this scheme runs on."""
    if scheme.kind is Kind.PLAIN:
        return Backend.NATIVE
    return _picked(scheme, runtime, "linear") or _ruled_linear(scheme.kind, runtime)


def expert_backend(scheme: Scheme, runtime: Runtime, *, biased: bool = False) -> Backend:
    """The kernel family routed experts run on; `biased` marks gpt-oss, the one MXFP4 model with expert biases."""
    return _picked(scheme, runtime, "moe", biased=biased) or _ruled_experts(scheme.kind, runtime, biased=biased)


# ------------------------------------------------------------------------------------------ by the engine's table


def table_format(scheme: Scheme, *, biased: bool = False) -> str:
    """The name under which engine tables hold matrices of this scheme (formulas/probe/formats.py has what was asked).
    A scheme read from a header alone, which names no writer, goes by the checkpoint method of the same tensors."""
    method, compressed = scheme.method, scheme.method == "compressed-tensors"
    match scheme.kind:
        case Kind.PLAIN:
            return "bf16"
        case Kind.FP8_BLOCK:
            return "ct_fp8_block128" if compressed else "fp8_block128"
        case Kind.FP8_TENSOR:
            static = "fp8_tensor_static" if scheme.inputs else "fp8_tensor"
            return {"modelopt": "modelopt_fp8", "compressed-tensors": "ct_fp8_tensor", "quark": "quark_fp8"}.get(
                method, static
            )
        case Kind.FP8_CHANNEL:
            return "ct_fp8_channel"
        case Kind.NVFP4:
            return "ct_nvfp4a16" if not scheme.inputs else "ct_nvfp4" if compressed else "nvfp4"
        case Kind.MXFP4:
            return "mxfp4_gpt_oss" if biased or method == "mxfp4" else "ct_mxfp4a16"
        case Kind.MXFP8:
            return "modelopt_mxfp8"
        case Kind.INT8_CHANNEL:
            return "ct_int8_w8a8"
    if scheme.bits == 8:
        return "ct_int8_channel" if compressed else "gptq_int8_g128"
    if compressed:
        return "ct_int4_g32" if scheme.group == 32 else "ct_int4_g128"
    return "awq_int4_g128" if method == "awq" else "gptq_int4_g128"


def _picked(scheme: Scheme, runtime: Runtime, part: str, *, biased: bool = False) -> Backend | None:
    """The family of the kernel the release's table picks; None where it has no word for this."""
    if runtime.table is None:
        return None
    name, capability = table_format(scheme, biased=biased), f"{runtime.sm // 10}.{runtime.sm % 10}"
    kernel = picked_kernel(runtime.table, capability, name, part, "ep") if runtime.expert_parallel else None
    kernel = kernel or picked_kernel(runtime.table, capability, name, part, "tp")
    absent = set(runtime.without)
    while kernel is not None and (missing := absent & libraries(kernel)):
        library = min(missing)
        absent.remove(library)
        family = f"{runtime.sm // 10}.0"  # libraries were hidden on one card of each family
        kernel = picked_kernel(runtime.table, family, name, part, f"without {library}")
    deep = kernel is not None and "deep_gemm" in libraries(kernel)
    return None if kernel is None or (deep and not has_deep_gemm(runtime)) else backend_of(kernel)


_LIBRARIES = {"flashinfer": r"flashinfer", "deep_gemm": r"deep_?gemm", "humming": r"humming"}


def libraries(kernel: str) -> set[str]:
    """The optional libraries a kernel of this name is from."""
    return {library for library, pattern in _LIBRARIES.items() if re.search(pattern, kernel, re.IGNORECASE)}


_FAMILIES = (
    (Backend.MARLIN, re.compile(r"marlin|W8A16Fp8", re.IGNORECASE)),  # compressed-tensors' own weight-only method
    (Backend.MACHETE, re.compile(r"machete", re.IGNORECASE)),
    (Backend.HUMMING, re.compile(r"humming", re.IGNORECASE)),
    (Backend.DEEP_GEMM, re.compile(r"deep_?gemm", re.IGNORECASE)),
    (Backend.FLASHINFER_TRTLLM, re.compile(r"flashinfer_?trtllm", re.IGNORECASE)),
    (Backend.FLASHINFER_CUTLASS, re.compile(r"flashinfer", re.IGNORECASE)),
    (Backend.CUTLASS, re.compile(r"cutlass", re.IGNORECASE)),
    (Backend.TRITON, re.compile(r"triton", re.IGNORECASE)),
    (Backend.NATIVE, re.compile(r"^Unquantized")),
)


def backend_of(kernel: str) -> Backend | None:
    """The family of a kernel an engine names; None for a name no family is known for."""
    return next((family for family, pattern in _FAMILIES if pattern.search(kernel)), None)


# ------------------------------------------------------------------------------------------ by rule

# DeepGEMM is off on Blackwell for these text model types (vllm 0.33.0 utils/deep_gemm.py).
_NO_DEEP_GEMM = {"qwen3_5_text": (100, 120), "qwen3_5_moe_text": (100, 120), "kolibri1": (120,)}


def has_deep_gemm(runtime: Runtime) -> bool:
    """Whether DeepGEMM serves FP8 block matrices of this model on this card."""
    family = runtime.sm // 10 * 10
    supported = family in (90, 100, 120) and runtime.has("deep_gemm")
    return supported and family not in _NO_DEEP_GEMM.get(runtime.model_type, ())


def _ruled_linear(kind: Kind, runtime: Runtime) -> Backend:
    """First supported of each list in vllm 0.25.1 model_executor/kernels/linear/__init__.py."""
    if kind is Kind.FP8_BLOCK:
        if has_deep_gemm(runtime):
            return Backend.DEEP_GEMM
        return Backend.MARLIN if runtime.sm < 90 else Backend.CUTLASS
    if kind in (Kind.FP8_TENSOR, Kind.FP8_CHANNEL):
        return Backend.MARLIN if runtime.sm < 89 else Backend.CUTLASS
    if kind in (Kind.NVFP4, Kind.MXFP4, Kind.MXFP8):
        return _weight_only(runtime) if runtime.sm < 100 else Backend.FLASHINFER_CUTLASS
    if kind is Kind.INT:
        return Backend.MACHETE if runtime.sm // 10 == 9 else Backend.MARLIN
    return Backend.CUTLASS


def _ruled_experts(kind: Kind, runtime: Runtime, *, biased: bool) -> Backend:
    """First supported of each list in vllm 0.25.1 fused_moe/oracle (nvfp4, mxfp4, mxfp8, fp8, int_wna16)."""
    family, flashinfer = runtime.sm // 10 * 10, runtime.has("flashinfer")
    if kind is Kind.MXFP4:
        if family == 90:
            return Backend.TRITON if biased else Backend.MARLIN
        if biased and family in (100, 110):
            return Backend.FLASHINFER_TRTLLM if flashinfer else Backend.TRITON
        return Backend.MARLIN
    if kind is Kind.NVFP4:
        if runtime.sm < 100:
            return _weight_only(runtime)
        if family in (100, 110) and flashinfer:
            return Backend.FLASHINFER_TRTLLM
        return Backend.FLASHINFER_CUTLASS if flashinfer else Backend.CUTLASS
    if kind is Kind.FP8_BLOCK:
        if runtime.sm < 89:
            return Backend.MARLIN
        if family in (100, 110) and flashinfer:
            return Backend.FLASHINFER_TRTLLM
        return Backend.DEEP_GEMM if family in (100, 120) and has_deep_gemm(runtime) else Backend.TRITON
    if kind in (Kind.FP8_TENSOR, Kind.FP8_CHANNEL, Kind.MXFP8):
        if runtime.sm < 89:
            return Backend.MARLIN
        if kind is Kind.FP8_TENSOR and flashinfer and runtime.sm >= 90:
            return Backend.FLASHINFER_TRTLLM if family in (100, 110) else Backend.FLASHINFER_CUTLASS
        return Backend.TRITON
    if kind is Kind.INT:
        return _weight_only(runtime)
    return Backend.FLASHINFER_TRTLLM if family in (100, 110) and flashinfer else Backend.TRITON


def _weight_only(runtime: Runtime) -> Backend:
    """Marlin, or on Hopper Humming, which every wheel since 0.25.1 requires and 0.32.0 is the first to put before it
    (the wheels' METADATA and quantization/utils/humming/priority.py, compared release by release)."""
    before = runtime.sm == 90 and runtime.release >= (0, 32, 0) and runtime.has("humming")
    return Backend.HUMMING if before else Backend.MARLIN
