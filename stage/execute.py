"""Carries a plan out, in the order that keeps every name true: blobs, links, manifest, ref, then what lies outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from formulas.errors import BadInput, DiskFull, ToolkitError
from formulas.units import human
from screen.repo import Revision, Tree

from .blob import Incoming
from .board import Event
from .digests import HASHERS, workers
from .disk import READ_BYTES, disk_free, folds_case, sync_folder, write_all
from .fetch import Download, Fetched
from .journal import Part, forget_line, part_line
from .layout import How, check_folder, clear, lay_out, publish_hf_cache
from .manifest import File, Layout, Manifest, Placement
from .plan import Fetch, Link, Reuse, Skipped, StagePlan, WriteRef, case_clash, make_plan
from .reuse import Digests, find_candidates, reuse
from .sources import Source, Thresholds
from .spans import part_size
from .store import Store

OnEvent = Callable[[Event], None]


class Wanted(NamedTuple):
    """What is to be staged: sizes and digests come from a trusted endpoint or a lock file."""

    repo: str
    revision: Revision
    tree: Tree
    skipped: tuple[Skipped, ...] = ()


class Places(NamedTuple):
    """Where to look for bytes besides the store, and where to lay the snapshot out."""

    hf_cache: Path | None = None  # to look in
    reuse: tuple[Path, ...] = ()
    to: Path | None = None
    ways: tuple[How, ...] = ("hard link", "reflink", "copy")
    publish_hf_cache: Path | None = None


class Outcome(NamedTuple):
    """What staging one snapshot came to. `failed`: by path, why; empty means complete and verified."""

    manifest: Manifest | None
    received: dict[str, int]
    failed: dict[str, ToolkitError]
    hosts: dict[str, tuple[str, ...]]  # by source, who sent its bytes in the end


def plan(store: Store, wanted: Wanted, places: Places) -> StagePlan:
    """The steps that stage it, from what is on this disk now; writes nothing."""
    candidates = find_candidates(store, wanted.tree, places.hf_cache, places.reuse)
    here = store.inspect(wanted.repo, wanted.revision, wanted.tree, candidates)
    return make_plan(wanted.repo, wanted.revision, wanted.tree, here, wanted.skipped)


def check_room(store: Store, steps: StagePlan, places: Places, reserve_bytes: int) -> None:
    """Raises DiskFull when the file systems written to cannot hold what the plan writes, and BadInput for names the
    target cannot tell apart and for a `--to` that is no place for the snapshot."""
    _check_free(store.root, steps.disk_bytes, reserve_bytes)
    for folder in filter(None, (places.to, places.publish_hf_cache)):
        if _device(folder) != _device(store.root):
            _check_free(folder, steps.total_bytes, reserve_bytes)
        elif "hard link" not in places.ways and folder == places.to:
            _check_free(folder, steps.disk_bytes + steps.total_bytes, reserve_bytes)
    if places.to is not None:
        check_folder(store, Tree(steps.entries), places.to)
    clash = case_clash(entry.path for entry in steps.entries)
    if clash and folds_case(store.root):
        raise BadInput(f"{store.root}: expected names it can tell apart, got {clash[0]} and {clash[1]}; it folds case")


def execute(
    store: Store, steps: StagePlan, places: Places, sources: Sequence[Source], thresholds: Thresholds,
    on_event: OnEvent, tool: str,
) -> Outcome:  # fmt: skip
    """Stages one snapshot; the caller holds the store's lock. Raises DiskFull; what has arrived is kept."""
    origins = _known_sources(store)
    fetches = list(steps.fetches)
    fetches += _reuse(store, steps.reuses, origins, on_event)
    fetched = Fetched({}, {}, {}, {})
    if fetches:
        paths: dict[str, list[str]] = {}
        for entry in steps.entries:
            paths.setdefault(entry.blob.oid, []).append(entry.path)
        journal = store.read_journal()
        incoming = [_incoming(store, step, tuple(paths[step.oid]), journal, thresholds) for step in fetches]
        download = Download(store, steps.repo, steps.revision.commit, sources, thresholds, on_event)
        with store.ballasted():
            fetched = download.run(incoming)
        origins |= fetched.origins
    if fetched.failed:
        return Outcome(None, fetched.received, fetched.failed, fetched.hosts)
    manifest = _finish(store, steps, origins, tool)
    if any(isinstance(step, WriteRef) for step in steps.steps):
        store.write_ref(steps.repo, steps.revision)
    _mend(store, on_event)
    manifest = _lay_out(store, manifest, places, on_event)
    return Outcome(manifest, fetched.received, {}, fetched.hosts)


