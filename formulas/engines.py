"""What an engine version accepts, refuses and picks: functions over a table the engine itself answered.

A table holds, per compute capability, every registered attention backend's verdict for each kind, head size and KV
dtype, and the linear and expert kernels picked, accepted and refused for each quantisation format. It is shipped for a
release (formulas/data/engine_vllm_VERSION.json) or answered live; both have this one form, `fold_answers`.

    {"engine", "version", "date", "notes", "torch", "architectures": {name: module}, "kv_dtypes": [...],
     "reasons": [text, ...], "sets": [[reason, ...], ...], "orders": [[backend, ...], ...],
     "rows": [[set or order, by KV dtype], ...], "kernels": [[[kernel, ...], [reason or null, ...]], ...],
     "capabilities": {"12.0": {
        "attention": {"head_sizes": {kind: [...]}, "auto": {kind: [row of orders, by head size]},
                      "verdicts": {backend: {kind: [row of sets, by head size]}}},
        "formats": {mode: {format: {"linear", "moe", "linear_verdicts", "moe_verdicts", "refused"}}}}}}

An empty set accepts; `mode` is "tp", "ep" or "without LIBRARY". Pure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .deployment import Deployment
from .errors import BadInput

Table = Mapping[str, Any]

SHIPPED_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
HIDDEN = {"9.0": ("humming", "flashinfer"), "10.0": ("flashinfer",), "12.0": ("flashinfer",)}
"""Libraries whose absence changes the kernels picked on these cards: asked again without each."""

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)
MLA_HEAD_SIZES = (320, 512, 576)
GQA_KINDS = ("gqa", "gqa_sliding", "sinks", "gqa_mm_prefix")
MLA_KINDS = ("mla", "mla_sparse")
KV_DTYPES = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "octave_k3v4", "octave_k3v3",
    "octave_k3v3_compact", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
    "nvfp4", "nvfp4_4over6",
)  # fmt: skip
"""Every value of --kv-cache-dtype (vllm 0.33.0 config/cache.py:44)."""

EXPERT_PARALLEL_FORMATS = (
    "bf16", "fp8_block128", "fp8_tensor_static", "ct_fp8_channel", "nvfp4", "ct_nvfp4", "mxfp4_gpt_oss", "ct_mxfp4a16",
    "modelopt_mxfp8", "awq_int4_g128", "ct_int4_g32",
)  # fmt: skip

FOREIGN = re.compile(r"ROCM_|CPU_|AMX_|XPU_")
"""Backends of other platforms. Their own check does not look at the platform, so on CUDA some say "accepted"
(vllm 0.33.0 v1/attention/backend.py:279); the CUDA platform never offers them (platforms/cuda.py:84)."""


class AttentionGate(NamedTuple):
    """One backend's verdict; `rank` is its place among those the engine would choose by itself (0 = chosen)."""

    backend: str
    accepted: bool
    reasons: tuple[str, ...]
    rank: int | None


class KernelGate(NamedTuple):
    """Kernels for one format: what is picked, what else would be accepted, what is refused and why."""

    format: str
    picked: str | None
    accepted: tuple[str, ...]
    refused: Mapping[str, str]
    refusal: str | None  # the engine's words where it refuses the format itself


# ------------------------------------------------------------------------------------------ asking and folding


def attention_question(dtype: str) -> dict[str, Any]:
    """Every kind, head size and KV dtype the tables hold, for models of this dtype."""
    rows = [[kind, size, kv] for kind in GQA_KINDS for size in HEAD_SIZES for kv in KV_DTYPES]
    rows += [[kind, size, kv] for kind in MLA_KINDS for size in MLA_HEAD_SIZES for kv in KV_DTYPES]
    return {"dtype": dtype, "rows": rows}


def format_questions(dtype: str) -> list[dict[str, Any]]:
    """All formats on one rank, and those with experts on two ranks under expert parallelism."""
    return [{"dtype": dtype}, {"dtype": dtype, "names": list(EXPERT_PARALLEL_FORMATS), "tp": 2, "ep": True}]


