"""A CUDA driver library that answers "no device", so that the engine's extensions load on any machine."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import tempfile

# What vLLM's compiled extensions take from the driver (nm -D of every .so of the 0.33.0 wheel).
DRIVER_FUNCTIONS = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
]
CODE = {  # ELF machine number, and "return 100" (CUDA_ERROR_NO_DEVICE) in its instructions
    "x86_64": (62, b"\xb8\x64\x00\x00\x00\xc3"),
    "aarch64": (183, b"\x80\x0c\x80\x52\xc0\x03\x5f\xd6"),
}


def driver_stub() -> bytes:
    """A shared library named libcuda.so.1 whose every function answers "no device": ELF, symbols, one hash bucket."""
    machine, code = CODE[platform.machine()]
    count = len(DRIVER_FUNCTIONS)
    strings = b"\0" + b"\0".join(name.encode() for name in ["libcuda.so.1", *DRIVER_FUNCTIONS]) + b"\0"
    at_code = 64 + 2 * 56
    at_symbols = (at_code + len(code) + 15) // 16 * 16
    at_hash = at_symbols + 24 * (count + 1)
    at_strings = at_hash + 4 * (count + 4)
    at_dynamic = (at_strings + len(strings) + 15) // 16 * 16
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", strings.index(b"\0" + name.encode() + b"\0") + 1, 0x12, 0, 1, at_code, len(code))
        for name in DRIVER_FUNCTIONS
    )
    chain = struct.pack(f"<{count + 4}I", 1, count + 1, 1, 0, *range(2, count + 1), 0)
    tags = [(14, 1), (4, at_hash), (5, at_strings), (6, at_symbols), (10, len(strings)), (11, 24), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    size = at_dynamic + len(dynamic)
    head = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    head += struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, size, size, 0x10000)
    head += struct.pack("<IIQQQQQQ", 2, 6, at_dynamic, at_dynamic, at_dynamic, len(dynamic), len(dynamic), 8)
    image = bytearray(size)
    parts = [(0, head), (at_code, code), (at_symbols, symbols), (at_hash, chain), (at_strings, strings)]
    for start, part in [*parts, (at_dynamic, dynamic)]:
        image[start : start + len(part)] = part
    return bytes(image)


def provide_driver() -> str:
    """Makes libcuda.so.1 loadable; `real` where the machine has one, else `stub`."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return "real"
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "libcuda.so.1")
        with open(path, "wb") as file:
            file.write(driver_stub())
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # found again by its soname after the file is gone
    return "stub"
