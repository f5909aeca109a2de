"""The cache: what was kept comes back or is a miss, whatever happened to its files meanwhile."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from screen.cache import Cache, Kind, file_key

KEY = "sha256:" + "a" * 64


def only_file(folder):
    [path] = [p for p in Path(folder).rglob("*") if p.is_file()]
    return path


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(Kind), st.text(max_size=80), st.binary(max_size=5000))
def test_what_is_kept_comes_back(kind, key, content):
    with tempfile.TemporaryDirectory() as folder:
        Cache(folder).keep(kind, key, content)
        assert Cache(folder).load(kind, key) == content
        assert Cache(folder).load(kind, key + "x") is None
        assert all(Cache(folder).load(other, key) is None for other in Kind if other is not kind)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_damage_is_a_miss(content, data):
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder)
        cache.keep(Kind.HEADER, KEY, content)
        path = only_file(folder)
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] ^= data.draw(st.integers(1, 255))
        else:
            del raw[at:]
        path.write_bytes(raw)
        assert cache.load(Kind.HEADER, KEY) is None
        cache.keep(Kind.HEADER, KEY, content)
        assert cache.load(Kind.HEADER, KEY) == content


def test_an_entry_under_another_name_is_a_miss(tmp_path):
    cache = Cache(tmp_path)
    cache.keep(Kind.HEADER, KEY, b"one")
    first = only_file(tmp_path)
    cache.keep(Kind.HEADER, "other", b"two")
    [second] = [p for p in tmp_path.rglob("*") if p.is_file() and p != first]
    os.replace(first, second)
    assert cache.load(Kind.HEADER, "other") is None


def test_file_keys_tell_repos_commits_and_paths_apart():
    assert len({file_key(*parts) for parts in [("a/b", "c", "d"), ("a", "b/c", "d"), ("a/b", "c", "d/e")]}) == 3


def test_size_is_bounded_and_the_longest_unused_go_first(tmp_path):
    cache = Cache(tmp_path, limit_bytes=40_000)
    for n in range(60):
        cache.keep(Kind.HEADER, str(n), os.urandom(1000))
        os.utime(cache._path(Kind.HEADER, str(n)), (n, n))
    cache.trim()
    assert 30_000 < cache.usage().bytes <= 40_000
    kept = [n for n in range(60) if cache.load(Kind.HEADER, str(n)) is not None]
    assert kept == list(range(60 - len(kept), 60))


def test_writing_alone_keeps_the_bound(tmp_path):
    cache = Cache(tmp_path, limit_bytes=40_000)
    for n in range(200):
        cache.keep(Kind.HEADER, str(n), os.urandom(1000))
        assert cache.usage().bytes <= 50_000


def test_use_makes_recent(tmp_path):
    cache = Cache(tmp_path)
    cache.keep(Kind.HEADER, KEY, b"x")
    os.utime(only_file(tmp_path), (1, 1))
    cache.load(Kind.HEADER, KEY)
    assert time.time() - only_file(tmp_path).stat().st_mtime < 60


def test_leftovers_of_killed_runs_go(tmp_path):
    cache = Cache(tmp_path)
    cache.keep(Kind.HEADER, KEY, b"x")
    old, new = (only_file(tmp_path).parent / f".new-{n}" for n in ("old", "new"))
    old.write_bytes(b"half"), new.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.trim()
    assert not old.exists()
    assert new.exists()
    assert cache.load(Kind.HEADER, KEY) == b"x"


def test_usage_and_clear(tmp_path):
    cache = Cache(tmp_path / "c")
    assert cache.usage()[1:3] == (0, 0)
    assert cache.clear().entries == 0
    cache.keep(Kind.HEADER, KEY, b"x")
    cache.keep(Kind.FILE, file_key("a/b", "c", "config.json"), b"{}")
    (tmp_path / "c" / "mine.txt").write_text("not the cache's")
    usage = cache.usage()
    assert usage.entries == 2
    assert usage.by_kind["header"][0] == usage.by_kind["file"][0] == 1
    assert usage.bytes == sum(size for _, size in usage.by_kind.values()) > 0
    assert cache.clear() == usage
    assert cache.usage().entries == 0
    assert (tmp_path / "c" / "mine.txt").exists()


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    cache.keep(Kind.HEADER, KEY, b"x")
    assert cache.load(Kind.HEADER, KEY) is None
    assert "cache" in cache.broken
    assert cache.usage().entries == 0


def test_threads_that_want_the_same_go_one_by_one(tmp_path):
    cache, inside, most = Cache(tmp_path), [], []

    def work(key):
        with cache.alone(Kind.HEADER, key):
            inside.append(key)
            most.append(inside.count(key))
            time.sleep(0.01)
            inside.remove(key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, ["a", "b"] * 8))
    assert max(most) == 1
    assert not list(cache._locks)


def test_concurrent_runs_share_a_folder(tmp_path):
    """Two processes and eight threads write and read the same keys: every answer is whole or a miss."""
    program = (
        "import sys; from screen.cache import *; cache = Cache(sys.argv[1], limit_bytes=2_000_000)\n"
        "for n in range(300):\n"
        "    cache.keep(Kind.HEADER, str(n % 10), bytes([n % 10]) * 5000)\n"
        "    got = cache.load(Kind.HEADER, str(n % 7)); assert got in (None, bytes([n % 7]) * 5000)\n"
        "assert cache.broken is None\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]
    wrong, cache = [], Cache(tmp_path)

    def watch():
        while any(run.poll() is None for run in runs):
            for n in range(10):
                if cache.load(Kind.HEADER, str(n)) not in (None, bytes([n]) * 5000):
                    wrong.append(n)
            time.sleep(0.01)

    watchers = [threading.Thread(target=watch) for _ in range(4)]
    [each.start() for each in watchers]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    [each.join() for each in watchers]
    assert not wrong
    assert all(cache.load(Kind.HEADER, str(n)) == bytes([n]) * 5000 for n in range(10))
