"""Files and folders: how they look, their digests, and putting them in place whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from formulas.errors import DiskFull

from .journal import Looks

READ_BYTES = 1 << 18  # stays in a core's cache between the copy from the kernel and the hash
FULL = {errno.ENOSPC, errno.EDQUOT}
_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{12}\.tmp")


def look(path: Path) -> Looks | None:
    """How a file looks, or None if there is none."""
    try:
        stat = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return Looks(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def same(path: Path, other: Path) -> bool:
    """Whether both names lead to one file."""
    try:
        return os.path.samestat(path.stat(), other.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def new_digest(oid: str, size: int) -> Any:
    """A hash that, fed with the blob's bytes, ends in the digest of this kind of oid.

    git's is the sha1 of `blob <size>\\0` and the bytes (huggingface_hub 2.4.0 utils/sha.py `git_hash`).
    """
    return hashlib.sha256() if oid.startswith("sha256:") else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def digest_file(path: Path, like: str, buffer: bytearray | None = None) -> str:
    """The oid of a file's bytes, of the same kind as `like`."""
    view = memoryview(buffer or bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        digest = new_digest(like, os.fstat(file.fileno()).st_size)
        while count := file.readinto(view):
            digest.update(view[:count])
    return f"{like.partition(':')[0]}:{digest.hexdigest()}"


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no repo path or other process uses."""
    shown = os.fsdecode(os.fsencode(path.name)[:100])  # a name may have 255 bytes: this one needs some of them
    return path.with_name(f".{shown}.{secrets.token_hex(6)}.tmp")


def is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, each name on disk before the next is made."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on disk, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such operation
            raise
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Puts a small file in place, whole or not at all."""
    make_folder(path.parent)
    temporary = temporary_name(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(fd, data, 0)
        os.fsync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, path)
    sync_folder(path.parent)


def write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    """Writes all of `data` at an offset. Raises DiskFull when there is no room."""
    view = memoryview(data)
    try:
        while view:
            count = os.pwrite(fd, view, at)
            view, at = view[count:], at + count
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(
                "disk: expected room for the next bytes, got none; what was fetched is kept",
                hint="make room, or name another place with --store, and run again to continue",
            ) from None
        raise


def disk_free(path: Path) -> int:
    """Bytes an ordinary user may still write on the file system of a path that may not exist yet."""
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def folds_case(folder: Path) -> bool:
    """Whether two names that differ by case are one in this folder. Makes and removes one file to see."""
    probe = folder / f".Case-{secrets.token_hex(4)}"
    probe.touch()
    try:
        return probe.with_name(probe.name.swapcase()).exists()
    finally:
        probe.unlink()


def leftovers(folders: Iterable[Path]) -> Iterator[Path]:
    """Temporary names that a killed process left behind."""
    for folder in folders:
        yield from (path for path in folder.rglob(".*.tmp") if is_temporary(path))
