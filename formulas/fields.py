"""Typed reads of a config.json that strangers wrote: a value of another type is as good as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Fields:
    """Typed reads of a config, text part first, then the outer part. A value of another type is as good as absent."""

    def __init__(self, *parts: Mapping[str, Any]):
        self._parts = parts

    def raw(self, *names: str) -> Any:
        """The first value present and not null under any of the names, or None."""
        for name in names:
            for part in self._parts:
                if part.get(name) is not None:
                    return part[name]
        return None

    def integer(self, *names: str) -> int | None:
        return whole(self.raw(*names))

    def number(self, *names: str) -> float | None:
        value = self.raw(*names)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if plain and math.isfinite(value) else None

    def text(self, *names: str) -> str | None:
        value = self.raw(*names)
        return value if isinstance(value, str) else None

    def flag(self, *names: str) -> bool | None:
        value = self.raw(*names)
        return value if isinstance(value, bool) else None

    def items(self, *names: str) -> list[Any]:
        value = self.raw(*names)
        return value if isinstance(value, list) else []

    def mapping(self, *names: str) -> Mapping[str, Any]:
        value = self.raw(*names)
        return value if isinstance(value, Mapping) else {}


def whole(value: Any) -> int | None:
    """A whole number from 0 up to 2**53, written as an int or as a float without a fraction; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and 0 <= value <= 2**53 else None
