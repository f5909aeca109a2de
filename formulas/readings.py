"""Two readings of a running engine, and the longest context they imply: in proportion, and block by block."""

from __future__ import annotations

from .budget import filled
from .cards import Card
from .deployment import Deployment
from .errors import BadInput
from .facts import Document, Facts
from .geometry import Geometry
from .kv import plan
from .units import parse_size


class KvReading(Document):
    """What an engine said: bytes left for the KV cache, and bytes a request of so many tokens needs; and what follows.

    `own_*` are this toolkit's plan of the same deployment with the bytes that were left."""

    left_bytes: int
    needed_bytes: int
    needed_tokens: int
    in_proportion_tokens: int
    own_longest_tokens: int | None = None
    own_needed_bytes: int | None = None


def parse_reading(text: str) -> KvReading:
    """The reading in `2.07GiB,5.68GiB@262144`. Raises BadInput."""
    left, _, rest = text.partition(",")
    needed, at, tokens = rest.partition("@")
    if not at or not tokens.isdecimal() or not parse_size(needed):
        raise BadInput(f"--kv-reading {text!r}: expected LEFT,NEEDED@TOKENS such as 2.07GiB,5.68GiB@262144")
    return _reading(parse_size(left), parse_size(needed), int(tokens))


def _reading(left_bytes: int, needed_bytes: int, tokens: int) -> KvReading:
    """The context a pool holds if bytes were proportional to tokens: what people compute by hand from two readings."""
    return KvReading(
        left_bytes=left_bytes, needed_bytes=needed_bytes, needed_tokens=tokens,
        in_proportion_tokens=round(left_bytes / needed_bytes * tokens),
    )  # fmt: skip


def against(reading: KvReading, facts: Facts, card: Card, deployment: Deployment) -> KvReading:
    """The reading with what this deployment's own block plan makes of the bytes that were left."""
    geometry = facts.geometry or Geometry()
    asked = filled(deployment.model_copy(update={"max_model_len": reading.needed_tokens}), card, geometry)
    planned = plan(geometry, asked, reading.left_bytes, facts.quantization)
    own = {"own_longest_tokens": planned.max_context, "own_needed_bytes": planned.needed_bytes}
    return reading.model_copy(update=own)
