"""What a checkpoint asks of an engine, in the words its tables are kept in: attention layers, KV dtypes, formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .deployment import Deployment
from .engines import Table, attention_gates
from .facts import Facts, Quantization, Role, Stack
from .geometry import Attention, Geometry, Layer
from .kv_dtypes import cache_dtype, model_dtype
from .refusals import Refusal


class Asked(NamedTuple):
    """An attention layer as the engine's selector sees it. `bound`: the model brings this backend itself, no selector
    is asked. `reason`: why the layer cannot be told, then the rest says nothing."""

    kind: str
    head_size: int
    kv_dtype: str
    bound: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} heads of {self.head_size}, KV cache in {self.kv_dtype}"


_IMAGES_BOTH_WAYS = {"bagel", "gemma3", "molmo2", "moondream3", "paligemma"}
"""Model types whose image tokens see one another (vllm 0.33.0 transformers_utils/model_arch_config_convertor.py
is_mm_prefix_lm). Gemma 4 says so in its config; the stricter kind is asked for it."""
_SINKS = {"gpt_oss": (Attention.FULL, Attention.SLIDING), "mimo_v2_flash": (Attention.SLIDING,)}
"""Layers with attention sinks by text model type (vllm 0.33.0 models/gpt_oss.py, mimo_v2.py)."""
QSA_BACKEND = "QWEN4_EXP_QSA_TRITON"


def attention_asked(
    kinds: Iterable[Layer], geometry: Geometry, deployment: Deployment, quantization: Quantization | None
) -> tuple[Asked, ...]:
    """The different attention layers among `kinds` (the target's, or the drafter's), in their order."""
    found = [_asked(layer, geometry, deployment, quantization) for layer in kinds]
    return tuple(dict.fromkeys(each for each in found if each is not None))


def _asked(
    layer: Layer, geometry: Geometry, deployment: Deployment, quantization: Quantization | None
) -> Asked | None:
    if layer.attention is Attention.NONE or layer.shares_kv:
        return None
    if layer.attention is Attention.UNKNOWN:
        return Asked("", 0, "", reason="; ".join(geometry.unmodelled) or "a kind of attention that is not modelled")
    if layer.attention in (Attention.MLA, Attention.DSA):
        latent = geometry.latent
        if latent is None:
            return Asked("", 0, "", reason="the sizes of the latent are not stated")
        sparse = layer.attention is Attention.DSA
        dtype = stated_kv_dtype(deployment, quantization) if sparse else cache_dtype(geometry, deployment, quantization)
        name = dtype if isinstance(dtype, str) else dtype.name
        return Asked("mla_sparse" if sparse else "mla", latent.kv_rank + latent.rope_dim, name)
    if layer.head_dim is None:
        return Asked("", 0, "", reason="the size of a head is not stated")
    bound = QSA_BACKEND if layer.attention is Attention.QSA else None
    name = cache_dtype(geometry, deployment, quantization).name
    return Asked(_kind(layer, geometry, deployment), layer.head_dim, name, bound)


def stated_kv_dtype(deployment: Deployment, quantization: Quantization | None) -> str:
    """The KV dtype asked for, before an engine makes its own form of it; `auto` where nobody asks."""
    own = quantization.kv_cache_dtype if quantization is not None else None
    return own if deployment.kv_cache_dtype == "auto" and own else deployment.kv_cache_dtype


def _kind(layer: Layer, geometry: Geometry, deployment: Deployment) -> str:
    if layer.attention is Attention.QSA:
        return "qsa"
    if layer.attention in _SINKS.get(geometry.text_model_type or "", ()):
        return "sinks"
    outer = geometry.model_type or ""
    if (outer in _IMAGES_BOTH_WAYS or outer.startswith("gemma4")) and not deployment.language_model_only:
        return "gqa_mm_prefix"
    return "gqa_sliding" if layer.attention is Attention.SLIDING else "gqa"


def qsa_refusal(geometry: Geometry, deployment: Deployment, quantization: Quantization | None) -> str | None:
    """Why Qwen4Exp's own attention does not start, or None. Source: vllm 0.33.0 models/qwen4_exp/nvidia/qsa.py."""
    stated = stated_kv_dtype(deployment, quantization)
    if stated not in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        return f"Qwen4Exp QSA requires a BF16 or FP8-e4m3 main KV cache, not {stated}"
    own = quantization.config.get("kv_cache_scheme") if quantization is not None else None
    if own is not None and quantization is not None and quantization.method == "compressed-tensors":
        return "Qwen4Exp QSA does not support KV quantization, and the checkpoint has a kv_cache_scheme"
    if deployment.dcp > 1:
        return "Qwen4Exp QSA does not support context parallelism"
    if model_dtype(geometry, deployment) != "bfloat16" or (deployment.sm is not None and deployment.sm < 80):
        return "Qwen4Exp QSA currently requires BF16"
    return None


# Formats

PLAIN_FORMATS = frozenset({"bf16", "fp16", "fp32"})
_INC = {"auto-round", "auto_round", "intel/auto-round", "inc"}


