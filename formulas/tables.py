"""The engines' own tables that ship with the package: data of a release, read once, as constant as any code here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from .deployment import Version, parse_version
from .errors import BadInput

_HEAD, _TAIL = "engine_vllm_", ".json"


@cache
def engine_table(version: str) -> Mapping[str, Any]:
    """What that vLLM release accepts on each card (formulas/engines.py reads it). BadInput where no table ships."""
    if version not in engine_tables():
        known = ", ".join(engine_tables())
        raise BadInput(
            f"vllm {version}: expected a release with a shipped table ({known}); its gates are unknown",
            hint="ask that engine itself: --engine-python PATH",
        )
    text = files("formulas").joinpath("data", f"{_HEAD}{version}{_TAIL}").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


@cache
def engine_tables() -> tuple[str, ...]:
    """The vLLM releases whose tables ship, oldest first."""
    names = (file.name for file in files("formulas").joinpath("data").iterdir())
    versions = (name[len(_HEAD) : -len(_TAIL)] for name in names if name.startswith(_HEAD))
    return tuple(sorted(versions, key=parse_version))


@cache
def table_for(release: Version) -> Mapping[str, Any] | None:
    """The table a release is read by: its own, else the newest before it; None for releases before all tables."""
    versions = [version for version in engine_tables() if parse_version(version) <= release]
    return engine_table(versions[-1]) if versions else None
