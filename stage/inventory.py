"""What a store holds, what of it is shared, and what could go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from formulas.errors import NotFound

from .disk import leftovers, look
from .manifest import Manifest
from .store import Store


class Snapshot(NamedTuple):
    """One staged commit. `bytes`: each blob once; `own_bytes`: of blobs that no other snapshot has."""

    repo: str
    commit: str
    refs: tuple[str, ...]
    files: int
    bytes: int
    own_bytes: int
    placements: tuple[str, ...]

    @property
    def shared_bytes(self) -> int:
        return self.bytes - self.own_bytes


class Removal(NamedTuple):
    """What `gc` would remove, in the order it is removed in: refs, manifests, snapshots, blobs, the rest."""

    refs: tuple[Path, ...]
    manifests: tuple[Path, ...]
    snapshots: tuple[Path, ...]
    blobs: tuple[tuple[str, int], ...]
    partials: tuple[tuple[Path, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes that become free, unless folders outside the store still link to them."""
        return sum(size for _, size in (*self.blobs, *self.partials))


def list_snapshots(store: Store) -> list[Snapshot]:
    manifests = list(store.read_manifests())
    uses = Counter(oid for manifest in manifests for oid in manifest.sizes)
    refs: dict[tuple[str, str], list[str]] = {}
    for repo, revision in store.read_refs():
        refs.setdefault((repo, revision.commit), []).append(revision.requested)
    return [
        Snapshot(
            m.repo, m.commit, tuple(refs.get((m.repo, m.commit), ())), len(m.files), sum(m.sizes.values()),
            sum(size for oid, size in m.sizes.items() if uses[oid] == 1), tuple(p.folder for p in m.placements),
        )
        for m in manifests
    ]  # fmt: skip


def plan_gc(store: Store, drop: Collection[tuple[str, str]] = ()) -> Removal:
    """What no manifest needs, once the snapshots in `drop` (repo, revision) are given up: unfinished downloads too.

    Marked from the manifests: one that cannot be read stops everything. Raises NotFound for a snapshot not there.
    """
    dropped: dict[tuple[str, str], Manifest] = {}
    for repo, revision in drop:
        commit = store.read_ref(repo, revision)
        manifest = store.read_manifest(repo, commit) if commit else None
        if manifest is None:
            raise NotFound(f"{repo}@{revision}: expected a staged snapshot, got none", hint="see `stage ls`")
        dropped[repo, manifest.commit] = manifest
    kept = {oid for m in store.read_manifests() if (m.repo, m.commit) not in dropped for oid in m.sizes}
    held = {(m.repo, m.commit) for m in store.read_manifests()} - dropped.keys()
    refs = [store.ref(repo, r.requested) for repo, r in store.read_refs() if (repo, r.commit) not in held]
    folders = [path for path in store.snapshots.glob("*/*/*") if path.is_dir()]
    folders += [path for path in store.snapshots.glob("*/*") if path.is_dir() and len(path.name) == 40]
    names = {store.snapshot(*key) for key in held}
    blobs = [(f"{path.parent.parent.name}:{path.name}", path.stat().st_size)
             for path in store.blobs.glob("*/*/*") if path.is_file() and not path.name.startswith(".")]  # fmt: skip
    rest = [*store.partials.glob("*"), *leftovers([store.root])]
    return Removal(
        tuple(sorted(refs)), tuple(sorted(store.manifest(*key) for key in dropped)),
        tuple(sorted(folder for folder in folders if folder not in names and not _within(folder, names))),
        tuple(sorted((oid, size) for oid, size in blobs if oid not in kept)),
        tuple(sorted({(path, looks.size) for path in rest if (looks := look(path))})),
    )  # fmt: skip


def collect(store: Store, removal: Removal) -> None:
    """Removes what the plan says; the caller holds the lock. In reverse of the order in which things are written."""
    for path in (*removal.refs, *removal.manifests):
        path.unlink(missing_ok=True)
    for folder in removal.snapshots:
        _remove_tree(folder)
    for oid, _ in removal.blobs:
        store.blob(oid).unlink(missing_ok=True)
    for path, _ in removal.partials:
        path.unlink(missing_ok=True)
    for folder in (*removal.snapshots, *removal.manifests, *removal.refs):
        _remove_empty(folder.parent, store.root)


def _within(folder: Path, names: Collection[Path]) -> bool:
    """Whether a folder lies in, or holds, a snapshot that stays."""
    return any(folder in name.parents or name in folder.parents for name in names)


def _remove_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    folder.rmdir()


def _remove_empty(folder: Path, root: Path) -> None:
    while folder.parent != root and root in folder.parents and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
