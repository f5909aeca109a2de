"""The store on disk: where everything lies, and the few ways in which it may change.

    blobs/sha256/ab/ab12..  blobs/git-sha1/0c/0c55..   verified, read-only, never modified
    partial/sha256-ab12..                              bytes of a blob still being fetched
    snapshots/REPO/COMMIT/  manifests/REPO/COMMIT.json  refs/REPO/REVISION

Written in the order blob, link, manifest, ref, and removed in reverse, each name by a rename that follows the fsync
of what it names: whatever moment a process dies at, a name that exists is true. Callers that write hold the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from formulas.errors import BadInput, ToolkitError
from screen.repo import Revision, Tree, is_commit

from .disk import FULL, is_temporary, look, make_folder, same, sync_folder, temporary_name, write_file
from .journal import Journal, bad_line, parse_journal, published_line, write_journal
from .manifest import Layout, Manifest, parse_manifest, write_manifest
from .plan import Candidate, Presence
from .spans import clip

FORMAT = b"1\n"
BALLAST_BYTES = 128 << 10
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class Store:
    """Paths and changes of one store. Makes nothing until something is written."""

    def __init__(self, root: Path):
        self.root = root
        self.blobs, self.partials, self.snapshots = root / "blobs", root / "partial", root / "snapshots"
        self.manifests_root, self.refs_root = root / "manifests", root / "refs"
        self.journal_path, self.lock_path = root / "journal.jsonl", root / "lock"
        self.ballast = self.partials / "ballast"

    def check(self) -> None:
        """Raises BadInput where this can be no store: a later format, or something that is no folder."""
        found = self.read_format()
        if found not in (None, FORMAT):
            raise BadInput(f"store {self.root}: expected format 1, got {found!r:.40}; it needs a newer stage")
        if self.root.exists() and not self.root.is_dir():
            raise BadInput(f"store {self.root}: expected a folder, got a file")

    def create(self) -> None:
        """Makes the folders of a new store. Raises BadInput for a folder of other files or a later format."""
        self.check()
        if self.read_format() is None:
            if self.root.is_dir() and not all(map(is_temporary, self.root.iterdir())):
                raise BadInput(f"store {self.root}: expected a store or an empty folder, got a folder of other files")
            write_file(self.root / "format", FORMAT)
        for folder in (self.blobs, self.partials, self.snapshots, self.manifests_root, self.refs_root):
            make_folder(folder)

    def tidy(self) -> None:
        """Removes temporary names that killed runs left, and rewrites a journal that is mostly history."""
        for path in (path for path in self.partials.iterdir() if is_temporary(path)):
            path.unlink()
        if (looks := look(self.journal_path)) and looks.size > 1 << 20:
            data = write_journal(self.read_journal())
            if len(data) < looks.size // 2:
                write_file(self.journal_path, data)

    def read_format(self) -> bytes | None:
        try:
            return (self.root / "format").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    # Where things lie

    def blob(self, oid: str) -> Path:
        kind, _, digest = oid.partition(":")
        return self.blobs / kind / digest[:2] / digest

    def partial(self, oid: str) -> Path:
        return self.partials / oid.replace(":", "-")

    def bad(self, oid: str) -> Path:
        """Where a blob that is not what its name says waits for its successor."""
        return self.partials / (oid.replace(":", "-") + ".bad")

    def snapshot(self, repo: str, commit: str) -> Path:
        return self.snapshots / repo / commit

    def manifest(self, repo: str, commit: str) -> Path:
        return self.manifests_root / repo / f"{commit}.json"

    def ref(self, repo: str, revision: str) -> Path:
        return self.refs_root / repo / quote(revision, safe="")

    # What is there

    def read_manifest(self, repo: str, commit: str) -> Manifest | None:
        path = self.manifest(repo, commit)
        try:
            return parse_manifest(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None

    def read_ref(self, repo: str, revision: str) -> str | None:
        """The commit a revision stands for in this store; a commit stands for itself."""
        if is_commit(revision):
            return revision
        try:
            commit = self.ref(repo, revision).read_text().strip()
        except FileNotFoundError:
            return None
        return commit if is_commit(commit) else None

    def read_manifests(self) -> Iterator[Manifest]:
        """Every complete snapshot, by repo and commit."""
        for path in sorted(self.manifests_root.rglob("*.json")):
            yield parse_manifest(path.read_bytes(), str(path))

    def read_refs(self) -> Iterator[tuple[str, Revision]]:
        for path in sorted(p for p in self.refs_root.rglob("*") if p.is_file() and not p.name.startswith(".")):
            repo = path.parent.relative_to(self.refs_root).as_posix()
            yield repo, Revision(unquote(path.name), path.read_text().strip())

    def read_bad(self) -> list[str]:
        """The oids of blobs that wait for their successor."""
        names = [path.name.removesuffix(".bad").rpartition("-") for path in self.partials.glob("*.bad")]
        return [f"{kind}:{digest}" for kind, _, digest in names]

    def read_journal(self) -> Journal:
        try:
            return parse_journal(self.journal_path.read_bytes())
        except FileNotFoundError:
            return parse_journal(b"")

    def inspect(
        self, repo: str, revision: Revision, tree: Tree, candidates: dict[str, tuple[Candidate, ...]] | None = None
    ) -> Presence:
        """What is here of a tree, by stat alone: no file is read but the journal, the manifest and the ref."""
        journal = self.read_journal()
        proven, unproven, parts = set[str](), dict[str, int](), dict[str, Any]()
        for oid in {entry.blob.oid for entry in tree.entries if entry.blob.known}:
            looks = look(self.blob(oid))
            if looks is not None and oid not in journal.bad and journal.published.get(oid) == looks:
                proven.add(oid)
            elif looks is not None:
                unproven[oid] = looks.size
            if (partial := look(self.partial(oid))) and (spans := clip(journal.spans(oid), partial.size)):
                parts[oid] = spans
        folder = self.snapshot(repo, revision.commit)
        named = [(entry.path, entry.blob.oid) for entry in tree.entries if entry.blob.known]
        links = {(path, oid) for path, oid in named if same(folder / path, self.blob(oid))}
        manifest = self.read_manifest(repo, revision.commit)
        return Presence(
            frozenset(proven), unproven, parts, candidates or {}, frozenset(links),
            None if manifest is None else frozenset((file.path, file.oid) for file in manifest.files),
            self.read_ref(repo, revision.requested),
        )  # fmt: skip

    # Changes

    def append(self, *lines: bytes) -> None:
        """Adds lines to the journal, on a full disk too. Not fsynced: a line that is lost costs work, never bytes.

        A line that was cut short, by a crash or a full disk, is ended first: it does not take the next one with it.
        """
        data = b"".join(lines)
        fd = os.open(self.journal_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except OSError as error:
                    if error.errno not in FULL or not self.ballast.exists():
                        raise
                    self.ballast.unlink()
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def ballasted(self) -> Iterator[None]:
        """Keeps some disk back inside the `with`, for the journal to say what has arrived when there is no more."""
        self.ballast.write_bytes(bytes(BALLAST_BYTES))
        try:
            yield
        finally:
            self.ballast.unlink(missing_ok=True)

    def publish(self, oid: str, source: Path, size: int) -> None:
        """Makes a file of this file system, whose digest was just taken, the blob; its old name goes away."""
        fd = os.open(source, os.O_RDONLY)
        try:
            if (found := os.fstat(fd).st_size) != size:
                raise ToolkitError(f"{oid}: expected {size} bytes to publish, got {found}; {source} was changed")
            os.fsync(fd)
            os.fchmod(fd, 0o444)
        finally:
            os.close(fd)
        target = self.blob(oid)
        make_folder(target.parent)
        os.rename(source, target)
        sync_folder(target.parent)
        self.record(oid)

    def record(self, oid: str) -> None:
        """Notes how a verified blob looks, so that it need not be read again while it looks like that."""
        if looks := look(self.blob(oid)):
            self.append(published_line(oid, looks))

    def set_aside(self, oid: str) -> None:
        """Takes a blob that is not what its name says out of blobs/."""
        self.append(bad_line(oid))
        os.rename(self.blob(oid), self.bad(oid))
        sync_folder(self.blob(oid).parent)

    def link(self, oid: str, path: Path) -> Layout:
        """Gives a blob a name: a hard link, or a relative symlink where there are none. Which of the two."""
        make_folder(path.parent)
        blob, temporary = self.blob(oid), temporary_name(self.partials / path.name)  # a crash leaves it there
        try:
            os.link(blob, temporary)
            layout: Layout = "hard link"
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.symlink(os.path.relpath(blob, path.parent), temporary)
            layout = "symlink"
        os.rename(temporary, path)
        temporary.unlink(missing_ok=True)  # renaming one name of a file onto another name of it leaves both
        return layout

    def write_manifest(self, manifest: Manifest) -> None:
        write_file(self.manifest(manifest.repo, manifest.commit), write_manifest(manifest))

    def write_ref(self, repo: str, revision: Revision) -> None:
        write_file(self.ref(repo, revision.requested), revision.commit.encode() + b"\n")
