"""Tensors of the card as shapes without storage: what the engine computes of them, and answers about their values."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from functools import partial


def nowhere():
    """A mode under which tensors for the card, or pinned for it, are shapes without storage; and what was pinned."""
    import torch
    from torch.overrides import TorchFunctionMode

    meta = torch.device("meta")

    def moved(value):
        if isinstance(value, torch.device) and value.type == "cuda":
            return meta
        return meta if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) else value

    class Nowhere(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.host: dict[int, object] = {}  # what would be pinned host memory, kept so that no address returns

        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            name = getattr(func, "__name__", "")
            first = args[0] if args else None
            of_meta = isinstance(first, torch.Tensor) and first.is_meta
            if of_meta and name in ANSWERS:
                return ANSWERS[name](first)
            if of_meta and name in ("equal", "allclose"):
                return True
            if of_meta and name in ("unique", "_unique2"):
                return torch.ones(1, dtype=first.dtype, device="cpu")
            if of_meta and name == "__bool__":
                return not getattr(first, "odd", False)
            if of_meta and func == torch.Tensor.is_cuda.__get__:
                return True
            if of_meta and name == "numpy":
                wide = torch.float32 if first.is_floating_point() else first.dtype
                return torch.zeros(first.shape, dtype=wide, device="cpu").numpy()
            if name == "copy_" and any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
                return first
            if name in ("cuda", "pin_memory") and isinstance(first, torch.Tensor):
                return first.to(meta)
            if name == "cpu" and of_meta:
                return first
            pinned = kwargs.pop("pin_memory", False)
            if pinned:
                kwargs["device"] = meta
            elif of_meta and name == "to":
                kwargs.pop("non_blocking", None)
                args = tuple(meta if a == torch.device("cpu") or a == "cpu" else a for a in args)
                if kwargs.get("device") is not None:
                    kwargs["device"] = meta
            if "device" in kwargs:
                device = kwargs["device"]
                kwargs["device"] = meta if isinstance(device, int) else moved(device)
            try:
                made = func(*(moved(a) for a in args), **kwargs)
            except NotImplementedError:
                shape = SHAPES.get(str(func).removesuffix(".default"))
                schema = getattr(getattr(func, "default", func), "_schema", None)
                if shape is None and (schema is None or schema.returns):
                    raise
                made = shape(torch, *args, **kwargs) if shape else None  # what returns nothing changes no shape
            if of_meta and isinstance(made, torch.Tensor) and suspicious(name, args):
                made.odd = True  # "is something wrong with these values?": no
            if pinned and isinstance(made, torch.Tensor):
                self.host[made.untyped_storage()._cdata] = made
            return made

    import triton

    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=lambda: types.SimpleNamespace(
            backend="cuda", arch=int("".join(map(str, torch.cuda.get_device_capability()))), warp_size=32),
        get_active_torch_device=lambda: meta, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0,
    ))  # fmt: skip
    triton.runtime.jit.JITFunction.run = lambda *args, **kwargs: None  # a kernel over shapes writes nothing
    with contextlib.suppress(ImportError):  # rewrites values expert by expert, changes no shape
        import vllm.model_executor.layers.quantization.utils.fp8_utils as fp8_utils

        fp8_utils.requant_weight_ue8m0_inplace = lambda *args, **kwargs: None
    torch.cuda.device = lambda device: contextlib.nullcontext()
    major, minor = torch.cuda.get_device_capability()
    card = torch.cuda.get_device_properties()  # Humming reads its own; bandwidth and speed tune, they decide no bytes
    smem = card.shared_memory_per_block_optin
    stated = types.SimpleNamespace(
        index=0, name="stated", is_ppu=False, sm_major=major, sm_minor=minor, sm_version=major * 10 + minor,
        sm_count=card.multi_processor_count, max_threads_per_block=1024, max_threads_per_sm=2048,
        max_registers_per_sm=65536, l2_cache_size=card.L2_cache_size, l2_cache_size_mb=card.L2_cache_size / 2**20,
        l1_cache_size=smem, l1_cache_size_kb=smem / 1024, default_smem_size=48 << 10, max_smem_size=smem,
        max_smem_size_kb=smem / 1024, memory_clock_khz=2_600_000, memory_bus_width=5120, sm_clock_khz=1_980_000,
        memory_bandwidth_gbps=3350.0, tensorcore_tops={},
    )  # fmt: skip
    sys.modules["humming._device_info"] = types.SimpleNamespace(_DeviceInfo=lambda index: stated)
    with contextlib.suppress(ImportError):
        from humming.device import DeviceInfo

        known = DeviceInfo.__new__
        DeviceInfo.__new__ = lambda cls, index=None: known(cls, 0)
        import humming.ops  # noqa: F401  (defines the kernels)
        from humming.jit.runtime import KernelRuntime

        KernelRuntime.prepare = lambda self: None  # nothing is compiled, and a kernel over shapes writes nothing
        for kernel in KernelRuntime.__subclasses__():
            kernel.__call__ = lambda self, *args, **kwargs: None
    with contextlib.suppress(ImportError):
        import flashinfer.experimental.b12x._lib.gating as gating
        import flashinfer.quantization.fp4_quantization as fp4

        # It asks torch whether a card is there before it asks which.
        replace(gating.get_compute_capability, lambda device=None: torch.cuda.get_device_capability())
        replace(fp4.block_scale_interleave, partial(interleaved_scales, torch, fp4._compute_swizzled_layout_sf_size))
    return Nowhere()


def replace(function, other) -> None:
    """Puts `other` wherever a loaded module holds `function`: FlashInfer would compile it for a card first."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else []:
            if value is function:
                setattr(module, name, other)


