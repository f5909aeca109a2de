"""Candidates found on a Hub: by the model they were made from, by words, author, tags and time.

The Hub lists up to a thousand models a request, so a few hundred candidates cost one. Source: huggingface_hub 2.4.0
hf_api.py (list_models), https://huggingface.co/docs/hub/model-cards (base_model_relation).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from datetime import date, datetime
from typing import NamedTuple

from .hub import Hub
from .source import ModelInfo
from .transport import Cost


@enum.unique
class Relation(enum.StrEnum):
    """How a model was made from its base, as its card says."""

    QUANTIZED = "quantized"
    FINETUNE = "finetune"
    MERGE = "merge"
    ADAPTER = "adapter"
    ANY = "any"


class Query(NamedTuple):
    """What is looked for: all of it must hold. `limit` is of what the Hub lists, before `since` is held against it."""

    base: str | None = None
    relation: Relation = Relation.QUANTIZED
    search: str | None = None
    author: str | None = None
    tags: tuple[str, ...] = ()
    since: date | None = None
    limit: int = 100

    @property
    def asks(self) -> bool:
        """Whether anything is looked for at all."""
        return bool(self.base or self.search or self.author or self.tags)

    def __str__(self) -> str:
        stated = [("quants-of", self.base), ("relation", self.relation if self.base else None), ("search", self.search),
                  ("author", self.author), *(("tag", tag) for tag in self.tags), ("since", self.since),
                  ("limit", self.limit)]  # fmt: skip
        return " ".join(f"--{name} {value}" for name, value in stated if value is not None)

    def filters(self) -> list[str]:
        """The tags of the Hub's listing that say the same."""
        if self.base is None:
            return list(self.tags)
        relation = "" if self.relation is Relation.ANY else f"{self.relation}:"
        return [f"base_model:{relation}{self.base}", *self.tags]


_FIELDS = ("lastModified", "createdAt", "downloads", "likes", "gated", "tags")


def find(hub: Hub, query: Query, cost: Cost) -> list[ModelInfo]:
    """The models that match, most downloaded first; with `since` the last changed first. One whose time of change is
    not stated is kept: it is not known to be older. Raises HubUnavailable, HubMisbehaved, AccessDenied."""
    found = hub.models(
        search=query.search, author=query.author, filters=query.filters(), expand=_FIELDS,
        sort="lastModified" if query.since else "downloads", limit=query.limit, cost=cost,
    )  # fmt: skip
    since = query.since
    if since is None:
        return found
    return [model for model in found if model.last_modified is None or model.last_modified.date() >= since]


def repos_file(query: Query, found: Iterable[ModelInfo], endpoint: str, now: datetime) -> str:
    """A file of repo lines for `screen`, with what was asked, where and when as comments."""
    found = list(found)
    head = [f"# {len(found)} models, as {endpoint} listed them at {now:%Y-%m-%d %H:%M} UTC", f"# screen find {query}"]
    return "\n".join([*head, *map(_line, found)]) + "\n"


def _line(model: ModelInfo) -> str:
    about = [
        *([f"changed {model.last_modified:%Y-%m-%d}"] if model.last_modified else []),
        *([f"{model.downloads} downloads"] if model.downloads is not None else []),
        *(["gated"] if model.gated else []),
    ]
    return f"{model.id}  # {', '.join(about)}" if about else model.id
