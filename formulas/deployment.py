"""How a checkpoint is served: the engine, its version and the options that change bytes. All frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Version = tuple[int, int, int]


class Deployment(BaseModel):
    """One engine start, in vLLM's own names. None means "what that engine version does by itself", never zero."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = "vllm"
    version: str = "0.33.0"
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    dcp: int = Field(1, ge=1)  # decode context parallel: ranks of a TP group that share a request's tokens
    expert_parallel: bool = False
    redundant_experts: int = Field(0, ge=0)  # EPLB's extra physical experts
    max_model_len: int | None = Field(None, ge=-1)  # -1: the longest that fits
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    kv_cache_dtype: str = "auto"
    block_size: int | None = Field(None, ge=1)
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    compilation_config: Mapping[str, Any] = {}
    attention_backend: str | None = None
    linear_backend: str | None = None
    moe_backend: str | None = None
    mtp: int = Field(0, ge=0)  # speculative tokens a step from the checkpoint's own drafter; 0 = it is not loaded
    ple: Literal["default", "gpu", "host"] = "default"  # default: what that engine version does
    language_model_only: bool = False
    limit_mm_per_prompt: Mapping[str, int] = {}
    mm_encoder_tp_mode: Literal["weights", "data"] = "weights"
    quantization: str | None = None
    dtype: str = "auto"
    hf_overrides: Mapping[str, Any] = {}
    capability: str | None = None  # of the card: "12.0"; decides which kernels run
    without: frozenset[str] = frozenset()  # optional libraries the engine does not find: flashinfer, deep_gemm, ...

    @model_validator(mode="after")
    def _is_readable(self) -> Deployment:
        parse_version(self.version)
        if self.capability is not None:
            parse_capability(self.capability)
        return self

    @property
    def release(self) -> Version:
        """The engine version as three numbers, for comparisons."""
        return parse_version(self.version)

    @property
    def sm(self) -> int | None:
        """Compute capability as the engine writes it, 10 x major + minor (sm120); None where the card is unknown."""
        return None if self.capability is None else parse_capability(self.capability)


def parse_version(text: str) -> Version:
    """The first three numbers of an engine version: `0.25.1`, `0.33.0rc1`, `0.11`. ValueError otherwise."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise ValueError(f"engine version {text!r}: expected numbers such as 0.33.0")
    major, minor, patch = match.groups(default="0")
    return int(major), int(minor), int(patch)


def parse_capability(text: str) -> int:
    """`12.0` as 120. ValueError for anything but major.minor."""
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None:
        raise ValueError(f"compute capability {text!r}: expected major.minor such as 12.0")
    return 10 * int(match[1]) + int(match[2])
