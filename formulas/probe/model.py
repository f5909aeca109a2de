"""One rank of one model, built and prepared by the engine itself."""

from __future__ import annotations

import collections
import enum
import json
import os
import tempfile

from .card import world
from .weigh import inventory, part_of, weigh


class Built(Exception):
    """Raised out of the engine's loader where only the choice of kernels was asked for."""


def model(request: dict, host_mode, answer: dict) -> None:
    """Fills `answer` with one rank of one model, built and prepared by the engine: bytes, KV specs, backends, kernels.

    What was learned before a refusal stays in it."""
    import torch
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    answer |= {key: request.get(key) for key in ("tp", "ep", "rank", "mtp")}
    tp, rank = request.get("tp", 1), request.get("rank", 0)
    built: list[dict] = []

    def note(self, model, model_config):
        built.append({**weigh(model, host_mode.host), "names": sorted(n for n, _ in model.named_parameters())})
        if len(built) == 1:
            answer.update(built[0])
            answer["kernels"] = chosen_kernels(model)
        if request.get("until") == "built":
            raise Built

    DummyModelLoader.load_weights = note
    folder = tempfile.mkdtemp()  # the engine reads from it again while it builds
    for name, content in request["files"].items():
        with open(os.path.join(folder, name), "w") as file:
            json.dump(content, file)
    options = dict(
        model=folder, skip_tokenizer_init=True, tensor_parallel_size=tp, load_format="dummy",
        enable_expert_parallel=bool(request.get("ep")), kv_cache_dtype=request.get("kv_cache_dtype", "auto"),
        trust_remote_code=False, **request.get("options", {}),
    )  # fmt: skip
    if request.get("mtp"):
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": request["mtp"]}
    config = EngineArgs(**options).create_engine_config()
    config.load_config.device = "meta"
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():  # a process is one rank of one world
            world(tp, rank)
            state.init_distributed_environment(tp, rank, "env://", rank, "fake")
            state.initialize_model_parallel(tp, 1, backend="fake")
        from vllm.model_executor.model_loader import get_model

        text = config.model_config.hf_text_config
        answer |= {
            "cls": config.model_config.architecture, "model_type": getattr(text, "model_type", None),
            "quant": config.model_config.quantization, "dtype": str(config.model_config.dtype),
            "kv_cache_dtype": config.cache_config.cache_dtype, "block_size": config.cache_config.block_size,
        }  # fmt: skip
        with host_mode:
            try:
                target = get_model(vllm_config=config)
            except Built:
                return
            answer["post"] = weigh(target, host_mode.host)
            if request.get("mtp"):
                from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

                alone = inventory(target)
                draft = load_eagle_model(target, config)
                own = {key: value for key, value in inventory(draft).items() if key not in alone}
                by: dict[str, int] = {}
                for name, size, _ in own.values():
                    by[part_of(name)] = by.get(part_of(name), 0) + size
                answer["drafter"] = {
                    "built": built[1]["total"],
                    "own": sum(by.values()),
                    "by": by,
                    "cls": type(draft).__name__,
                }
            layers = {
                name: layer
                for name, layer in config.compilation_config.static_forward_context.items()
                if isinstance(layer, AttentionLayerBase)
            }
            answer["attn_backends"] = dict(collections.Counter(
                f"{type(layer).__name__}:{backend_name(layer)}" for layer in layers.values()))  # fmt: skip
            specs = collections.Counter()
            for layer in layers.values():
                if spec := layer.get_kv_cache_spec(config):
                    specs[f"{type(spec).__name__} block={spec.block_size} page={spec.page_size_bytes}"] += 1
            answer["kv_specs"] = dict(specs)
            answer["kv_shared_layers"] = sum(
                bool(getattr(layer, "kv_sharing_target_layer_name", None)) for layer in layers.values())  # fmt: skip


def backend_name(layer) -> str:
    try:
        return str(layer.get_attn_backend().get_name())
    except Exception as error:  # a layer without a backend of its own
        return f"{type(error).__name__}: {error}"


def chosen_kernels(model) -> dict[str, int]:
    """How many layers use which quantisation method and kernel, as `Method/Kernel`."""
    counts: dict[str, int] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        scheme = getattr(module, "scheme", None)
        names = [name for holder in (scheme, method) if holder is not None and (name := kernel_name(holder))]
        counted = "/".join([type(scheme or method).__name__, *names[:1]])
        counts[counted] = counts.get(counted, 0) + 1
    return counts


def kernel_name(holder, depth: int = 2) -> str | None:
    """The kernel a quantisation method keeps: the member of a backend enumeration, else a kernel object's class."""
    kept = vars(holder).items() if depth else ()
    backend = next((v.name for k, v in kept if k.endswith("backend") and isinstance(v, enum.Enum)), None)
    own = backend or next((type(v).__name__ for k, v in kept if k in KERNEL_FIELDS and v is not None), None)
    inner = [v for _, v in kept if type(v).__module__.startswith("vllm.model_executor.layers.quantization")]
    return own or next((name for v in inner if hasattr(v, "__dict__") and (name := kernel_name(v, depth - 1))), None)


KERNEL_FIELDS = ("kernel", "fp8_linear", "w8a8_block_fp8_linear")
