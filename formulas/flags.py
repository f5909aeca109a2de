"""Flags an engine accepts and then ignores or rewrites: what becomes of them, where, and what its log says.

Each row was read in the sources of the versions it names; other versions are unknown, so a version between two rows of
the same flag has none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple


class IgnoredFlag(NamedTuple):
    """A flag that does not do what it says; `log` None where the engine is silent about it."""

    flag: str
    becomes: str
    when: str
    versions: tuple[str, ...]  # minor versions whose source was read
    log: str | None
    source: str  # file and line in the newest of them

    def document(self) -> dict[str, Any]:
        """The row as `fit gates --json` prints it."""
        return {"flag": self.flag, "becomes": self.becomes, "when": self.when, "versions": ", ".join(self.versions),
                "log": self.log, "source": self.source}  # fmt: skip


BOTH = ("0.25", "0.33")

FLAGS: tuple[IgnoredFlag, ...] = (
    IgnoredFlag(
        "--mamba-cache-mode", "align with prefix caching, none without", "any value given", ("0.33",),
        "--mamba-cache-mode is deprecated and will be removed in v0.33.0. It has no effect: Mamba prefix caching "
        "follows --enable-prefix-caching.",
        "engine/arg_utils.py:462, :2304; config/cache.py:176",
    ),
    IgnoredFlag(
        "--mamba-cache-mode all", "align", "models without support for mode all", ("0.25",),
        "Hybrid or mamba-based model detected without support for prefix caching with Mamba cache 'all' mode: "
        "falling back to 'align' mode.",
        "model_executor/models/config.py:570",
    ),
    IgnoredFlag(
        "--mamba-cache-mode", "none", "prefix caching is off", BOTH,
        "Mamba cache mode is set to 'none' when prefix caching is disabled", "model_executor/models/config.py:781",
    ),
    IgnoredFlag(
        "--gdn-prefill-backend flashinfer", "triton",
        "capability other than 9.x, 10.x, 12.x; or 10.x, 12.x with a key head other than 128 or CUDA below 13",
        ("0.33",), "Using Triton/FLA GDN prefill kernel (head_k_dim=...).",
        "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:249",
    ),
    IgnoredFlag(
        "--gdn-prefill-backend cutedsl", "triton",
        "capability other than 10.x, a key head other than 128, CUDA below 13", ("0.33",),
        "Using Triton/FLA GDN prefill kernel (head_k_dim=...).",
        "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:249",
    ),
    IgnoredFlag(
        "--kv-cache-dtype auto", "fp8 or nvfp4, as the checkpoint's kv_cache_scheme or kv_cache_quant_algo says",
        "ModelOpt checkpoints", BOTH, None, "utils/torch_utils.py:443, engine/arg_utils.py:2297",
    ),
    IgnoredFlag(
        "--kv-cache-dtype auto", "fp8_e4m3", "GlmMoeDsaForCausalLM on capability 10.x", ("0.33",),
        "Using fp8 kv-cache for GlmMoeDsaForCausalLM on SM10x", "model_executor/models/config.py:96",
    ),
    IgnoredFlag(
        "--kv-cache-dtype auto", "fp8_ds_mla (656 bytes a token and layer)",
        "sparse MLA on FLASHINFER_MLA_SPARSE_SM120", ("0.33",), None,
        "model_executor/layers/attention/mla_attention.py:370",
    ),
    IgnoredFlag(
        "--kv-cache-dtype bfloat16", "auto, which on capability 12.x is fp8_ds_mla", "DeepseekV32ForCausalLM",
        ("0.33",), "Using bfloat16 kv-cache for DeepSeekV3.2", "model_executor/models/config.py:84",
    ),
    IgnoredFlag(
        "--kv-cache-dtype fp8", "fp8_ds_mla (656 bytes a token and layer instead of 576)",
        "sparse MLA on FLASHMLA_SPARSE or FLASHINFER_MLA_SPARSE_SM120", ("0.33",), None,
        "model_executor/layers/attention/mla_attention.py:359",
    ),
    IgnoredFlag(
        "--attention-backend (none given)", "TRITON_ATTN for every layer", "Gemma 4 where FlashAttention 4 is missing",
        BOTH, "Gemma4 model has heterogeneous head dimensions {...}. FA4 not available, forcing TRITON_ATTN backend.",
        "model_executor/models/config.py:362",
    ),
    IgnoredFlag(
        "--linear-backend", "automatic choice for that layer type", "the backend has no kernel for it", ("0.33",),
        "--linear-backend=... has no kernel for this linear layer type; using automatic selection for that layer type.",
        "model_executor/kernels/linear/__init__.py:402",
    ),
    IgnoredFlag(
        "VLLM_USE_DEEP_GEMM=1", "0", "model type qwen3_5_text, qwen3_5_moe_text (10.x, 12.x), kolibri1 (12.x)",
        ("0.33",), "Auto-disabled DeepGemm for model_type=... on Blackwell. To disable DeepGemm globally, set "
        "VLLM_USE_DEEP_GEMM=0.",
        "config/vllm.py:1633, utils/deep_gemm.py:29",
    ),
    IgnoredFlag(
        "--disable-cascade-attn", "nothing", "any value given", ("0.33",),
        "--disable-cascade-attn is deprecated and has no effect since cascade attention has been removed. It will be "
        "removed in v0.33.0.",
        "engine/arg_utils.py:474, :1991",
    ),
    IgnoredFlag(
        "--block-size", "a slower attention backend", "the size rules out the one the engine would choose", BOTH,
        "--block-size N precluded higher-priority backend(s) .... Using ... instead, which may result in reduced "
        "performance.",
        "platforms/cuda.py:488",
    ),
    IgnoredFlag(
        "--enforce-eager", "also -cc.mode=none, and custom operators on: DeepSeek's rotary cache is kept in float32",
        "always", ("0.33",),
        "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. ...",
        "config/vllm.py:1772, model_executor/layers/rotary_embedding/deepseek_scaling_rope.py:56",
    ),
)  # fmt: skip


def ignored_flags(version: str) -> tuple[IgnoredFlag, ...]:
    """The rows that were read in this version's source; empty where none was read."""
    minor = re.match(r"\d+\.\d+", version)
    return tuple(row for row in FLAGS if minor and minor.group() in row.versions)


def obeyed_otherwise(words: Iterable[str], version: str) -> list[str]:
    """What becomes of those options among command line words that this release is known to ignore or rewrite."""
    given = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else (word,))]
    pairs = {(flag, value) for flag, value in pairwise([*given, ""]) if flag.startswith("-")}
    found = []
    for row in ignored_flags(version):
        flag, _, value = row.flag.partition(" ")
        if any(flag == chosen and value in ("", given) for chosen, given in pairs):
            found.append(f"{row.flag} becomes {row.becomes}; when: {row.when} (vllm {row.source})")
    return found
