"""Which files of a tree hold the weights, and whether index and headers tell the same story."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import orjson

from formulas.errors import HubMisbehaved

from .header import Header
from .repo import Entry, Tree, check_path

INDEX = "model.safetensors.index.json"

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{5,6})-of-(?P<parts>[0-9]{5,6})\.safetensors")
_MOST_LOST = 100_000
_COPY = re.compile(r"consolidated[\w.\-]*\.safetensors|.+\.(?:fp16|fp32|bf16|non_ema)\.safetensors")
_ADAPTER = re.compile(r"(?:adapter_model|.*lora[\w.\-]*)\.safetensors", re.IGNORECASE)


class Index(NamedTuple):
    """model.safetensors.index.json: tensor -> shard, and the data bytes it states (None where it states none)."""

    shard_of: dict[str, str]
    total_size: int | None

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.shard_of.values()))


class Names(NamedTuple):
    """How many tensors a file has, and the bytes of all their names."""

    tensors: int
    bytes: int


class Placed(NamedTuple):
    """What an index says but for the tensors' names: those it places in each file, and the data bytes it states."""

    names: dict[str, Names]
    total_size: int | None

    @property
    def shards(self) -> list[str]:
        return sorted(self.names)

    @property
    def tensors(self) -> int:
        return sum(names.tensors for names in self.names.values())


class ShardSet(NamedTuple):
    """The safetensors files of a tree by what they are to the model; each file is in one of the groups."""

    shards: tuple[Entry, ...]  # what a loader reads: the index's shards and the strays
    strays: tuple[Entry, ...]  # those of `shards` the index does not name (mtp.safetensors)
    missing: tuple[str, ...]  # named by the index, else by the numbers of their siblings, and not in the tree
    copies: tuple[Entry, ...]  # the same weights once more, in another layout or precision
    adapters: tuple[Entry, ...]
    components: dict[str, tuple[Entry, ...]]  # folder -> files, of diffusers pipelines and other sub-models


class Problem(NamedTuple):
    """One way in which index, tree and headers disagree."""

    kind: str  # shard_missing | not_in_header | not_in_index | wrong_shard | twice | total_size
    number: int  # of tensors or shards
    example: str
    text: str


def parse_index(data: bytes, *, name: str = INDEX) -> Index:
    """The index in a file's bytes. Raises HubMisbehaved where it maps no tensors to files, or to unsafe paths."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise HubMisbehaved(f"{name}: expected JSON, got {data[:40]!r}: {error}", code="malformed_index") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not set(map(type, found.values())) <= {str}:
        raise HubMisbehaved(f"{name}: expected a weight_map of tensors to files, got none", code="malformed_index")
    for shard in set(found.values()):
        check_path(shard)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return Index(found, total if type(total) is int and total > 0 else None)


def placed(index: Index) -> Placed:
    """The index in short."""
    spelled: defaultdict[str, int] = defaultdict(int)
    for tensor, file in index.shard_of.items():
        spelled[file] += len(tensor)
    tensors = Counter(index.shard_of.values())
    return Placed({file: Names(count, spelled[file]) for file, count in tensors.items()}, index.total_size)


def shard_set(tree: Tree, index: Index | Placed | None) -> ShardSet:
    """The tree's safetensors files told apart: the union of the index's shards and of strays beside them."""
    entries = {entry.path: entry for entry in tree.entries if entry.path.endswith(".safetensors")}
    named = {path for path in index.shards if path in entries} if index else set()
    missing = [path for path in index.shards if path not in entries] if index else []
    root = [path for path in entries if "/" not in path and path not in named]
    adapters = [path for path in root if _ADAPTER.fullmatch(path)]
    others = [path for path in root if path not in adapters]
    weights = named or {path for path in others if not _COPY.fullmatch(path)}
    copies = [path for path in others if path not in weights and weights and _COPY.fullmatch(path)]
    if named:
        whole = {f"{match['stem']}.safetensors" for match in map(_NUMBERED.fullmatch, named) if match}
        copies += [path for path in others if path in whole]
    strays = [path for path in others if path not in weights and path not in copies]
    shards = sorted({*weights, *strays})
    if index is None:  # its own list is the better one: MiniMax-M2.7 has 125 shards, all named `-of-00130`
        missing = _unnumbered(shards)
    components: dict[str, list[Entry]] = defaultdict(list)
    for path, entry in entries.items():
        if "/" in path and path not in named:
            components[path.rpartition("/")[0]].append(entry)
    return ShardSet(
        shards=tuple(entries[path] for path in shards),
        strays=tuple(entries[path] for path in sorted(strays)) if index else (),
        missing=tuple(sorted(missing)),
        copies=tuple(entries[path] for path in sorted(copies)),
        adapters=tuple(entries[path] for path in adapters),
        components={folder: tuple(files) for folder, files in sorted(components.items())},
    )


def reconcile(index: Index | None, headers: Mapping[str, Header]) -> tuple[Problem, ...]:
    """Where the index and the shards' own headers disagree; without an index, tensors stored twice."""
    if index is not None and _agree(index, headers):
        return ()
    problems = []
    held: dict[str, str] = {}
    twice = []
    for path, header in headers.items():
        if not held.keys().isdisjoint(header.names):
            twice += [name for name in header.names if name in held]
        held.update(dict.fromkeys(header.names, path))
    if twice:
        problems.append(_problem("twice", twice, "stored in two shards: {}; a loader keeps the one it reads last"))
    if index is None:
        return tuple(problems)
    named = set(index.shards)
    missing = sorted(named - headers.keys())
    if missing:
        problems.append(_problem("shard_missing", missing, "shards the index names were not read: {}"))
    if index.shard_of != held:
        problems += _placed_elsewhere(index, held, headers.keys(), set(twice))
    data_bytes = sum(header.data_bytes for path, header in headers.items() if path in named)
    if not missing and index.total_size not in (None, data_bytes):
        file_bytes = data_bytes + sum(8 + h.length for path, h in headers.items() if path in named)
        how = "; it counts the files, headers included" if index.total_size == file_bytes else ""
        text = f"the index states a total_size of {index.total_size}, its shards hold {data_bytes} bytes{how}"
        problems.append(Problem("total_size", 1, str(index.total_size), text))
    return tuple(problems)


