"""Reads two checkpoints for a comparison, as far as the other makes it worth: trees, then configs, then headers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from formulas.errors import HubMisbehaved

from .cache import Cache
from .census import parse_config
from .chain import Evidence, Known, Spent, total
from .compare import Comparison, Side, compare
from .evidence import Means, buy, small_file
from .pairs import algorithm, differing_json, pair, same_blob, same_bytes, same_weights
from .repo import Entry, Tree
from .source import Source
from .survey import SHARDS_AT_ONCE, Line
from .transport import Cost

_PIECE = 8 * 2**20


class Reading:
    """One checkpoint being read: what is known of it so far, and what that cost."""

    def __init__(self, line: Line, means: Means):
        if line.error is not None:
            raise line.error
        assert line.source is not None
        self.source: Source = line.source
        self.known = Known(line.repo, line.revision)
        self.cost = Cost()
        self._means = means

    def buy(self, level: Evidence) -> None:
        self.known = buy(level, self.known, self.source, self.cost, self._means)

    @property
    def tree(self) -> Tree:
        assert self.known.tree is not None
        return self.known.tree

    def spent(self) -> Spent:
        return Spent(**{name: getattr(self.cost, name) for name in Spent.model_fields})

    def digest(self, likes: Mapping[str, str], on_read: Callable[[Entry], None]) -> None:
        """Replaces digests by those of the bytes themselves, for each path by the algorithm that `likes` names."""
        entries = []
        for entry in self.tree.entries:
            if (wanted := likes.get(entry.path)) is not None:
                on_read(entry)
                entry = entry._replace(blob=entry.blob._replace(oid=self._digest(entry, wanted)))
            entries.append(entry)
        self.known = replace(self.known, tree=Tree(tuple(entries)))

    def _digest(self, entry: Entry, how: str) -> str:
        size = entry.blob.size
        digest = hashlib.sha256() if how == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        for start in range(0, size, _PIECE):
            stop = min(size, start + _PIECE)
            digest.update(self.source.read_range(self.known.reads, self.known.at, entry, start, stop, self.cost))
        return f"{how}:{digest.hexdigest()}"

    def read_json(self, paths: Iterator[str]) -> dict[str, Mapping[str, Any]]:
        """The configs, and those of the paths that are there and are JSON objects."""
        found = dict(self.known.bundle.files) if self.known.bundle else {}
        for path in paths:
            if (entry := self.tree.find(path)) is not None:
                data = small_file(self.known, self.source, entry, self.cost, self._means.cache)
                try:
                    found[path] = parse_config(data, name=path)
                except HubMisbehaved:
                    continue  # that the files differ is told anyway
        return found


def read_and_compare(
    a: Line, b: Line, cache: Cache, on_read: Callable[[Entry], None] = lambda entry: None
) -> Comparison:
    """The comparison of two checkpoints. Equal bytes cost two trees and no header; files without a digest (those on
    this machine) are digested where the other side has one of that size, `on_read` being told of each.

    Raises what reading raises: NotFound, AccessDenied, HubUnavailable, HubMisbehaved, HeaderError, BadInput.
    """
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as shards, ThreadPoolExecutor(2) as two:
        sides = [Reading(line, Means(cache, shards)) for line in (a, b)]
        for level in (Evidence.INFO, Evidence.TREE):
            _both(two, sides, level)
        _digest(sides, on_read)
        files = pair(sides[0].tree, sides[1].tree)
        documents: list[Mapping[str, Mapping[str, Any]]] = [{}, {}]
        if not same_bytes(files):
            _both(two, sides, Evidence.CONFIG)
            if not same_weights(files):
                _both(two, sides, Evidence.HEADERS)
            documents = [side.read_json(differing_json(files)) for side in sides]
    read = [Side(_called(side.known), side.tree, document, side.known.facts)
            for side, document in zip(sides, documents, strict=True)]  # fmt: skip
    return compare(read[0], read[1], total(side.spent() for side in sides))


def _both(pool: Executor, sides: list[Reading], level: Evidence) -> None:
    list(pool.map(lambda side: side.buy(level), sides))


def _called(known: Known) -> str:
    """`org/name@commit`; the bare name of a folder that states no commit."""
    return f"{known.reads}@{known.commit}" if known.commit else known.reads


def _digest(sides: list[Reading], on_read: Callable[[Entry], None]) -> None:
    """Digests what can only be told apart by its bytes: files of one size of which a digest is missing, or of which
    the two digests are of different algorithms."""
    likes: list[dict[str, str]] = [{}, {}]
    for one, other in _candidates(sides[0].tree, sides[1].tree):
        if same_blob(one, other) is not None:
            continue
        # What is stated stays; of two stated ones git's is made anew, whose file is small.
        known = sorted({algorithm(entry.blob.oid) for entry in (one, other) if entry.blob.known}, reverse=True)
        wanted = known[0] if known else "sha256"
        for place, entry in enumerate((one, other)):
            if not entry.blob.known or algorithm(entry.blob.oid) != wanted:
                likes[place][entry.path] = wanted
    for side, wanted_of in zip(sides, likes, strict=True):
        side.digest(wanted_of, on_read)


def _candidates(a: Tree, b: Tree) -> Iterator[tuple[Entry, Entry]]:
    """Files that may be the same: of one name, else of one size under names the other side lacks."""
    ours, theirs = ({entry.path: entry for entry in tree.entries} for tree in (a, b))
    yield from ((entry, theirs[path]) for path, entry in ours.items() if path in theirs)
    for path, entry in ours.items():
        if path not in theirs:
            yield from ((entry, other) for name, other in theirs.items()
                        if name not in ours and other.blob.size == entry.blob.size)  # fmt: skip
