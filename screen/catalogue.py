"""Checkpoints for the demo Hub: generated from compact descriptions, or from folders of recorded headers.

A description (screen/data/*.repo.json) states a checkpoint's tensors as groups, how they are laid out over files, and
the fields of its config that mean something; the headers, the index and the sizes follow. It may be `like` another one
and then says only what differs: shards that come out equal have equal digests, as re-uploads have.
"""

from __future__ import annotations

import functools
import gzip
import importlib.resources
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict

from formulas.errors import BadInput
from formulas.facts import Group
from formulas.tensors import TensorGroup, expand, tensor_bytes

from .demofiles import (
    INDEX,
    Tensor,
    byte_tokenizer,
    elements,
    head_bytes,
    header_bytes,
    index_file,
    safetensors_file,
    tensor_names,
)  # fmt: skip
from .demorepo import Content, DemoRepo

_DIGITS = re.compile(r"\d+")


class Rule(BaseModel):
    """Which file a tensor goes to: the first rule whose `match` is found in its name decides.

    `file` is a format string over the numbers `match` names, each divided by its entry in `per`; with `max_bytes`, over
    `i` (from 1) of `n` files that are filled in the order of the names, numbers counting as numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: str = ""
    file: str
    per: dict[str, int] = {}
    max_bytes: int | None = None
    metadata: dict[str, str] | None = {"format": "pt"}  # __metadata__ of these files


class Description(BaseModel):
    """One repo of the shipped catalogue. What is None is taken from the repo it is `like`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: str
    about: str  # what it is there to show
    source: str | None = None  # where the facts are from
    like: str | None = None
    groups: tuple[Group, ...] | None = None
    without: str | None = None  # tensors whose name this matches are left out
    layout: tuple[Rule, ...] | None = None
    index: Literal["total", "empty", "none"] | None = None  # metadata of the index file
    unindexed: tuple[str, ...] = ()  # files the index does not mention
    truncated: dict[str, int] = {}  # file -> bytes its end lacks
    random_weights: int | None = None  # seed of real weights; None = zeros
    config: dict[str, Any] | None = None
    config_changes: dict[str, Any] = {}  # merged into the config; null removes a key
    files: dict[str, Any] = {}  # text or JSON documents
    sizes: dict[str, int] = {}  # other large files, of zeros
    card: dict[str, Any] = {}
    readme: str | None = None
    gated: Literal[False, "auto", "manual"] = False
    private: bool = False
    disabled: bool = False
    missing: bool = False
    renamed_to: str | None = None
    tags: tuple[str, ...] = ()
    downloads: int = 0
    likes: int = 0
    created: str = "2026-08-26T00:00:00.000Z"
    unsafe: dict[str, str] = {}


class Shard(NamedTuple):
    file: str
    tensors: list[Tensor]
    metadata: dict[str, str] | None


def demo_repos() -> list[DemoRepo]:
    """Every repo of the shipped catalogue. Headers are generated when a repo is first asked for."""
    return [_repo(description) for description in descriptions().values()]


@functools.cache
def descriptions() -> dict[str, Description]:
    """The shipped descriptions by repo name, in the order of their files."""
    folder = importlib.resources.files("screen") / "data"
    found = [
        Description.model_validate_json(file.read_bytes())
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".repo.json")
    ]
    return {description.repo: description for description in found}


def headers_dir(folder: Path, configs: Path | None = None) -> list[DemoRepo]:
    """A repo for every `*.json.gz` of recorded headers; with its config where `configs`/org__name has one.

    Each file is `{repo, headers: {shard: header}, file_sizes: {shard: bytes}}`; it is read when first asked for.
    """
    if not (recorded := sorted(folder.glob("*.json.gz"))):
        raise BadInput(f"{folder}: expected recorded headers (*.json.gz), found none")
    return [
        DemoRepo(name, functools.partial(_recorded, path, configs and configs / path.name.removesuffix(".json.gz")))
        for path in recorded
        for name in [path.name.removesuffix(".json.gz").replace("__", "/", 1)]
    ]


