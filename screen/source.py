"""What every place that holds checkpoints answers, a Hub and a local folder alike."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .repo import Entry, Revision, Tree, is_commit
from .transport import Cost


class ModelInfo(BaseModel):
    """What the Hub's API says of a repo; it answers, it decides nothing. Absent fields are None or empty."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    id: str
    identity: str | None = Field(None, alias="_id")  # stays when the repo is renamed; a path proves nothing
    sha: str | None = None
    author: str | None = None
    private: bool = False
    gated: bool | str = False
    disabled: bool = False
    last_modified: datetime | None = Field(None, alias="lastModified")
    created_at: datetime | None = Field(None, alias="createdAt")
    tags: tuple[str, ...] = ()
    card: dict[str, Any] = Field({}, alias="cardData")
    library_name: str | None = None
    pipeline_tag: str | None = None
    downloads: int | None = None
    likes: int | None = None
    security: dict[str, Any] | None = Field(None, alias="securityRepoStatus")

    @field_validator("last_modified", "created_at")
    @classmethod
    def _in_some_zone(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @field_validator("private", "disabled", "tags", "card", mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value


class RepoInfo(NamedTuple):
    """A resolved name: the commit, the name the Hub itself uses (differs for a renamed repo), and what it says."""

    revision: Revision
    canonical: str
    info: ModelInfo


class Source(Protocol):
    """Where checkpoints are read from: a Hub, or a local folder."""

    free: bool  # reading again costs nothing, so nothing read is kept; digests are claims, so none is relied on

    def resolve(self, repo: str, revision: str, cost: Cost) -> RepoInfo: ...

    def tree(self, repo: str, commit: str, cost: Cost) -> Tree: ...

    def read_file(self, repo: str, commit: str, entry: Entry, cost: Cost, limit: int) -> bytes: ...

    def read_range(self, repo: str, commit: str, entry: Entry, start: int, stop: int, cost: Cost) -> bytes: ...

    def metadata_in_one(self, repo: str, revision: Revision, index: str, cost: Cost) -> bytes | None: ...


def name(repo: str, commit: str, path: str) -> str:
    """How messages name a file: `org/name@3f2a91c0 config.json`; without a commit where there is none."""
    return f"{repo}@{commit[:8]} {path}" if is_commit(commit) else f"{repo} {path}"


def digest(data: bytes, like: str) -> str:
    """The digest of a whole file, of the kind `like` is: git's blob sha1 for `git-sha1:`, sha256 for the rest."""
    if like.startswith("git-sha1:"):
        return "git-sha1:" + hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return "sha256:" + hashlib.sha256(data).hexdigest()
