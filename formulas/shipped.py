"""The tables that ship with the package, read from formulas/data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from .calibrate import Point
from .facts import Facts


@cache
def coefficients() -> Mapping[str, float]:
    """Every fitted number by name; tests re-derive them from the points marked for fitting."""
    return {name: float(value) for name, value in json.loads(_text("coefficients.json")).items()}


@cache
def checkpoints() -> Mapping[str, Facts]:
    """Facts of the checkpoints the measured points are about, by name; `#config` marks those without headers."""
    rows = (json.loads(line) for line in _text("checkpoints.jsonl").splitlines())
    return {row["checkpoint"]: Facts.model_validate(row["facts"]) for row in rows}


@cache
def points() -> tuple[Point, ...]:
    """The measured runs that ship with the package."""
    return tuple(Point.model_validate_json(line) for line in _text("points.jsonl").splitlines())


def _text(name: str) -> str:
    return files("formulas").joinpath("data", name).read_text(encoding="utf-8")
