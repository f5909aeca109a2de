"""From headers and config to facts: the census of bytes, experts, MTP, PLE, and how the weights are stored.

Counting goes by name family (a name without its digits) and form: of a checkpoint of 300,000 tensors there are about
a hundred, and each is classified once.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from math import prod
from typing import Any

import orjson

from formulas.errors import HubMisbehaved, ToolkitError
from formulas.facts import Cell, Experts, Facts, Mtp, Ple, Quantization, Role, Stack
from formulas.geometry import Geometry, parse_geometry
from formulas.roles import classify, classify_family, is_numbered_mtp
from formulas.tensors import Form, TensorGroup, family, fold_columns, tensor_bytes

from .formats import PLAIN, Module, by_role, leading, modules
from .header import Header
from .quantization import declared_format, ignore_list, kv_cache_dtype, method, quantization_config, without_lists

Counts = Mapping[tuple[str, Form], int]
"""(name family, form) -> number of tensors."""

_TABLE = re.compile(r"(?:^|\.)(?:ngram_embeddings?|embed_tokens_per_layer|engram\w*\.(?:.*\.)?\w*embed\w*)(?:\.|$)")
_JOIN = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.eh_proj\.weight$")
_BEFORE_LAYER = re.compile(r"(?:^|\.)layers\.$")
_PLE_KINDS = (
    ("per_layer", re.compile(r"(?:^|\.)(?:embed_tokens_per_layer|per_layer_\w+)(?:\.|$)")),
    ("engram", re.compile(r"(?:^|\.)engram\w*(?:\.|$)")),
    ("ngram", re.compile(r"(?:^|\.)(?:ple|ngram_\w+)(?:\.|$)")),
)

DEPTH = 64  # of a config: its readers may recurse


def parse_config(data: bytes, *, name: str) -> dict[str, Any]:
    """A config file as an object; `Infinity` and `NaN` are read, as its writers mean them. Raises HubMisbehaved."""
    try:
        config = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            config = _encodable(json.loads(data))
        except (ValueError, RecursionError) as error:
            text = f"{name}: expected JSON, got {data[:40]!r}: {error}"
            raise HubMisbehaved(text, code="malformed_config") from None
    if not isinstance(config, dict):
        raise HubMisbehaved(f"{name}: expected an object, got {type(config).__name__}", code="malformed_config")
    if _deeper(config, DEPTH):
        text = f"{name}: expected values nested at most {DEPTH} deep, got more; no engine's config is"
        raise HubMisbehaved(text, code="malformed_config")
    return config



def _deeper(value: Any, depth: int) -> bool:
    """Whether objects and lists nest more than `depth` deep; looked at level by level, so that no depth is too much."""
    level = [value]
    for _ in range(depth):
        items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in items if isinstance(each, dict | list)]
    return bool(level)


def _encodable(value: Any) -> Any:
    """The same value with lone surrogates, which no output can carry, as question marks."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def census(headers: Mapping[str, Header], config: Mapping[str, Any] | None) -> tuple[Cell, ...]:
    """Tensors, elements and bytes by stack, role and dtype. The cells sum to the data bytes of the files."""
    layers, groups = _groups(headers.values(), config or {})
    cells = _cells(_counts(groups, layers))
    assert sum(cell.bytes for cell in cells) == sum(header.data_bytes for header in headers.values())
    return cells


def mtp_from(config: Mapping[str, Any]) -> int | None:
    """The number from which layers are MTP; None unless the config declares num_nextn_predict_layers."""
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    nextn, layers = config.get("num_nextn_predict_layers"), config.get("num_hidden_layers")
    declared = type(nextn) is int and nextn > 0 and type(layers) is int and layers >= 0
    return layers if declared else None


