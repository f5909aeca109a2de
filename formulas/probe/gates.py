"""The engine's own gates: attention backends, linear and expert kernels, architectures."""

from __future__ import annotations

import contextlib
import enum
import pkgutil
import sys

from .formats import FORMATS, TINY_DENSE, TINY_GPT_OSS, TINY_MOE
from .model import model
from .words import first_line, refusal

ATTENTION_KINDS: dict[str, dict] = {  # AttentionSelectorConfig fields that differ from a plain decoder layer
    "gqa": {},
    "gqa_sliding": {"has_sliding_window": True},
    "sinks": {"has_sink": True},
    "gqa_mm_prefix": {"use_mm_prefix": True},
    "mla": {"use_mla": True},
    "mla_sparse": {"use_mla": True, "use_sparse": True},
}


def attention(asked: dict) -> list[dict]:
    """Every registered backend's verdict for each kind, head size and KV dtype asked.

    A row holds what `validate_configuration` says of each backend (None: a tag without a class), and `auto`, the
    platform's own list in the order it is walked, refused members left out.
    """
    import torch
    import vllm.platforms as platforms
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    platform_class, capability = type(platforms.current_platform), platforms.current_platform.get_device_capability()
    dtype = getattr(torch, asked.get("dtype", "bfloat16"))
    rows = []
    with set_current_vllm_config(VllmConfig()):
        for kind, head_size, kv_dtype in asked["rows"]:
            config = AttentionSelectorConfig(
                head_size=head_size, dtype=dtype, kv_cache_dtype=kv_dtype, block_size=None, **ATTENTION_KINDS[kind]
            )
            verdicts: dict[str, list[str] | None] = {}
            for backend in AttentionBackendEnum:
                if not backend.value:
                    verdicts[backend.name] = None
                    continue
                try:
                    found = backend.get_class()
                    verdicts[backend.name] = found.validate_configuration(
                        device_capability=capability, **config._asdict()
                    )
                except Exception as error:
                    verdicts[backend.name] = [f"{type(error).__name__}: {first_line(error)}"]
            valid, invalid = platform_class.get_valid_backends(
                device_capability=capability, attn_selector_config=config, num_heads=asked.get("heads", 32)
            )
            rows.append({
                "kind": kind, "head_size": head_size, "kv_dtype": kv_dtype, "verdicts": verdicts,
                "auto": [candidate.backend.name for candidate in valid],
                "listed": [b.name for b in sorted(
                    [c.backend for c in valid] + list(invalid),
                    key=lambda b: next((c.priority for c in valid if c.backend is b), invalid.get(b, (0,))[0]))],
            })  # fmt: skip
    return rows


class Overheard:
    """What the engine's kernel selections were asked while a model was built."""

    def __init__(self):
        self.moe: list[tuple] = []  # (oracle module, arguments of is_supported_config)
        self.linear: list[tuple] = []  # (kernel class, its config)