def fold_answers(answers: Sequence[Mapping[str, Any]], *, date: str, notes: str = "") -> Table:
    """The table of an engine from its answers (formulas/probe), one a capability and set of hidden libraries.

    An answer with `without` adds its formats to the capability under "without LIBRARY"; equal parts are kept once."""
    versions = {answer["vllm"] for answer in answers}
    if len(versions) != 1:
        raise BadInput(f"engine table: expected answers of one version, got {', '.join(sorted(versions)) or 'none'}")
    pools = Pools({}, {}, {}, {}, {})
    capabilities: dict[str, dict[str, Any]] = {}
    for answer in answers:
        known = capabilities.setdefault(answer["capability"], {"formats": {}})
        modes = [f"without {name}" for name in answer.get("without") or ()] or ["tp", "ep"]
        for mode, said in zip(modes, answer["formats"], strict=False):
            known["formats"][mode] = {name: _fold_format(one, pools) for name, one in said.items()}
        if "attention" in answer:
            known["attention"] = _fold_attention(answer["attention"], pools)
    return {
        "engine": "vllm", "version": versions.pop(), "date": date, "notes": notes, "torch": answers[0]["torch"],
        "kv_dtypes": list(KV_DTYPES), "reasons": list(pools.reasons), "sets": [list(s) for s in pools.sets],
        "orders": [list(order) for order in pools.orders], "rows": [list(row) for row in pools.rows],
        "kernels": [[[name for name, _ in one], [why for _, why in one]] for one in pools.kernels],
        "architectures": answers[0]["registry"], "capabilities": capabilities,
    }  # fmt: skip


class Pools(NamedTuple):
    """What a table keeps once: reasons, sets of them, orders of backends, rows of either, kernel verdicts."""

    reasons: dict[str, int]
    sets: dict[tuple[int, ...], int]
    orders: dict[tuple[str, ...], int]
    rows: dict[tuple[int | None, ...], int]
    kernels: dict[tuple[tuple[str, int | None], ...], int]


def _fold_attention(rows: Sequence[Mapping[str, Any]], pools: Pools) -> dict[str, Any]:
    cells = {(row["kind"], row["head_size"], row["kv_dtype"]): row for row in rows}
    kinds: dict[str, list[int]] = {}
    for kind, size, _ in cells:
        kinds.setdefault(kind, [])
        kinds[kind] += [size] if size not in kinds[kind] else []

    def row_of(kind: str, size: int, value: Callable[[Mapping[str, Any]], int | None]) -> int:
        row = tuple(value(cells[kind, size, kv]) for kv in KV_DTYPES)
        return pools.rows.setdefault(row, len(pools.rows))

    def verdict(backend: str, cell: Mapping[str, Any]) -> int | None:
        why = cell["verdicts"][backend]
        if why is None:
            return None
        ids = tuple(_id(pools.reasons, text) for text in why)
        return pools.sets.setdefault(ids, len(pools.sets))

    def order(cell: Mapping[str, Any]) -> int:
        return pools.orders.setdefault(tuple(cell["auto"]), len(pools.orders))

    backends = list(rows[0]["verdicts"])
    return {
        "head_sizes": kinds,
        "auto": {kind: [row_of(kind, size, order) for size in sizes] for kind, sizes in kinds.items()},
        "verdicts": {
            backend: {
                kind: [row_of(kind, size, partial(verdict, backend)) for size in sizes]
                for kind, sizes in kinds.items()
            }
            for backend in backends
        },
    }


def _id(reasons: dict[str, int], text: str) -> int:
    return reasons.setdefault(text, len(reasons))


def _fold_format(said: Mapping[str, Any], pools: Pools) -> dict[str, Any]:
    linear, moe = picked_kernels(said["kernels"] or {}, set(said["linear"]))
    folded: dict[str, Any] = {
        "linear": linear, "moe": moe, "linear_verdicts": _verdicts(said["linear"], pools),
        "moe_verdicts": _verdicts(said["moe"], pools),
    }  # fmt: skip
    for part in ("refused", "experts_refused"):
        if said.get(part) and bool(said["kernels"]) == (part == "experts_refused"):
            folded[part] = _id(pools.reasons, said[part]["message"])
    return folded


def _verdicts(verdicts: Mapping[str, str | None], pools: Pools) -> int:
    ids = tuple((kernel, None if why is None else _id(pools.reasons, why)) for kernel, why in verdicts.items())
    return pools.kernels.setdefault(ids, len(pools.kernels))


def picked_kernels(counts: Mapping[str, int], linear_kernels: set[str]) -> tuple[str | None, str | None]:
    """The linear and the expert kernel of a built model, from its layers counted by `Method/Kernel`.

    The kernel most linear layers use; a method without a named kernel stands for itself, and unquantised layers count
    only where nothing else is there."""
    experts = [name for name in counts if "MoE" in name or "Experts" in name]
    others = sorted(
        (name for name in counts if name not in experts and not _AROUND.match(name)),
        key=lambda name: (name.startswith("Unquantized"), name.partition("/")[2] not in linear_kernels, -counts[name]),
    )
    return (_short(others[0]) if others else None, _short(experts[0]) if experts else None)


