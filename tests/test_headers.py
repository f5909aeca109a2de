"""Reading headers: what is asked of the Hub and paid, and that guessing lengths never changes what is read."""

import gzip
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import Loopback, ranged, reply

from formulas.errors import HeaderError, HubUnavailable
from screen.cache import Cache
from screen.counting import Tally
from screen.header import HEADER_CAP, Header, parse_header
from screen.headers import Lengths, Names, read_headers, read_headers_in_one
from screen.hub import Hub
from screen.repo import Blob, Entry, Revision
from screen.transport import Cost
from screen.wire import Limits

COMMIT = "a" * 40
QUICK = Limits(first_byte_seconds=2, stall_seconds=2, retries=1, backoff_seconds=0.01)
SHARED = Path(__file__).parents[1].parent / "shared"


def tensors(shard: int, count: int) -> dict:
    return {
        f"model.layers.{shard}.mlp.experts.{n}.up_proj.weight": {
            "dtype": "BF16", "shape": [2, 2], "data_offsets": [8 * n, 8 * n + 8]
        }
        for n in range(count)
    }  # fmt: skip


def safetensors(header: dict, pad: int = 0) -> bytes:
    text = orjson.dumps(header) + b" " * pad
    return struct.pack("<Q", len(text)) + text + bytes(max((t["data_offsets"][1] for t in header.values()), default=0))


def names_of(names):
    lengths = [len(name) for name in names]
    return Names(len(lengths), sum(lengths))


