"""Gates that ask the model card: notes on what it states, and on what was not found in it; rules only by policy."""

from __future__ import annotations

from collections.abc import Iterator

from .chain import Criteria, Evidence, Gate, Known
from .findings import Answer, Source, note, passed, reject, unknown
from .readme import PROVENANCE, WARNINGS


def card(known: Known, criteria: Criteria) -> Iterator[Answer]:
    policy, found = criteria.policy, known.card
    wanted, refused = policy.card_states or (), policy.card_refuses or ()
    if found is None:
        if wanted or refused:
            yield unknown("there is no card to read, and the policy asks for what it states", None, list(wanted))
        elif criteria.reads_card and known.bundle is not None:
            yield note("there is no card", None)
        return
    for topic in wanted:
        quote = found.first(topic)
        if quote is None:
            yield reject(f"the card was not found to state its {topic}, and the policy requires it", None, topic)
        else:
            yield passed(f"the card states its {topic}: {quote}", list(found.stated[topic]), topic)
    for topic in refused:
        if (quote := found.first(topic)) is not None:
            text = f"the card states {topic}, which the policy refuses: {quote}"
            yield reject(text, list(found.stated[topic]), topic)
    if not criteria.card:
        return
    for topic in WARNINGS:
        if topic not in refused and (quote := found.first(topic)) is not None:
            yield note(f"{topic}, says the card: {quote}", list(found.stated[topic]))
    stated = [topic for topic in PROVENANCE if topic in found.stated]
    missing = [topic for topic in PROVENANCE if topic not in found.stated]
    said = "; ".join(f"{topic}: {found.first(topic)}" for topic in stated) or "nothing"
    yield note(f"the card states {said}. Not found: {', '.join(missing) or 'nothing'}",
               {"stated": {topic: list(quotes) for topic, quotes in found.stated.items()}, "not_found": missing})


GATES: tuple[Gate, ...] = (
    Gate("card", Evidence.CONFIG, Source.CARD, card, "what the model card states, with --card or a policy that asks",
         ("card_states", "card_refuses")),
)  # fmt: skip
