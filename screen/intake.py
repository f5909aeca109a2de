"""Facts of what a command line calls a checkpoint: a repo, a local folder or file, or rows that `screen` printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from formulas.errors import AccessDenied, BadInput, HubUnavailable, NotFound, ToolkitError
from formulas.facts import Facts
from formulas.geometry import overridden

from .cache import Cache
from .census import derive, parse_config
from .chain import CONFIG_FILES, Criteria, Failure, Known
from .desk import Desk, read_text
from .evidence import SMALL_FILE, small_file
from .policy import Policy
from .survey import Line, survey
from .transport import Cost

_FACT_OVERRIDES = {"ple_embedding_dtype"}  # what an engine's override of facts without a config can still reach


class Taken(NamedTuple):
    """Facts of one checkpoint, or None with why there are none to plan by; and why an answer on them is unknown."""

    name: str
    facts: Facts | None
    reasons: tuple[str, ...] = ()
    skipped: str | None = None
    line: Line | None = None  # where its files can be read


def take(word: str, desk: Desk, cache: Cache, overrides: Mapping[str, Any]) -> Iterator[Taken]:
    """What one CHECKPOINT word names: one checkpoint, or one for each row of a JSON document or stdin.

    `overrides` are laid over config.json. Raises BadInput for a word or row that is none, and the error that kept a
    repo from being read."""
    path = Path(word)
    if path.name == "config.json" and path.is_file():
        path = path.parent
        word = str(path)
    if word == "-" or (path.is_file() and path.suffix in (".json", ".jsonl")):
        text = sys.stdin.read() if word == "-" else read_text(path)
        rows = [line for line in text.splitlines() if line.strip()]
        if not rows:
            raise BadInput(f"{word}: expected facts JSON as `screen --json` prints it, got nothing")
        documents = [text] if text.lstrip().startswith("{\n") else rows
        yield from (_row(document, word, overrides) for document in documents)
        return
    for line in desk.lines([word]):
        yield Taken(line.repo, _read(line, cache, overrides), line=line)


def _read(line: Line, cache: Cache, overrides: Mapping[str, Any]) -> Facts:
    """Facts of a repo or folder; from its config alone where it has no safetensors to read."""
    [item] = survey([line], Criteria(Policy(scan="ignore"), datetime.now(UTC)), cache, overrides)
    verdict = item.verdict
    if verdict.error is not None:
        raise _as_error(verdict.error)
    if verdict.facts is not None and verdict.facts.geometry is not None:
        return verdict.facts
    facts = _from_config(line, cache, overrides)
    if facts is None:
        decisive = verdict.decisive()
        because = f"; {decisive.because}" if decisive else ""
        raise BadInput(f"{line.repo}: expected a checkpoint with a config.json, got none{because}")
    return facts


def _from_config(line: Line, cache: Cache, overrides: Mapping[str, Any]) -> Facts | None:
    name, files = _config_files(line, cache)
    config = files.get("config.json")
    if config is None:
        return None
    return derive(overridden(config, overrides), None, hf_quant=files.get("hf_quant_config.json"), repo=name)


def config_files(taken: Taken, cache: Cache) -> dict[str, dict[str, Any]]:
    """The config files of a checkpoint, by name. Raises BadInput where only facts of it are at hand."""
    if taken.line is None:
        raise BadInput(f"{taken.name}: expected a repo or folder whose config an engine can be shown, got facts only")
    return _config_files(taken.line, cache)[1]


def _config_files(line: Line, cache: Cache) -> tuple[str, dict[str, dict[str, Any]]]:
    """(the Hub's own name, config files by name) of a line."""
    if line.source is None:
        return line.repo, {}
    cost = Cost()
    resolved = line.source.resolve(line.repo, line.revision, cost)
    at = resolved.revision.commit
    tree = line.source.tree(resolved.canonical, at, cost)
    known = Known(line.repo, line.revision, canonical=resolved.canonical, commit=at, tree=tree)
    return resolved.canonical, {
        path: parse_config(small_file(known, line.source, entry, cost, cache), name=path)
        for path in CONFIG_FILES
        if (entry := tree.find(path)) is not None and entry.blob.size <= SMALL_FILE
    }


def _as_error(failure: Failure) -> ToolkitError:
    kind = HubUnavailable if failure.retry else AccessDenied if failure.code == "access_denied" else NotFound
    return kind(failure.message, hint=failure.hint, code=failure.code, retry=failure.retry)


def _row(text: str, where: str, overrides: Mapping[str, Any]) -> Taken:
    """One row of `screen --json`, or a facts document. A row that was dropped or not judged is not planned for.

    Rows hold a geometry, not a config: an override that they cannot take makes the answer unknown."""
    try:
        body = json.loads(text)
        name = body.get("canonical") or body.get("repo") or where
        facts, outcome = body.get("facts", body), body.get("outcome", "keep")
        if outcome in ("drop", "error"):
            return Taken(str(name), None, skipped=_why(body))
        if facts is None:
            raise ValueError("its facts are null: screen did not reach them")
        known = {field: facts[field] for field in Facts.model_fields if field in facts}
        if not known.keys() - {"model_type"}:
            own = "a model's config (read by the name config.json only)" if "model_type" in facts else "other fields"
            raise ValueError(own)
        for field, theirs in (("repo", "canonical"), ("commit", "commit")):
            known[field] = known.get(field) or body.get(theirs) or body.get(field)
        document = Facts.model_validate(known)
    except (ValueError, AttributeError, TypeError) as error:
        raise BadInput(f"{where}: expected facts JSON as `screen --json` prints it, got {error!s:.200}") from None
    strange = sorted(_leaves(overrides) - _FACT_OVERRIDES)
    reasons = [f"{key} cannot be overridden in facts from {where}: pass the repo or the folder" for key in strange]
    if document.geometry is None:
        reasons.append(f"the row of {name} holds no geometry: its config was not reached")
    return Taken(str(name), document, tuple(reasons))


def _why(body: Mapping[str, Any]) -> str:
    """Why `screen` did not keep a row, in its own words."""
    if body.get("error"):
        return str(body["error"].get("message"))
    rejected = next((f for f in body.get("findings") or [] if f.get("outcome") == "reject"), None)
    return str(rejected["because"]) if rejected else "screen dropped it"


def _leaves(overrides: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for key, value in overrides.items():
        found |= _leaves(value) if isinstance(value, Mapping) else {key}
    return found
