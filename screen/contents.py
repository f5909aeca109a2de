"""Gates that ask the headers: experts, dtypes, formats as stored, MTP head, PLE table, index, a reference."""

from __future__ import annotations

import re
from collections.abc import Iterator

from formulas.facts import Facts, Stack
from formulas.roles import classify
from formulas.units import human

from .chain import Criteria, Evidence, Gate, Known
from .findings import Answer, Source, among, grouped, note, passed, reject, some, unknown
from .loadable import built_table
from .shards import ShardSet


def pruned(found: int, wanted: int) -> str:
    """The sentence on a layer with another number of experts than the full model has."""
    if found < wanted:
        return f"{found} of {wanted} experts a layer: a pruned model, not a smaller quantisation of the full one"
    return f"{found} experts a layer, the full model has {wanted}: another model"


def experts(known: Known, criteria: Criteria) -> Iterator[Answer]:
    seen = known.facts.experts if known.facts else None
    found = seen.found if seen else None
    reference, of = criteria.policy.experts, "the policy"
    if reference is None and criteria.like is not None and criteria.like.experts is not None:
        reference, of = criteria.like.experts.found, criteria.like.repo or "the reference"
    if seen is None or found is None or not (found or reference):
        if seen is not None and seen.declared and seen.layers == 0:
            text = f"the config declares {seen.declared} experts a layer, no tensor is named as one; renamed or removed"
            yield unknown(text, 0, reference or seen.declared)
        elif reference:
            yield unknown(f"experts cannot be counted in the headers, {of} has {reference} a layer", None, reference)
        return
    sound = True
    if seen.declared is not None and seen.declared != found:
        sound = False
        text = f"config.json declares {seen.declared} experts a layer, the files have {found}"
        yield reject(f"{text}; an engine cannot load that", found, seen.declared)
    if seen.uneven:
        sound = False
        layers = [f"layer {layer} has {count}" for layer, count in sorted(seen.uneven.items())]
        text = f"most layers have {found} experts, {some(layers)}; an engine cannot load that"
        yield reject(text, {str(layer): count for layer, count in seen.uneven.items()}, found)
    if reference is not None and found != reference:
        sound = False
        yield reject(pruned(found, reference), found, reference)
    if sound:
        yield passed(f"{found} experts in each of {seen.layers} layers", found, reference or seen.declared)


