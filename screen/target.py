"""Where candidates are to run: a card, how many of them, and how the engine is started there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from formulas.cards import Card, find_card
from formulas.deployment import Deployment
from formulas.errors import BadInput
from formulas.options import deployment_from, parse_arguments


class Target(NamedTuple):
    """Where a candidate is to run: the card, how it is served there, and the fitted numbers of the arithmetic."""

    card: Card
    deployment: Deployment
    coefficients: Mapping[str, float]
    unmodelled: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # the engine options as given

    @property
    def name(self) -> str:
        """The cards, as asked for: `h200 x 2`."""
        return f"{self.card.name} x {self.deployment.tp * self.deployment.pp * self.deployment.dp}"


class Engine(NamedTuple):
    """An engine release on a target: what it says of itself. `table` is None where none ships for the release."""

    target: Target
    table: Mapping[str, Any] | None
    registries: Mapping[str, Any]


def parse_target(
    text: str, context: str | None, coefficients: Mapping[str, float], *, flag: str = "--fits",
    more: tuple[str, ...] = (),
) -> Target:  # fmt: skip
    """The target in `rtx-pro-6000:2` or `h200:1 --mtp 2 --kv-cache-dtype fp8`: a card, how many, and engine options.

    `context` is the length to hold (None: the model's own), `more` are engine options given elsewhere. Raises BadInput.
    """
    words = shlex.split(text)
    name, _, count = (words[0] if words else "").partition(":")
    if not name or (count and not count.isdecimal()) or count == "0":
        raise BadInput(f"{flag} {text!r}: expected CARD:N such as rtx-pro-6000:2, got something else")
    options = (*words[1:], *more, *(("--max-model-len", context) if context else ()))
    given = parse_arguments(options)
    if given.words:
        raise BadInput(f"{flag} {text!r}: expected options of the engine after the card, got {given.words[0]!r}")
    card = find_card(name, given.fields.get("capability"))
    fields = {"tp": int(count or 1), "capability": card.capability} | given.fields
    return Target(card, deployment_from(fields), coefficients, given.reasons, options)
