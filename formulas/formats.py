"""Which weight a quantization config stores in which scheme: the answer of config.json, where no header was read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any, NamedTuple

from .schemes import PLAIN, Kind, Scheme, Weight
from .tensors import TensorGroup, fold

# Built by the engine without the quantization config, or never stored quantised by any exporter seen so far.
_NEVER = re.compile(
    r"(^|\.)(embed_tokens|embeddings|word_embeddings|embed_tokens_per_layer|per_layer_\w+|conv1d|in_proj_[ab]|in_proj_ba|"
    r"\w*gate|router|router\.\w+|router\.layer|shared_expert_gate|weights_proj|ngram_embedding|index_qk_proj|"
    r"fc_embedding|fc_hidden|eh_proj|fc|input_mix_weight_\w+|block_inject_weight|position_embedding\w*)$"
)
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "")


class Formats(NamedTuple):
    """A quantization config as a rule: the scheme of a weight, and what could not be read from it."""

    scheme: Callable[[Weight], Scheme]
    unmodelled: tuple[str, ...] = ()


def assign(weights: Iterable[Weight], method: str | None, config: Mapping[str, Any], ignore: Iterable[str]) -> tuple[
    list[Weight], tuple[str, ...]
]:  # fmt: skip
    """The weights with the schemes a quantization config gives them, and why any of them is not known."""
    formats = _read(method, config)
    skipped = mentions(ignore) if (method or "").startswith("awq") else matcher(ignore)
    found = []
    for weight in weights:
        tower = method == "fp8" and weight.stack == "vision" and _FP8_TOWER.match(weight.name)
        quantised = tower or (is_matrix(weight) and not skipped(weight))
        found.append(weight._replace(scheme=formats.scheme(weight)) if quantised else weight)
    return found, formats.unmodelled


def is_matrix(weight: Weight) -> bool:
    """Whether an engine would build this weight as a linear layer that can be quantised."""
    return len(weight.shape) == 2 and not _NEVER.search(weight.name) and weight.stack in ("main", "mtp")


# Pixtral's tower is built with the model's FP8 config, whose ignore list vllm 0.33.0 compares with whole names only
# (quantization/fp8.py, ignored_layers_match_mode): an entry for the tower does not spare its layers.
_FP8_TOWER = re.compile(r"^(attention\.[qkvo]|feed_forward\.(gate|up|down))_proj$|^multi_modal_projector\.linear_\d$")


def spellings(weight: Weight) -> list[str]:
    """The names under which ignore lists and layer tables mention this weight's module."""
    below = weight.name if weight.layer is None else f"layers.{weight.layer}.{weight.name}"
    if weight.experts:
        below = below.replace("experts.", "experts.0.", 1)
    if weight.stack == "mtp":
        return [f"mtp.{below}", f"model.mtp.{below}", below]
    return [f"{prefix}{below}" for prefix in _PREFIXES]


def matcher(entries: Iterable[str]) -> Callable[[Weight], bool]:
    """Whether a weight is named by any entry: a module or an ancestor, a wildcard, or `re:` and a pattern."""
    exact: set[str] = set()
    patterns: list[str] = []
    wildcards: list[str] = []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(entry[3:])
        elif any(c in entry for c in "*?["):
            wildcards.append(translate(entry))
        else:
            exact.add(entry)
    patterns += ["|".join(dict.fromkeys(wildcards))] if wildcards else []
    compiled = [re.compile(p) for p in dict.fromkeys(patterns)]
    # A bare word names a module anywhere (AWQ: "visual", "gate").
    words = {entry for entry in exact if "." not in entry and not entry.isdigit()}

    def matches(weight: Weight) -> bool:
        for name in spellings(weight):
            if any(pattern.match(name) for pattern in compiled):
                return True
            while name:
                if name in exact:
                    return True
                name = name.rpartition(".")[0]
        return not words.isdisjoint(weight.name.split("."))

    return matches


_MERGED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
           "up_proj": "gate_up_proj"}  # fmt: skip


def mentions(entries: Iterable[str]) -> Callable[[Weight], bool]:
    """Whether an entry occurs anywhere in a weight's name, or in that of the matrix it is merged into: AWQ's rule
    (vllm 0.33.0 quantization/utils/quant_utils.py is_layer_skipped, match_mode "substring")."""
    words = tuple(entries)

    def matches(weight: Weight) -> bool:
        path, _, leaf = weight.name.rpartition(".")
        merged = weight._replace(name=f"{path}.{_MERGED.get(leaf, leaf)}")
        return any(word in name for name in (*spellings(weight)[:2], *spellings(merged)[:2]) for word in words)

    return matches


def _read(method: str | None, config: Mapping[str, Any]) -> Formats:
    if method is None:
        return Formats(lambda weight: PLAIN)
    reader = _READERS.get(method.lower())
    if reader is None:
        return Formats(lambda weight: PLAIN, (f"quantization {method}: what it stores is not known without a header",))
    return reader(config)


