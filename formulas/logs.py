"""What an engine's start-up log says it measured. vLLM's wording from 0.10 to 0.33; unknown lines are passed over.

A log prints rounded numbers: each reading keeps how far off it can be, so that a comparison knows what it may claim.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import BadInput
from .facts import Document
from .units import GIB, KIB, MIB


class Reading(NamedTuple):
    """A number from a log: bytes (or tokens, or a ratio) and half of its last printed digit."""

    value: float
    rounding: float


class StartLog(Document):
    """One engine start, as its log tells it. What the log does not say is None."""

    engine: str = "vllm"
    version: str | None = None
    model: str | None = None
    arguments: Mapping[str, Any] = {}  # vLLM's own names: tensor_parallel_size, max_model_len, kv_cache_dtype...
    total_memory: Reading | None = None
    free_memory: Reading | None = None
    model_memory: Reading | None = None  # "Model loading took"
    peak_activation: Reading | None = None
    non_torch: Reading | None = None
    cudagraph_estimate: Reading | None = None
    cudagraph_actual: Reading | None = None
    available_kv: Reading | None = None
    kv_tokens: Reading | None = None
    max_concurrency: Reading | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    cache_queries: Reading | None = None  # from /metrics, when it was appended


_SIZE = r"(-?[\d.,]+) ?(GiB|GB|MiB|MB|KiB|B)"
_UNIT = {"GiB": GIB, "GB": GIB, "MiB": MIB, "MB": MIB, "KiB": KIB, "B": 1}  # the engine's "GB" are 2**30 as well

# Sizes. Several wordings of one reading, newest first; the last match in a log wins, for a restarted engine.
_SIZES: tuple[tuple[str, str], ...] = (
    ("model_memory", rf"Model loading took {_SIZE}"),
    ("model_memory", rf"Loading model weights took {_SIZE}"),
    ("model_memory", rf"model weights take {_SIZE}"),
    ("model_memory", rf"Actual usage is {_SIZE} for weight"),
    ("peak_activation", rf"torch peak memory increase: {_SIZE}"),
    ("peak_activation", rf"PyTorch activation peak memory takes {_SIZE}"),
    ("peak_activation", rf"{_SIZE} for peak activation"),
    ("non_torch", rf"non-torch forward increase memory: {_SIZE}"),
    ("non_torch", rf"non_torch_memory takes {_SIZE}"),
    ("non_torch", rf"{_SIZE} for non-torch memory"),
    ("cudagraph_estimate", rf"Estimated CUDA graph memory: {_SIZE}"),
    ("cudagraph_actual", rf"CUDA graph pool memory: {_SIZE} \(actual\)"),
    ("cudagraph_actual", rf"Graph capturing finished in [\d.]+ secs?, took {_SIZE}"),
    ("available_kv", rf"Available KV cache memory: {_SIZE}"),
    ("available_kv", rf"the rest of the memory reserved for KV Cache is {_SIZE}"),
    ("total_memory", rf"total_memory={_SIZE}"),
    ("total_memory", rf"total_gpu_memory \({_SIZE}\)"),
    ("total_memory", rf"Free memory on device[^(]*\([\d.]+/{_SIZE}\)"),
    ("free_memory", rf"Initial free memory:? {_SIZE}"),
    ("free_memory", r"Free memory on device[^(]*\((-?[\d.]+)/[\d.]+ (GiB)\)"),
)
_PLAIN: tuple[tuple[str, str], ...] = (
    ("kv_tokens", r"KV cache size: ([\d,]+) tokens"),
    ("max_concurrency", r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"),
)
_WHOLE: tuple[tuple[str, str], ...] = (
    ("block_size", r"Setting attention block size to (\d+) tokens"),
    ("num_blocks", r"# (?:GPU|cuda) blocks: (\d+)"),
    ("num_blocks", r"num_gpu_blocks(?:=| is: )\"?(\d+)"),
)
_ARGUMENT = re.compile(r"(?<![\w.])([a-z_]+)=('[^']*'|\"[^\"]*\"|[\w.+-]+)")
_KNOWN = {
    "tensor_parallel_size": int, "pipeline_parallel_size": int, "data_parallel_size": int, "max_seq_len": int,
    "max_model_len": int, "max_num_seqs": int, "max_num_batched_tokens": int, "gpu_memory_utilization": float,
    "kv_cache_dtype": str, "enforce_eager": bool, "enable_prefix_caching": bool, "enable_expert_parallel": bool,
    "disable_custom_all_reduce": bool,
    "quantization": str, "language_model_only": bool, "block_size": int,
}  # fmt: skip


def parse_log(text: str) -> StartLog:
    """The readings in a start-up log. Raises BadInput when it holds none: then it is no engine's start."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    found: dict[str, Any] = {}
    for name, pattern in _SIZES:
        if name not in found and (matches := re.findall(pattern, text)):
            number, unit = matches[-1]
            found[name] = _reading(number, _UNIT[unit])
    for name, pattern in _PLAIN:
        if matches := re.findall(pattern, text):
            found[name] = _reading(matches[-1], 1)
    for name, pattern in _WHOLE:
        if name not in found and (matches := re.findall(pattern, text)):
            found[name] = int(matches[-1])
    if not found:
        raise BadInput("log: expected a vLLM start-up log with lines such as 'Model loading took 62.12 GiB', got none")
    if match := re.search(r"(?:engine \(v|vLLM API server version |vLLM version:? )v?([\w.+]+)", text):
        found["version"] = match[1].rstrip(".")
    arguments = _arguments(text)
    found["model"] = arguments.pop("model", None)
    return StartLog(arguments=arguments, **found)


