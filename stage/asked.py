"""What a command line of `stage` asks for: snapshots by name, by the verdicts of `screen`, or by a lock file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from formulas.errors import BadInput
from screen.repo import is_commit, parse_repo_line

from .job import read_lock


def read_targets(
    repos: list[str] | None, verdicts: str | None, lock: Path | None, on_skip: Callable[[str], None]
) -> list[tuple[str, str]]:
    """(repo, revision) of everything asked for, each once, in order; none when `screen` kept nothing.

    Raises BadInput.
    """
    asked = [parse_repo_line(line) for line in repos or ()]
    if verdicts is not None:
        asked += read_kept(verdicts, on_skip)
    elif lock is not None and not asked:
        locked = read_lock(lock)
        asked = [(locked.repo, locked.commit)]
    elif not asked:
        raise BadInput("REPO: expected org/name[@revision], --from or --lock, got nothing")
    return list(dict.fromkeys(asked))


def read_kept(name: str, on_skip: Callable[[str], None]) -> list[tuple[str, str]]:
    """The rows of `screen --json` with outcome keep, at the commit that was judged; the others are told. `-`: stdin.

    Raises BadInput.
    """
    try:
        lines = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).splitlines()
    except OSError as error:
        raise BadInput(f"{name}: expected lines of `screen --json`, got {error.strerror}") from None
    kept = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = orjson.loads(line)
            repo, commit, outcome = row.get("canonical") or row["repo"], row.get("commit"), row["outcome"]
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{name} line {number}: expected a verdict of `screen --json`, got {line[:60]!r}") from None
        if outcome != "keep":
            on_skip(f"skipped {repo}: {outcome}")
        elif isinstance(commit, str) and is_commit(commit):
            kept.append(parse_repo_line(f"{repo}@{commit}"))
        elif commit is None:
            on_skip(f"skipped {repo}: no commit was judged (a local folder?)")
        else:
            raise BadInput(f"{name} line {number}: expected a commit of 40 hex digits, got {commit!r:.60}")
    return kept