class Repo:
    """Files served as the Hub serves LFS files: a redirect to another origin, where ranges are read."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.entries = [Entry(path, Blob(f"sha256:{n:064x}", len(files[path]))) for n, path in enumerate(files)]
        headers = {path: parse_header(data, file_size=len(data), name=path) for path, data in files.items()}
        self.names = {path: names_of(tensor.name for tensor in header.tensors) for path, header in headers.items()}
        self.cdn = Loopback(lambda r: ranged(self.files[r.query["path"][0]], r))
        self.hub = Loopback(self._redirect)

    def _redirect(self, request):
        if "safetensors-metadata" in request.path:
            return self.in_one
        if "/revision/" in request.path:
            return reply(200, json.dumps({"id": "o/n", "sha": COMMIT}).encode())
        return reply(302, b"", {"Location": f"{self.cdn.url}/blob?path={request.path.rpartition('/')[2]}&sig=x"})

    in_one = reply(404)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cdn.__exit__(), self.hub.__exit__()

    def read(self, cache, *, names=True, entries=None, cost=None):
        with Hub(self.hub.url, limits=QUICK) as source, ThreadPoolExecutor(8) as pool:
            chosen, known = self.entries if entries is None else entries, self.names if names else None
            tally = Tally()
            read_headers(source, cache, "o/n", COMMIT, chosen, cost or Cost(), pool, tally, names=known)
            return tally.headers


def test_one_request_a_shard_and_few_bytes_more(tmp_path):
    with Repo({f"m-{n}.safetensors": safetensors(tensors(n, 300 + 7 * n)) for n in range(30)}) as repo:
        cost = Cost()
        found = repo.read(Cache(tmp_path), cost=cost)
        assert {path: len(header.tensors) for path, header in found.items()} == {
            f"m-{n}.safetensors": 300 + 7 * n for n in range(30)
        }
        header_bytes = sum(8 + header.length for header in found.values())
        assert cost.requests == 30
        assert cost.cdn_requests <= 32
        assert cost.bytes_read <= 1.05 * header_bytes
        assert cost.cached_headers == 0


def test_without_names_the_hub_is_asked_no_more_often(tmp_path):
    """Short guesses cost a second range at the CDN, not a second redirect."""
    with Repo({f"m-{n}.safetensors": safetensors(tensors(n, 900 + 50 * n)) for n in range(12)}) as repo:
        cost = Cost()
        found = repo.read(Cache(tmp_path), names=False, cost=cost)
        assert all(isinstance(header, Header) for header in found.values())
        assert cost.requests == 12
        assert cost.cdn_requests <= 24


def test_a_warm_run_reads_nothing_and_equal_blobs_are_read_once(tmp_path):
    with Repo({f"m-{n}.safetensors": safetensors(tensors(n, 50)) for n in range(6)}) as repo:
        twin = [Entry(f"copy-{n}.safetensors", entry.blob) for n, entry in enumerate(repo.entries)]
        cost = Cost()
        found = repo.read(Cache(tmp_path), entries=[*repo.entries, *twin], cost=cost)
        assert len(found) == 12
        assert cost.requests == cost.cached_headers == 6
        again = Cost()
        assert repo.read(Cache(tmp_path), entries=[*repo.entries, *twin], cost=again) == found
        assert (again.requests, again.cdn_requests, again.bytes_read, again.cached_headers) == (0, 0, 0, 12)


def test_unknown_digests_are_never_cached(tmp_path):
    with Repo({"m.safetensors": safetensors(tensors(0, 5))}) as repo:
        entry = repo.entries[0]._replace(blob=Blob("unknown", repo.entries[0].blob.size))
        for _ in range(2):
            cost = Cost()
            repo.read(Cache(tmp_path), entries=[entry], cost=cost)
            assert cost.requests == 1
        assert Cache(tmp_path).usage().entries == 0


def test_lengths_around_the_first_range_are_read_right(tmp_path, monkeypatch):
    """Whatever the guess, short by a byte or long by one, the header read is the file's."""
    over = [0]
    monkeypatch.setattr(Lengths, "guess", lambda self, path: max(0, repo.whole + over[0]))
    with Repo({}) as repo, Hub(repo.hub.url, limits=QUICK) as source, ThreadPoolExecutor(1) as pool:

        @settings(max_examples=60, deadline=None)
        @given(st.integers(0, 12), st.integers(0, 40), st.integers(-12, 12))
        def check(count, pad, off):
            data = safetensors(tensors(1, count), pad)
            repo.files["m"], repo.whole, over[0] = data, 8 + struct.unpack("<Q", data[:8])[0], off
            entry, cost = Entry("m", Blob("unknown", len(data))), Cost()
            source.renew("o/n", COMMIT, "m")
            tally = Tally()
            read_headers(source, Cache(tmp_path), "o/n", COMMIT, [entry], cost, pool, tally)
            assert tally.headers["m"] == parse_header(data, file_size=len(data), name="m")
            first = min(len(data), max(8, repo.whole + off))
            assert (cost.requests, cost.cdn_requests) == (1, 1 if first >= repo.whole else 2)

        check()


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", b"<html>" * 50,
     struct.pack("<Q", HEADER_CAP + 1) + bytes(100), struct.pack("<Q", 50) + b"{", struct.pack("<Q", 2) + b"{}" + b"x",
     safetensors(tensors(0, 5))[:-1]],
    ids=["empty", "seven", "lfs-pointer", "html", "over-cap", "cut-in-header", "too-long", "cut-in-data"],
)  # fmt: skip
def test_a_malformed_header_is_the_answer_for_its_file_only(data, tmp_path):
    with Repo({"good.safetensors": safetensors(tensors(0, 5))}) as repo:
        repo.files["bad.safetensors"] = data
        bad = Entry("bad.safetensors", Blob("sha256:" + "f" * 64, len(data)))
        cost = Cost()
        found = repo.read(Cache(tmp_path), entries=[bad, *repo.entries], cost=cost)
        assert isinstance(found["bad.safetensors"], HeaderError)
        assert "o/n@aaaaaaaa bad.safetensors" in found["bad.safetensors"].message
        assert isinstance(found["good.safetensors"], Header)
        assert cost.bytes_read < 200_000  # a length beyond the cap was not asked for


def test_a_hub_that_fails_is_raised_not_recorded(tmp_path):
    with Loopback(lambda r: reply(500)) as server, ThreadPoolExecutor(2) as pool:
        entries = [Entry(f"m{n}.safetensors", Blob("unknown", 100)) for n in range(5)]
        with pytest.raises(HubUnavailable):
            read_headers(Hub(server.url, limits=QUICK), Cache(tmp_path), "o/n", COMMIT, entries, Cost(), pool, Tally())


# The one-request route