_AROUND = re.compile(r"\w*(Embedding|KVCache)Method")


def _short(name: str) -> str:
    method, _, kernel = name.partition("/")
    return kernel or method


# ------------------------------------------------------------------------------------------ reading a table


def _capability(table: Table, capability: str) -> Mapping[str, Any]:
    known: Mapping[str, Any] = table["capabilities"]
    if capability not in known:
        raise BadInput(
            f"vllm {table['version']}: expected a capability of {', '.join(known)}, got {capability}; no table says",
            hint="ask the engine itself: --engine-python PATH",
        )
    found: Mapping[str, Any] = known[capability]
    return found


def attention_gates(
    table: Table, capability: str, kind: str, head_size: int, kv_dtype: str
) -> tuple[AttentionGate, ...] | None:
    """Every backend's verdict for one attention layer, best first, then the refused; None where the table is silent.

    A backend of another platform is refused whatever its own check says. A tag without a class is left out."""
    attention = _capability(table, capability)["attention"]
    sizes = attention["head_sizes"].get(kind, [])
    if head_size not in sizes or kv_dtype not in table["kv_dtypes"]:
        return None
    place, column = sizes.index(head_size), table["kv_dtypes"].index(kv_dtype)
    order = table["orders"][table["rows"][attention["auto"][kind][place]][column]]
    gates = []
    for name, rows in attention["verdicts"].items():
        why = table["rows"][rows[kind][place]][column]
        if why is None:
            continue
        words = tuple(table["reasons"][index] for index in table["sets"][why])
        if FOREIGN.match(name) and not words:
            words = ("not a backend of the CUDA platform",)
        gates.append(AttentionGate(name, not words, words, order.index(name) if name in order else None))
    return tuple(sorted(gates, key=lambda g: (not g.accepted, g.rank is None, g.rank or 0, g.backend)))


def chosen_attention(table: Table, capability: str, kind: str, head_size: int, kv_dtype: str) -> str | None:
    """The backend the engine takes by itself, None where none is accepted or the table is silent."""
    gates = attention_gates(table, capability, kind, head_size, kv_dtype) or ()
    return next((gate.backend for gate in gates if gate.rank == 0), None)


def formats(table: Table, capability: str) -> tuple[str, ...]:
    """The quantisation formats the table was asked about."""
    return tuple(_capability(table, capability)["formats"]["tp"])


def picked_kernel(table: Table, capability: str, format: str, part: str, mode: str) -> str | None:
    """The kernel picked for the "linear" layers or the experts ("moe") of a format, "tp", "ep" or "without LIBRARY";
    None where the engine refuses, or the table was not asked."""
    formats = table["capabilities"].get(capability, {}).get("formats", {})
    found: str | None = formats.get(mode, {}).get(format, {}).get(part)
    return found


def linear_gates(table: Table, capability: str, format: str, *, parallel: str = "tp") -> KernelGate | None:
    """Linear kernels for one format on this card, "tp" or "without LIBRARY"; None where the table was not asked."""
    return _kernels(table, capability, format, "linear", parallel)


def moe_gates(table: Table, capability: str, format: str, *, parallel: str = "tp") -> KernelGate | None:
    """Expert kernels for one format on this card, experts divided by "tp" or "ep", or "without LIBRARY"."""
    return _kernels(table, capability, format, "moe", parallel)


def _kernels(table: Table, capability: str, format: str, part: str, parallel: str) -> KernelGate | None:
    said = _capability(table, capability)["formats"].get(parallel, {}).get(format)
    if said is None:
        return None
    reasons: list[str] = table["reasons"]
    names, whys = table["kernels"][said[f"{part}_verdicts"]]
    verdicts: dict[str, int | None] = dict(zip(names, whys, strict=True))
    accepted = tuple(name for name, why in verdicts.items() if why is None)
    refused = {name: reasons[why] for name, why in verdicts.items() if why is not None}
    words = said.get("refused", said.get("experts_refused") if part == "moe" else None)
    refusal = None if words is None else spoken(reasons[words])
    return KernelGate(format, said[part], accepted, refused, refusal)


def spoken(message: str) -> str:
    """An engine's words; where it raised a template with its values beside it, the two put together."""
    if not message.startswith("('"):
        return message
    try:
        template, *values = ast.literal_eval(message)
        return str(template % tuple(values))
    except (ValueError, SyntaxError, TypeError):
        return message


# ------------------------------------------------------------------------------------------ what a kernel means


