"""Gates that ask whether an engine could load what the headers list: scales, fused layers, the ignore list.

What is stored comes from the headers, what the engine will build from the quantisation config; a weight on which the
two differ is found only after the download otherwise. Source: vllm 0.33.0 quantization/modelopt.py, compressed_tensors,
fp8.py, and the `packed_modules_mapping` of its models.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from formulas.deployment import Deployment
from formulas.facts import Facts, Role, Stack
from formulas.formats import assign, is_matrix, matcher
from formulas.ngram import table_format
from formulas.roles import classify, classify_family
from formulas.schemes import PLAIN, Kind, Weight, read_weights
from formulas.tensors import TensorGroup, family
from formulas.units import human

from .chain import Criteria, Evidence, Gate, Known
from .findings import Answer, Source, grouped, note, passed, reject
from .formats import PLAIN as PLAIN_FORMATS


def _answer(stack: str, criteria: Criteria) -> Callable[..., Answer]:
    """Whether a stack that cannot load rejects: the MTP head does where the policy requires one."""
    denied = criteria.policy.unloadable == "deny" and (stack != Stack.MTP or criteria.policy.mtp == "required")
    return reject if denied else note


# What the config leaves out, against what is stored

# The engine finds the unquantised layers of these in the headers itself, where the config does not list them.
_READ_BY_ENGINE = {"awq", "awq_marlin", "gptq", "gptq_marlin"}
_FLOATS = {"BF16", "F16", "F32"}


def unlisted(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Weights stored in a plain dtype that the config would have quantised, and quantised ones that it leaves out."""
    stored, quantization = linear_layers(known.facts), known.facts.quantization if known.facts else None
    if not stored or quantization is None or quantization.method is None:
        return
    if quantization.method in _READ_BY_ENGINE and not quantization.ignore:
        return
    plain = [weight._replace(scheme=PLAIN) for weight in stored]
    built, unmodelled = assign(plain, quantization.method, quantization.config, quantization.ignore)
    if unmodelled:
        return
    left_out = matcher(quantization.ignore)
    bare: defaultdict[str, list[str]] = defaultdict(list)
    scaled: defaultdict[str, list[str]] = defaultdict(list)
    for weight, wanted in zip(stored, built, strict=True):
        if weight.scheme.kind is Kind.PLAIN and wanted.scheme.kind is not Kind.PLAIN and weight.dtype in _FLOATS:
            bare[weight.stack].append(module_name(weight))
        elif weight.scheme.kind is not Kind.PLAIN and left_out(weight):
            scaled[weight.stack].append(module_name(weight))
    for stack, modules in bare.items():
        found, what = grouped(modules), "MTP modules" if stack == Stack.MTP else "modules"
        yield _answer(stack, criteria)(
            f"{found.number} {what} are stored unquantised and are not on the ignore list ({found}): the engine "
            "builds them quantised and finds no scales", list(found.patterns), "on the ignore list",
        )  # fmt: skip
    for stack, modules in scaled.items():
        found, what = grouped(modules), "MTP modules" if stack == Stack.MTP else "modules"
        yield _answer(stack, criteria)(
            f"{found.number} {what} are on the ignore list and stored quantised ({found}): the engine builds "
            "them unquantised and has no place for their scales", list(found.patterns), "not on the ignore list",
        )  # fmt: skip
    if not bare and not scaled:
        yield passed("what the quantisation config leaves out is what is stored unquantised", len(quantization.ignore))


def linear_layers(facts: Facts | None) -> Sequence[Weight]:
    """The linear layers as stored, one expert standing for all; none where tensors are not known.

    The output layer and the PLE table have gates and rules of their own and are left out.
    """
    if facts is None or facts.tensor_groups is None:
        return ()
    return _linear_layers(tuple(facts.tensor_groups), len(facts.geometry.layers) if facts.geometry else 0)


@functools.lru_cache(maxsize=32)  # several gates ask it of one checkpoint
def _linear_layers(groups: tuple[TensorGroup, ...], layers: int) -> tuple[Weight, ...]:
    weights = read_weights(groups, layers or None)
    return tuple(weight for weight in weights if is_matrix(weight) and _role(weight) not in _APART)


_APART = {Role.LM_HEAD, Role.PLE, Role.EMBED}


def _role(weight: Weight) -> Role:
    return classify_family(family(weight.name))[1]


def module_name(weight: Weight) -> str:
    """The module's name below the prefixes in which checkpoints differ; one expert stands for all."""
    below = weight.name if weight.layer is None else f"layers.{weight.layer}.{weight.name}"
    return f"mtp.{below}" if weight.stack == Stack.MTP else below


# Layers the engine fuses

FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Siblings an engine holds as one parameter, so that they have one format. Source: vllm 0.33.0, the models'
`packed_modules_mapping`."""
EXPERTS: tuple[tuple[str, ...], ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))
"""The same for routed experts: one kernel runs all of them. Source: vllm 0.33.0 fused_moe/layer.py."""


def fused(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Fused layers of which one part is quantised, or on the ignore list, and another is not."""
    stored, quantization = linear_layers(known.facts), known.facts.quantization if known.facts else None
    listed = matcher(quantization.ignore if quantization and quantization.method else ())
    beside: defaultdict[tuple[str, int | None, str], dict[str, Weight]] = defaultdict(dict)
    for weight in stored:
        parent, _, leaf = weight.name.rpartition(".")
        beside[weight.stack, weight.layer, parent][leaf] = weight
    halves: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    whole = 0
    for members in beside.values():
        for parts in EXPERTS if any(weight.experts for weight in members.values()) else FUSED:
            present = [members[part] for part in parts if part in members]
            forms = [(_form(weight), listed(weight)) for weight in present]
            if len(set(forms)) > 1:
                halves[present[0].stack, _half(present, forms)].append(module_name(present[0]))
            elif len(present) > 1 and present[0].scheme.kind is not Kind.PLAIN:
                whole += 1
    for (stack, how), modules in halves.items():
        found = grouped(modules)
        yield _answer(stack, criteria)(
            f"{found.number} fused layers are half quantised, {how} ({found}): an engine holds their parts as one and "
            "refuses two formats", list(found.patterns), "one format",
        )  # fmt: skip
    if whole and not halves:
        yield passed(f"the parts of {whole} fused layers have one format each", whole)


def _form(weight: Weight) -> str:
    """How a part is stored; with a scale for its inputs it is run by another kernel than without."""
    return f"{weight.scheme.kind} with input scale" if weight.scheme.inputs else weight.scheme.kind


def _half(present: Sequence[Weight], forms: Sequence[tuple[str, bool]]) -> str:
    """Which part is what, in the fewest words: the formats where they differ, else who is on the ignore list."""
    parts = [weight.name.rpartition(".")[2] for weight in present]
    if len({form for form, _ in forms}) > 1:
        return ", ".join(f"{part} {form}" for part, (form, _) in zip(parts, forms, strict=True))
    named = [part for part, (_, listed) in zip(parts, forms, strict=True) if listed]
    rest = [part for part, (_, listed) in zip(parts, forms, strict=True) if not listed]
    return f"{' and '.join(named)} on the ignore list, {' and '.join(rest)} not"


# Scales

_LEAF = re.compile(
    r"^(?P<module>.+?)[._](?P<leaf>weight_packed|weight_scale_inv|weight_scale_2|weight_scale|weight_global_scale|"
    r"weight|input_scale|input_global_scale|qweight|qzeros|scales|g_idx|blocks|scale_inv|scale|SCB|weight\.absmax)$"
)
_FP8 = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_BYTES = {"U8", "I8", "F4", "U32"}
_ONE_SCALE = ("weight_scale", "weight_scale_inv", "scale", "scale_inv")
_UNEVEN = ("input_scale", "input_global_scale", "qzeros", "g_idx")  # needed by all of a family, or by none


class Module(NamedTuple):
    """A family of modules: their tensor groups by parameter."""

    family: str
    groups: dict[str, list[TensorGroup]]

    def packed(self) -> tuple[str, list[TensorGroup]] | None:
        """The parameter that holds the values, and its groups; None where nothing is packed."""
        for leaf in ("qweight", "blocks", "weight_packed", "weight", ""):
            if leaf == "" and not self.family.endswith("_proj"):
                continue  # a mask or a state kept in bytes; packed experts are named so
            held = [g for g in self.groups.get(leaf, []) if leaf in ("qweight", "blocks", "weight_packed")
                    or g.dtype in _FP8 | _BYTES]  # fmt: skip
            if held:
                return leaf, held
        return None

    def needs(self, leaf: str) -> list[tuple[str, ...]]:
        """The parameters without which the values mean nothing; of each tuple one is enough."""
        dtypes = {group.dtype for group in self.groups[leaf]}
        if leaf in ("qweight", "blocks"):
            needed: list[tuple[str, ...]] = [("scales",)]
        elif leaf == "weight_packed":
            needed = [("weight_scale",), *([("weight_global_scale",)] if self._is_nvfp4() else [])]
        elif dtypes & _FP8:
            needed = [_ONE_SCALE]
        else:
            needed = [(*_ONE_SCALE, "scales", "SCB", "weight.absmax")]
            needed += [("weight_scale_2",)] if self._is_nvfp4() else []
        return [*needed, *((leaf,) for leaf in _UNEVEN if leaf in self.groups)]

    def _is_nvfp4(self) -> bool:
        """Whether there is a second scale: of packed formats the one with E4M3 scales a group has it."""
        return any(group.dtype == "F8_E4M3" for group in self.groups.get("weight_scale", []))


NOTHING = Module("", {})


