"""Where candidates are to fit: a card, how many of them, and how the engine is started there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from formulas.cards import Card, find_card
from formulas.deployment import Deployment
from formulas.errors import BadInput
from formulas.options import deployment_from, parse_arguments


class Target(NamedTuple):
    """Where a candidate is to fit: the card, how it is served there, and the fitted numbers of the arithmetic."""

    card: Card
    deployment: Deployment
    coefficients: Mapping[str, float]
    unmodelled: tuple[str, ...] = ()


def parse_target(text: str, context: str | None, coefficients: Mapping[str, float]) -> Target:
    """The target in `rtx-pro-6000:2` or `h200:1 --mtp 2 --kv-cache-dtype fp8`: a card, how many, and engine options.

    `context` is the length to hold (None: the model's own). Raises BadInput."""
    words = shlex.split(text)
    name, _, count = (words[0] if words else "").partition(":")
    if not name or (count and not count.isdecimal()) or count == "0":
        raise BadInput(f"--fits {text!r}: expected CARD:N such as rtx-pro-6000:2, got something else")
    given = parse_arguments([*words[1:], *(["--max-model-len", context] if context else [])])
    if given.words:
        raise BadInput(f"--fits {text!r}: expected options of the engine after the card, got {given.words[0]!r}")
    card = find_card(name, given.fields.get("capability"))
    fields = {"tp": int(count or 1), "capability": card.capability} | given.fields
    return Target(card, deployment_from(fields), coefficients, given.reasons)
