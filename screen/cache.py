"""What was read before: headers and indexes by the digest of their file, small files by (repo, commit, path).

Both are named by what can never change, so nothing is ever invalid, only damaged or too old to keep:

    FOLDER/v2/header/ab/ab12...      the first 8 + N bytes of a safetensors file
    FOLDER/v2/api/cd/cd34...         a header as the Hub's safetensors-metadata route states it
    FOLDER/v2/file/ef/ef56...        a small file of a commit

Each entry is a digest of its key and content, then the content, compressed. Entries are written aside and renamed, so
any number of runs may share a folder; one that is damaged, or stands under the wrong name, is a miss.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import zstandard

from formulas.errors import BadInput
from formulas.units import GIB, MIB

_VERSION = "v2"
_DIGEST = 16
_TOUCH_SECONDS = 3600.0  # an entry used again within the hour stays as recent as it is
_STALE_SECONDS = 86400.0  # a half-written entry this old was left by a killed run
_TRIM_EVERY = 64 * MIB  # written between two looks at the size


@enum.unique
class Kind(enum.StrEnum):
    HEADER = "header"
    API = "api"
    FILE = "file"


class Usage(NamedTuple):
    """What the cache holds: files and bytes on disk, of all and by kind."""

    folder: str
    entries: int
    bytes: int
    limit_bytes: int
    by_kind: dict[str, tuple[int, int]]  # kind -> (entries, bytes)


class Cache:
    """A folder of entries, at most `limit_bytes` large; those unused longest go first. Threads may share it."""

    def __init__(self, folder: Path | str, *, limit_bytes: int = 4 * GIB):
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        self._root = self.folder / _VERSION
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[tuple[Kind, str], threading.Lock] = WeakValueDictionary()
        self._until_trim = 0  # the first entry written looks at what earlier runs left
        self._run, self._serial = secrets.token_hex(8), itertools.count()
        self.broken: str | None = None  # why nothing is written any more, if so

    def load(self, kind: Kind, key: str) -> bytes | None:
        """The content kept under this key; None when there is none, or it is not what was written."""
        path = self._path(kind, key)
        try:
            raw = path.read_bytes()
            if time.time() - path.stat().st_mtime > _TOUCH_SECONDS:
                os.utime(path)
        except OSError:
            return None
        if raw[:_DIGEST] != _sum(kind, key, raw[_DIGEST:]):
            return None
        return zstandard.decompress(raw[_DIGEST:])

    def holds(self, kind: Kind, key: str) -> bool:
        """Whether there is an entry under this key; only `load` can tell whether it is sound."""
        return os.path.exists(self._path(kind, key))  # False, too, for a folder that may not be read

    def keep(self, kind: Kind, key: str, content: bytes) -> None:
        """Keeps content for later. A full or read-only disk costs only the cache, never the run: see `broken`."""
        if self.broken is not None:
            return
        packed = zstandard.compress(content, 1)
        path = self._path(kind, key)
        aside = path.parent / f".new-{self._run}-{next(self._serial)}"
        try:
            try:
                aside.write_bytes(_sum(kind, key, packed) + packed)
            except FileNotFoundError:  # the first of its folder, or another run has cleared the cache
                path.parent.mkdir(parents=True, exist_ok=True)
                aside.write_bytes(_sum(kind, key, packed) + packed)
            aside.replace(path)
            if self._due(len(packed)):
                self.trim()
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            self.broken = f"{self.folder}: {error.strerror or error}"

    @contextlib.contextmanager
    def alone(self, kind: Kind, key: str) -> Iterator[None]:
        """Held by one thread at a time for a key, so that two that want the same bytes pay for them once."""
        with self._lock:
            lock = self._locks.setdefault((kind, key), threading.Lock())
        with lock:
            yield

    def usage(self) -> Usage:
        """What is there now; a folder that does not exist holds nothing."""
        sizes: dict[str, list[int]] = {kind.value: [] for kind in Kind}
        for _, size, path in self._entries():
            sizes.setdefault(path.parent.parent.name, []).append(size)
        by_kind = {kind: (len(each), sum(each)) for kind, each in sizes.items()}
        entries, total = (sum(column) for column in zip(*by_kind.values(), strict=True))
        return Usage(str(self.folder), entries, total, self.limit_bytes, by_kind)

    def clear(self) -> Usage:
        """Removes all entries, nothing else in the folder; what there was. Raises BadInput."""
        before = self.usage()
        try:
            shutil.rmtree(self._root)
        except FileNotFoundError:
            pass
        except OSError as error:
            text = f"cache {self.folder}: expected a folder that can be emptied, got {error.strerror}"
            raise BadInput(text) from None
        return before

    def trim(self) -> None:
        """Removes what was unused longest until a tenth of the limit is free, and what killed runs left behind."""
        entries = sorted(self._entries(), key=lambda entry: entry[0])
        total, now = sum(size for _, size, _ in entries), time.time()
        target = self.limit_bytes if total <= self.limit_bytes else self.limit_bytes * 9 // 10
        for used, size, path in entries:
            half_written = path.name.startswith(".new-")
            if total > target if not half_written else now - used > _STALE_SECONDS:
                path.unlink(missing_ok=True)
                total -= size

    def _due(self, written: int) -> bool:
        with self._lock:
            self._until_trim -= written
            if self._until_trim > 0:
                return False
            self._until_trim = min(_TRIM_EVERY, self.limit_bytes // 4)
            return True

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(last used, bytes, path) of each entry; another run may remove some meanwhile."""
        for path in self._root.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    def _path(self, kind: Kind, key: str) -> Path:
        spelled = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return self._root / kind / spelled[:2] / spelled


def file_key(repo: str, commit: str, path: str) -> str:
    """The key of a small file: no repo name, commit or path holds the separator."""
    return "\0".join((repo, commit, path))


def _sum(kind: Kind, key: str, packed: bytes) -> bytes:
    spelled = hashlib.sha256(f"{kind}\0{key}".encode("utf-8", "surrogatepass")).digest()
    return hashlib.blake2b(packed, digest_size=_DIGEST, key=spelled).digest()
