"""One writer per store: a lock file that names its owner, is waited for with a bound, and outlives no dead owner.

Made by `link` or O_EXCL, which hold on cluster file systems where `flock` succeeds for everybody. Nothing depends on
it for correctness: a lock taken wrongly costs bytes fetched twice, since digests decide and names appear by rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from formulas.errors import StoreLocked

HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 120.0  # an owner elsewhere that was not heard of for so long is dead


class Owner(NamedTuple):
    """Who holds a lock. `place`: the machine's boot and the process namespace; only there the pid says something."""

    pid: int
    started: int  # the process's start, in clock ticks since boot: pids are used again
    host: str
    place: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextlib.contextmanager
def hold(path: Path, *, wait_seconds: float, on_wait: Callable[[str], None] = lambda because: None) -> Iterator[None]:
    """Holds the lock inside the `with`. Raises StoreLocked when a living process still has it after `wait_seconds`."""
    me, until, told = myself(), time.monotonic() + wait_seconds, None
    while not _make(path, me):
        owner, seen = read_owner(path), _mtime(path)
        if seen is not None and is_dead(owner, path):
            _remove_stale(path, owner)
            continue
        if owner is not None and owner != told:
            told = owner
            on_wait(f"the store is locked by {owner}")
        if time.monotonic() >= until:
            raise StoreLocked(
                f"store {path.parent}: expected it free, got it locked by {owner or 'a process just starting'}; "
                f"waited {wait_seconds:.0f} s",
                hint="let the other run finish, or wait longer with --lock-wait",
            )
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, ended), name="lock heartbeat", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        if read_owner(path) == me:
            path.unlink(missing_ok=True)


def myself() -> Owner:
    return Owner(os.getpid(), _started(os.getpid()) or 0, socket.gethostname(), _place())


def read_owner(path: Path) -> Owner | None:
    """Who a lock file names; None when there is none, or its owner is about to write its name."""
    try:
        found = json.loads(path.read_text())
        return Owner(int(found["pid"]), int(found["started"]), str(found["host"]), str(found["place"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def is_dead(owner: Owner | None, path: Path) -> bool:
    """Whether nobody can be behind a lock any more: the process is gone, or it has not been heard of for too long."""
    if owner is not None and owner.place == _place():
        return _started(owner.pid) != owner.started
    if owner is not None and owner.host == socket.gethostname() and _boot(owner.place) != _boot(_place()):
        return True  # this machine has been started anew since
    return _age(path) > (SILENT_SECONDS if owner else HEARTBEAT_SECONDS)


def _make(path: Path, me: Owner) -> bool:
    """Whether the lock is ours now: a file that names us, given the lock's name where there is none by that name."""
    text, mine = json.dumps(me._asdict()).encode(), _temporary(path)
    mine.write_bytes(text)
    try:
        os.link(mine, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # no hard links here: the name first, who it is a moment later
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.write(fd, text)
            finally:
                os.close(fd)
            return True
        return False
    finally:
        mine.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _remove_stale(path: Path, owner: Owner | None) -> None:
    """Removes a dead owner's lock, but not the lock of somebody who was quicker to do so."""
    aside = _temporary(path)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if read_owner(aside) != owner:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):  # a lock that is gone or unreachable has no heart to beat
            os.utime(path)


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system and not by that of this machine."""
    probe = _temporary(path)
    probe.touch()
    try:
        return probe.stat().st_mtime - (_mtime(path) or float("inf"))
    finally:
        probe.unlink()


def _place() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _boot(place: str) -> str:
    return place.partition(" ")[0]


def _started(pid: int) -> int | None:
    """When a process of this place was started; None when it is not there, 0 where that cannot be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
