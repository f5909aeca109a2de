"""Two checkpoints side by side: the same bytes by digests alone, else what differs: tensors, config, ignore lists.

A comparison of equal bytes needs two trees. Where weights differ the headers say whether the structure does: of two
checkpoints with one structure, a patch, a layout or a memory plan made for one holds for the other.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from formulas.facts import Cell, Document, Facts, Role, Stack
from formulas.formats import matcher
from formulas.roles import classify
from formulas.tensors import TensorGroup, expand, fold

from .chain import Spent
from .findings import grouped
from .flat import flat
from .loadable import linear_layers, module_name
from .pairs import FilePair, pair, same_bytes, same_weights
from .quantization import without_lists
from .repo import Tree

Form = tuple[str, tuple[int, ...]]
"""(dtype, shape) of a tensor."""


# Tensors


class Pattern(Document):
    """Tensors of one pattern that one side lacks, or that both have in two forms (`dtype`, `shape`)."""

    pattern: str
    count: int
    example: str
    side: str  # a | b | both
    stack: Stack
    role: Role


class Change(Document):
    """Tensors of one pattern in the form of either side."""

    tensor: str
    a: tuple[str, tuple[int, ...]]
    b: tuple[str, tuple[int, ...]]


class Structure(Document):
    """How names, dtypes and shapes differ. `same` leaves nothing out: it is true for equal sets only."""

    same: bool
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    changed: tuple[Change, ...] = ()
    patterns: tuple[Pattern, ...] = ()


def structure(a: Iterable[TensorGroup], b: Iterable[TensorGroup], mtp_from: int | None = None) -> Structure:
    """The difference of two sets of tensors, by pattern; layers numbered `mtp_from` or more are the MTP head's.
    Groups that both have are not spelled out."""
    mine, theirs = set(a), set(b)
    left, right = _forms(mine - theirs), _forms(theirs - mine)
    only_a = fold((name, *left[name]) for name in left.keys() - right.keys())
    only_b = fold((name, *right[name]) for name in right.keys() - left.keys())
    changes: defaultdict[tuple[Form, Form], list[str]] = defaultdict(list)
    for name in left.keys() & right.keys():
        if left[name] != right[name]:
            changes[left[name], right[name]].append(name)
    changed = [(group, forms) for forms, names in changes.items() for group in fold((name, "", ()) for name in names)]
    changed.sort(key=lambda item: item[0].pattern)
    found = [*((group, "a") for group in only_a), *((group, "b") for group in only_b),
             *((group, "both") for group, _ in changed)]  # fmt: skip
    return Structure(
        same=not (only_a or only_b or changed),
        only_a=tuple(dict.fromkeys(group.pattern for group in only_a)),
        only_b=tuple(dict.fromkeys(group.pattern for group in only_b)),
        changed=tuple(Change(tensor=group.pattern, a=forms[0], b=forms[1]) for group, forms in changed),
        patterns=tuple(_pattern(group, side, mtp_from) for group, side in found),
    )


def _forms(groups: Iterable[TensorGroup]) -> dict[str, Form]:
    return {name: (dtype, shape) for name, dtype, shape in expand(groups)}


def _pattern(group: TensorGroup, side: str, mtp_from: int | None) -> Pattern:
    example = next(group.names())
    stack, role = classify(example, mtp_from)
    return Pattern(pattern=group.pattern, count=group.copies, example=example, side=side, stack=stack, role=role)


# Bytes by role


class Part(Document):
    """The bytes of one stack and role on either side, by dtype. `same`: equal tensors, dtypes and bytes."""

    stack: Stack
    role: Role
    a: dict[str, int]
    b: dict[str, int]
    same: bool


def parts(a: Iterable[Cell], b: Iterable[Cell]) -> tuple[Part, ...]:
    """The two censuses, one line a stack and role."""
    sides: dict[tuple[Stack, Role], tuple[list[Cell], list[Cell]]] = defaultdict(lambda: ([], []))
    for place, cells in enumerate((a, b)):
        for cell in cells:
            sides[cell.stack, cell.role][place].append(cell)
    stacks, roles = list(Stack), list(Role)
    return tuple(
        Part(stack=stack, role=role, a={cell.dtype: cell.bytes for cell in mine},
             b={cell.dtype: cell.bytes for cell in theirs}, same=mine == theirs)
        for (stack, role), (mine, theirs) in sorted(
            sides.items(), key=lambda item: (stacks.index(item[0][0]), roles.index(item[0][1])))
    )  # fmt: skip


# Config


class ConfigDifference(Document):
    """Keys by dotted path; those of another file than config.json begin with its name and a colon."""

    only_a: dict[str, Any]
    only_b: dict[str, Any]
    changed: dict[str, dict[str, Any]]


Files = Mapping[str, Mapping[str, Any]]
"""Parsed JSON files by path."""

_QUANTIZATION = {"quantization_config", "compression_config", "quantization"}


def config_difference(a: Files, b: Files) -> ConfigDifference:
    """How the JSON files differ that both sides have been read for. Lists of layers are left to `ignore`."""
    ours, theirs = _keys(a), _keys(b)
    shared = ours.keys() & theirs.keys()
    return ConfigDifference(
        only_a={key: ours[key] for key in sorted(ours.keys() - theirs.keys())},
        only_b={key: theirs[key] for key in sorted(theirs.keys() - ours.keys())},
        changed={key: {"a": ours[key], "b": theirs[key]} for key in sorted(shared) if ours[key] != theirs[key]},
    )


def _keys(files: Files) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, document in files.items():
        prefix = "" if path == "config.json" else f"{path}:"
        found |= {prefix + key: _spelled(value) for key, value in flat(_short(document)).items()}
    return found


def _spelled(value: Any) -> Any:
    """The value; as a word where it is a number that JSON cannot hold."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _short(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the lists of layers in its quantisation part, which are as long as the model."""
    return {key: (without_lists if key in _QUANTIZATION else _short)(item) if isinstance(item, Mapping) else item
            for key, item in config.items()}  # fmt: skip


