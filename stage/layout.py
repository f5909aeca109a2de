"""A snapshot laid out outside the store: as plain files (`--to`), or in the layout of the Hugging Face cache."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from formulas.errors import BadInput, ToolkitError
from screen.repo import Tree, is_commit

from .disk import (
    digest_file,
    folds_case,
    is_temporary,
    look,
    make_folder,
    same,
    sync_folder,
    temporary_name,
    write_file,
)  # fmt: skip
from .manifest import File, Manifest
from .plan import case_clash
from .store import Store

How = Literal["hard link", "reflink", "copy"]
_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file, copy on write
_COSTS: tuple[How, ...] = ("hard link", "reflink", "copy")


def lay_out(store: Store, manifest: Manifest, folder: Path, ways: tuple[How, ...] = _COSTS) -> How:
    """Makes `folder` hold the snapshot's files; the most expensive way that was needed for one of them.

    A hard link is read-only and is the blob itself; a copy has the blob's mtime, by which a later run knows it.
    """
    make_folder(folder)
    clash = case_clash(file.path for file in manifest.files)
    if clash and folds_case(folder):
        raise BadInput(f"{folder}: expected names it can tell apart, got {clash[0]} and {clash[1]}; it folds case")
    used: How = ways[0]
    for path in {(folder / file.path).parent for file in manifest.files}:
        for left in (left for left in path.glob(".*.tmp") if is_temporary(left)):
            left.unlink()  # of a run that was killed here
    for file in manifest.files:
        how = place(store.blob(file.oid), folder / file.path, ways)
        used = max(used, how, key=_COSTS.index)
    return used


def check_folder(store: Store, tree: Tree, folder: Path) -> None:
    """Raises BadInput when a snapshot cannot be laid out there, or would take the place of files that are not its own.

    A folder that this store laid out before may be laid out anew; in any other, a file in the way has to be the same.
    """
    real, root = folder.resolve(), store.root.resolve()
    if real == root or root in real.parents:
        raise BadInput(f"--to {folder}: expected a folder outside the store, got one in {store.root}")
    above = next(path for path in (real, *real.parents) if path.exists())
    if not above.is_dir():
        raise BadInput(f"--to {folder}: expected a folder, got the file {above}")
    if any(placement.folder == str(real) for m in store.read_manifests() for placement in m.placements):
        return
    for entry in tree.entries:
        target = folder / entry.path
        there = look(target)
        if there is None or same(target, store.blob(entry.blob.oid)):
            continue
        if target.is_dir() or there.size != entry.blob.size or digest_file(target, entry.blob.oid) != entry.blob.oid:
            raise BadInput(
                f"--to {folder}: expected no other files in the way, got {target}, which is not the snapshot's; "
                "nothing was replaced",
                hint="name a new folder, or move that file away",
            )


def clear(store: Store, manifest: Manifest, folder: Path, kept: set[str]) -> None:
    """Removes a snapshot's files from a folder it was laid out in, but those in `kept` and those changed since."""
    for file in (file for file in manifest.files if file.path not in kept):
        path, blob = folder / file.path, store.blob(file.oid)
        there, wanted = look(path), look(blob)
        if same(path, blob) or (there and wanted and there[:2] == wanted[:2]):
            path.unlink()
            while path.parent != folder and not any((path := path.parent).iterdir()):
                path.rmdir()


def place(blob: Path, target: Path, ways: tuple[How, ...]) -> How:
    """Puts a blob's bytes at `target` in the first of the ways that works here; which one."""
    if "hard link" in ways and same(target, blob):
        return "hard link"
    there, wanted = look(target), look(blob)
    if there and wanted and there[:2] == wanted[:2] and there.inode != wanted.inode and "copy" in ways:
        return "copy"
    make_folder(target.parent)
    temporary = temporary_name(target)
    for how in ways:
        try:
            _WAYS[how](blob, temporary)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if how == ways[-1] or error.errno not in _IMPOSSIBLE:
                raise
            continue
        os.rename(temporary, target)
        temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
        return how
    raise ToolkitError(f"{target}: expected a way to lay it out, got none")


def hard_link(source: Path, target: Path) -> None:
    os.link(source.resolve(), target)


def reflink(source: Path, target: Path) -> None:
    """A file that shares the source's blocks until either is changed. Raises OSError where there is no such thing."""
    with source.open("rb") as old, target.open("xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    _like(source, target)


def copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, 1 << 20)
        new.flush()
        os.fsync(new.fileno())
    _like(source, target)


def _like(source: Path, target: Path) -> None:
    stat = source.stat()
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))


_WAYS: dict[How, Callable[[Path, Path], None]] = {"hard link": hard_link, "reflink": reflink, "copy": copy}
_IMPOSSIBLE = {
    errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EMLINK
}  # fmt: skip


def publish_hf_cache(store: Store, manifest: Manifest, cache: Path) -> How:
    """Puts the snapshot in a Hugging Face cache, where huggingface_hub finds it offline; the way that was needed.

    blobs/<etag>, snapshots/<commit>/<path> as relative symlinks, refs/<revision> without a newline
    (huggingface_hub 2.4.0 file_download.py `_create_symlink`, `_cache_commit_hash_for_specific_revision`). That
    library trusts any file in blobs/, so one that is not ours is digested first, and replaced if it is wrong.
    """
    root = cache / ("models--" + manifest.repo.replace("/", "--"))
    used: How = "hard link"
    for file in manifest.files:
        blob, target = store.blob(file.oid), root / "blobs" / file.oid.partition(":")[2]
        there = look(target)
        if there is None or not (same(target, blob) or _right(target, there.size, file)):
            used = max(used, place(blob, target, _COSTS), key=_COSTS.index)
        _symlink(target, root / "snapshots" / manifest.commit / file.path)
    if not is_commit(manifest.requested):
        write_file(root / "refs" / manifest.requested, manifest.commit.encode())
    return used


def _right(path: Path, size: int, file: File) -> bool:
    return size == file.size and digest_file(path, file.oid) == file.oid


def _symlink(target: Path, path: Path) -> None:
    make_folder(path.parent)
    link = os.path.relpath(target, path.parent)
    if path.is_symlink() and os.readlink(path) == link:
        return
    temporary = temporary_name(path)
    os.symlink(link, temporary)
    os.rename(temporary, path)