def _everywhere(scheme: Scheme) -> Formats:
    return Formats(lambda weight: scheme)


def _but_the_head(scheme: Scheme) -> Formats:
    """Engines give these methods to linear layers and experts only."""
    return Formats(lambda weight: PLAIN if weight.name == "lm_head" else scheme)


def _fp8(config: Mapping[str, Any]) -> Formats:
    static = config.get("activation_scheme") == "static"
    block = config.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2:
        rows, columns = (_whole(size, 128) for size in block)
        return _but_the_head(Scheme(Kind.FP8_BLOCK, block=(rows, columns), method="fp8"))
    return _but_the_head(Scheme(Kind.FP8_TENSOR, inputs=static, method="fp8"))


_MODELOPT = {
    "NVFP4": Scheme(Kind.NVFP4, group=16, inputs=True, method="modelopt"),
    "W4A16_NVFP4": Scheme(Kind.NVFP4, group=16, method="modelopt"),
    "FP8": Scheme(Kind.FP8_TENSOR, inputs=True, method="modelopt"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(Kind.FP8_CHANNEL, method="modelopt"),
    "FP8_PB_WO": Scheme(Kind.FP8_BLOCK, method="modelopt"),
    "FP8_BLOCK": Scheme(Kind.FP8_BLOCK, method="modelopt"),
    "MXFP8": Scheme(Kind.MXFP8, group=32, method="modelopt"),
}


def _modelopt(config: Mapping[str, Any]) -> Formats:
    inner = config.get("quantization")
    stated = inner if isinstance(inner, Mapping) else config
    algo = str(stated.get("quant_algo") or config.get("quant_algo") or "").upper()
    layers = stated.get("quantized_layers")
    if algo == "MIXED_PRECISION" and isinstance(layers, Mapping):
        return _by_layer(layers)
    if algo in _MODELOPT:
        return _everywhere(_MODELOPT[algo])
    groups = config.get("config_groups")
    if not algo and isinstance(groups, Mapping):
        return _compressed(config)
    return Formats(lambda weight: PLAIN, (f"modelopt {algo or 'without quant_algo'}: not known without a header",))


def compact_layers(layers: Mapping[str, Any]) -> dict[str, str]:
    """{name pattern: algorithm} of modelopt's table of quantised layers, which names every expert of every layer.
    Expert numbers are dropped (`experts.0` stands for all), layer numbers folded: 200,000 entries become a dozen."""
    stated = {
        _EXPERT_NUMBER.sub("experts.0.", str(name)): str(how.get("quant_algo"))
        for name, how in layers.items()
        if isinstance(how, Mapping)
    }
    return {group.pattern: group.dtype for group in fold((name, algo, ()) for name, algo in stated.items())}


_EXPERT_NUMBER = re.compile(r"experts\.\d+\.")


def _by_layer(layers: Mapping[str, Any]) -> Formats:
    """The scheme of each layer from modelopt's table, as found or compacted."""
    compacted = {**compact_layers(layers), **{name: how for name, how in layers.items() if isinstance(how, str)}}
    algorithms = {
        name: algo.upper()
        for pattern, algo in compacted.items()
        for name in TensorGroup(pattern, "", ()).names()
    }

    def scheme(weight: Weight) -> Scheme:
        for name in spellings(weight):
            parts = name.split(".")
            for end in range(len(parts), 0, -1):
                if (algo := algorithms.get(".".join(parts[:end]))) is not None:
                    return _MODELOPT.get(algo, PLAIN)
        return PLAIN

    unknown = sorted({algo for algo in algorithms.values() if algo not in _MODELOPT})
    return Formats(scheme, tuple(f"modelopt {algo}: not known without a header" for algo in unknown))


def layer_scheme(config: Mapping[str, Any], weight: Weight) -> Scheme | None:
    """What a mixed-precision modelopt config states for one weight; None where it has no table of layers."""
    inner = config.get("quantization")
    layers = (inner if isinstance(inner, Mapping) else config).get("quantized_layers")
    return _by_layer(layers).scheme(weight) if isinstance(layers, Mapping) else None


def _compressed(config: Mapping[str, Any]) -> Formats:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return Formats(lambda weight: PLAIN, ("compressed-tensors without config_groups: not known without a header",))
    rules: list[tuple[Callable[[Weight], bool], Scheme]] = []
    unmodelled = []
    for group in groups.values():
        stated = group if isinstance(group, Mapping) else {"weights": {}}
        scheme = _compressed_scheme(stated)
        if scheme is None:
            unmodelled.append(f"compressed-tensors weights {stated.get('weights')}: not known without a header")
            continue
        named = stated.get("targets")
        targets = [str(t) for t in named] if isinstance(named, list) else ["Linear"]
        everything = "Linear" in targets
        rules.append(((lambda weight: True) if everything else matcher(targets), scheme))

    def pick(weight: Weight) -> Scheme:
        return next((scheme for matches, scheme in rules if matches(weight)), PLAIN)

    return Formats(pick, tuple(unmodelled))


def _compressed_scheme(group: Mapping[str, Any]) -> Scheme | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return PLAIN
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size = _whole(weights.get("group_size"), 0)
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") in (False, "local")
    method = "compressed-tensors"
    if kind == "float" and bits == 8:
        by = {"channel": Kind.FP8_CHANNEL, "tensor": Kind.FP8_TENSOR, "block": Kind.FP8_BLOCK}.get(str(strategy))
        if size == 32:
            return Scheme(Kind.MXFP8, group=32, method=method)
        return None if by is None else Scheme(by, inputs=static, method=method)
    if kind == "float" and bits == 4:
        four = Kind.NVFP4 if size == 16 else Kind.MXFP4
        return Scheme(four, group=size, inputs=static, method=method)
    if kind == "int" and bits == 8 and isinstance(inputs, Mapping):
        return Scheme(Kind.INT8_CHANNEL, inputs=static, method=method)
    if kind == "int" and bits in (2, 4, 8):
        return Scheme(Kind.INT, bits=bits, group=max(size, 0), zeros=not weights.get("symmetric", True), method=method)
    return None


def _whole(value: object, default: int) -> int:
    """A number a config states; the default where it states none, zero, or something else."""
    return value if type(value) is int and value else default


def _awq(config: Mapping[str, Any]) -> Formats:
    bits = _whole(config.get("bits") or config.get("w_bit"), 4)
    size = _whole(config.get("group_size") or config.get("q_group_size"), 128)
    scheme = Scheme(Kind.INT, bits=bits, group=max(size, 0), zeros=True, method="awq")
    return _but_the_head(scheme)


def _gptq(config: Mapping[str, Any]) -> Formats:
    scheme = Scheme(
        Kind.INT, bits=_whole(config.get("bits"), 4), group=max(_whole(config.get("group_size"), 128), 0), zeros=True,
        method="gptq",
    )  # fmt: skip
    head = scheme if config.get("lm_head") else PLAIN
    return Formats(lambda weight: head if weight.name == "lm_head" else scheme)


def _autoround(config: Mapping[str, Any]) -> Formats:
    """Intel's AutoRound packs like GPTQ or AWQ; extra_config names the layers that differ."""
    packing = str(config.get("packing_format") or "auto_round:auto_gptq")
    plain = (_awq if "awq" in packing else _gptq)({**config, "lm_head": False})
    extra = config.get("extra_config")
    own = {str(k): v for k, v in extra.items() if isinstance(v, Mapping)} if isinstance(extra, Mapping) else {}
    kept = [k for k, v in own.items() if _whole(v.get("bits"), 4) >= 16]
    wide = matcher([f"re:{k}" if any(c in k for c in "*|()") else k for k in kept])
    return Formats(lambda weight: PLAIN if wide(weight) else plain.scheme(weight))


def _mxfp4(config: Mapping[str, Any]) -> Formats:
    scheme = Scheme(Kind.MXFP4, group=32, method="mxfp4")
    return Formats(lambda weight: scheme if weight.experts else PLAIN)


def _quark(config: Mapping[str, Any]) -> Formats:
    stated = config.get("global_quant_config")
    weight = stated.get("weight") if isinstance(stated, Mapping) else None
    if isinstance(weight, Mapping):
        dtype, scheme = str(weight.get("dtype")), str(weight.get("qscheme"))
        if dtype == "fp4":
            return _but_the_head(Scheme(Kind.MXFP4, group=32, method="quark"))
        if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
            kind = Kind.FP8_TENSOR if scheme == "per_tensor" else Kind.FP8_CHANNEL
            return _but_the_head(Scheme(kind, inputs=scheme == "per_tensor", method="quark"))
    return Formats(lambda weight: PLAIN, ("quark: what it stores is not known without a header",))


_READERS: dict[str, Callable[[Mapping[str, Any]], Formats]] = {
    "fp8": _fp8, "modelopt": _modelopt, "modelopt_fp4": _modelopt, "modelopt_mixed": _modelopt, "nvfp4": _modelopt,
    "compressed-tensors": _compressed, "awq": _awq, "awq_marlin": _awq, "gptq": _gptq, "gptq_marlin": _gptq,
    "auto-round": _autoround, "auto_round": _autoround, "intel/auto-round": _autoround, "inc": _autoround,
    "mxfp4": _mxfp4, "gpt_oss_mxfp4": _mxfp4, "quark": _quark,
}  # fmt: skip
