"""What a gate can answer, and the words it answers in."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from formulas.facts import Document
from formulas.tensors import fold


@enum.unique
class Outcome(enum.StrEnum):
    """What a gate found. `unknown` is for what was asked and could not be told; `note` never decides anything."""

    PASS = "pass"
    REJECT = "reject"
    UNKNOWN = "unknown"
    NOTE = "note"


@enum.unique
class Source(enum.StrEnum):
    """What a finding rests on, from what merely answers (a card) to what decides (a header, the engine)."""

    CARD = "card"
    API = "api"
    TREE = "tree"
    CONFIG = "config"
    HEADER = "header"
    ENGINE = "engine"


class Finding(Document):
    """What one gate found of one repo: what was seen, what was allowed, which source decided, and why."""

    gate: str
    outcome: Outcome
    observed: Any = None
    limit: Any = None
    source: Source
    because: str


class Answer(NamedTuple):
    """A gate's answer; the chain adds the gate's name, and its usual source where the answer names none."""

    outcome: Outcome
    because: str
    observed: Any = None
    limit: Any = None
    source: Source | None = None


passed = partial(Answer, Outcome.PASS)
reject = partial(Answer, Outcome.REJECT)
unknown = partial(Answer, Outcome.UNKNOWN)
note = partial(Answer, Outcome.NOTE)


def among(
    noun: str, observed: Iterable[str] | None, allowed: Iterable[str] | None, denied: Iterable[str] | None
) -> Iterator[Answer]:
    """One answer on words held against a policy's lists, without regard to case; none where the policy is silent."""
    if allowed is None and denied is None:
        return
    allow, deny = (sorted(words) if words is not None else None for words in (allowed, denied))
    if observed is None:
        yield unknown(f"{noun} is not known, and the policy asks for it", None, allow or deny)
        return
    seen = sorted(set(observed))
    refused = [word for word in seen if deny and _matches(word, deny)]
    strange = [word for word in seen if allow is not None and not _matches(word, allow)]
    if refused:
        yield reject(f"{noun} {', '.join(refused)} is refused", seen, {"denied": deny})
    elif strange:
        yield reject(f"{noun} {', '.join(strange)} is not among {', '.join(allow or ['none'])}", seen, allow)
    else:
        yield passed(f"{noun} {', '.join(seen) or 'none'} is allowed", seen, allow if allow is not None else deny)


def some(names: Sequence[str], shown: int = 5) -> str:
    """Names for a sentence: the first few, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


class Grouped(NamedTuple):
    """Names for a sentence: how many, the patterns that stand for them, and one of them."""

    number: int
    patterns: tuple[str, ...]
    example: str

    def __str__(self) -> str:
        if self.number == 1:
            return self.example
        return f"{some(self.patterns, 3)}; one is {self.example}"


def grouped(names: Iterable[str]) -> Grouped:
    """Names by pattern; the example is the shortest. Names must not be empty."""
    unique = sorted(set(names))
    patterns = tuple(group.pattern for group in fold((name, "", ()) for name in unique))
    return Grouped(len(unique), patterns, min(unique, key=lambda name: (len(name), name)))


def _matches(word: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(word.lower(), pattern.lower()) for pattern in patterns)
