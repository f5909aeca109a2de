"""The user's own measured points: one line each, with the facts of the checkpoint, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .calibrate import Case, Point, case_of
from .errors import BadInput
from .facts import Facts


def read_cases(where: Path, coefficients: Mapping[str, float]) -> list[Case]:
    """The points of a file, ready to be predicted; none where there is no file. Raises BadInput for a damaged line."""
    found = []
    for number, line in enumerate(_lines(where), 1):
        try:
            body = json.loads(line)
            point, facts = Point.model_validate(body["point"]), Facts.model_validate(body["facts"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{where}:{number}: expected a point, got {error!s:.120}; remove the line") from None
        found.append(case_of(point, facts, coefficients))
    return found


def keep(where: Path, point: Point, facts: Facts) -> None:
    """Adds a point to a file; one of the same name is replaced."""
    kept = [line for line in _lines(where) if json.loads(line)["point"].get("point") != point.point]
    body = {"point": point.model_dump(mode="json"), "facts": facts.model_dump(mode="json", exclude_none=True)}
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        fresh = where.with_suffix(".new")
        fresh.write_text("\n".join([*kept, json.dumps(body)]) + "\n")
        fresh.replace(where)
    except OSError as error:
        raise BadInput(f"{where}: expected a file that can be written, got {error.strerror}") from None


def _lines(where: Path) -> list[str]:
    try:
        return [line for line in where.read_text().splitlines() if line.strip()] if where.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: expected a file of points, got {error}") from None
