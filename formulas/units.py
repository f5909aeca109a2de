"""Bytes are ints everywhere; GiB exists only where a number is read or shown."""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import BadInput

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_STEP = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Bytes in a size as people write it: `71.2GiB` and `71.2G` are binary, `72GB` is decimal, `512` is bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BadInput(f"size {text!r}: expected a number with a unit such as 71.2GiB or 500MB, got something else")
    number, prefix, binary = match.groups()
    decimal = bool(prefix) and not binary and text.strip().upper().endswith("B")
    step: int = (1000 if decimal else 1024) ** _STEP[prefix.upper()]
    return round(Decimal(number) * step)


def gib(count: int | float | None, places: int = 2) -> str:
    """A byte count in GiB without its unit, for table cells; `unknown` for None."""
    return "unknown" if count is None else f"{count / GIB:.{places}f}"


def human(count: int | float | None) -> str:
    """A byte count with the largest binary unit that keeps it at 1 or more: `62.12 GiB`, `480.0 KiB`, `12 B`."""
    if count is None:
        return "unknown"
    for size, unit, places in ((TIB, "TiB", 2), (GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(count) >= size:
            return f"{count / size:.{places}f} {unit}"
    return f"{count:.0f} B"