def in_one(repo, cache, cost, entries=None):
    with Hub(repo.hub.url, limits=QUICK) as source:
        chosen, main = repo.entries if entries is None else entries, Revision("main", COMMIT)
        tally = Tally()
        served = read_headers_in_one(source, cache, "o/n", main, chosen, "model.safetensors.index.json", cost, tally)
        return tally.headers if served else None


def test_one_request_reads_all_and_is_kept_apart(tmp_path):
    headers = {f"m-{n}.safetensors": tensors(n, 20) for n in range(10)}
    with Repo({path: safetensors(header) for path, header in headers.items()}) as repo:
        repo.in_one = reply(200, json.dumps({"index": {}, "headers": headers}).encode())
        cost, cache = Cost(), Cache(tmp_path)
        found = in_one(repo, cache, cost)
        ranges = repo.read(Cache(tmp_path / "other"))
        assert {path: header.tensors for path, header in found.items()} == {p: h.tensors for p, h in ranges.items()}
        assert (cost.requests, cost.cdn_requests) == (2, 0)
        again = Cost()
        assert in_one(repo, cache, again) == found
        assert (again.requests, again.cached_headers) == (0, 10)
        cold = Cost()
        repo.read(cache, cost=cold)
        assert cold.requests == 10  # what the API said is no header that was read
        assert in_one(repo, cache, Cost()) is None  # better evidence is at hand


def test_one_request_that_lacks_a_file_is_no_answer(tmp_path):
    headers = {f"m-{n}.safetensors": tensors(n, 3) for n in range(3)}
    with Repo({path: safetensors(header) for path, header in headers.items()}) as repo:
        repo.in_one = reply(200, json.dumps({"headers": {k: v for k, v in headers.items() if "1" not in k}}).encode())
        assert in_one(repo, Cache(tmp_path), Cost()) is None
        for answer in (reply(404), reply(200, b"<html>"), reply(200, b"[]"), reply(200, b'{"headers":{}}')):
            repo.in_one = answer
            assert in_one(repo, Cache(tmp_path), Cost()) is None


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_one_request_is_read_however_it_is_spelled(tmp_path, order, separators):
    headers = {f"m-{n}.safetensors": tensors(n, 3) for n in range(3)}
    with Repo({path: safetensors(header) for path, header in headers.items()}) as repo:
        stated = dict(sorted((headers | {"m-01.safetensors": {}}).items())[::order])  # and one nobody asked for
        repo.in_one = reply(200, json.dumps({"index": {}, "headers": stated}, separators=separators).encode())
        found = in_one(repo, Cache(tmp_path), Cost())
        assert {path: header.tensors for path, header in found.items()} == {
            path: header.tensors for path, header in repo.read(Cache(tmp_path / "other")).items()
        }


def test_one_request_finds_truncated_files_too(tmp_path):
    headers = {"m.safetensors": tensors(0, 30)}
    with Repo({"m.safetensors": safetensors(headers["m.safetensors"])}) as repo:
        repo.in_one = reply(200, json.dumps({"headers": headers}).encode())
        cut = repo.entries[0]._replace(blob=Blob("unknown", 100))
        assert isinstance(in_one(repo, Cache(tmp_path), Cost(), [cut])["m.safetensors"], HeaderError)


# Real headers


@pytest.mark.skipif(not (SHARED / "data" / "headers").is_dir(), reason="needs the recorded headers beside the clone")
def test_guesses_on_real_headers_are_close():
    """Of headers as they are: at most 1.05 of their bytes asked for, a second range for at most 1 in 10 files."""
    asked = needed = seconds = files = 0
    for path in sorted((SHARED / "data" / "headers").glob("*.json.gz")):
        if path.stat().st_size > 250_000:
            continue  # the largest take seconds to unpack and add nothing
        recorded = orjson.loads(gzip.decompress(path.read_bytes()))["headers"]
        names = {shard: names_of(header.keys() - {"__metadata__"}) for shard, header in recorded.items()}
        lengths = Lengths(names)
        for shard, header in recorded.items():
            text = len(orjson.dumps(header))
            length, guess = 8 + text + -text % 8, lengths.guess(shard)
            asked += max(guess, length)
            needed += length
            seconds += guess < length
            files += 1
            lengths.learn(shard, length)
    assert files > 200
    assert asked <= 1.05 * needed
    assert seconds <= files / 10
