"""Whether what is on disk is what the manifest says: every byte digested again, every header read, nothing changed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import orjson

from formulas.errors import HeaderError
from screen.header import Header, header_length, parse_header

from .digests import workers
from .disk import READ_BYTES, digest_file
from .journal import bad_line
from .manifest import Manifest
from .store import Store

INDEX = "model.safetensors.index.json"


class Difference(NamedTuple):
    """A file that is not as the manifest says."""

    path: str
    because: str


class Structure(NamedTuple):
    """What the safetensors headers of a snapshot say. `broken`: headers that cannot be, or do not fit their file."""

    shards: int
    tensors: int
    broken: tuple[Difference, ...]
    misplaced: tuple[Difference, ...]  # where the index and the headers disagree


class Verification(NamedTuple):
    differences: tuple[Difference, ...]
    structure: Structure
    files: int
    bytes: int  # digested: each file once, however many names it has
    seconds: float

    @property
    def problems(self) -> tuple[Difference, ...]:
        return self.differences + self.structure.broken + self.structure.misplaced


def verify(
    store: Store, manifest: Manifest, *, threads: int, on_bytes: Callable[[int], object] = lambda count: None
) -> Verification:
    """Digests every file of the snapshot, in the store and in each folder it was laid out in, and checks the headers.

    Files that are one (hard links) are read once. Blobs found wrong are noted in the journal, and nothing else is
    written: the next `stage` fetches them again.
    """
    began = time.monotonic()
    folders = [store.snapshot(manifest.repo, manifest.commit), *(Path(p.folder) for p in manifest.placements)]
    wanted: dict[tuple[int, int, str], list[Path]] = {}
    differences, sizes = list[Difference](), dict[Path, int]()
    for file in manifest.files:
        for path in [store.blob(file.oid), *(folder / file.path for folder in folders)]:
            try:
                stat = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                differences.append(Difference(_shown(path, file.path, folders), "missing"))
                continue
            if stat.st_size != file.size:
                because = f"expected {file.size} bytes, got {stat.st_size}"
                differences.append(Difference(_shown(path, file.path, folders), because))
                if path == store.blob(file.oid):
                    _note(store, file.oid)
                continue
            sizes[path] = stat.st_size
            wanted.setdefault((stat.st_dev, stat.st_ino, file.oid), []).append(path)
    names = {store.blob(file.oid): file.path for file in manifest.files}
    buffers = threading.local()

    def check(item: tuple[tuple[int, int, str], list[Path]]) -> list[Difference]:
        (_, _, oid), paths = item
        if not hasattr(buffers, "mine"):
            buffers.mine = bytearray(READ_BYTES)
        try:
            got = digest_file(paths[0], oid, buffers.mine)
        except OSError as error:  # a bad sector, or not ours to read: the others are checked all the same
            got = f"none ({error.strerror})"
        on_bytes(sizes[paths[0]])
        if got == oid:
            return []
        if store.blob(oid) in paths:
            _note(store, oid)
        name = names[store.blob(oid)]
        return [Difference(_shown(path, name, folders), f"expected {oid}, got {got}") for path in paths]

    with workers(threads) as pool:
        for found in pool.map(check, sorted(wanted.items(), key=lambda item: -sizes[item[1][0]])):
            differences += found
    structure = read_structure(folders[0], manifest)
    count = sum(sizes[paths[0]] for paths in wanted.values())
    return Verification(
        tuple(sorted(set(differences))), structure, len(manifest.files), count, time.monotonic() - began
    )


def _note(store: Store, oid: str) -> None:
    """Writes down that a blob is wrong, where the store may be written to."""
    with contextlib.suppress(OSError):
        store.append(bad_line(oid))


def read_structure(folder: Path, manifest: Manifest) -> Structure:
    """What the headers of a laid-out snapshot say, held against each file's size and against the index."""
    headers: dict[str, Header] = {}
    broken = list[Difference]()
    paths = [file.path for file in manifest.files if file.path.endswith(".safetensors")]
    for path in paths:
        try:
            headers[path] = _read_header(folder / path, path)
        except HeaderError as error:
            broken.append(Difference(path, error.message))
        except (FileNotFoundError, NotADirectoryError):
            broken.append(Difference(path, "missing"))
        except OSError as error:
            broken.append(Difference(path, f"cannot be read ({error.strerror})"))
    index = [d for file in manifest.files if file.path.rsplit("/", 1)[-1] == INDEX
             for d in _check_index(folder, file.path, headers, {file.path for file in manifest.files})]  # fmt: skip
    return Structure(len(paths), sum(len(h.names) for h in headers.values()), tuple(broken), tuple(index))


def _read_header(path: Path, name: str) -> Header:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        length = header_length(os.pread(fd, 8, 0), file_size=size, name=name)
        return parse_header(os.pread(fd, 8 + length, 0), file_size=size, name=name)
    finally:
        os.close(fd)


def _check_index(folder: Path, path: str, headers: dict[str, Header], known: set[str]) -> Iterable[Difference]:
    """Tensors the index places in a shard that does not have them, and shards it names that are not there."""
    try:
        weight_map = orjson.loads((folder / path).read_bytes())["weight_map"]
        by_shard: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            by_shard.setdefault(shard, set()).add(tensor)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [Difference(path, f"expected a weight_map of tensors and shards, got none ({error})")]
    above = path[: -len(INDEX)]
    found = []
    for shard, tensors in sorted(by_shard.items()):
        header = headers.get(above + shard)
        if above + shard not in known:
            found.append(Difference(path, f"names {shard}, which is not in the snapshot"))
        elif header is not None and (absent := tensors - set(header.names)):
            found.append(Difference(path, f"places {min(absent)} (and {len(absent) - 1} more) in {shard}: not there"))
        elif header is not None and (extra := set(header.names) - tensors):
            found.append(Difference(path, f"does not place {min(extra)} (and {len(extra) - 1} more) of {shard}"))
    return found


def _shown(path: Path, name: str, folders: list[Path]) -> str:
    """How a difference names a file: by its path in the repo, with the folder where it is not the snapshot's own."""
    return name if not any(path == folder / name for folder in folders[1:]) else str(path)
