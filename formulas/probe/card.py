"""A card of a stated capability, and a world of ranks, as the engine sees them."""

from __future__ import annotations

import types

MULTIPROCESSORS = {7: 40, 8: 108, 9: 132, 10: 148, 11: 20, 12: 188}  # of the largest card of each family


class Idle:
    """A stream or event of a card that is not there."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def card(capability: str | None, memory_bytes: int) -> dict:
    """Installs a CUDA platform of the stated capability (default: the first card's) and says what it is."""
    import vllm.platforms as platforms
    from vllm.platforms.interface import DeviceCapability

    name = None
    if capability is None:
        from vllm.utils.import_utils import import_pynvml

        nvml = import_pynvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SystemExit(f"no card is found here ({error}); state a capability such as 12.0") from error
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        capability = "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
        name, memory_bytes = nvml.nvmlDeviceGetName(handle), int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    from vllm.platforms.cuda import CudaPlatformBase

    stated = DeviceCapability(*map(int, capability.split(".")))

    class StatedCard(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return stated

        @classmethod
        def get_device_name(cls, device_id=0):
            return name or f"card of capability {capability}"

        @classmethod
        def get_device_uuid(cls, device_id=0):
            return f"GPU-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return memory_bytes

        @classmethod
        def device_count(cls):
            return 64

        @classmethod
        def is_fully_connected(cls, physical_device_ids):
            return True

        @classmethod
        def is_integrated_gpu(cls, device_id=0):
            return False

        @classmethod
        def num_compute_units(cls, device_id=0):
            return properties.multi_processor_count

        @classmethod
        def get_current_memory_usage(cls, device=None):
            return 0.0

        @classmethod
        def get_device_communicator_cls(cls):
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    platforms._current_platform = StatedCard()

    import torch

    properties = types.SimpleNamespace(
        name=name or "stated", major=stated.major, minor=stated.minor, total_memory=memory_bytes, is_integrated=False,
        multi_processor_count=MULTIPROCESSORS.get(stated.major, 132), warp_size=32, gcnArchName="",
        shared_memory_per_block_optin=99 << 10 if stated.major == 12 else 227 << 10, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (stated.major, stated.minor)
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 64
    torch.cuda.mem_get_info = lambda device=None: (memory_bytes, memory_bytes)
    for name_ in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device"):
        setattr(torch.cuda, name_, lambda *args, **kwargs: None)
    torch.cuda.Stream, torch.cuda.Event = type("Stream", (Idle,), {}), type("Event", (Idle,), {})
    torch.cuda.current_stream = lambda device=None: torch.cuda.Stream()
    torch.accelerator.current_device_index = lambda: 0
    for name_ in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device_index"):
        setattr(torch.accelerator, name_, lambda *args, **kwargs: None)
    torch.accelerator.max_memory_allocated = torch.accelerator.memory_allocated = lambda device=None: 0
    torch.accelerator.memory_reserved = lambda device=None: 0
    torch.accelerator.get_memory_info = lambda device=None: (memory_bytes, memory_bytes)
    return {"capability": capability, "name": name, "memory_bytes": memory_bytes}


def world(size: int, rank: int) -> None:
    """Pretends `size` ranks in this one process: torch's `fake` backend under vLLM's own group construction."""
    import torch.distributed
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    new_group = torch.distributed.distributed_c10d.new_group
    torch.distributed.new_group = lambda ranks=None, **kwargs: new_group(ranks, backend="fake")
    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
    state._node_count = lambda group: 1
    state.in_the_same_node_as = lambda group, source_rank=0: [True] * group.size()