def scales(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Packed weights without the scales that give their values a size."""
    facts = known.facts
    if facts is None or facts.tensor_groups is None:
        return
    lacking: defaultdict[tuple[Stack, str], list[str]] = defaultdict(list)
    families = _families(facts.tensor_groups)
    whole = 0
    for module in families.values():
        if (packed := module.packed()) is None:
            continue
        leaf, held = packed
        above = families.get(module.family.rpartition(".")[0], NOTHING).groups  # one scale for all parts of a table
        for needed in module.needs(leaf):
            if any(name in above for name in needed):
                continue
            missing = _missing(held, [group for name in needed for group in module.groups.get(name, [])])
            if missing:
                lacking[classify(missing[0])[0], needed[0]] += missing
        whole += sum(group.copies for group in held)
    for (stack, leaf), modules in lacking.items():
        found = grouped(modules)
        quantised = facts.quantization is not None and facts.quantization.method is not None
        yield (_answer(stack, criteria) if quantised else note)(
            f"{found.number} packed weights have no {leaf} ({found}): their values have no size; the loader stops or "
            "reads noise", list(found.patterns), leaf,
        )  # fmt: skip
    if whole and not lacking:
        yield passed(f"all {whole} packed weights have their scales", whole)


def _families(groups: Iterable[TensorGroup]) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for group in groups:
        match = _LEAF.match(group.pattern)
        module, leaf = (match["module"], match["leaf"]) if match else (group.pattern, "")
        name = re.sub(r"\{[0-9,\-]+\}", "", module)
        found.setdefault(name, Module(name, {})).groups.setdefault(leaf, []).append(group)
    return found


def _missing(held: Sequence[TensorGroup], companions: Sequence[TensorGroup]) -> list[str]:
    """The modules of `held` without a companion. Patterns that agree are not spelled out."""
    there = {_stem(group.pattern) for group in companions}
    rest = [group for group in held if _stem(group.pattern) not in there]
    if not rest:
        return []
    names = {_stem(name) for group in companions for name in group.names()}
    return [stem for group in rest for name in group.names() if (stem := _stem(name)) not in names]


def _stem(name: str) -> str:
    match = _LEAF.match(name)
    return match["module"] if match else name


# The n-gram table

_TABLE_DTYPES = {"float8_e4m3fn": "fp8", "nvfp4": "nvfp4"}
_MISSPELT = re.compile(r"(?:^|\.)ngram_embeddings?\.shards?[._][0-9{]")
_SHARD = re.compile(r"(?:^|\.)ngram_embeddings?\.shard_[0-9{]")


def packed_table(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """A table whose parts are named otherwise than the engine asks for them, or packed as it does not build it.

    Source: vllm 0.33.0 models/qwen4_exp/common/ngram_embedding.py (shard_{k}.weight, from_quant_config).
    """
    facts = known.facts
    if facts is None or facts.tensor_groups is None or facts.ple is None or facts.ple.kind != "ngram":
        return
    answer = reject if criteria.policy.unloadable == "deny" else note
    misspelt = [group for group in facts.tensor_groups if _MISSPELT.search(group.pattern)]
    if misspelt and not any(_SHARD.search(group.pattern) for group in facts.tensor_groups):
        found = grouped(name for group in misspelt for name in group.names())
        yield answer(
            f"the PLE table's {found.number} tensors are named {found}: the engine asks for shard_N and leaves the "
            "table unset; they have to be renamed", list(found.patterns), "shard_N",
        )  # fmt: skip
    stored, declared = (facts.ple.format or "").partition("_")[0], facts.ple.declared_dtype
    if declared is not None and declared not in _TABLE_DTYPES:
        yield answer(f"config.json declares ple_embedding_dtype {declared}: the engine knows "
                     f"{' and '.join(_TABLE_DTYPES)} and stops", declared, list(_TABLE_DTYPES))  # fmt: skip
        return
    built = built_table(facts)
    if stored in ("", built) or (stored == "fp8" and built == "bf16") or (built == "bf16" and stored in _PLAIN):
        return  # the FP8 table nobody declared is the gate `table`'s
    if stored.startswith("nvfp4") and built == "nvfp4":
        return
    because = f"config.json declares {declared}" if declared else "config.json does not declare otherwise"
    advice = "declare nvfp4 in text_config" if stored.startswith("nvfp4") else "it needs an engine that is patched"
    yield answer(f"the PLE table is stored as {stored} ({human(facts.ple.table_bytes)}), the engine builds it in "
                 f"{built}, since {because}: the shapes do not fit; {advice}", stored, built)  # fmt: skip


_PLAIN = set(PLAIN_FORMATS.values())


def built_table(facts: Facts) -> str:
    """fp8 | nvfp4 | bf16: how the engine builds the n-gram table of this checkpoint, whatever is stored."""
    if facts.geometry is not None and facts.geometry.ngram is not None:
        return table_format(facts.geometry, facts.quantization, Deployment())
    return _TABLE_DTYPES.get((facts.ple and facts.ple.declared_dtype) or "", "bf16")


HEADERS, HEADER = Evidence.HEADERS, Source.HEADER

GATES: tuple[Gate, ...] = (
    Gate("scales", HEADERS, HEADER, scales, "a scale beside every packed weight", ("unloadable",)),
    Gate("fused", HEADERS, HEADER, fused, "one format for the parts of a layer that engines fuse", ("unloadable",)),
    Gate("unlisted", HEADERS, HEADER, unlisted, "weights as stored, against what the quantisation config leaves out",
         ("unloadable",)),
    Gate("packed-table", HEADERS, HEADER, packed_table, "names and packing of the PLE table, against what is built",
         ("unloadable",)),
)  # fmt: skip
