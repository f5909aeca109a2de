"""Repositories as the demo Hub knows them: files of stated size and digest, commits, refs, who may read them.

A checkpoint of 125 GiB takes a few MB here: a shard is its real header followed by zeros that exist only while they
are sent. Files of up to `EXACT_BYTES`, and files on disk, carry their true digests: whoever fetches one can verify it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

EXACT_BYTES = 32 * 2**20
_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".model")
_LFS_BYTES = 10 * 2**20  # the Hub asks for LFS above 10 MB, whatever the name
_TIME = "%Y-%m-%dT%H:%M:%S.000Z"
PIECE_BYTES = 2**20  # files are read and sent in pieces of at most this
_ZEROS = memoryview(bytes(PIECE_BYTES))


class Content:
    """The bytes of one file: `head`, then zeros up to `size`; or a file on disk."""

    def __init__(
        self,
        head: bytes = b"",
        size: int | None = None,
        path: Path | None = None,
        elements: Mapping[str, int] | None = None,  # by dtype, of a safetensors file: the Hub states them
    ):
        self.head, self.path, self.elements = head, path, elements or {}
        self.size = size if size is not None else path.stat().st_size if path else len(head)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the bytes; of a description of them where a file of zeros is too long to digest."""
        if self.path is None and self.size - len(self.head) > EXACT_BYTES:
            return hashlib.sha256(b"%d bytes of zeros after " % self.size + self.head).hexdigest()
        digest = hashlib.sha256()
        for piece in self.pieces(0, self.size):
            digest.update(piece)
        return digest.hexdigest()

    @cached_property
    def git_sha1(self) -> str:
        """Git's blob name: sha1 over `blob <size>\\0` and the bytes."""
        return git_blob(b"".join(self.pieces(0, self.size)))

    @property
    def xet_hash(self) -> str:
        """What stands where a Xet hash stands: as long as a sha256, and of something else."""
        return hashlib.sha256(b"xet" + self.sha256.encode()).hexdigest()

    @property
    def pointer(self) -> bytes:
        """The text git holds in place of an LFS file (https://git-lfs.github.com/spec/v1)."""
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize %d\n" % (
            self.sha256.encode(), self.size)  # fmt: skip

    def pieces(self, start: int, stop: int) -> Iterator[memoryview | bytes]:
        """The bytes of [start, stop), in pieces of at most `PIECE_BYTES`."""
        if self.path is not None:
            with self.path.open("rb") as file:
                for at in range(start, stop, PIECE_BYTES):
                    count = min(PIECE_BYTES, stop - at)
                    yield os.pread(file.fileno(), count, at).ljust(count, b"\0")
            return
        known = memoryview(self.head)
        for at in range(start, min(stop, len(known)), PIECE_BYTES):
            yield known[at : min(at + PIECE_BYTES, stop)]
        for at in range(max(start, len(known)), stop, PIECE_BYTES):
            yield _ZEROS[: stop - at]


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def as_content(value: Content | Path | bytes | str | dict[str, Any] | list[Any]) -> Content:
    """What a file of a repo may be given as: content, a path, bytes, text, or a JSON document."""
    if isinstance(value, Content):
        return value
    if isinstance(value, Path):
        return Content(path=value)
    if isinstance(value, bytes):
        return Content(value)
    return Content((value if isinstance(value, str) else json.dumps(value, indent=2) + "\n").encode())


def is_lfs(path: str, content: Content) -> bool:
    return path.endswith(_LFS_SUFFIXES) or content.size > _LFS_BYTES


class Commit(NamedTuple):
    """One state of a repo. `files` by path, in the order the tree lists them."""

    oid: str
    title: str
    date: str
    files: dict[str, Content]


Files = Mapping[str, Any]


@dataclass
class DemoRepo:
    """A repo on the demo Hub. `files` may be a function, called when somebody first asks for the repo."""

    name: str
    files: Files | Callable[[], Files] = field(default_factory=dict)
    gated: Literal[False, "auto", "manual"] = False
    private: bool = False
    disabled: bool = False
    missing: bool = False  # listed, but gone: the model listing is older than the repo
    renamed_to: str | None = None
    card: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pipeline_tag: str | None = "text-generation"
    downloads: int = 0
    likes: int = 0
    created: str = "2026-08-26T00:00:00.000Z"
    unsafe: Mapping[str, str] = field(default_factory=dict)  # path -> level, as the security scan reports it
    branches: dict[str, str] = field(default_factory=dict)  # besides main: branch or tag -> commit
    pushed: int = 0

    @cached_property
    def history(self) -> list[Commit]:
        """Commits of main, oldest first; the last one is what `main` resolves to."""
        files = self.files() if callable(self.files) else self.files
        return [self._commit(files, "initial commit", 0)]

    @property
    def main(self) -> Commit:
        return self.history[-1]

    def push(self, files: Files, title: str = "update") -> str:
        """The new commit of `main`, after replacing or adding these files (None removes one)."""
        merged = {**self.main.files, **files}
        kept = {path: value for path, value in merged.items() if value is not None}
        self.pushed += 1
        self.history.append(self._commit(kept, title, self.pushed))
        return self.main.oid

    def find(self, revision: str) -> Commit | None:
        """The commit a branch, tag or (whole) commit id names."""
        if revision == "main":
            return self.main
        oid = self.branches.get(revision, revision)
        return next((commit for commit in self.history if commit.oid == oid), None)

    def _commit(self, files: Files, title: str, number: int) -> Commit:
        contents = {path: as_content(value) for path, value in files.items()}
        digest = hashlib.sha1(f"{self.name} {number} {title}".encode())
        for path, content in sorted(contents.items()):
            digest.update(f"\n{path} {content.size} {content.sha256}".encode())
        return Commit(digest.hexdigest(), title, self._date(number), contents)

    @property
    def modified(self) -> str:
        return self._date(self.pushed)

    def _date(self, number: int) -> str:
        """Commits are a day apart."""
        return (datetime.strptime(self.created, _TIME) + timedelta(days=number)).strftime(_TIME)


def folder_repo(name: str, folder: Path, **about: Any) -> DemoRepo:
    """A repo of the files under a folder, with their true digests."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return DemoRepo(name, files, **about)


def directories(paths: Iterator[str]) -> list[str]:
    """Every folder above these paths."""
    parents = (itertools.accumulate(path.split("/")[:-1], lambda a, b: f"{a}/{b}") for path in paths)
    return sorted(set(itertools.chain.from_iterable(parents)))
