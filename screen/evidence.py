"""What each level of evidence buys: the page, the tree, the small files, the headers. One function a level."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from formulas.errors import AccessDenied, HubMisbehaved
from formulas.facts import Facts
from formulas.geometry import overridden

from .apart import Apart, Lost
from .cache import Cache, Kind, file_key
from .census import derive, parse_config
from .chain import CONFIG_FILES, Bundle, Evidence, Known, Page
from .counting import Count, Origin, Tally
from .findings import Source as Rests
from .headers import read_headers, read_headers_in_one
from .readme import Card, parse_readme, read_card
from .repo import Entry, Revision, is_commit
from .shards import INDEX, shard_set
from .source import ModelInfo, Source
from .transport import Cost

LONGEST_CARD = 4 * 2**20
SMALL_FILE = 256 * 2**20  # the index of a 300,000-tensor repo takes 31 MB
LARGE_INDEX = 4 * 2**20  # some 40,000 tensors: a tenth of a second to count, half of what a process takes to start
ONE_REQUEST_FROM = 4  # shards: fewer cost less by a range each, which says more


class Means(NamedTuple):
    """What evidence is bought with: the cache, threads that read shards, and what overrides every config.json."""

    cache: Cache
    shards: Executor
    overrides: Mapping[str, Any] = MappingProxyType({})
    card: bool = False  # whether the README is worth a request
    apart: Apart | None = None  # processes that count large repos


def buy(level: Evidence, known: Known, source: Source, cost: Cost, means: Means) -> Known:
    """What is known with one more level. Raises NotFound, AccessDenied, HubUnavailable, HubMisbehaved, HeaderError."""
    match level:
        case Evidence.INFO:
            return _page(known, source, cost)
        case Evidence.TREE:
            return _tree(known, source, cost)
        case Evidence.CONFIG:
            return _configs(known, source, cost, means)
        case Evidence.HEADERS:
            return _headers(known, source, cost, means)


def _page(known: Known, source: Source, cost: Cost) -> Known:
    found = source.resolve(known.repo, known.revision, cost)
    if found.info.disabled:
        raise AccessDenied(f"{known.repo}: the Hub has disabled this repo; nobody can read it", code="disabled")
    commit = found.revision.commit
    # A folder on this machine states no commit.
    return replace(known, canonical=found.canonical, commit=commit if is_commit(commit) else None,
                   page=page(found.info))  # fmt: skip


def page(info: ModelInfo) -> Page:
    """What the gates ask of a repo's page. A licence that is called `other` goes by its own name."""
    stated = info.card.get("license")
    if isinstance(stated, list):
        stated = ", ".join(map(str, stated))
    if stated == "other" and isinstance(info.card.get("license_name"), str):
        stated = info.card["license_name"]
    tagged = next((tag.removeprefix("license:") for tag in info.tags if tag.startswith("license:")), None)
    security = info.security or {}
    flagged = security.get("filesWithIssues")
    return Page(
        licence=stated if isinstance(stated, str) else tagged,
        last_modified=info.last_modified,
        gated=str(info.gated) if info.gated else None,
        private=info.private,
        scan_done=security.get("scansDone"),
        unsafe_files=tuple(str(file.get("path")) for file in flagged if isinstance(file, dict))
        if isinstance(flagged, list) else (),
        card=info.card or None,
    )  # fmt: skip


def _tree(known: Known, source: Source, cost: Cost) -> Known:
    tree = source.tree(known.reads, known.at, cost)
    known = replace(known, tree=tree, shards=shard_set(tree, None))
    return replace(known, facts=_facts(known))


def _configs(known: Known, source: Source, cost: Cost, means: Means) -> Known:
    if means.apart and _large(known):
        means.apart.prepare()
    files: dict[str, Mapping[str, Any]] = {}
    broken: dict[str, str] = {}
    for path in CONFIG_FILES:
        if known.tree is None or (entry := known.tree.find(path)) is None:
            continue
        data = small_file(known, source, entry, cost, means.cache)
        try:
            files[path] = parse_config(data, name=path)
        except HubMisbehaved as error:
            broken[path] = error.message
    if means.overrides and "config.json" in files:
        files["config.json"] = overridden(files["config.json"], means.overrides)
    known = replace(known, bundle=Bundle(files, broken))
    if means.card:
        known = replace(known, card=_card(known, source, cost, means.cache))
    return replace(known, facts=_facts(known))


