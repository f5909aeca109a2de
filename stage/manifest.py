"""The manifest of a snapshot: its presence in a store means complete and verified. It is also what `--lock` reads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from formulas.errors import BadInput, HubMisbehaved
from screen.repo import Blob, Entry, Revision, Tree, check_path, is_commit, is_repo, parse_oid

Layout = Literal["hard link", "symlink"]


class File(BaseModel):
    """One file: its bytes by digest, where they came from, and how it is laid out in the snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    size: int
    oid: str
    source: str  # origin of the URL that sent most of it, or what local file it was
    layout: Layout = "hard link"


class Placement(BaseModel):
    """A folder outside the store into which the snapshot was laid out (`--to`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    folder: str
    how: Literal["hard link", "reflink", "copy"]


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1
    repo: str
    requested: str
    commit: str
    time: str  # UTC, when the last file was verified
    tool: str
    files: tuple[File, ...]
    placements: tuple[Placement, ...] = ()

    @property
    def revision(self) -> Revision:
        return Revision(self.requested, self.commit)

    @property
    def tree(self) -> Tree:
        return Tree(tuple(Entry(file.path, Blob(file.oid, file.size)) for file in self.files))

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each blob."""
        return {file.oid: file.size for file in self.files}


def parse_manifest(data: bytes, name: str) -> Manifest:
    """The manifest in a file's bytes, every name in it checked as those a Hub sends are. Raises BadInput."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(f"{name}: expected a manifest of format 1, got {where}: {first['msg']}") from None
    if not is_commit(manifest.commit):
        raise BadInput(f"{name}: expected a commit of 40 hex digits, got {manifest.commit!r}")
    if not is_repo(manifest.repo):
        raise BadInput(f"{name}: expected a repo such as org/name, got {manifest.repo!r:.200}")
    paths = {file.path for file in manifest.files}
    try:
        for text in (manifest.requested, *paths):
            check_path(text)
    except HubMisbehaved as error:
        raise BadInput(f"{name}: {error.message}") from None
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    if len(paths) < len(manifest.files) or folders & paths:
        raise BadInput(f"{name}: expected each path once, as a file or as a folder, got one twice")
    for file in manifest.files:
        kind, _, digest = file.oid.partition(":")
        if file.size < 0 or parse_oid(digest if kind == "sha256" else None, digest) != file.oid:
            raise BadInput(f"{name} {file.path}: expected sha256:<64 hex> or git-sha1:<40 hex>, got {file.oid!r}")
    return manifest


def write_manifest(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=1).encode() + b"\n"
