"""What would make a deployment that does not fit fit: the smallest changes, in the engine's own flags, and their price.

A change alone is preferred, then a set of changes from which none can be left out, then more cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import floor
from typing import Any, NamedTuple

from .budget import context_bytes
from .cards import Card
from .deployment import Deployment
from .facts import Document, Facts
from .lengths import longest
from .ngram import table_is_pinned
from .units import human

SHORTEST = 1024  # tokens: a context below this is no answer
MOST_CARDS = 64
_LEAST_ROWS = 8
_HIGHEST_SHARE = 0.98  # another process, or the next driver, needs a little as well
_LEAST_BATCH = 2048  # a step of fewer tokens slows prefill down more than it frees


class Change(NamedTuple):
    """One change to a deployment: the engine's words for it, the fields it sets, and what it costs."""

    flag: str
    update: dict[str, Any]
    cost: str


class Way(Document):
    """A way to make it fit: flags, what they cost, and what is left then."""

    flags: str
    cost: str
    available_kv_bytes: int | None
    max_context: int | None


class Tried(NamedTuple):
    """A judged deployment, as far as the search looks at it."""

    fits: bool | None
    needs_only_context: bool  # nothing but the length of a request stands in its way
    max_context: int | None
    available_bytes: int | None
    refused: bool = False  # the engine would not start, whatever the memory


Judge = Callable[[Deployment], Tried]


def ways(facts: Facts, card: Card, asked: Deployment, failed: Tried, judge: Judge) -> tuple[Way, ...]:
    """Up to three ways to make `asked` fit, the smallest first; none where nothing tried is enough."""
    found: list[Way] = []
    length = asked.max_model_len or 0
    if _is_shorter_enough(failed):
        found.append(_shorter([], failed, length))
    ladders = list(_ladders(facts, card, asked))
    if failed.refused:
        ladders = [_own_length(facts, asked), *ladders, _whole_experts(facts, asked), _fewer_cards(asked)]
        ladders = [ladder for ladder in ladders if ladder]
    alone = _first_alone(ladders, asked, judge)
    if alone:
        found.append(alone)
    else:
        found += _together(ladders, asked, judge, length)
    if len(found) < 2 or not alone:
        found += _more_cards(asked, judge) or ([] if found else _more_cards_and_shorter(asked, judge, length))
    return tuple(found[:3])


def _is_shorter_enough(tried: Tried) -> bool:
    return tried.needs_only_context and (tried.max_context or 0) >= SHORTEST


def _shorter(changes: list[Change], tried: Tried, length: int) -> Way:
    context = tried.max_context or 0
    changes = [change for change in changes if "max_model_len" not in change.update]
    flags = [*(change.flag for change in changes), f"--max-model-len {context}"]
    costs = [*(change.cost for change in changes), f"a context of {context:,} tokens instead of {length:,}"]
    return Way(flags=" ".join(flags), cost="; ".join(costs), available_kv_bytes=tried.available_bytes,
               max_context=context)  # fmt: skip


def _way(changes: list[Change], tried: Tried) -> Way:
    return Way(
        flags=" ".join(change.flag for change in changes),
        cost="; ".join(change.cost for change in changes),
        available_kv_bytes=tried.available_bytes,
        max_context=tried.max_context,
    )


def _applied(asked: Deployment, changes: list[Change]) -> Deployment:
    return asked.model_copy(update={k: v for change in changes for k, v in change.update.items()})


def _first_alone(ladders: list[list[Change]], asked: Deployment, judge: Judge) -> Way | None:
    """The mildest single change that is enough. Only a ladder whose last rung is enough is climbed."""
    for ladder in ladders:
        if not judge(_applied(asked, ladder[-1:])).fits:
            continue
        for change in ladder:
            tried = judge(_applied(asked, [change]))
            if tried.fits:
                return _way([change], tried)
    return None


