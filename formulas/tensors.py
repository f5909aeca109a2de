"""Tensors as a checkpoint stores them, one by one or folded into groups of equal siblings.

A 300,000-tensor checkpoint is a few dozen groups: `model.layers.{0-47}.mlp.experts.{0-511}.up_proj.weight`, U8
[640, 1280]. Groups travel in documents, in the demo catalogue and in calibration points; every formula that goes
tensor by tensor goes group by group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from .errors import BadInput

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits per element of every dtype of the safetensors 0.8 format (safetensors/src/tensor.rs, `Dtype::bitsize`)."""


Form = tuple[str, tuple[int, ...]]
"""A tensor's dtype and shape."""


class TensorInfo(NamedTuple):
    """One tensor of a file: half-open byte range [start, stop) within the file's data region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorGroup(NamedTuple):
    """Tensors that differ only in the numbers of their names: every combination of the numbers in the braces."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def copies(self) -> int:
        """How many tensors the group stands for."""
        return prod(map(len, self._ranges()), start=1)

    @property
    def bytes_each(self) -> int:
        """Bytes of one tensor of the group."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def bytes_total(self) -> int:
        return self.copies * self.bytes_each

    def names(self) -> Iterator[str]:
        """Every tensor name, the last number counting fastest. Raises BadInput for braces that hold no numbers."""
        literals, ranges = _parse(self.pattern)
        spelled = "%d".join(text.replace("%", "%%") for text in literals)
        return (spelled % numbers for numbers in product(*ranges))

    def numbers(self, position: int) -> list[int]:
        """The numbers the brace at `position` (from 0) runs over."""
        return self._ranges()[position]

    def parted(self, position: int, limit: int) -> list[TensorGroup]:
        """The group as two: numbers at `position` below the limit, and the others; as one where all are alike."""
        literals, ranges = _parse(self.pattern)
        sides = [n for n in ranges[position] if n < limit], [n for n in ranges[position] if n >= limit]
        parts = [(*ranges[:position], side, *ranges[position + 1 :]) for side in sides if side]
        return [self._replace(pattern=_spell(literals, part)) for part in parts]

    def literals(self) -> list[str]:
        """The texts around the braces: one more than there are braces."""
        return _parse(self.pattern)[0]

    def _ranges(self) -> list[list[int]]:
        return _parse(self.pattern)[1]


DIGITS = b"0123456789"
# A whole name component, or the part number of an n-gram table shard; no leading zeros, so that names round-trip.
_NUMBER = re.compile(r"(?:(?<![^.])|(?<=shard_))(0|[1-9][0-9]{0,8})(?![^.])")
# Braces of a name itself are doubled, as in Python's format strings.
_TOKEN = re.compile(r"\{\{|\}\}|\{([0-9,\-]+)\}|[^{}]+|.", re.DOTALL)
MOST_COPIES = 100_000_000
"""More tensors than any checkpoint has; a pattern beyond it is a mistake or an attack."""


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor of this dtype and shape takes in a file; sub-byte dtypes round up to whole bytes."""
    return (prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def family(name: str) -> str:
    """The name without its digits: names that count over layers, experts or parts are one family."""
    return name.encode(errors="surrogatepass").translate(None, DIGITS).decode(errors="surrogatepass")


def families(names: Sequence[str]) -> list[str]:
    """The family of each name, all at once: a tenth of the time a name."""
    joined = "\n".join(names)
    found = family(joined).split("\n")
    return found if len(found) == len(names) else [family(name) for name in names]  # a name may hold the separator


def fold(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorGroup]:
    """(name, dtype, shape) triples as groups, sorted by pattern: `expand` gives back exactly the same set."""
    triples = list(tensors)
    return fold_columns([name for name, _, _ in triples], [(dtype, shape) for _, dtype, shape in triples])


def fold_columns(names: Sequence[str], forms: Iterable[Form]) -> list[TensorGroup]:
    """The same of names and their (dtype, shape), in two columns."""
    forms, kins = list(forms), families(names)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for place, kin in enumerate(kins):
        members[kin].append(place)
    groups = []
    for places in members.values():
        for (dtype, shape), alike in _by_form([names[p] for p in places], [forms[p] for p in places]).items():
            for literals, ranges in _full_product(alike) or _products_of(alike):
                groups.append(TensorGroup(_spell(literals, ranges), dtype, shape))
    return sorted(groups)


def _by_form(names: list[str], forms: list[Form]) -> dict[Form, list[str]]:
    """The names of each form; most families have one."""
    if forms.count(forms[0]) == len(forms):
        return {forms[0]: names}
    found: defaultdict[Form, list[str]] = defaultdict(list)
    for name, form in zip(names, forms, strict=True):
        found[form].append(name)
    return found


Product = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
"""The texts between the numbers, and the numbers at each place: every combination of them."""


def _full_product(names: list[str]) -> list[Product] | None:
    """The one product that all names of a family are, if they are; by one search over all of them."""
    literals = _NUMBER.split(names[0])[::2]
    if len(literals) < 3:
        return None
    number = "(0|[1-9][0-9]{0,8})"
    found = re.findall(f"^{number.join(map(re.escape, literals))}$", "\n".join(names), re.MULTILINE)
    places = list(map(set, zip(*found, strict=True)))
    if len(found) != len(names) or len(set(names)) != prod(map(len, places)):  # a name is hashed once for all
        return None
    return [(tuple(literals), tuple(tuple(sorted(map(int, place))) for place in places))]


def _products_of(names: Iterable[str]) -> list[Product]:
    """Names as products, one or more for each way to spell the texts between their numbers."""
    members: defaultdict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        parts = _NUMBER.split(name)
        members[tuple(parts[::2])].add(tuple(map(int, parts[1::2])))
    return [(literals, ranges) for literals, numbers in members.items() for ranges in _products(numbers)]


def expand(groups: Iterable[TensorGroup]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every (name, dtype, shape) the groups stand for."""
    for group in groups:
        for name in group.names():
            yield name, group.dtype, group.shape


def _products(members: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Number tuples as a union of Cartesian products: equal tails are merged over their first number."""
    if members == {()}:
        return [()]
    tails: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in members:
        tails.setdefault(first, set()).add(tuple(rest))
    by_tail: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rests in tails.items():
        by_tail.setdefault(frozenset(rests), []).append(first)
    return [(tuple(sorted(firsts)), *ranges) for rests, firsts in by_tail.items() for ranges in _products(set(rests))]


def _spell(literals: Sequence[str], ranges: Sequence[Sequence[int]]) -> str:
    first, *rest = (text.replace("{", "{{").replace("}", "}}") for text in literals)
    return first + "".join(f"{{{_spell_numbers(r)}}}{text}" for r, text in zip(ranges, rest, strict=True))


def _parse(pattern: str) -> tuple[list[str], list[list[int]]]:
    """The literal texts of a pattern and, between each two, the numbers of a brace. Raises BadInput."""
    literals, ranges = [""], []
    for token in _TOKEN.finditer(pattern):
        if token[1] is not None:
            ranges.append(_numbers(token[1]))
            literals.append("")
        elif token[0] in "{}":
            raise BadInput(f"tensor pattern {pattern!r:.200}: expected {{{{ for a brace of the name, got {token[0]}")
        else:
            literals[-1] += token[0][0] if token[0] in ("{{", "}}") else token[0]
    if prod(map(len, ranges), start=1) > MOST_COPIES:
        raise BadInput(f"tensor pattern {pattern!r:.200}: expected at most {MOST_COPIES} tensors, got more")
    return literals, ranges


def _spell_numbers(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(text: str) -> list[int]:
    """The numbers of `0-47,50`, in the order written."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or len(found) + high - low >= MOST_COPIES:
            raise BadInput(f"tensor pattern {{{text:.80}}}: expected numbers and ranges such as {{0-47,50}}")
        found.extend(range(low, high + 1))
    return found