def _card(known: Known, source: Source, cost: Cost, cache: Cache) -> Card | None:
    """What the README states; its front matter as the API has it, where it does. None without a README."""
    entry = known.tree.find("README.md") if known.tree else None
    if entry is None or entry.blob.size > LONGEST_CARD:
        return None
    text = small_file(known, source, entry, cost, cache).decode(errors="replace")
    front, body = parse_readme(text)
    stated = known.page.card if known.page else None
    return read_card(stated or front, body)


def small_file(known: Known, source: Source, entry: Entry, cost: Cost, cache: Cache) -> bytes:
    """A file of a commit, from the cache if it was read before; a folder on this machine has no commit to go by."""
    if not entry.blob.known:
        return source.read_file(known.reads, known.at, entry, cost, SMALL_FILE)
    # Copies share an index by its digest. Other files are asked of each repo: that is how a gated one shows.
    key = entry.blob.oid if entry.path == INDEX else file_key(known.reads, known.at, entry.path)
    with cache.alone(Kind.FILE, key):
        data = cache.load(Kind.FILE, key)
        if data is None:
            data = source.read_file(known.reads, known.at, entry, cost, SMALL_FILE)
            cache.keep(Kind.FILE, key, data)
    return data


def _headers(known: Known, source: Source, cost: Cost, means: Means) -> Known:
    """The index, and if every shard it names is there, their headers; of a large repo counted in a process of its
    own, and once more in this one should that be lost."""
    remote = means.apart.tally() if means.apart and _large(known) else None
    if remote is not None:
        try:
            with remote:
                return _counted(known, source, cost, means, remote)
        except Lost:
            if means.apart and means.apart.closed:  # nobody waits for this repo any more
                raise
    return _counted(known, source, cost, means, Tally())


def _large(known: Known) -> bool:
    """Whether counting its tensors takes about as long as starting a process for that."""
    index = known.tree.find(INDEX) if known.tree else None
    return index is not None and index.blob.size >= LARGE_INDEX


def _counted(known: Known, source: Source, cost: Cost, means: Means, count: Count) -> Known:
    known = _indexed(known, source, cost, means.cache, count)
    if known.shards is None or known.shards.missing:
        return known
    wanted, index, in_one = known.shards.shards, known.index, False
    named = [entry for entry in wanted if entry not in known.shards.strays]
    if index is not None and len(named) >= ONE_REQUEST_FROM:
        revision = Revision(known.revision, known.at)
        in_one = read_headers_in_one(source, means.cache, known.reads, revision, named, INDEX, cost, count)
    # The route tells of the index's shards only.
    entries = known.shards.strays if in_one else wanted
    names = index.names if index else None
    read_headers(source, means.cache, known.reads, known.at, entries, cost, means.shards, count, names=names)
    files = known.bundle.files if known.bundle else {}
    found = count.counted(
        Origin(files.get("config.json"), files.get("hf_quant_config.json"), known.reads, known.commit,
               sum(entry.blob.size for entry in wanted))
    )  # fmt: skip
    rests = Rests.API if in_one else Rests.HEADER
    return replace(known, header_source=rests, problems=found.problems, facts=found.facts)


def _indexed(known: Known, source: Source, cost: Cost, cache: Cache, count: Count) -> Known:
    """The index: read here because it is the size of the headers, which many repos never come to."""
    if known.tree is None or (entry := known.tree.find(INDEX)) is None:
        return known
    data = small_file(known, source, entry, cost, cache)
    try:
        index = count.index(data)
    except HubMisbehaved as error:
        return replace(known, index_broken=error.message)
    return replace(known, index=index, shards=shard_set(known.tree, index))


def _facts(known: Known) -> Facts:
    """What follows from the evidence so far, without headers."""
    files = known.bundle.files if known.bundle else {}
    shards = known.shards.shards if known.shards else ()
    return derive(
        files.get("config.json"), None, hf_quant=files.get("hf_quant_config.json"), repo=known.reads,
        commit=known.commit, file_bytes=sum(entry.blob.size for entry in shards), shards=len(shards),
    )  # fmt: skip
