"""Names of things on a Hub, and the tree of one commit. Paths come from strangers: they are checked here, once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from formulas.errors import BadInput, HubMisbehaved

_REPO = re.compile(r"(?:[A-Za-z0-9][\w.\-]*/)?[A-Za-z0-9_][\w.\-]*")
_HEX40, _HEX64 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


class Revision(NamedTuple):
    """What was asked for (branch, tag, commit) and the commit it resolved to."""

    requested: str
    commit: str


class Blob(NamedTuple):
    """Content: `oid` is `sha256:<64 hex>`, `git-sha1:<40 hex>` or `unknown`; equal known oids are equal bytes."""

    oid: str
    size: int

    @property
    def known(self) -> bool:
        return self.oid != "unknown"


class Entry(NamedTuple):
    """One file of a tree."""

    path: str
    blob: Blob


class Tree(NamedTuple):
    """All files of one commit, sorted by path."""

    entries: tuple[Entry, ...]

    def find(self, path: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.path == path), None)


def parse_repo_line(text: str) -> tuple[str, str]:
    """(repo, revision) of `org/name[@rev]`; the revision defaults to `main`. Raises BadInput."""
    repo, at, revision = text.strip().partition("@")
    if not is_repo(repo) or (at and not revision):
        raise BadInput(
            f"repo {text.strip()!r:.200}: expected org/name or org/name@revision, got something else",
            hint="of a page's address, only the org/name after the host" if "://" in text else None,
        )
    return repo, revision or "main"


def is_repo(name: str) -> bool:
    """Whether this can be the name of a repo, and so a folder's: `org/name`, or one of the first ones, `gpt2`."""
    return _REPO.fullmatch(name) is not None and ".." not in name


def is_commit(revision: str) -> bool:
    return _HEX40.fullmatch(revision) is not None


def check_path(path: str) -> str:
    """The path itself when it is safe to create under a folder on any system; else HubMisbehaved."""
    parts = path.split("/")
    bad = (
        not path
        or "\\" in path
        or "\0" in path
        or ":" in parts[0]
        or any(part in ("", ".", "..") for part in parts)
    )
    if bad:
        raise HubMisbehaved(f"path {path!r}: expected a plain relative path, got one that can escape; refused")
    return path


def parse_oid(lfs_sha256: object, git_sha1: object) -> str:
    """The oid of a tree entry: LFS sha256 if there is one, else git's sha1; `unknown` when neither is plain hex."""
    if isinstance(lfs_sha256, str):
        return f"sha256:{lfs_sha256}" if _HEX64.fullmatch(lfs_sha256) else "unknown"
    if isinstance(git_sha1, str) and _HEX40.fullmatch(git_sha1):
        return f"git-sha1:{git_sha1}"
    return "unknown"


def parse_tree(items: Iterable[Mapping[str, Any]]) -> Tree:
    """The tree in the Hub's listing (all pages joined). Raises HubMisbehaved for unsafe or colliding paths."""
    entries: dict[str, Entry] = {}
    for item in items:
        if item.get("type") != "file":
            continue
        path, size, lfs = item.get("path"), item.get("size"), item.get("lfs")
        lfs = lfs if isinstance(lfs, Mapping) else None
        size = lfs.get("size", size) if lfs else size
        if not isinstance(path, str) or not isinstance(size, int) or size < 0:
            raise HubMisbehaved(f"tree entry {dict(item)!r:.200}: expected a path and a size, got neither or less")
        blob = Blob(parse_oid(lfs.get("oid") if lfs else None, item.get("oid")), size)
        if path in entries and entries[path].blob != blob:
            raise HubMisbehaved(f"{path}: the tree lists it twice with different content; refused")
        entries[check_path(path)] = Entry(path, blob)
    folders = {path[:i] for path in entries for i, c in enumerate(path) if c == "/"}
    if clash := folders & entries.keys():
        raise HubMisbehaved(f"{min(clash)}: the tree lists it both as a file and as a folder; refused")
    return Tree(tuple(entries[path] for path in sorted(entries)))