def listen(heard: Overheard) -> None:
    """Lets `heard` note every question the engine asks of an expert or linear kernel."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    def note(original):
        def asked(cls, *args, **kwargs):
            module = sys.modules[sys._getframe(1).f_globals["__name__"]]
            if "oracle" in module.__name__:
                heard.moe.append((module, args or tuple(kwargs.values())))
            return original(cls, *args, **kwargs)

        return staticmethod(asked)

    def subclasses(cls):
        for sub in cls.__subclasses__():
            yield sub
            yield from subclasses(sub)

    import vllm.model_executor.layers.fused_moe.experts as experts

    for found in pkgutil.iter_modules(experts.__path__):
        with contextlib.suppress(Exception):
            __import__(f"{experts.__name__}.{found.name}")
    kernels = {FusedMoEExperts, *subclasses(FusedMoEExperts)}
    for cls in {base for kernel in kernels for base in kernel.__mro__}:  # mixins decide, too
        if "is_supported_config" in vars(cls):
            cls.is_supported_config = note(cls.is_supported_config)

    def hear(kernel):
        original = kernel.can_implement.__func__

        def can_implement(cls, config, *args, **kwargs):
            heard.linear.append((cls, config))
            return original(cls, config, *args, **kwargs)

        kernel.can_implement = classmethod(can_implement)

    for kernel in {kernel for kernels in linear_lists(linear).values() for kernel in kernels}:
        with contextlib.suppress(AttributeError):
            hear(kernel)


def linear_lists(linear) -> dict[str, list]:
    """The linear kernels of this platform by the list they are walked in, best first."""
    from vllm.platforms import PlatformEnum

    return {name: table[PlatformEnum.CUDA] for name, table in vars(linear).items()
            if name.startswith("_POSSIBLE_") and PlatformEnum.CUDA in table}  # fmt: skip


def expert_verdicts(heard: Overheard) -> dict[str, str | None]:
    """`BACKEND/Class` -> why it is refused, None where accepted, for every backend of each oracle that was asked."""
    verdicts: dict[str, str | None] = {}
    for module in dict.fromkeys(module for module, _ in heard.moe):
        arguments = next(args for asked, args in heard.moe if asked is module)
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, enum.Enum)
                 and kind.__name__.lower().endswith("moebackend")]  # fmt: skip
        classes_of = next((f for name, f in vars(module).items() if name.endswith("backend_to_kernel_cls")), None)
        activation_of = getattr(module, "_backend_activation_key", None)
        for backend in [] if classes_of is None else [b for kind in kinds for b in kind if b.name != "NONE"]:
            try:
                classes = classes_of(backend)
                if activation_of is not None:  # MXFP4: each backend computes with activations of its own format
                    arguments = (*arguments[:2], activation_of(backend), *arguments[3:])
            except Exception as error:
                verdicts[backend.name] = f"{type(error).__name__}: {first_line(error)}"
                continue
            for cls in classes if isinstance(classes, (list, tuple)) else [classes]:
                try:
                    accepted, reason = cls.is_supported_config(cls, *arguments)
                except Exception as error:
                    accepted, reason = False, f"{type(error).__name__}: {first_line(error)}"
                verdicts[f"{backend.name}/{cls.__name__}"] = None if accepted else str(reason)
    return verdicts


def linear_verdicts(heard: Overheard) -> dict[str, str | None]:
    """Linear kernel -> why it is refused, None where accepted, over every list a kernel was asked from."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability().to_int()
    verdicts: dict[str, str | None] = {}
    for kernels in linear_lists(linear).values():
        config = next((config for kernel, config in heard.linear if kernel in kernels), None)
        if config is None or (verdicts and not any(kernel.__name__ not in verdicts for kernel in kernels)):
            continue
        for kernel in kernels:
            try:
                if hasattr(kernel, "is_supported"):
                    accepted, reason = kernel.is_supported(capability)
                else:
                    least = kernel.get_min_capability()
                    accepted, reason = capability >= least, f"requires capability {least}"
                if accepted:
                    accepted, reason = kernel.can_implement(config)
            except Exception as error:
                accepted, reason = False, f"{type(error).__name__}: {first_line(error)}"
            verdicts[kernel.__name__] = None if accepted else str(reason)
    return verdicts


def formats(asked: dict, mode, answers: dict) -> None:
    """Fills `answers`: format -> linear and expert kernels picked, accepted, refused, or the format's own refusal."""
    heard = Overheard()
    listen(heard)
    for name in asked.get("names") or FORMATS:
        quantization, options = FORMATS[name]
        tiny = TINY_GPT_OSS if name == "mxfp4_gpt_oss" else TINY_MOE
        config = {**tiny, **({"quantization_config": quantization} if quantization else {})}
        request = {"files": {"config.json": config}, "tp": asked.get("tp", 1), "ep": asked.get("ep", False),
                   "until": "built", "options": {"dtype": asked.get("dtype", "auto"), **options}}  # fmt: skip
        heard.moe.clear()
        heard.linear.clear()
        said = attempt(request, mode)
        experts = said.get("refused") if not said.get("kernels") else None
        if experts:  # the format may serve linear layers alone
            request["files"]["config.json"] = {**config, **TINY_DENSE}
            said = attempt(request, mode)
        answers[name] = {
            "quant": said.get("quant"), "kernels": said.get("kernels"), "moe": expert_verdicts(heard),
            "linear": linear_verdicts(heard), "refused": said.get("refused"), "experts_refused": experts,
        }  # fmt: skip


def attempt(request: dict, mode) -> dict:
    """What a build says of itself, with the engine's refusal where it ended in one."""
    said: dict = {}
    try:
        model(request, mode, said)
    except Exception as error:
        said["refused"] = refusal(error)
    return said


def registry() -> dict[str, str]:
    """Architecture -> the module that serves it, of this engine version."""
    from vllm.model_executor.models.registry import ModelRegistry

    return {name: str(getattr(entry, "module_name", "")) for name, entry in sorted(ModelRegistry.models.items())}