def derive(
    config: Mapping[str, Any] | None,
    headers: Mapping[str, Header] | None,
    *,
    hf_quant: Mapping[str, Any] | None = None,
    repo: str | None = None,
    commit: str | None = None,
    file_bytes: int | None = None,
    shards: int | None = None,
) -> Facts:
    """All that config.json, hf_quant_config.json and the headers say; what was not read (None) stays None."""
    known = config or {}
    geometry = _geometry(config)
    quant = quantization_config(known, hf_quant)
    layers, groups = (None, None) if headers is None else _groups(headers.values(), known)
    counts = None if groups is None else _counts(groups, layers)
    found = None if counts is None else modules(counts, quant)
    facts = Facts(
        repo=repo,
        commit=commit,
        file_bytes=file_bytes,
        shards=shards if headers is None else len(headers),
        architecture=_first_text(known.get("architectures")),
        model_type=_text(known.get("model_type")),
        quantization=None if config is None and found is None else _quantization(known, quant, hf_quant, found),
        experts=_experts(None, geometry, None),
        mtp=_mtp(None, geometry),
        ple=_ple(None, None, known, geometry),
        geometry=geometry,
    )
    if counts is None:
        return facts
    cells = _cells(counts)
    return facts.model_copy(update={
        "tensor_bytes": sum(cell.bytes for cell in cells),
        "tensors": sum(cell.tensors for cell in cells),
        "census": cells,
        "tensor_groups": groups,
        "experts": _experts(groups, geometry, layers),
        "mtp": _mtp(cells, geometry),
        "ple": _ple(counts, found, known, geometry),
    })  # fmt: skip


def _groups(headers: Iterable[Header], config: Mapping[str, Any]) -> tuple[int | None, tuple[TensorGroup, ...]]:
    """(the number from which layers are MTP, all tensors folded; numbered MTP layers apart, so that a group is of one
    stack).

    Where the config is silent, a layer that joins embedding and hidden state (`eh_proj`) is MTP all the same.
    """
    held = list(headers)
    names = list(chain.from_iterable(header.names for header in held))
    groups = fold_columns(names, chain.from_iterable(header.forms for header in held))
    layers = mtp_from(config)
    if layers is None:
        joins = [_JOIN.search(name) for group in groups if "eh_proj" in group.pattern for name in group.names()]
        layers = min((int(match[1]) for match in joins if match), default=None)
    if layers is None:
        return None, tuple(groups)
    return layers, tuple(sorted(part for group in groups for part in _apart(group, layers)))


def _apart(group: TensorGroup, layers: int) -> list[TensorGroup]:
    """The group's layers below this number and from it on."""
    at = next((i for i, text in enumerate(group.literals()[:-1]) if _BEFORE_LAYER.search(text)), None)
    return [group] if at is None else group.parted(at, layers)


def _counts(groups: Iterable[TensorGroup], layers: int | None) -> Counts:
    """Tensors by family and form; a numbered MTP layer counts as the family it has under `mtp.`."""
    counts: Counter[tuple[str, Form]] = Counter()
    for group in groups:
        kin = family("".join(group.literals()))
        numbered = is_numbered_mtp(next(group.names()), layers)
        counts[f"mtp.{kin}" if numbered else kin, (group.dtype, group.shape)] += group.copies
    return counts