def _reuse(store: Store, reuses: Sequence[Reuse], origins: dict[str, str], on_event: OnEvent) -> list[Fetch]:
    """Turns local files into blobs; what is still to be fetched because none had the right bytes."""
    digests, again = Digests(), list[Fetch]()
    if reuses:
        on_event({"event": "hashing", "because": f"{len(reuses)} local files have to be digested before they are used",
                  "bytes": sum(step.size for step in reuses)})  # fmt: skip
    with workers(HASHERS) as pool:
        for step, how in zip(reuses, pool.map(lambda step: reuse(store, step, digests), reuses), strict=True):
            if how is not None:
                origins.setdefault(step.oid, "this disk")
                on_event({"event": "file", "path": step.path, "oid": step.oid, "bytes": step.size,
                          "source": "this disk", "how": how})  # fmt: skip
                continue
            if not step.candidates:
                store.set_aside(step.oid)
                on_event({"event": "quarantined", "path": step.path, "oid": step.oid, "sources": [],
                          "because": f"{step.oid}: the blob in the store is not what its name says"})  # fmt: skip
            again.append(Fetch(step.oid, step.size, step.path, (), 0))
    return again


def _incoming(store: Store, step: Fetch, paths: tuple[str, ...], journal: Any, thresholds: Thresholds) -> Incoming:
    """The blob as the download takes it on: with the parts that are here, or those of a damaged blob."""
    partial = store.partial(step.oid)
    parts: tuple[Part, ...] = ()
    if step.have:
        ends = max(stop for _, stop in step.have)
        parts = tuple(
            Part(part.start, min(part.stop, ends), part.source) for part in journal.parts[step.oid] if part.start < ends
        )
    else:
        # Lines of an earlier file of this name would vouch for bytes that this one does not have.
        partial.unlink(missing_ok=True)
        store.append(forget_line(step.oid))
    if step.salvage:
        parts = (Part(0, step.salvage, ""),)
        _copy_start(store.blob(step.oid), partial, step.salvage)
        store.append(part_line(step.oid, parts[0]))
    if store.blob(step.oid).exists():
        store.set_aside(step.oid)
    size = part_size(step.size, thresholds.part_bytes, thresholds.largest_part_bytes)
    return Incoming(step, paths, parts, size)


def _copy_start(source: Path, target: Path, count: int) -> None:
    """The first `count` bytes of a file as a new one: the damaged file may be linked from places we do not own."""
    with source.open("rb") as old:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            at = 0
            while at < count and (data := old.read(min(READ_BYTES, count - at))):
                write_all(fd, data, at)
                at += len(data)
            os.fsync(fd)
        finally:
            os.close(fd)