# Ignore lists


class IgnoreDifference(Document):
    """What either quantisation leaves out. `of` says what is counted: the modules of both checkpoints that a list
    covers, or its entries as written where tensors are not known."""

    of: str  # modules | entries
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    only_a_count: int
    only_b_count: int
    common: int
    entries_a: int
    entries_b: int


def ignore_difference(a: Facts | None, b: Facts | None) -> IgnoreDifference | None:
    """Two ignore lists as sets; None where neither side has one. One list may spell what the other has as a wildcard,
    so they are held against the linear layers of both checkpoints, which are spelled alike."""
    lists = [facts.quantization.ignore if facts and facts.quantization else () for facts in (a, b)]
    if not any(lists):
        return None
    layers = {module_name(weight): weight for facts in (a, b) for weight in linear_layers(facts)}
    if layers and all(facts is not None and facts.tensor_groups is not None for facts in (a, b)):
        covered = [_covered(layers, entries) for entries in lists]
    else:
        layers, covered = {}, [set(entries) for entries in lists]
    only_a, only_b = covered[0] - covered[1], covered[1] - covered[0]
    return IgnoreDifference(
        of="modules" if layers else "entries",
        only_a=grouped(only_a).patterns if only_a else (),
        only_b=grouped(only_b).patterns if only_b else (),
        only_a_count=len(only_a),
        only_b_count=len(only_b),
        common=len(covered[0] & covered[1]),
        entries_a=len(lists[0]),
        entries_b=len(lists[1]),
    )


def _covered(layers: Mapping[str, Any], entries: Sequence[str]) -> set[str]:
    listed = matcher(entries)
    return {name for name, weight in layers.items() if listed(weight)}


# The whole


@enum.unique
class Verdict(enum.StrEnum):
    """What two checkpoints are to each other."""

    SAME_BYTES = "same bytes"
    SAME_WEIGHTS = "same weights, other files"
    SAME_STRUCTURE = "same structure, other weights"
    DIFFERENT = "different structure"
    UNKNOWN = "other weights, structure not known"


class Side(NamedTuple):
    """One checkpoint as far as it was read. `files` are the JSON files read of it."""

    name: str
    tree: Tree
    files: Files
    facts: Facts | None


class Comparison(Document):
    """What `screen compare --json` prints. Parts that need more than trees are None where the trees decided."""

    a: str
    b: str
    verdict: Verdict
    same_bytes: bool
    files: int
    identical_files: int
    identical_bytes: int
    differing_files: tuple[FilePair, ...]
    structure: Structure | None
    parts: tuple[Part, ...] | None
    census: dict[str, tuple[Cell, ...]] | None
    formats: dict[str, dict[str, str]] | None  # stack/role -> format, of either side
    config: ConfigDifference | None
    ignore: IgnoreDifference | None
    cost: Spent


def compare(a: Side, b: Side, cost: Spent) -> Comparison:
    """The comparison, as far as the sides were read."""
    files = pair(a.tree, b.tree)
    equal, weights = same_bytes(files), same_weights(files)
    groups = [side.facts.tensor_groups if side.facts else None for side in (a, b)]
    cells = [side.facts.census if side.facts else None for side in (a, b)]
    found = None
    if groups[0] is not None and groups[1] is not None:
        found = structure(groups[0], groups[1], _mtp_from(a.facts) or _mtp_from(b.facts))
    if found is None and weights:
        found = Structure(same=True)
    known = cells[0] is not None and cells[1] is not None
    if equal:
        verdict = Verdict.SAME_BYTES
    elif weights:
        verdict = Verdict.SAME_WEIGHTS
    elif found is None:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.SAME_STRUCTURE if found.same else Verdict.DIFFERENT
    identical = [file for file in files if file.same]
    return Comparison(
        a=a.name, b=b.name, verdict=verdict, same_bytes=equal, files=len(files), identical_files=len(identical),
        identical_bytes=sum(file.a_bytes or 0 for file in identical),
        differing_files=tuple(file for file in files if not file.same),
        structure=found,
        parts=parts(cells[0] or (), cells[1] or ()) if known else None,
        census={"a": cells[0] or (), "b": cells[1] or ()} if known else None,
        formats={"a": _formats(a.facts), "b": _formats(b.facts)} if known else None,
        config=None if equal else config_difference(*_readable(a, b)),
        ignore=None if equal else ignore_difference(a.facts, b.facts),
        cost=cost,
    )  # fmt: skip


def _mtp_from(facts: Facts | None) -> int | None:
    """The number from which layers are the MTP head's, where the config declares one; no other names have it."""
    geometry = facts.geometry if facts else None
    return len(geometry.layers) if geometry and geometry.mtp_layers and geometry.layers else None


def _readable(a: Side, b: Side) -> tuple[Files, Files]:
    """The JSON files of either side, without those that both have and only one could be read as JSON."""
    broken = {path for path in a.files.keys() ^ b.files.keys() if a.tree.find(path) and b.tree.find(path)}
    ours, theirs = ({path: document for path, document in side.files.items() if path not in broken} for side in (a, b))
    return ours, theirs


def _formats(facts: Facts | None) -> dict[str, str]:
    return facts.quantization.by_role if facts and facts.quantization else {}
