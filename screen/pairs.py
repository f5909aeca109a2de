"""The files of two checkpoints, each with its like: by name, and where that fails by digest."""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from formulas.facts import Document

from .repo import Entry, Tree


@enum.unique
class Kind(enum.StrEnum):
    """What a file of a checkpoint is for."""

    WEIGHTS = "weights"
    INDEX = "index"
    CONFIG = "config"
    TOKENIZER = "tokenizer"
    TEMPLATE = "chat template"
    CODE = "code"
    DOCUMENT = "document"
    OTHER = "other"


_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"\.safetensors$|\.(bin|pt|pth|gguf)$", Kind.WEIGHTS),
    (r"\.safetensors\.index\.json$", Kind.INDEX),
    (r"chat_template[^/]*$", Kind.TEMPLATE),
    (r"(tokenizer|tokenization|vocab|merges|special_tokens|added_tokens|tekken|spiece)[^/]*\.(json|txt|model)$|"
     r"\.(tiktoken|model)$", Kind.TOKENIZER),
    (r"\.json$", Kind.CONFIG),
    (r"\.py$", Kind.CODE),
    (r"(^|/)(README|LICENSE|LICENCE|NOTICE|CHANGELOG)[^/]*$|(^|/)\.git\w+$|\.(md|png|jpe?g|gif|svg|webp|pdf|ico)$",
     Kind.DOCUMENT),
)  # fmt: skip


def kind(path: str) -> Kind:
    """What a file is for, by its name."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, path, re.IGNORECASE)), Kind.OTHER)


class FilePair(Document):
    """One file of either side. Sizes are None where a side lacks it; `same` is None where a digest is not known."""

    path: str
    path_b: str | None = None  # where the same bytes have another name
    kind: Kind
    a_bytes: int | None
    b_bytes: int | None
    same: bool | None


def pair(a: Tree, b: Tree) -> list[FilePair]:
    """Every file of both trees, once: pairs of one name, then pairs of equal bytes under two names, then the rest."""
    theirs = {entry.path: entry for entry in b.entries}
    mine = {entry.path: entry for entry in a.entries}
    pairs = [(entry, theirs[entry.path]) for entry in a.entries if entry.path in theirs]
    moved: dict[str, list[Entry]] = defaultdict(list)
    for entry in b.entries:
        if entry.path not in mine and entry.blob.known:
            moved[entry.blob.oid].append(entry)
    alone: list[Entry] = []
    for entry in a.entries:
        if entry.path not in theirs:
            same = moved[entry.blob.oid].pop(0) if entry.blob.known and moved[entry.blob.oid] else None
            if same:
                pairs.append((entry, same))
            else:
                alone.append(entry)
    met = {other.path for _, other in pairs}
    found = [
        FilePair(path=one.path, path_b=other.path if other.path != one.path else None, kind=kind(one.path),
                 a_bytes=one.blob.size, b_bytes=other.blob.size, same=same_blob(one, other)) for one, other in pairs
    ]  # fmt: skip
    found += [FilePair(path=e.path, kind=kind(e.path), a_bytes=e.blob.size, b_bytes=None, same=False) for e in alone]
    found += [FilePair(path=e.path, kind=kind(e.path), a_bytes=None, b_bytes=e.blob.size, same=False)
              for e in b.entries if e.path not in met]  # fmt: skip
    return sorted(found, key=lambda file: file.path)


def same_blob(one: Entry, other: Entry) -> bool | None:
    """Whether two files are the same bytes; None where that needs a digest that is not there."""
    if one.blob.size != other.blob.size:
        return False
    if not (one.blob.known and other.blob.known) or algorithm(one.blob.oid) != algorithm(other.blob.oid):
        return None
    return one.blob.oid == other.blob.oid


def algorithm(oid: str) -> str:
    """`sha256` or `git-sha1`: digests of two algorithms say nothing of each other."""
    return oid.partition(":")[0]


def same_bytes(files: Iterable[FilePair]) -> bool:
    """Whether all that an engine reads is equal; cards, licences and pictures may differ."""
    return all(file.same for file in files if file.kind is not Kind.DOCUMENT)


def same_weights(files: Iterable[FilePair]) -> bool:
    """Whether there are weights and all of them are equal."""
    weights = [file.same for file in files if file.kind is Kind.WEIGHTS]
    return bool(weights) and all(weights)


def differing_json(files: Iterable[FilePair]) -> Iterator[str]:
    """The small JSON files of either side worth reading: those that tell how to load and to prompt, and differ."""
    for file in files:
        if file.path in JSON_FILES and not file.same and max(file.a_bytes or 0, file.b_bytes or 0) <= LARGEST_JSON:
            yield file.path


JSON_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json",
              "chat_template.json")  # fmt: skip
LARGEST_JSON = 4 * 2**20