def _together(ladders: list[list[Change]], asked: Deployment, judge: Judge, length: int) -> list[Way]:
    """A set of changes from which none can be left out and of which none can be milder; with a shorter context where
    all changes together leave too little for the one asked for."""
    ladders, tried = _answerable(ladders, asked, judge)
    if tried is None or not (tried.fits or _is_shorter_enough(tried)):
        return []
    # Where the context asked for cannot be had at all, half of the longest that can be had is worth the changes.
    wanted = None if tried.fits else max(SHORTEST, (tried.max_context or 0) // 2)

    def is_enough(found: Tried) -> bool:
        if wanted is None:
            return bool(found.fits)
        return found.needs_only_context and (found.max_context or 0) >= wanted

    chosen = {id(ladder): ladder[-1] for ladder in ladders}
    for ladder in reversed(ladders):
        rest = [change for key, change in chosen.items() if key != id(ladder)]
        if rest and is_enough(judge(_applied(asked, rest))):
            del chosen[id(ladder)]
    for ladder in ladders:
        if id(ladder) not in chosen:
            continue
        rest = [change for key, change in chosen.items() if key != id(ladder)]
        chosen[id(ladder)] = next(c for c in ladder if c is ladder[-1] or is_enough(judge(_applied(asked, [*rest, c]))))
    changes = list(chosen.values())
    tried = judge(_applied(asked, changes))
    return [_way(changes, tried) if tried.fits else _shorter(changes, tried, length)]


def _answerable(
    ladders: list[list[Change]], asked: Deployment, judge: Judge
) -> tuple[list[list[Change]], Tried | None]:
    """The ladders whose last rungs can be judged together, and that judgement: a change that makes the answer unknown
    is no way out."""
    kept: list[list[Change]] = []
    last: Tried | None = None
    for ladder in ladders:
        tried = judge(_applied(asked, [each[-1] for each in [*kept, ladder]]))
        if tried.fits is not None:
            kept, last = [*kept, ladder], tried
            if tried.fits:
                break
    return kept, last


def _own_length(facts: Facts, asked: Deployment) -> list[Change]:
    most, length = longest(facts.geometry) if facts.geometry else None, asked.max_model_len or 0
    if most is None or length <= most:
        return []
    return [Change(f"--max-model-len {most}", {"max_model_len": most}, f"the model's own {most:,} tokens")]


def _whole_experts(facts: Facts, asked: Deployment) -> list[Change]:
    has_experts = facts.geometry is not None and facts.geometry.experts is not None
    if asked.expert_parallel or not has_experts or asked.tp == 1:
        return []
    return [Change("--enable-expert-parallel", {"expert_parallel": True}, "whole experts on each rank")]


def _fewer_cards(asked: Deployment) -> list[Change]:
    sizes = [size for size in (8, 4, 2, 1) if size < asked.tp]
    return [Change(f"--tensor-parallel-size {size}", {"tp": size}, f"{size} cards instead of {asked.tp}")
            for size in sizes]  # fmt: skip


def _more_cards(asked: Deployment, judge: Judge) -> list[Way]:
    size = 2 * asked.tp
    while size <= MOST_CARDS:
        change = Change(f"--tensor-parallel-size {size}", {"tp": size}, f"{size // asked.tp} times the cards")
        tried = judge(_applied(asked, [change]))
        if tried.fits:
            return [_way([change], tried)]
        size *= 2
    return []


def _more_cards_and_shorter(asked: Deployment, judge: Judge, length: int) -> list[Way]:
    """Where no number of cards holds the context asked for: the fewest that hold a shorter one."""
    size = 2 * asked.tp
    while size <= MOST_CARDS:
        change = Change(f"--tensor-parallel-size {size}", {"tp": size}, f"{size // asked.tp} times the cards")
        tried = judge(_applied(asked, [change]))
        if _is_shorter_enough(tried):
            return [_shorter([change], tried, length)]
        size *= 2
    return []


def _ladders(facts: Facts, card: Card, asked: Deployment) -> Iterator[list[Change]]:
    """Changes that make room, the mildest ladder first; each ladder climbs to its largest change."""
    yield from (ladder for ladder in (
        _utilization(card, asked), _rows(asked), _batch(asked), _drafts(asked), _table(facts, asked), _dtype(asked),
        _text_only(facts, asked), _no_drafter(asked),
    ) if ladder)  # fmt: skip


def _utilization(card: Card, asked: Deployment) -> list[Change]:
    """Up to the share that is free at start-up, where the engine asks for no more than it finds."""
    share = asked.gpu_memory_utilization or 0.0
    free = (card.total_bytes - context_bytes(asked, card)) / card.total_bytes
    most = min(floor(100 * free) / 100, _HIGHEST_SHARE)
    if asked.kv_cache_memory_bytes is not None or card.unified or most <= share:
        return []
    left = human((1 - most) * card.total_bytes)
    return [Change(f"--gpu-memory-utilization {most:g}", {"gpu_memory_utilization": most},
                   f"leaves {left} of the card to everything else")]  # fmt: skip


def _rows(asked: Deployment) -> list[Change]:
    found, rows = [], asked.max_num_seqs or 0
    while rows // 2 >= _LEAST_ROWS:
        rows //= 2
        found.append(Change(f"--max-num-seqs {rows}", {"max_num_seqs": rows},
                            f"{rows} sequences at once instead of {asked.max_num_seqs}"))  # fmt: skip
    return found


def _batch(asked: Deployment) -> list[Change]:
    found, tokens = [], asked.max_num_batched_tokens or 0
    while tokens // 2 >= _LEAST_BATCH:
        tokens //= 2
        update = {"max_num_batched_tokens": tokens, "max_num_seqs": min(asked.max_num_seqs or tokens, tokens)}
        cost = f"prompts in steps of {tokens} tokens instead of {asked.max_num_batched_tokens}"
        found.append(Change(f"--max-num-batched-tokens {tokens}", update, cost))
    return found


def _drafts(asked: Deployment) -> list[Change]:
    return [Change(f"--mtp {depth}", {"mtp": depth}, f"{depth} draft tokens instead of {asked.mtp}")
            for depth in range(asked.mtp - 1, 0, -1)]  # fmt: skip


def _no_drafter(asked: Deployment) -> list[Change]:
    return [Change("--mtp 0", {"mtp": 0}, "no speculative decoding")] if asked.mtp else []


def _table(facts: Facts, asked: Deployment) -> list[Change]:
    has_table = facts.ple is not None and facts.ple.kind in ("ngram", "engram")
    if not has_table or table_is_pinned(asked):
        return []
    return [Change("--ple host", {"ple": "host"}, "the n-gram table in pinned host memory")]


def _dtype(asked: Deployment) -> list[Change]:
    if asked.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        return []
    return [Change("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}, "keys and values in 8 bits")]


def _text_only(facts: Facts, asked: Deployment) -> list[Change]:
    has_eyes = facts.census is not None and any(cell.stack.value in ("vision", "audio") for cell in facts.census)
    if asked.language_model_only or not has_eyes:
        return []
    return [Change("--language-model-only", {"language_model_only": True}, "text only")]