def _finish(store: Store, steps: StagePlan, origins: dict[str, str], tool: str) -> Manifest:
    """Links and the manifest; an existing manifest that says as much is kept as it is."""
    old = store.read_manifest(steps.repo, steps.revision.commit)
    if not steps.steps and old is not None:
        return old
    layouts: dict[str, Layout] = {file.path: file.layout for file in old.files} if old else {}
    folder = store.snapshot(steps.repo, steps.revision.commit)
    for link in (step for step in steps.steps if isinstance(step, Link)):
        layouts[link.path] = store.link(link.oid, folder / link.path)
    for place in {(folder / entry.path).parent for entry in steps.entries}:
        sync_folder(place)  # a manifest that survives a power cut names links that do
    wanted = {
        entry.path: File(
            path=entry.path, size=entry.blob.size, oid=entry.blob.oid, source=origins.get(entry.blob.oid, "unknown"),
            layout=layouts.get(entry.path, "hard link"),
        )
        for entry in steps.entries
    }  # fmt: skip
    kept = {file.path: file for file in old.files} if old else {}
    files = {**kept, **wanted}
    manifest = Manifest(
        repo=steps.repo, requested=steps.revision.requested, commit=steps.revision.commit, tool=tool,
        time=datetime.now(UTC).isoformat(timespec="seconds"), files=tuple(files[path] for path in sorted(files)),
        placements=old.placements if old else (),
    )  # fmt: skip
    store.write_manifest(manifest)
    return manifest


def _mend(store: Store, on_event: OnEvent) -> None:
    """Lays every snapshot and folder out again that had a link to a blob which was replaced, then lets that go."""
    replaced = [oid for oid in store.read_bad() if store.blob(oid).exists()]
    for manifest in store.read_manifests() if replaced else ():
        folder = store.snapshot(manifest.repo, manifest.commit)
        hit = [file for file in manifest.files if file.oid in replaced]
        for file in hit:
            store.link(file.oid, folder / file.path)
        for placement in manifest.placements if hit else ():
            if Path(placement.folder).is_dir():
                ways: tuple[How, ...] = ("copy",) if placement.how == "copy" else ("hard link", "reflink", "copy")
                lay_out(store, manifest, Path(placement.folder), ways)
                on_event({"event": "laid out", "folder": placement.folder, "how": placement.how, "repo": manifest.repo})
    for oid in replaced:
        store.bad(oid).unlink()


def _lay_out(store: Store, manifest: Manifest, places: Places, on_event: OnEvent) -> Manifest:
    placements = tuple(p for p in manifest.placements if Path(p.folder).is_dir())
    if places.to is not None:
        how = lay_out(store, manifest, places.to, places.ways)
        on_event({"event": "laid out", "folder": str(places.to), "how": how, "repo": manifest.repo})
        placement = Placement(folder=str(places.to.resolve()), how=how)
        _take_over(store, manifest, places.to.resolve(), on_event)
        placements = (*(p for p in placements if p.folder != placement.folder), placement)
    if placements != manifest.placements:
        manifest = manifest.model_copy(update={"placements": placements})
        store.write_manifest(manifest)
    if places.publish_hf_cache is not None:
        how = publish_hf_cache(store, manifest, places.publish_hf_cache)
        on_event({"event": "laid out", "folder": str(places.publish_hf_cache), "how": how, "repo": manifest.repo})
    return manifest


def _take_over(store: Store, manifest: Manifest, folder: Path, on_event: OnEvent) -> None:
    """Makes a folder this snapshot's alone: of another one laid out there before, no shard stays among ours."""
    for other in store.read_manifests():
        left = tuple(p for p in other.placements if p.folder != str(folder))
        if left == other.placements or (other.repo, other.commit) == (manifest.repo, manifest.commit):
            continue
        clear(store, other, folder, {file.path for file in manifest.files})
        store.write_manifest(other.model_copy(update={"placements": left}))
        because = f"held {other.repo}@{other.commit[:8]} before; its files are replaced"
        on_event({"event": "warning", "path": str(folder), "because": because})


def _known_sources(store: Store) -> dict[str, str]:
    """Where the blobs of complete snapshots came from."""
    return {file.oid: file.source for manifest in store.read_manifests() for file in manifest.files}


def _check_free(folder: Path, needed: int, reserve_bytes: int) -> None:
    free = disk_free(folder)
    if needed and free < needed + reserve_bytes:
        raise DiskFull(
            f"disk of {folder}: expected {human(needed)} free beside a reserve of {human(reserve_bytes)}, got "
            f"{human(free)}; nothing was fetched",
            hint="make room, lower --reserve, or name another place with --store",
        )


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