def _agree(index: Index, headers: Mapping[str, Header]) -> bool:
    """Whether all is as it should be, for which one look at each tensor is enough: none can be in two places."""
    return (
        sum(len(header.names) for header in headers.values()) == len(index.shard_of)
        and all({path}.issuperset(map(index.shard_of.get, header.names)) for path, header in headers.items())
        and headers.keys() == set(index.shard_of.values())
        and index.total_size in (None, sum(header.data_bytes for header in headers.values()))
    )


def _placed_elsewhere(
    index: Index, held: Mapping[str, str], read: Container[str], twice: Container[str]
) -> Iterator[Problem]:
    """Tensors that are not where the index says, of the shards that were read."""
    lost = [name for name, path in index.shard_of.items() if name not in held and path in read]
    if lost:
        yield _problem("not_in_header", lost, "in the index but in no shard: {}")
    extra = [name for name in held if name not in index.shard_of]
    if extra:
        files = sorted({held[name] for name in extra})
        yield _problem("not_in_index", extra, f"in {_some(files)} but not in the index: {{}}")
    moved = [name for name, path in index.shard_of.items() if name in held and held[name] != path and path in read]
    if moved := [name for name in moved if name not in twice]:
        yield _problem("wrong_shard", moved, "in another shard than the index says: {}")


def _unnumbered(paths: Iterable[str]) -> list[str]:
    """Names that `-00001-of-00003` promises and the paths lack; a few writers count from 0. Of names that promise
    more than any model has, not all."""
    sets: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for path in paths:
        if match := _NUMBERED.fullmatch(path):
            sets[match["stem"], match["parts"]][int(match["part"])] = match["part"]
    lost = []
    for (stem, parts), have in sets.items():
        first, width = (0 if 0 in have else 1), len(next(iter(have.values())))
        numbers = range(first, first + min(int(parts), 99_999))
        lost += [f"{stem}-{part:0{width}}-of-{parts}.safetensors" for part in numbers if part not in have]
        if len(lost) >= _MOST_LOST:
            break
    return lost


def _problem(kind: str, names: list[str], text: str) -> Problem:
    return Problem(kind, len(names), names[0], text.format(f"{len(names)} ({_some(names)})"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