def _cells(counts: Counts) -> tuple[Cell, ...]:
    sums: dict[tuple[Stack, Role, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for (name, (dtype, shape)), copies in counts.items():
        cell = sums[*classify_family(name), dtype]
        cell[0] += copies
        cell[1] += copies * prod(shape)
        cell[2] += copies * tensor_bytes(dtype, shape)
    stacks, roles = list(Stack), list(Role)
    ordered = sorted(sums, key=lambda key: (stacks.index(key[0]), roles.index(key[1]), key[2]))
    return tuple(
        Cell(stack=stack, role=role, dtype=dtype, tensors=n, elements=elements, bytes=size)
        for stack, role, dtype in ordered
        for n, elements, size in [sums[stack, role, dtype]]
    )


def _geometry(config: Mapping[str, Any] | None) -> Geometry | None:
    """The geometry; None where the config is absent or no geometry can be read from it."""
    try:
        return None if config is None else parse_geometry(dict(config))
    except ToolkitError:
        return None


def _quantization(
    config: Mapping[str, Any],
    quant: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None,
    found: list[Module] | None,
) -> Quantization:
    how = method(config, quant)
    declared = declared_format(how, quant) if quant else None
    return Quantization(
        method=how,
        format=declared if found is None else _main_format(found),
        by_role={} if found is None else by_role(found),
        ignore=ignore_list(quant, hf_quant),
        kv_cache_dtype=kv_cache_dtype(quant, hf_quant),
        config=without_lists(quant),
        source="config" if found is None else "header",
    )


def _main_format(found: list[Module]) -> str | None:
    """The packed format of the main stack beside its table; its plain dtype where nothing is packed."""
    bytes_of: Counter[str] = Counter()
    for module in found:
        if module.stack is Stack.MAIN and module.role is not Role.PLE:
            bytes_of[module.format] += module.bytes
    packed = {name: size for name, size in bytes_of.items() if name not in PLAIN.values()}
    return leading(packed or bytes_of) if bytes_of else None


def _experts(groups: Iterable[TensorGroup] | None, geometry: Geometry | None, mtp_layers: int | None) -> Experts | None:
    """Experts a layer of the main stack, by number in the names or by the first size of packed tensors."""
    declared = geometry.experts.count if geometry and geometry.experts else None
    if groups is None:
        return None if geometry is None else Experts(declared=declared)
    numbered: dict[int, set[int]] = defaultdict(set)
    packed: dict[int, int] = {}
    for group in groups:
        if classify(next(group.names()), mtp_layers) != (Stack.MAIN, Role.EXPERT):
            continue
        literals = group.literals()
        layers = group.numbers(0) if len(literals) > 1 else [0]
        at = next((i for i, text in enumerate(literals) if text.endswith("experts.")), None)
        for layer in layers:
            if at is not None and at < len(literals) - 1:
                numbered[layer].update(group.numbers(at))
            elif len(group.shape) >= 3:
                packed[layer] = max(packed.get(layer, 0), group.shape[0])
    each = packed | {layer: len(ids) for layer, ids in numbered.items()}
    if not each:
        return Experts(declared=declared, layers=0)
    usual = Counter(each.values()).most_common(1)[0][0]
    uneven = {layer: count for layer, count in sorted(each.items()) if count != usual}
    return Experts(declared=declared, found=usual, layers=len(each), uneven=uneven)


def _mtp(cells: Iterable[Cell] | None, geometry: Geometry | None) -> Mtp | None:
    declared = geometry.mtp_layers if geometry else None
    if cells is None:
        return None if geometry is None else Mtp(declared=declared)
    mine = [cell for cell in cells if cell.stack is Stack.MTP]
    dtypes: Counter[str] = Counter()
    for cell in mine:
        dtypes[cell.dtype] += cell.bytes
    return Mtp(
        declared=declared,
        tensors=sum(cell.tensors for cell in mine),
        bytes=sum(cell.bytes for cell in mine),
        dtypes=dict(sorted(dtypes.items())),
    )


def _ple(
    counts: Counts | None, found: list[Module] | None, config: Mapping[str, Any], geometry: Geometry | None
) -> Ple | None:
    """Per-layer embeddings by their tensors; before headers are read, by what the config declares."""
    declared = _text(
        next((part["ple_embedding_dtype"] for part in _parts(config) if "ple_embedding_dtype" in part), None)
    )
    if counts is None or found is None:
        if geometry is None:
            return None
        kind = "ngram" if geometry.ngram else "per_layer" if geometry.per_layer_dim else "none"
        return Ple(kind=kind, declared_dtype=declared)
    mine = {key: copies for key, copies in counts.items() if classify_family(key[0])[1] is Role.PLE}
    kind = next((kind for kind, names in _PLE_KINDS if any(names.search(name) for name, _ in mine)), "none")
    sizes = {key: copies * tensor_bytes(*key[1]) for key, copies in mine.items()}
    formats: Counter[str] = Counter()
    for module in found:
        if _TABLE.search(module.family):
            formats[module.format.partition("_")[0]] += module.bytes
    return Ple(
        kind=kind,
        tensors=sum(mine.values()),
        bytes=sum(sizes.values()),
        table_bytes=sum(size for (name, _), size in sizes.items() if _TABLE.search(name)),
        format=leading(formats) if formats else None,
        declared_dtype=declared,
    )


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The text part of a config, then the whole."""
    text = config.get("text_config")
    return [text, config] if isinstance(text, Mapping) else [config]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _first_text(value: object) -> str | None:
    return _text(value[0]) if isinstance(value, list) and value else None
