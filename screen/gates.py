"""Every gate, as data: what it needs, what it decides by, which policy keys it obeys, and the question itself.

This module holds the table and the gates that ask the page, the tree and the config; `contents` those that ask headers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from formulas.units import human

from . import card, contents, fits, loadable, on
from .chain import CONFIG_FILES, Criteria, Evidence, Gate, Known
from .findings import Answer, Outcome, Source, among, note, passed, reject, some, unknown
from .flat import flat
from .shards import INDEX

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_WEIGHTS = {".gguf": "GGUF", ".onnx": "ONNX", ".h5": "Keras", ".msgpack": "Flax", ".npz": "NumPy"}

# INFO: what the Hub says of the repo


def access(known: Known, criteria: Criteria) -> Iterator[Answer]:
    page = known.page
    if page is None:
        return
    if page.gated and criteria.policy.gated == "deny":
        yield reject("access has to be requested, and the policy refuses that", page.gated, "open")
    elif page.gated:
        yield note("access to the files has to be requested on the repo's page", page.gated)
    else:
        yield passed("private, readable with this token" if page.private else "no request for access is needed", "open")


def licence(known: Known, criteria: Criteria) -> Iterator[Answer]:
    stated = known.page.licence if known.page else None
    yield from among("licence", stated and [stated], criteria.policy.licences, criteria.policy.deny_licences)


def age(known: Known, criteria: Criteria) -> Iterator[Answer]:
    policy = criteria.policy
    limits = []
    if policy.changed_after is not None:
        limits.append(datetime.combine(policy.changed_after, datetime.min.time(), UTC))
    if policy.max_age_days is not None:
        oldest = min(policy.max_age_days, (criteria.now - datetime.min.replace(tzinfo=UTC)).days)
        limits.append(criteria.now - timedelta(days=oldest))
    if not limits:
        return
    limit = max(limits)
    changed = known.page.last_modified if known.page else None
    if changed is None:
        yield unknown("the time of the last change is not stated", None, limit.isoformat())
        return
    answer = passed if changed >= limit else reject
    yield answer(f"last change {changed:%Y-%m-%d}, wanted {limit:%Y-%m-%d} or later",
                 changed.isoformat(), limit.isoformat())  # fmt: skip


def scan(known: Known, criteria: Criteria) -> Iterator[Answer]:
    page, wanted = known.page, criteria.policy.scan
    if wanted == "ignore":
        return
    if page and page.unsafe_files:
        yield reject(f"the Hub's security scan flags {some(list(page.unsafe_files))}", list(page.unsafe_files), wanted)
    elif page and page.scan_done:
        yield passed("the Hub's security scan is finished and flags nothing", "clean", wanted)
    elif wanted == "clean":
        yield unknown("no finished security scan is stated", None, wanted)


# TREE: every file, its size and digest


def safetensors(known: Known, criteria: Criteria) -> Iterator[Answer]:
    if known.tree is None or known.shards is None:
        return
    if count := len(known.shards.shards):
        yield passed(f"{count} safetensors file{'s' if count > 1 else ''}", count)
        return
    paths = [entry.path for entry in known.tree.entries]
    pickles = [path for path in paths if path.lower().endswith(_PICKLES)]
    others = sorted({kind for path in paths for end, kind in _OTHER_WEIGHTS.items() if path.lower().endswith(end)})
    if known.shards.adapters:
        yield reject("only an adapter, no model", [entry.path for entry in known.shards.adapters], "safetensors")
    elif known.shards.components:
        folders = list(known.shards.components)
        yield reject(f"only models in folders of their own, as pipelines have: {some(folders)}", folders, "safetensors")
    elif pickles:
        yield reject(f"only pickle weights, which run code when loaded: {some(pickles)}", pickles, "safetensors")
    elif others:
        yield reject(f"only {' and '.join(others)} weights", others, "safetensors")
    else:
        yield reject("no weight files at all", [], "safetensors")


def numbering(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """What the numbers in the names promise; where there is an index that decides, so a gap is a note."""
    if known.shards is None or known.tree is None or len(known.shards.shards) + len(known.shards.missing) < 2:
        return
    answer = contents.complete(known.shards, "the shard numbers promise")
    if answer.outcome is Outcome.REJECT and known.tree.find(INDEX) is not None:
        answer = answer._replace(outcome=Outcome.NOTE)
    yield answer


def size(known: Known, criteria: Criteria) -> Iterator[Answer]:
    low, high = criteria.policy.min_size, criteria.policy.max_size
    total = known.facts.file_bytes if known.facts else None
    if low is None and high is None:
        return
    if total is None:
        yield unknown("the size of the weights is not known", None, {"min": low, "max": high})
    elif low is not None and total < low:
        yield reject(f"weights take {human(total)}, less than {human(low)}", total, low)
    elif high is not None and total > high:
        yield reject(f"weights take {human(total)}, more than {human(high)}", total, high)
    else:
        yield passed(f"weights take {human(total)}", total, {"min": low, "max": high})


def duplicate(known: Known, criteria: Criteria) -> Iterator[Answer]:
    twin = known.twin
    if twin is None:
        return
    if twin.differs:
        yield note(f"the same weights as {twin.short}, byte for byte; not the same {some(twin.differs)}", twin.name)
    elif not twin.readable:
        yield note(f"byte for byte the same checkpoint as {twin.short}, which cannot be read", twin.name)
    elif criteria.policy.duplicates == "drop":
        yield reject(f"byte for byte the same checkpoint as {twin.short}", twin.name, "one copy")
    else:
        yield note(f"byte for byte the same checkpoint as {twin.short}", twin.name)


def names(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Paths that are one file where the file system folds case."""
    folded: dict[str, list[str]] = defaultdict(list)
    for entry in known.tree.entries if known.tree else ():
        folded[entry.path.casefold()].append(entry.path)
    for paths in folded.values():
        if len(paths) > 1:
            yield note(f"{' and '.join(paths)} differ by case only; they are one file where case is folded", paths)


