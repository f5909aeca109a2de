"""The tables that ship with the package, read from formulas/data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from .calibrate import Point
from .facts import Facts
from .tables import engine_table as engine_table
from .tables import engine_tables as engine_tables


@cache
def coefficients() -> Mapping[str, float]:
    """Every fitted number by name; tests re-derive them from the points marked for fitting."""
    return {name: float(value) for name, value in json.loads(_text("coefficients.json")).items()}


@cache
def checkpoints() -> Mapping[str, Facts]:
    """Facts of the checkpoints the measured points are about, by name; `#config` marks those without headers."""
    rows = (json.loads(line) for line in _lines("checkpoints.jsonl", "module_checkpoints.jsonl"))
    return {row["checkpoint"]: Facts.model_validate(row["facts"]) for row in rows}


@cache
def points() -> tuple[Point, ...]:
    """The measured runs that ship with the package, and builds of an engine's own modules."""
    return tuple(Point.model_validate_json(line) for line in _lines("points.jsonl", "module_points.jsonl"))


@cache
def passed_over() -> tuple[tuple[str, str], ...]:
    """Public runs that are no points, each with the reason."""
    rows = map(json.loads, _lines("passed_over.jsonl"))
    return tuple((row["source"], row["because"]) for row in rows)


def _lines(*names: str) -> list[str]:
    return [line for name in names for line in _text(name).splitlines()]


@cache
def engine_registries() -> Mapping[str, Any]:
    """Which vLLM releases have which architecture, one release a minor version."""
    registries: Mapping[str, Any] = json.loads(_text("engine_registries.json"))
    return registries


def _text(name: str) -> str:
    return files("formulas").joinpath("data", name).read_text(encoding="utf-8")