def attention_refusals(
    geometry: Geometry, deployment: Deployment, quantization: Quantization | None, table: Table
) -> Iterator[str]:
    """Attention layers that no backend of the release takes on this card (Refusal), and a forced backend that refuses
    them or that the release does not know; nothing where its table is silent."""
    card, forced = deployment.capability, deployment.attention_backend
    if card is None or card not in table["capabilities"]:
        return
    kinds = (*geometry.layer_kinds, *(geometry.mtp_kinds if deployment.mtp else ()))
    for each in attention_asked(kinds, geometry, deployment, quantization):
        if each.bound or each.reason:
            continue
        gates = attention_gates(table, card, each.kind, each.head_size, each.kv_dtype)
        where = f"attention {each.kind}, head size {each.head_size}, KV {each.kv_dtype}, capability {card}"
        if gates and not any(gate.accepted for gate in gates):
            yield Refusal(f"{where}: no backend of vllm {table['version']} takes it; the engine refuses")
        elif gates and forced:
            own = next((gate for gate in gates if gate.backend == forced), None)
            if own is None:
                yield f"attention backend {forced}: vllm {table['version']} has none of that name"
            elif not own.accepted:
                yield Refusal(f"{where}: {forced} refuses it, {'; '.join(own.reasons)}")


def format_asked(stored: str, quantization: Quantization | None, text_model_type: str | None = None) -> str | None:
    """The name under which engine tables hold weights stored in the format `stored` (as the headers show or the config
    declares) by this checkpoint's quantisation method; None where the tables were not asked about it."""
    method = (quantization.method if quantization else None) or ""
    config = quantization.config if quantization else {}
    if stored in PLAIN_FORMATS:
        return "bf16"
    if method == "compressed-tensors":
        return _compressed(stored, _inputs(config))
    if method in _INC:
        gptq = "awq" not in str(config.get("packing_format") or "gptq")
        return "auto_round_int4_g128" if stored == "int4_g128" and gptq else None
    if method.startswith("gptq"):
        return _gptq(stored, config)
    if method == "fp8":
        static = "_static" if config.get("activation_scheme") == "static" else ""
        return {"fp8_block128": "fp8_block128", "fp8_tensor": f"fp8_tensor{static}"}.get(stored)
    if method == "mxfp4":
        return "mxfp4_gpt_oss" if stored == "mxfp4" and text_model_type == "gpt_oss" else None
    if method.startswith("modelopt"):
        return {"nvfp4": "nvfp4", "fp8_tensor": "modelopt_fp8", "mxfp8": "modelopt_mxfp8"}.get(stored)
    return _OTHERS.get((method.removesuffix("_marlin"), stored))


_OTHERS = {
    ("awq", "int4_g128"): "awq_int4_g128", ("quark", "fp8_tensor"): "quark_fp8",
    ("fbgemm_fp8", "fp8_channel"): "fbgemm_fp8",
}  # fmt: skip


def _inputs(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How compressed-tensors quantises activations: of the first group that does."""
    groups = config.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    found = (group.get("input_activations") for group in each if isinstance(group, Mapping))
    return next((one for one in found if isinstance(one, Mapping)), None)


def _compressed(stored: str, inputs: Mapping[str, Any] | None) -> str | None:
    if inputs is None:
        return {
            "nvfp4": "ct_nvfp4a16", "nvfp4a16": "ct_nvfp4a16", "mxfp4": "ct_mxfp4a16", "int4_g128": "ct_int4_g128",
            "int4_g32": "ct_int4_g32", "int8_channel": "ct_int8_channel", "fp8_channel": "ct_fp8_w8a16",
        }.get(stored)  # fmt: skip
    names = {
        "nvfp4": "ct_nvfp4", "nvfp4a16": "ct_nvfp4a16", "mxfp4": "ct_mxfp4", "fp8_channel": "ct_fp8_channel",
        "fp8_tensor": "ct_fp8_tensor", "fp8_block128": "ct_fp8_block128", "int8_channel": "ct_int8_w8a8",
    }  # fmt: skip
    if stored == "int4_g128" and inputs.get("num_bits") == 8 and inputs.get("type") == "float":
        return "ct_w4a8_fp8"
    return names.get(stored)


def _gptq(stored: str, config: Mapping[str, Any]) -> str | None:
    if config.get("desc_act") is True:
        return "gptq_int4_act_order" if stored.startswith("int4") else None
    if stored.startswith("int3"):
        return "gptq_int3"
    return {"int4_g128": "gptq_int4_g128", "int8_g128": "gptq_int8_g128"}.get(stored)


class Stored(NamedTuple):
    """Weights of one format: whose they are, and whether routed experts or linear layers."""

    stack: Stack
    experts: bool
    format: str

    @property
    def what(self) -> str:
        part = "experts" if self.experts else "linear layers"
        return f"MTP {part}" if self.stack is Stack.MTP else part


_LINEAR = {Role.ATTENTION, Role.LINEAR_ATTENTION, Role.MLP, Role.SHARED_EXPERT, Role.LM_HEAD}


def stored_formats(facts: Facts) -> list[Stored]:
    """What kernels have to be found for: by stack and role where headers were read, else as the config declares."""
    quantization, geometry = facts.quantization, facts.geometry
    if quantization is None:
        return []
    if not quantization.by_role:
        declared = quantization.format
        if declared is None or declared == "mixed":
            return []
        has_experts = geometry is not None and geometry.experts is not None and bool(geometry.experts.count)
        return [Stored(Stack.MAIN, has_experts, declared)]
    found = []
    for place, stored in quantization.by_role.items():
        stack, _, role = place.partition("/")
        experts = role == Role.EXPERT
        if stack in (Stack.MAIN, Stack.MTP) and (experts or (role in _LINEAR and stored not in PLAIN_FORMATS)):
            found.append(Stored(Stack(stack), experts, stored))
    return list(dict.fromkeys(found))
