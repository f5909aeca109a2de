"""Nested keys as dotted paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(value: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested keys as dotted paths to what is not a mapping; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = item
    return found