def meaning(kernel: str | None) -> str:
    """What a kernel does with packed weights: memory and speed, in a few words."""
    if kernel is None:
        return "none: the engine refuses this format here"
    return next((text for pattern, text in _MEANINGS if pattern.search(kernel)), "native arithmetic of the format")


_MEANINGS = [
    (re.compile(r"MARLIN|Marlin"),
     "weight-only: weights stay packed, products in 16 bit; saves memory, not arithmetic"),
    (re.compile(r"HUMMING|Humming"), "weight-only or mixed, compiled for the card at start"),
    (re.compile(r"EMULATION|Emulation"), "emulated: packed in memory, widened to bf16 at every product; slow"),
    (re.compile(r"W4A16|WNA16|Machete|Exllama|Conch"), "weight-only: weights stay packed, products in 16 bit"),
    (re.compile(r"^Unquantized"), "16 bit: this format leaves these layers unquantised"),
    (re.compile(r"Torch"), "PyTorch's own scaled product"),
]  # fmt: skip


# ------------------------------------------------------------------------------------------ formats and versions

UNREADABLE: dict[str, str] = {
    "exl2": "read by ExLlamaV2 and TabbyAPI, by no stock vLLM",
    "exl3": "read by ExLlamaV3 and TabbyAPI, by no stock vLLM",
    "gguf": "read by llama.cpp; vLLM 0.33 needs the vllm-gguf-plugin package",
    "mlx": "read by MLX on Apple machines; vLLM takes it for unquantised and fails on its shapes",
    "bitsandbytes": "quantised by bitsandbytes: vLLM 0.33 has no reader any more",
    "aqlm": "vLLM 0.33 has no reader any more",
    "hqq": "vLLM 0.33 has no reader any more",
    "qengine": "read by its own engine only",
}
"""Formats that no stock vLLM 0.33.0 reads: its quantization methods (quantization/__init__.py:15) hold none of them,
"Unknown quantization method: ..." (config/model.py); gguf is an extra, `vllm[extra-quant]`."""


def unreadable(method: str | None) -> str | None:
    """Why no stock engine reads checkpoints of this quantisation method; None where one does, or nothing is known."""
    return None if method is None else UNREADABLE.get(method.lower())


class Since(NamedTuple):
    """Where an architecture stands in the engine's registries that were read, one a minor release."""

    first: str  # the oldest release that has it; where that is the oldest read, it may be older still
    last: str | None  # the newest release that has it, None where the newest read still does
    oldest_read: bool


def since(registries: Mapping[str, Any], architecture: str) -> Since | None:
    """The first release whose registry has the architecture, and the last where it was removed; None: none has it.

    `registries` is formulas/data/engine_registries.json: the releases read, and per architecture [first, last]."""
    found = registries["since"].get(architecture)
    return None if found is None else Since(found[0], found[1], found[0] == registries["releases"][0])


def build_question(files: Mapping[str, Any], deployment: Deployment, *, rank: int = 0) -> dict[str, Any]:
    """The request that lets an engine build one rank of this checkpoint; `files` are its small JSON files by name.

    Raises BadInput for what one process cannot stand for: pipeline or data parallel ranks."""
    if deployment.pp > 1 or deployment.dp > 1:
        raise BadInput(f"live: expected pp 1 and dp 1, got pp {deployment.pp}, dp {deployment.dp}; one rank is built")
    options = {
        "max_model_len": deployment.max_model_len, "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens, "block_size": deployment.block_size,
        "enable_prefix_caching": deployment.enable_prefix_caching, "enforce_eager": deployment.enforce_eager or None,
        "attention_backend": deployment.attention_backend, "linear_backend": deployment.linear_backend,
        "moe_backend": deployment.moe_backend, "quantization": deployment.quantization,
        "dtype": None if deployment.dtype == "auto" else deployment.dtype,
        "language_model_only": deployment.language_model_only or None,
        "hf_overrides": dict(deployment.hf_overrides) or None,
        "limit_mm_per_prompt": dict(deployment.limit_mm_per_prompt) or None,
        "mm_encoder_tp_mode": None if deployment.mm_encoder_tp_mode == "weights" else deployment.mm_encoder_tp_mode,
    }  # fmt: skip
    model = {
        "files": dict(files), "tp": deployment.tp, "ep": deployment.expert_parallel, "rank": rank,
        "mtp": deployment.mtp, "kv_cache_dtype": deployment.kv_cache_dtype,
        "options": {name: value for name, value in options.items() if value is not None},
    }  # fmt: skip
    return {"capability": deployment.capability, "without": sorted(deployment.without), "models": [model]}