def interleaved_scales(torch, size_of, unswizzled_sf, out=None):
    """FlashInfer's swizzled FP4 scales: rows padded to 128, columns to 4, flat."""
    experts = unswizzled_sf.shape[0] if unswizzled_sf.dim() == 3 else 1
    size = experts * size_of(unswizzled_sf.shape[-2], unswizzled_sf.shape[-1], 128)
    return torch.empty(size, dtype=unswizzled_sf.dtype, device="meta") if out is None else out


def packed_scales(torch, sf, mn, k, **kwargs):
    """DeepGEMM's UE8M0 layout: a row of scales for every row of the weight, four exponents to an int32."""
    if torch.cuda.get_device_capability()[0] == 9:
        return sf  # Hopper reads float scales of 128 x 128 blocks as they are
    lead = () if sf.dim() == 2 else (sf.shape[0],)
    return torch.empty(*lead, -(-mn // 4) * 4, -(-k // 512), dtype=torch.int32, device="meta")


# Extension functions that have no shape function of their own (engine 0.33.0).
SHAPES = {
    "deep_gemm.transform_sf_into_required_layout": packed_scales,
    "_C.get_cuda_view_from_cpu_tensor": lambda torch, tensor: tensor,
}


def suspicious(name: str, args: tuple) -> bool:
    """Whether this question about values is answered "no" for ordinary weights; an answer made of such, too."""
    if name in ("all", "logical_or", "__or__"):
        return getattr(args[0], "odd", False)
    if name in ("gt", "__gt__"):
        return not (len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 0)
    return name in ("isnan", "isinf", "any", "lt", "__lt__")


# Values the engine reads off weights while it prepares them; every weight is taken to be ordinary.
ANSWERS = {
    "item": lambda tensor: 1.0 if tensor.is_floating_point() else 1,
    "__float__": lambda tensor: 1.0,
    "__int__": lambda tensor: 1,
    "__index__": lambda tensor: 1,
    "tolist": lambda tensor: [1.0] * tensor.numel() if tensor.dim() else 1.0,
    "data_ptr": lambda tensor: 0,
}