# CONFIG: config.json, hf_quant_config.json, the index


def config(known: Known, criteria: Criteria) -> Iterator[Answer]:
    bundle = known.bundle
    if bundle is None:
        return
    for path, problem in sorted(bundle.broken.items()):
        yield unknown(f"{problem}; what {path} says is not known", None)
    if "config.json" in bundle.files:
        yield passed("config.json is readable", "config.json")
    elif "config.json" not in bundle.broken:
        yield unknown("the repo has no config.json; architecture and declared quantisation are not known", None)


def twin_config(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Which keys differ where weights are equal and configs are not."""
    if known.bundle is None or known.twin_bundle is None or known.twin is None:
        return
    paths = [path for path in CONFIG_FILES if path in known.twin.differs]
    if not paths:
        return
    ours, theirs = (flat({path: bundle.files.get(path, {}) for path in paths})
                    for bundle in (known.bundle, known.twin_bundle))  # fmt: skip
    differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    changes = {key: {"here": ours.get(key), "there": theirs.get(key)} for key in differing}
    what = some([key.removeprefix("config.json.") for key in differing]) or "spelling only"
    yield note(f"with the weights of {known.twin.short}, the config differs in {what}", changes)


def architecture(known: Known, criteria: Criteria) -> Iterator[Answer]:
    policy, facts = criteria.policy, known.facts
    seen = facts.architecture if facts else None
    yield from among("architecture", seen and [seen], policy.architectures, policy.deny_architectures)


def model_type(known: Known, criteria: Criteria) -> Iterator[Answer]:
    policy, facts = criteria.policy, known.facts
    seen = facts.model_type if facts else None
    yield from among("model_type", seen and [seen], policy.model_types, policy.deny_model_types)


def remote_code(known: Known, criteria: Criteria) -> Iterator[Answer]:
    stated = known.bundle.files.get("config.json") if known.bundle else None
    if stated is None:
        if criteria.policy.remote_code == "deny":
            yield unknown("whether code from the repo is needed is not known", None, "none")
        return
    mapped = stated.get("auto_map")
    if not mapped:
        if criteria.policy.remote_code == "deny":
            yield passed("config.json names no code of the repo", [], "none")
        return
    classes = sorted(str(key) for key in mapped) if isinstance(mapped, Mapping) else [str(mapped)]
    answer = reject if criteria.policy.remote_code == "deny" else note
    yield answer(f"config.json asks for code from the repo (auto_map: {some(classes)})", classes, "none")


def method(known: Known, criteria: Criteria) -> Iterator[Answer]:
    stated = known.bundle.files.get("config.json") if known.bundle else None
    quantization = known.facts.quantization if known.facts else None
    seen = (quantization and quantization.method) or ("none" if stated is not None else None)
    yield from among("quantisation method", seen and [seen], criteria.policy.methods, criteria.policy.deny_methods)


def declared_experts(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """A config that says itself that experts were removed costs no header."""
    declared = known.facts.experts.declared if known.facts and known.facts.experts else None
    wanted = criteria.policy.experts
    if wanted is not None and declared is not None and declared != wanted:
        yield reject(contents.pruned(declared, wanted), declared, wanted)


INFO, TREE, CONFIG = Evidence.INFO, Evidence.TREE, Evidence.CONFIG

GATES: tuple[Gate, ...] = (
    Gate("access", INFO, Source.API, access, "the repo exists, is not disabled, and may be read", ("gated",)),
    Gate("licence", INFO, Source.CARD, licence, "the licence its card states", ("licences", "deny_licences")),
    Gate("age", INFO, Source.API, age, "the time of the last change", ("changed_after", "max_age_days")),
    Gate("scan", INFO, Source.API, scan, "the Hub's security scan", ("scan",)),
    Gate("safetensors", TREE, Source.TREE, safetensors, "the file list: safetensors, not only pickle or GGUF"),
    Gate("shards", TREE, Source.TREE, numbering, "the shard numbers in the file names"),
    Gate("size", TREE, Source.TREE, size, "bytes of the weight files", ("min_size", "max_size")),
    Gate("duplicate", TREE, Source.TREE, duplicate, "digests of weights and configs, against earlier rows",
         ("duplicates",)),
    Gate("names", TREE, Source.TREE, names, "paths that differ by case only"),
    Gate("config", CONFIG, Source.CONFIG, config, "config.json is there and is JSON"),
    Gate("twin-config", CONFIG, Source.CONFIG, twin_config, "the config of an earlier row with the same weights"),
    Gate("architecture", CONFIG, Source.CONFIG, architecture, "config.json: architectures",
         ("architectures", "deny_architectures")),
    Gate("model-type", CONFIG, Source.CONFIG, model_type, "config.json: model_type",
         ("model_types", "deny_model_types")),
    Gate("remote-code", CONFIG, Source.CONFIG, remote_code, "config.json: auto_map", ("remote_code",)),
    Gate("method", CONFIG, Source.CONFIG, method, "config.json or hf_quant_config.json: quantisation method",
         ("methods", "deny_methods")),
    Gate("declared-experts", CONFIG, Source.CONFIG, declared_experts, "config.json: experts a layer", ("experts",)),
    *card.GATES,
    *on.DECLARED,
    *contents.GATES,
    *loadable.GATES,
    *on.STORED,
    *fits.GATES,
)  # fmt: skip
