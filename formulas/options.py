"""The engine's own options, by the engine's own names: one table for command lines, seat files and serve commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError

from .deployment import Deployment, parse_capability, parse_version
from .engine_options import ENGINE_FLAGS, HARMLESS, is_engine_switch
from .errors import BadInput
from .units import parse_size


class Option(NamedTuple):
    """One engine option: its flags, the deployment field it sets, how its text is read, and what it is for."""

    flags: tuple[str, ...]
    field: str
    read: Callable[[str], Any]
    help: str
    is_switch: bool = False


def _length(text: str) -> int:
    """A context length; `auto` and `-1` are the longest that fits, kept as -1."""
    if text in ("auto", "-1"):
        return -1
    if (count := _count(text)) < 1:
        raise ValueError("at least 1")
    return count


def _count(text: str) -> int:
    """A number as the engine takes it: 262144, or 256k (thousands), or 256K (1024)."""
    scale = {"k": 1000, "m": 10**6, "K": 1024, "M": 2**20}.get(text[-1:], 1)
    return int(float(text.rstrip("kKmM")) * scale)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _limits(text: str) -> dict[str, int]:
    """`{"image": 2}` or the older `image=2,video=0`."""
    if text.lstrip().startswith("{"):
        return {str(k): int(v) for k, v in _object(text).items()}
    return {name.strip(): int(count) for name, _, count in (part.partition("=") for part in text.split(","))}


def _engine(text: str) -> str:
    """The version in `vllm==0.33.0` or `0.33.0`. Other engines are not modelled and say so."""
    name, _, version = text.rpartition("==")
    if name not in ("", "vllm"):
        raise ValueError(f"only vllm is modelled, got {name}")
    parse_version(version)
    return version.removeprefix("v")


def _capability(text: str) -> str:
    parse_capability(text)
    return text


def _names(text: str) -> frozenset[str]:
    return frozenset(part.strip().replace("-", "_") for part in text.split(",") if part.strip())


def _dtype(text: str) -> str:
    if text not in ("auto", "half", "float16", "bfloat16", "float", "float32"):
        raise ValueError("not one of the engine's")
    return text


def _table_place(text: str) -> str:
    if text not in ("gpu", "host"):
        raise ValueError("expected gpu or host")
    return text


def _on(text: str) -> bool:
    return text.lower() in ("true", "1", "yes", "on")


OPTIONS: tuple[Option, ...] = (
    Option(("--tensor-parallel-size", "--tp", "-tp"), "tp", int, "cards that share each layer"),
    Option(("--pipeline-parallel-size", "--pp", "-pp"), "pp", int, "stages of layers"),
    Option(("--data-parallel-size", "--dp", "-dp"), "dp", int, "copies of the attention; experts are split over them"),
    Option(("--decode-context-parallel-size", "--dcp", "-dcp"), "dcp", int, "ranks that share one request's KV cache"),
    Option(("--enable-expert-parallel", "-ep"), "expert_parallel", _on, "whole experts on each rank", is_switch=True),
    Option(("--max-model-len",), "max_model_len", _length, "longest context, or auto: what fits [the model's]"),
    Option(("--max-num-seqs",), "max_num_seqs", int, "sequences in a step [the engine's, by card]"),
    Option(("--max-num-batched-tokens",), "max_num_batched_tokens", _count, "tokens in a step [the engine's, by card]"),
    Option(("--gpu-memory-utilization",), "gpu_memory_utilization", float, "share of the card [the engine's]"),
    Option(("--kv-cache-dtype",), "kv_cache_dtype", str, "auto, bfloat16, fp8, fp8_e4m3, fp8_ds_mla, nvfp4..."),
    Option(("--kv-cache-memory-bytes",), "kv_cache_memory_bytes", parse_size, "give the KV cache exactly this"),
    Option(("--block-size",), "block_size", int, "tokens in a KV block [the engine's]"),
    Option(("--enforce-eager",), "enforce_eager", _on, "no CUDA graphs, no compilation", is_switch=True),
    Option(("--no-enable-prefix-caching",), "enable_prefix_caching", lambda text: not _on(text), "no prefix caching",
           is_switch=True),
    Option(("--no-async-scheduling",), "async_scheduling", lambda text: not _on(text), "one batch in flight",
           is_switch=True),
    Option(("--language-model-only",), "language_model_only", _on, "skip vision and audio", is_switch=True),
    Option(("--limit-mm-per-prompt",), "limit_mm_per_prompt", _limits, "images, videos... in a prompt, as JSON"),
    Option(("--mm-encoder-tp-mode",), "mm_encoder_tp_mode", str, "weights: shard the encoder; data: a copy a rank"),
    Option(("--attention-backend",), "attention_backend", str, "force one attention backend"),
    Option(("--moe-backend",), "moe_backend", str, "force one MoE backend"),
    Option(("--linear-backend",), "linear_backend", str, "force one linear backend"),
    Option(("--quantization", "-q"), "quantization", str, "override the checkpoint's quantisation method"),
    Option(("--dtype",), "dtype", _dtype, "auto, bfloat16, float16, float32"),
    Option(("--hf-overrides",), "hf_overrides", _object, "config.json fields to override, as JSON"),
    Option(("--compilation-config", "-cc"), "compilation_config", _object, "as JSON: cudagraph_mode, mode"),
    Option(("--mtp",), "mtp", int, "speculative tokens from the checkpoint's own drafter, 0 = off"),
    Option(("--ple",), "ple", _table_place, "where the n-gram table lives: gpu or host [that engine version's]"),
    Option(("--capability",), "capability", _capability, "compute capability such as 12.0 [the card's]"),
    Option(("--engine",), "version", _engine, "engine and version, vllm==0.33.0"),
    Option(("--without",), "without", _names, "optional libraries absent: flashinfer,deep_gemm,custom_all_reduce"),
)  # fmt: skip

_BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
_SPECULATIVE = ("--speculative-config", "-sc")
# Switches that say what is the default where it is on, or that say it another way than an option above.
_SAYING: Mapping[str, tuple[str, Any]] = {
    "--enable-prefix-caching": ("enable_prefix_caching", True),
    "--async-scheduling": ("async_scheduling", True),
    "--disable-custom-all-reduce": ("without", frozenset({"custom_all_reduce"})),
}


def read_option(flag: str, text: str) -> tuple[str, Any]:
    """(field, value) of one option. Raises BadInput with the flag in the text."""
    option = _BY_FLAG[flag]
    try:
        return option.field, option.read(text)
    except (ValueError, KeyError) as error:
        raise BadInput(f"{flag} {text!r}: expected {option.help}, got something else ({error})") from None


def deployment_from(values: Mapping[str, Any]) -> Deployment:
    """A deployment with these fields; None means not given. Raises BadInput."""
    try:
        return Deployment(**{field: value for field, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "deployment"
        raise BadInput(f"{where}: {first['msg']}, got {first['input']!r:.80}") from None


class Arguments(NamedTuple):
    """Command line words, sorted out."""

    fields: dict[str, Any]  # what the options set
    reasons: tuple[str, ...]  # one for each option that is not modelled: it is never ignored
    words: tuple[str, ...]  # what is no option and no option's value


def parse_arguments(given: Iterable[str]) -> Arguments:
    """What would follow `vllm serve`, sorted out. Raises BadInput for an option the engine does not have, one that
    lacks its value, and a value it does not take."""
    fields: dict[str, Any] = {}
    reasons: list[str] = []
    words: list[str] = []
    queue = list(given)
    while queue:
        word = queue.pop(0)
        if word == "-" or not word.startswith("-"):
            words.append(word)
            continue
        flag, eq, text = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in _SAYING:
            field, value = _SAYING[flag]
            fields[field] = value | fields.get(field, frozenset()) if field == "without" else value
            continue
        option = _BY_FLAG.get(flag)
        is_switch = option.is_switch if option else is_engine_switch(flag)
        if is_switch is None:
            raise BadInput(_unheard_of(flag))
        if not eq:
            if not is_switch and (not queue or _is_flag(queue[0])):
                raise BadInput(f"{flag}: expected a value, got none")
            text = "true" if is_switch else queue.pop(0)
        if option:
            field, value = read_option(option.flags[0], text)
            fields[field] = value
        elif flag in _SPECULATIVE:
            fields["mtp"], more = speculative(text)
            reasons += more
        elif flag not in HARMLESS:
            reasons.append(f"{flag} is not modelled")
    return Arguments(fields, tuple(reasons), tuple(words))


def _is_flag(text: str) -> bool:
    """Whether a word is an option: it starts with a dash and is no number such as -1."""
    return text.startswith("-") and not text[1:2].isdigit()


def _unheard_of(flag: str) -> str:
    near = get_close_matches(flag, [*_BY_FLAG, *_SAYING, *sorted(ENGINE_FLAGS)], n=1, cutoff=0.7)
    return f"{flag}: expected an option of vllm, got none of that name" + (f"; is {near[0]} meant?" if near else "")


def speculative(text: str) -> tuple[int, tuple[str, ...]]:
    """Draft tokens of the checkpoint's own drafter in a `--speculative-config`, and why another one is not modelled."""
    try:
        config = _object(text)
        depth = int(config.get("num_speculative_tokens", 0))
    except (ValueError, TypeError) as error:
        raise BadInput(f"--speculative-config {text!r:.80}: expected a JSON object, got {error}") from None
    method = str(config.get("method", ""))
    own = not config.get("model") and (method == "mtp" or method.endswith("_mtp"))
    reason = () if own else (f"speculative method {method or 'draft model'} is not modelled",)
    return depth, reason


def serve_arguments(deployment: Deployment) -> list[str]:
    """The words after `vllm serve MODEL` that start this deployment; only what differs from the engine's defaults."""
    words: list[str] = []
    plain = Deployment()
    for option in OPTIONS:
        value = getattr(deployment, option.field)
        if option.field in ("mtp", "ple", "capability", "version", "without") or value == getattr(plain, option.field):
            continue
        words.append(option.flags[0])
        if not option.is_switch:
            words.append(json.dumps(dict(value)) if isinstance(value, Mapping) else str(value))
    if deployment.mtp:
        config = {"method": "mtp", "num_speculative_tokens": deployment.mtp}
        words += ["--speculative-config", json.dumps(config)]
    if deployment.ple != "default":
        words += ["--engram-config", json.dumps({"cpu_offload": deployment.ple == "host"})]
    return words
