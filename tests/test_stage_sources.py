"""When a source is slow and what is done about it, and when a lock's owner is dead: with clocks of our own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from formulas.errors import StoreLocked
from formulas.units import MIB
from screen.hub import Hub
from stage.blob import STUCK_SECONDS, Incoming
from stage.board import Board
from stage.journal import Part
from stage.lock import SILENT_SECONDS, Owner, hold, is_dead, myself, read_owner
from stage.plan import Fetch
from stage.sources import Source, Thresholds, judge

RULES = Thresholds()


def source(name: str, **about) -> Source:
    return Source(Hub(f"http://{name}.invalid"), trusted=False, connections=16, **about)


def feed(one: Source, seconds: float, rate: float, *, start: float = 0.0, active: int = 4) -> float:
    """Lets a source bring bytes at a rate, sampled each second; the time it is then."""
    one.active, received = active, one.settled
    for step in range(int(seconds) + 1):
        one.sample(start + step, int(received + rate * step))
    one.settled = int(received + rate * seconds)
    return start + seconds


def test_a_source_is_judged_by_half_a_minute_and_not_before():
    slow, fast = source("slow"), source("fast")
    feed(fast, 29, 50 * MIB)
    now = feed(slow, 29, 1 * MIB)
    assert judge([slow, fast], now, RULES) == []
    feed(fast, 31, 50 * MIB)
    now = feed(slow, 31, 1 * MIB)
    [verdict] = judge([slow, fast], now, RULES)
    assert (verdict.source, verdict.drop, slow.limit) == (slow, False, 2), "first: fewer connections, a fresh address"
    assert "5.0 MiB/s" in verdict.because
    now = feed(slow, 31, 1 * MIB, start=now)
    [verdict] = judge([slow, fast], now, RULES)
    assert verdict.drop, "then: the next source"


def test_the_only_source_is_never_dropped_for_being_slow():
    alone, now = source("alone"), 0.0
    for _ in range(4):
        now = feed(alone, 31, 10_000, start=now)
        [verdict] = judge([alone], now, RULES)
        assert not verdict.drop
    assert alone.limit == 1


def test_idle_time_is_not_slowness():
    idle, fast = source("idle"), source("fast")
    feed(fast, 60, 50 * MIB)
    now = feed(idle, 60, 0, active=0)
    assert judge([idle, fast], now, RULES) == []


def test_a_source_that_recovers_is_forgiven():
    one, fast = source("one"), source("fast")
    now = feed(one, 31, 1000)
    feed(fast, 31, MIB)
    assert judge([one, fast], now, RULES)
    now = feed(one, 31, MIB, start=now)
    assert judge([one, fast], now, RULES) == []
    assert one.strikes == 0


def test_connections_grow_while_that_pays():
    one = source("one")
    limits = [one.limit]
    for tick, rate in enumerate([0, 8, 32, 64, 128, 130, 131]):
        one.active = one.limit
        one.sample(tick, (one._samples[-1].received if one._samples else 0) + rate * MIB)
        one.adapt(16)
        limits.append(one.limit)
    assert limits == [4, 4, 8, 16, 16, 16, 16, 16]
    quick = source("quick")
    for tick in range(5):
        quick.active = quick.limit
        quick.sample(tick, tick * 1000 * MIB)
        quick.adapt(16)
    assert quick.limit == 4, "this machine is the limit, not the connection"


def incoming(size: int = 64 * MIB, parts: tuple[Part, ...] = ()) -> Incoming:
    fetch = Fetch("sha256:" + "0" * 64, size, "model.safetensors", tuple((p.start, p.stop) for p in parts), 0)
    return Incoming(fetch, (fetch.path,), parts, 16 * MIB)


def test_parts_go_out_in_order_and_the_tail_is_shared():
    blob, first, second = incoming(), source("a"), source("b")
    board = Board([blob], [first, second], RULES)
    runs = [board.take(first, None) for _ in range(4)]
    assert [(run.start, run.stop) for run in runs] == [(n * 16 * MIB, (n + 1) * 16 * MIB) for n in range(4)]
    assert board._next(second, None, runs[0].began) is None, "requests that have just begun keep their bytes"
    later = runs[0].began + STUCK_SECONDS + 1
    for run in runs[:3]:
        run.at, run.heard = run.start + 15 * MIB, later
    taken = board._next(second, None, later)
    assert (taken.blob, taken.start, taken.stop) == (blob, 48 * MIB, 64 * MIB), "nothing came for so long: all of it"
    assert runs[3].left == 0


def test_the_frontier_is_the_first_byte_that_is_missing():
    blob, one = incoming(parts=(Part(0, MIB, ""), Part(32 * MIB, 48 * MIB, ""))), source("a")
    board = Board([blob], [one], RULES)
    assert blob.frontier() == MIB
    run = board.take(one, None)
    assert run.start == MIB
    run.at = run.stop = 17 * MIB
    assert blob.frontier() == 17 * MIB
    board.settle(run)
    last = board.take(one, run)
    assert last.start == 17 * MIB, "the next request begins where this one ended"
    last.at = last.stop
    assert blob.frontier() == 48 * MIB, "a gap that closes joins what was there already"


# Locks


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def write(path, owner: Owner) -> None:
    path.write_text(json.dumps(owner._asdict()))


def test_a_lock_names_its_owner_and_goes_away(path):
    with hold(path, wait_seconds=0):
        assert read_owner(path) == myself()
        name = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(StoreLocked, match=name), hold(path, wait_seconds=0):
            pass
        assert path.exists()
    assert not path.exists()
    assert not list(path.parent.iterdir())


def test_a_dead_owner_loses_the_lock_at_once(path):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    write(path, myself()._replace(pid=gone.pid))
    began = time.monotonic()
    with hold(path, wait_seconds=5):
        assert time.monotonic() - began < 2


def test_a_pid_that_was_used_again_is_somebody_else(path):
    write(path, myself()._replace(started=1))
    with hold(path, wait_seconds=0):
        assert read_owner(path) == myself()


def test_a_machine_that_was_started_anew_has_no_old_owners(path):
    me = myself()
    write(path, me._replace(place="another-boot " + me.place.partition(" ")[2]))
    assert is_dead(read_owner(path), path)


@pytest.mark.parametrize(("silent", "dead"), [(SILENT_SECONDS - 20, False), (SILENT_SECONDS + 20, True)])
def test_an_owner_elsewhere_is_dead_when_it_was_silent_for_long(path, silent, dead):
    write(path, Owner(1, 1, "another-host", "another-boot pid:[1]"))
    then = time.time() - silent
    os.utime(path, (then, then))
    assert is_dead(read_owner(path), path) is dead


def test_waiting_is_bounded_and_says_for_whom(path):
    write(path, Owner(7, 1, "another-host", "another-boot pid:[1]"))
    said = list[str]()
    began = time.monotonic()
    with pytest.raises(StoreLocked), hold(path, wait_seconds=0.5, on_wait=said.append):
        pass
    assert 0.4 < time.monotonic() - began < 3
    assert said == ["the store is locked by process 7 on another-host"]