def _recorded(path: Path, config: Path | None) -> dict[str, Any]:
    document = orjson.loads(gzip.decompress(path.read_bytes()))
    files: dict[str, Any] = {}
    for shard, header in document["headers"].items():
        tensors = [Tensor(n, t["dtype"], tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"]
        files[shard] = Content(header_bytes(header), document["file_sizes"][shard], elements=elements(tensors))
    if len(files) > 1:
        owners = {n: s for s, header in document["headers"].items() for n in header if n != "__metadata__"}
        data_bytes = sum(t["data_offsets"][1] - t["data_offsets"][0] for h in document["headers"].values()
                         for n, t in h.items() if n != "__metadata__")  # fmt: skip
        files[INDEX] = index_file(owners, {"total_size": data_bytes})
    for extra in sorted(config.glob("*.json")) if config and config.is_dir() else ():
        files[extra.name] = extra
    return files


# From a description to files.


def _repo(description: Description) -> DemoRepo:
    about = {name: getattr(description, name) for name in (
        "gated", "private", "disabled", "missing", "renamed_to", "tags", "downloads", "likes", "created", "unsafe",
        "card")}  # fmt: skip
    about["tags"] = (*_listed_tags(description), *description.tags)
    return DemoRepo(description.repo, functools.partial(_files, description.repo), **about)


def _files(name: str) -> dict[str, Any]:
    """The files of a described repo."""
    description = descriptions()[name]
    files: dict[str, Any] = {path: Content(size=size) for path, size in description.sizes.items()}
    files["README.md"] = _readme(description)
    if config := _config(description):
        files["config.json"] = config
    shards = _shards(_tensors_key(description))
    if len(shards) > 1 and _inherited(description, "index") != "none":
        files[INDEX] = _described_index(_tensors_key(description), description.unindexed,
                                        _inherited(description, "index") or "total")  # fmt: skip
    for path, content in shards.items():
        if lacking := description.truncated.get(path):
            content = Content(content.head, content.size - lacking, elements=content.elements)
        files[path] = content
    if description.random_weights is not None:
        files |= {"tokenizer.json": byte_tokenizer(), "generation_config.json": {"eos_token_id": 0}}
    return files | description.files


def _listed_tags(description: Description) -> tuple[str, ...]:
    config = _inherited(description, "config") or {}
    stored = ("safetensors",) if _inherited(description, "groups") else ()
    return (*stored, config["model_type"]) if "model_type" in config else stored


def _inherited(description: Description, name: str) -> Any:
    value = getattr(description, name)
    return _inherited(descriptions()[description.like], name) if value is None and description.like else value


def _config(description: Description) -> dict[str, Any] | None:
    known = _inherited(description, "config")
    return None if known is None else _merged(_unfolded(known), description.config_changes)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """JSON merge patch (RFC 7396)."""
    merged = dict(base)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged


def _unfolded(value: Any) -> Any:
    """A config with every `{"repeat": [...], "times": n}` and `{"names": [patterns]}` written out."""
    if isinstance(value, dict):
        if value.keys() == {"names"}:
            return [name for pattern in value["names"] for name in TensorGroup(pattern, "U8", ()).names()]
        if value.keys() == {"repeat", "times"}:
            return value["repeat"] * value["times"]
        return {name: _unfolded(item) for name, item in value.items()}
    return value


def _readme(description: Description) -> str:
    front = "".join(f"{name}: {json.dumps(value)}\n" for name, value in description.card.items())
    return f"---\n{front}---\n# {description.repo}\n\n{description.readme or description.about}\n"


def _tensors_key(description: Description) -> str:
    """The repo whose description the shards come from: equal ones are generated once."""
    own = description.groups is not None or description.without or description.layout is not None
    return description.repo if own or description.like is None else _tensors_key(descriptions()[description.like])


@functools.cache
def _shards(name: str) -> dict[str, Content]:
    """The safetensors files of the described repo of this name."""
    description = descriptions()[name]
    groups = _inherited(description, "groups") or ()
    left_out = re.compile(description.without) if description.without else None
    tensors = (Tensor(*t) for t in expand(groups) if not (left_out and left_out.search(t[0])))
    return {
        shard.file: safetensors_file(shard.tensors, metadata=shard.metadata, seed=_seed(description, i))
        for i, shard in enumerate(lay_out(tensors, _inherited(description, "layout") or ()))
    }


def _seed(description: Description, number: int) -> int | None:
    return None if description.random_weights is None else description.random_weights * 1000 + number


@functools.cache
def _described_index(name: str, unindexed: tuple[str, ...], metadata: str) -> Content:
    shards = {file: content for file, content in _shards(name).items() if file not in unindexed}
    owners = {tensor: file for file, content in shards.items() for tensor in tensor_names(content)}
    total = sum(content.size - head_bytes(content) for content in shards.values())
    return index_file(owners, {"total_size": total} if metadata == "total" else {})


def lay_out(tensors: Iterable[Tensor], rules: Sequence[Rule]) -> Iterator[Shard]:
    """Every file with its tensors, by the first rule each name matches. Raises BadInput where none does."""
    compiled = [(rule, re.compile(rule.match)) for rule in rules]
    files: dict[str, tuple[Rule, list[Tensor]]] = {}
    members: dict[tuple[str, ...], list[Tensor]] = {}  # by rule and numbers: a file's name is made up once
    for tensor in tensors:
        rule, match = _first_match(compiled, tensor.name)
        if (key := (rule.file, *match.groups())) not in members:
            numbers = {name: int(digits) // rule.per.get(name, 1) for name, digits in match.groupdict().items()}
            file = rule.file if rule.max_bytes else rule.file.format(**numbers)
            members[key] = files.setdefault(file, (rule, []))[1]
        members[key].append(tensor)
    for file, (rule, owned) in files.items():
        parts = list(_filled(owned, rule.max_bytes)) if rule.max_bytes else [owned]
        for i, part in enumerate(parts, 1):
            yield Shard(file.format(i=i, n=len(parts)), part, rule.metadata)


def _first_match(rules: Iterable[tuple[Rule, re.Pattern[str]]], name: str) -> tuple[Rule, re.Match[str]]:
    for rule, pattern in rules:
        if match := pattern.search(name):
            return rule, match
    raise BadInput(f"{name}: expected a layout rule that matches it, got none")


def _filled(tensors: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    filled = 0
    for tensor in sorted(tensors, key=lambda t: _natural(t.name)):
        size = tensor_bytes(tensor.dtype, tensor.shape)
        if part and filled + size > max_bytes:
            yield part
            part, filled = [], 0
        part.append(tensor)
        filled += size
    yield part


def _natural(name: str) -> str:
    """A sort key by which numbers count as numbers."""
    return _DIGITS.sub(lambda digits: digits[0].zfill(9), name)