def parse_metrics(text: str) -> dict[str, int]:
    """block_size and num_blocks from the engine's `/metrics` page, where `vllm:cache_config_info` carries them."""
    match = re.search(r"vllm:cache_config_info\{([^}]*)\}", text)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1])) if match else {}
    wanted = {"block_size": "block_size", "num_gpu_blocks": "num_blocks"}
    return {ours: int(labels[theirs]) for theirs, ours in wanted.items() if labels.get(theirs, "").isdigit()}


def _reading(number: str, unit: int) -> Reading:
    """A printed number. The engine rounds sizes to two places and drops trailing zeros: `1.3GiB` is 1.30."""
    digits = number.replace(",", "")
    decimals = len(digits.partition(".")[2])
    if unit == 1:
        return Reading(float(digits), 0.5 * 10.0**-decimals if decimals else 0.0)
    return Reading(float(digits) * unit, 0.5 * unit * 10.0 ** -max(decimals, 2))


def _arguments(text: str) -> dict[str, Any]:
    """The options the engine started with: what `non-default args` states, and what the config line ended up as."""
    found: dict[str, Any] = {}
    if match := re.search(r"with config: (.*)", text):
        for name, value in _ARGUMENT.findall(match[1]):
            _take(found, "max_model_len" if name == "max_seq_len" else name, value)
        if match := re.search(r"speculative_config=SpeculativeConfig\((.*?)\)", text):
            found["speculative"] = _speculative(match[1])
    if match := re.search(r"non-default args: (\{.*\})", text):
        try:
            stated = ast.literal_eval(match[1])
        except (ValueError, SyntaxError):
            stated = {}
        for name, value in stated.items():
            if name in _KNOWN or name == "model":
                found[name] = value
            elif name == "speculative_config" and isinstance(value, dict):
                found["speculative"] = {k: value[k] for k in ("method", "num_speculative_tokens") if k in value}
    return found


def _take(found: dict[str, Any], name: str, text: str) -> None:
    value = text.strip("'\"")
    if name == "model":
        found.setdefault(name, value)
    elif name in _KNOWN and value not in ("None", "auto"):
        read: Callable[[str], Any] = _KNOWN[name]
        try:
            found.setdefault(name, value == "True" if read is bool else read(value))
        except ValueError:
            return


def _speculative(text: str) -> dict[str, Any]:
    method = re.search(r"method='([^']*)'", text)
    tokens = re.search(r"num_(?:speculative|spec)_tokens=(\d+)", text)
    return {
        **({"method": method[1]} if method else {}),
        **({"num_speculative_tokens": int(tokens[1])} if tokens else {}),
    }
