"""Blobs that are on this machine already: in other snapshots, in the Hugging Face cache, in folders the user names.

A name or a size only makes a file a candidate. Its bytes are digested before they become a blob.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from formulas.errors import BadInput
from screen.repo import Tree

from .disk import FULL, digest_file, look
from .layout import copy, hard_link, reflink
from .plan import Candidate, Reuse
from .store import Store


def find_candidates(
    store: Store, tree: Tree, hf_cache: Path | None, folders: Sequence[Path]
) -> dict[str, tuple[Candidate, ...]]:
    """Local files that may hold blobs of the tree which the store lacks, likeliest first; no file is read."""
    lacking = [e for e in tree.entries if e.blob.known and e.blob.size and look(store.blob(e.blob.oid)) is None]
    wanted = {entry.blob.oid: entry for entry in lacking}
    found: dict[str, list[Candidate]] = {}

    def add(oid: str, path: Path, *, linkable: bool) -> None:
        real = Path(os.path.realpath(path))
        with contextlib.suppress(PermissionError):
            if (looks := look(real)) and looks.size == wanted[oid].blob.size:
                shares = linkable and real.stat().st_dev == device
                found.setdefault(oid, []).append(Candidate(str(real), looks.size, shares))

    if not wanted:
        return {}
    device = _existing(store.root).stat().st_dev
    for manifest in store.read_manifests():
        for file in manifest.files:
            if file.oid in wanted:
                add(file.oid, store.snapshot(manifest.repo, manifest.commit) / file.path, linkable=True)
    names = {oid.partition(":")[2]: oid for oid in wanted}
    for path in hf_cache.glob("models--*/blobs/*") if hf_cache else ():
        if path.name in names:
            add(names[path.name], path, linkable=True)
    sizes: dict[int, list[str]] = {}
    for oid, entry in wanted.items():
        sizes.setdefault(entry.blob.size, []).append(oid)
    for path, size in _walk(folders):
        for oid in sizes.get(size, ()):
            add(oid, path, linkable=False)
    # A folder of 200 shards of one size: the file of the same name first, then at most as many as were seen.
    return {
        oid: tuple(sorted(paths, key=lambda c: Path(c.path).name != Path(wanted[oid].path).name))
        for oid, paths in found.items()
    }  # fmt: skip


class Digests:
    """Digests of local files, each taken once; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], str] = {}

    def of(self, path: str, like: str) -> str:
        key = (path, like.partition(":")[0])
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = digest_file(Path(path), like)
            with self._lock:
                self._known[key] = known
        return known


def reuse(store: Store, step: Reuse, digests: Digests) -> str | None:
    """Makes a local file the blob; how (`hard link of PATH`), or None when no candidate has the right bytes.

    A file that others may change in place is copied (blocks shared where the file system can), never linked.
    """
    if not step.candidates:
        try:
            if digest_file(store.blob(step.oid), step.oid) != step.oid:
                return None
        except OSError:  # a bad sector
            return None
        store.record(step.oid)
        return "digested again"
    for candidate in step.candidates:
        path, target = Path(candidate.path), store.partial(step.oid).with_suffix(".reuse")
        target.unlink(missing_ok=True)
        try:
            before = look(path)
            if digests.of(candidate.path, step.oid) != step.oid:
                continue
            how = _take(path, target, shares=candidate.shares)
            if how == "copy" and digest_file(target, step.oid) != step.oid:
                continue
            if look(path) != before:
                continue  # it was changed under our hands
            store.publish(step.oid, target, step.size)
            return f"{how} of {path}"
        except OSError as error:
            if error.errno in FULL:
                raise
            continue  # gone since the plan was made, not for us to read, or on a bad sector: there are other places
        finally:
            target.unlink(missing_ok=True)
    return None


def _take(path: Path, target: Path, *, shares: bool) -> str:
    if shares:
        try:
            hard_link(path, target)
            return "hard link"
        except OSError:
            target.unlink(missing_ok=True)
    try:
        reflink(path, target)
        return "reflink"
    except OSError:
        target.unlink(missing_ok=True)
    copy(path, target)
    return "copy"


def _walk(folders: Iterable[Path]) -> Iterable[tuple[Path, int]]:
    for folder in folders:
        if not folder.is_dir():
            raise BadInput(f"{folder}: expected a folder to reuse files of, got none")
        for above, _, names in os.walk(folder):
            for name in names:
                path = Path(above, name)
                with contextlib.suppress(PermissionError):
                    if looks := look(path):
                        yield path, looks.size


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
