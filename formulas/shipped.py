"""The tables that ship with the package, read from formulas/data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def coefficients() -> Mapping[str, float]:
    """Every fitted number by name; tests re-derive them from the points marked for fitting."""
    return {name: float(value) for name, value in json.loads(_text("coefficients.json")).items()}


def _text(name: str) -> str:
    return files("formulas").joinpath("data", name).read_text(encoding="utf-8")