def empty(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Files that are sound and hold nothing."""
    facts = known.facts
    if facts is not None and facts.tensor_bytes == 0:
        yield reject(f"the headers name {facts.tensors} tensors, of no bytes: there is no model in them", 0, 1)


def dtypes(known: Known, criteria: Criteria) -> Iterator[Answer]:
    census = known.facts.census if known.facts else None
    seen = None if census is None else [cell.dtype for cell in census if cell.stack is Stack.MAIN]
    yield from among("dtype", seen, criteria.policy.dtypes, criteria.policy.deny_dtypes)


def formats(known: Known, criteria: Criteria) -> Iterator[Answer]:
    policy = criteria.policy
    yield from among("weight format", weight_formats(known.facts), policy.formats, policy.deny_formats)


def weight_formats(facts: Facts | None) -> list[str] | None:
    """How the main stack's weights are stored: one format, or all of a mixture; None when not known."""
    quantization = facts.quantization if facts else None
    if quantization is None or quantization.format is None:
        return None
    if quantization.format != "mixed":
        return [quantization.format]
    return sorted({f for place, f in quantization.by_role.items() if place.startswith(f"{Stack.MAIN}/")}) or None


def mtp(known: Known, criteria: Criteria) -> Iterator[Answer]:
    policy = criteria.policy
    head = known.facts.mtp if known.facts else None
    asked = policy.mtp != "any" or policy.mtp_dtypes is not None or policy.max_mtp is not None
    if head is None or head.tensors is None:
        if asked:
            yield unknown("whether there is an MTP head is not known", None, policy.mtp)
        return
    if head.declared and not head.tensors:
        text = f"config.json declares {head.declared} MTP layer{'s'[:head.declared - 1]}, the files have no MTP tensors"
        yield note(f"{text}; speculative decoding with it cannot start", 0, head.declared)
    if head.declared == 0 and head.tensors:
        yield note(f"the files have {head.tensors} MTP tensors, config.json declares no MTP layer", head.tensors, 0)
    held = f"MTP head of {human(head.bytes)} in {', '.join(sorted(head.dtypes))}" if head.tensors else "no MTP head"
    if policy.mtp == "required":
        yield (passed if head.tensors else reject)(f"{held}; the policy requires one", head.tensors, "required")
    elif policy.mtp == "forbidden":
        yield (reject if head.tensors else passed)(f"{held}; the policy forbids one", head.tensors, "forbidden")
    if head.tensors:
        yield from among("MTP dtype", head.dtypes, policy.mtp_dtypes, None)
        if policy.max_mtp is not None:
            answer = passed if (head.bytes or 0) <= policy.max_mtp else reject
            yield answer(f"MTP head takes {human(head.bytes)} of {human(policy.max_mtp)}", head.bytes, policy.max_mtp)


def table(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """The per-layer embedding table: its format, and whether the config declares it."""
    policy = criteria.policy
    ple = known.facts.ple if known.facts else None
    if ple is None:
        yield from among("PLE format", None, policy.ple_formats, None)
        return
    seen = None if ple.kind != "none" and ple.format is None else [ple.format or "none"]
    yield from among("PLE format", seen, policy.ple_formats, None)
    if ple.kind != "ngram" or not (ple.format or "").startswith("fp8") or ple.declared_dtype is not None:
        return
    if known.facts and built_table(known.facts) == "fp8":
        return
    if known.bundle is None or "config.json" not in known.bundle.files:
        yield note("the PLE table is FP8; without a config.json whether it is declared is not known", None)
        return
    answer = note if policy.undeclared_table == "allow" else reject
    # The declaration is what makes the engine build an FP8 table; without it the parameter is created at two bytes.
    yield answer(
        f"the PLE table is FP8 ({human(ple.table_bytes)}) and config.json has no ple_embedding_dtype: it loads as "
        f"bf16, {human(ple.table_bytes)} more, or fails; declare float8_e4m3fn in text_config or by --hf-overrides",
        None, "float8_e4m3fn",
    )  # fmt: skip


def complete(shards: ShardSet, promise: str) -> Answer:
    """Whether every promised shard is there."""
    missing, found = shards.missing, len(shards.shards)
    if missing:
        verb = "shards are" if len(missing) > 1 else "shard is"
        text = f"{len(missing)} {verb} missing that {promise}: {some(missing)}"
        return reject(text, found, found + len(missing), Source.TREE)
    return passed(f"every shard is there that {promise}", found)


def index_files(known: Known, criteria: Criteria) -> Iterator[Answer]:
    if known.index_broken:
        yield note(f"{known.index_broken}; shards are taken from the file list", None)
    elif known.index is not None and known.shards is not None:
        yield complete(known.shards, "the index names")


def beside(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Safetensors files that are not part of the model as it is loaded."""
    if known.shards is None:
        return
    for files, what in ((known.shards.copies, "hold the weights once more"), (known.shards.adapters, "are adapters")):
        if files:
            paths = [entry.path for entry in files]
            yield note(f"{some(paths)} {what} ({human(sum(entry.blob.size for entry in files))}), not counted", paths)
    if known.shards.components and known.shards.shards:
        folders = list(known.shards.components)
        yield note(f"folders with models of their own, not counted: {some(folders)}", folders)


def index(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Where the index and the headers tell different stories."""
    if known.problems is None:
        return
    for problem in known.problems:
        if problem.kind in ("not_in_header", "shard_missing"):
            yield reject(f"{problem.text}; they would stay unset", problem.number, 0)
        elif problem.kind == "not_in_index":
            answer = reject if criteria.policy.unindexed == "deny" else note
            yield answer(f"{problem.text}; an engine that loads by the index skips them", problem.number, 0)
        else:
            yield note(problem.text, problem.number)
    if known.index is not None and not known.problems:
        yield passed("index and headers name the same tensors in the same shards", known.index.tensors)


# What holds a module's values, and what quantisation adds beside them; a module is the same in every format.
_VALUES = re.compile(r"\.(?:weight|qweight|weight_packed)$|(?<=_proj)_blocks$")
_BESIDE = re.compile(
    r"\.(?:bias|biases|qzeros|scales|scale|scale_inv|g_idx|SCB|weight_(?!packed)\w+|weight(?:\.\w+)+|pre_quant_scale|"
    r"(?:input|activation|output)_\w*scale\w*|(?:[qkv]|kv|prob)_scale)$|(?<=_proj)_(?:bias|scales|\w*scale\w*)$"
)
_EXPERT = re.compile(r"\.experts\.\{[0-9,\-]+\}\.")
_PACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def modules(facts: Facts) -> set[str] | None:
    """The modules a checkpoint's tensors belong to, one expert standing for all; None when tensors are not known.

    Scales and packed forms are left out and fused experts are split, so two quantisations of one model are equal.
    """
    if facts.tensor_groups is None:
        return None
    found: set[str] = set()
    for group in facts.tensor_groups:
        if _BESIDE.search(group.pattern):
            continue
        pattern = _VALUES.sub("", _EXPERT.sub(".experts.*.", group.pattern))
        for module in group._replace(pattern=pattern).names():
            if packed := _PACKED.search(module):
                found.update(f"{module[:packed.start()]}.experts.*.{half}" for half in _HALVES[packed[1]])
            else:
                found.add(module)
    return found


def like(known: Known, criteria: Criteria) -> Iterator[Answer]:
    if criteria.like is None:
        return
    reference = criteria.like.repo or "the reference"
    wanted, seen = modules(criteria.like), modules(known.facts) if known.facts else None
    if wanted is None or seen is None:
        yield unknown(f"tensors cannot be held against those of {reference}", None, reference)
        return
    answer = reject if criteria.policy.unplaced == "deny" else note
    if strange := seen - wanted:
        text = f"{len(strange)} modules that {reference} does not have ({grouped(strange)}); its loader stops there"
        yield answer(text, list(grouped(strange).patterns), reference)
    # A stack that is absent as a whole is a smaller checkpoint, not a broken one.
    stacks = {classify(module, None)[0] for module in seen}
    missing = wanted - seen
    absent = {module for module in missing if classify(module, None)[0] not in stacks}
    if lost := missing - absent:
        text = f"{len(lost)} modules of {reference} are missing ({grouped(lost)}); they would stay unset"
        yield answer(text, list(grouped(lost).patterns), reference)
    if absent:
        text = f"{len(absent)} modules of {reference} are left out with their stack ({grouped(absent)})"
        yield note(text, list(grouped(absent).patterns), reference)
    if not strange and not missing:
        yield passed(f"has the modules of {reference}", len(seen), reference)


HEADERS, HEADER = Evidence.HEADERS, Source.HEADER

GATES: tuple[Gate, ...] = (
    Gate("index-files", HEADERS, Source.CONFIG, index_files, "the files the index names, against the tree"),
    Gate("beside", HEADERS, Source.TREE, beside, "safetensors files that neither index nor names count as weights"),
    Gate("index", HEADERS, HEADER, index, "tensors by shard, against the index", ("unindexed",)),
    Gate("empty", HEADERS, HEADER, empty, "bytes of all tensors"),
    Gate("experts", HEADERS, HEADER, experts, "experts counted in every layer, against config, policy and reference",
         ("experts",)),
    Gate("dtypes", HEADERS, HEADER, dtypes, "dtypes of the main stack", ("dtypes", "deny_dtypes")),
    Gate("format", HEADERS, HEADER, formats, "dtypes and companion scales of the main stack",
         ("formats", "deny_formats")),
    Gate("mtp", HEADERS, HEADER, mtp, "tensors of the MTP head, against config and policy",
         ("mtp", "mtp_dtypes", "max_mtp")),
    Gate("table", HEADERS, HEADER, table, "dtype and scales of the PLE table, against config and policy",
         ("ple_formats", "undeclared_table")),
    Gate("like", HEADERS, HEADER, like, "module names, against the reference checkpoint of --like", ("unplaced",)),
)  # fmt: skip
