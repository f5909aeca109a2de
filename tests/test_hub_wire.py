"""The HTTP client against servers that misbehave on purpose: deadlines, ranges, redirects, limits, tokens."""

import math
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import CLOSE, Loopback, elapsed, ranged, reply

from formulas.errors import BadInput, HubMisbehaved, HubUnavailable, NotFound
from screen.hub import Hub
from screen.pacing import Outages, Wait, once
from screen.repo import Blob, Entry
from screen.transport import Cost
from screen.wire import Cut, Expired, Limits, RangeIgnored, RangeRefused, Slow, Stalled, Throttled, WrongRange

QUICK = Limits(
    connect_seconds=0.5, first_byte_seconds=0.6, stall_seconds=0.6, floor_bytes_per_second=1000,
    floor_window_seconds=0.5, call_seconds=1.0, throttle_seconds=5, retries=2, backoff_seconds=0.01, connections=8,
)  # fmt: skip
CALM = replace(QUICK, connect_seconds=10, first_byte_seconds=20, stall_seconds=20, call_seconds=60)
"""For tests that are not about time, on a machine that is busy with others."""
COMMIT = "a" * 40
DATA = bytes(range(256)) * 40
ENTRY = Entry("m.safetensors", Blob("unknown", len(DATA)))


def hub(server, **options):
    return Hub(server.url, **({"limits": CALM} | options))


def read(client, start=0, stop=len(DATA), cost=None):
    return client.read_range("org/name", COMMIT, ENTRY, start, stop, cost or Cost())


def test_range_is_asked_for_plainly_and_with_the_token():
    with Loopback(lambda r: ranged(DATA, r)) as server:
        assert read(hub(server, token="hf_x"), 10, 30) == DATA[10:30]
        request = server.requests[0]
    assert request.target == f"/org/name/resolve/{COMMIT}/m.safetensors"
    assert request.headers["range"] == "bytes=10-29"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["authorization"] == "Bearer hf_x"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_keep_the_query_and_leave_the_token_at_home(status):
    def answer(request):
        if request.path.startswith("/org"):
            return reply(status, b"Found", {"Location": "/moved/x?etag=%22a%22&b=1"})
        return reply(status, b"Found", {"Location": f"{cdn.url}/blob?X-Sig=a%2Fb&e=1"})

    with Loopback(lambda r: ranged(DATA, r)) as cdn, Loopback(answer) as server:
        cost = Cost()
        assert read(hub(server, token="hf_x"), cost=cost) == DATA
        assert server.requests[1].target == "/moved/x?etag=%22a%22&b=1"
        assert cdn.requests[0].target == "/blob?X-Sig=a%2Fb&e=1"
        assert [("authorization" in r.headers) for r in server.requests + cdn.requests] == [True, True, False]
        assert (cost.requests, cost.cdn_requests) == (2, 1)
        assert cost.bytes_read == len(DATA) + 2 * len(b"Found")


def test_token_does_not_come_back_after_a_detour():
    def answer(request):
        if request.path == "/back":
            return ranged(DATA, request)
        return reply(302, b"", {"Location": f"{other.url}/x"})

    with Loopback(lambda r: reply(302, b"", {"Location": f"{server.url}/back"})) as other, Loopback(answer) as server:
        read(hub(server, token="hf_x"))
        assert ["authorization" in r.headers for r in server.requests] == [True, False]


def test_netrc_and_cookies_are_not_used(tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with Loopback(lambda r: ranged(DATA, r, headers={"Set-Cookie": "a=b"})) as server:
        client = hub(server)
        read(client), read(client)
        assert not any({"authorization", "cookie"} & r.headers.keys() for r in server.requests)


@pytest.mark.parametrize(("location", "said"), [
    ("/again", "at most 10 redirects, got another"), ("ftp://127.0.0.1/x", "over HTTP, got one to 'ftp://127"),
    ("file:///etc/hostname", "over HTTP, got one to 'file:///"),
])  # fmt: skip
def test_endless_or_odd_redirects_are_refused(location, said):
    with Loopback(lambda r: reply(302, b"", {"Location": location})) as server:
        with pytest.raises(HubMisbehaved, match=said):
            read(hub(server))
        assert len(server.requests) <= 11


def test_whole_file_in_answer_to_a_range_is_not_read():
    sent = threading.Event()

    def answer(request):
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"
        for _ in range(1000):
            yield bytes(1_000_000)
        sent.set()

    with Loopback(answer) as server:
        cost = Cost()
        with pytest.raises(RangeIgnored):
            read(hub(server), cost=cost)
        assert cost.bytes_read == 0
        assert len(server.requests) == 1
        assert not sent.wait(0.05)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": f"bytes 1-{len(DATA)}/{len(DATA)}"},
        {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA) + 1}"},
        {"Content-Range": f"bytes 0-{len(DATA) - 1}/*"},
        {"Content-Range": "nonsense"},
        {"Content-Length": str(len(DATA) - 1)},
        {"Content-Encoding": "gzip"},
    ],
    ids=lambda h: next(iter(h.values())),
)
def test_wrong_ranges_are_refused_before_the_body(headers):
    with Loopback(lambda r: ranged(DATA, r, headers=headers)) as server:
        cost = Cost()
        with pytest.raises(WrongRange):
            read(hub(server), cost=cost)
        assert cost.bytes_read == 0
        assert len(server.requests) == 1


def test_416_is_its_own_error():
    with Loopback(lambda r: reply(416, b"", {"Content-Range": "bytes */5"})) as server, pytest.raises(RangeRefused):
        read(hub(server))


def head():
    return b"HTTP/1.1 206 X\r\nContent-Range: bytes 0-10239/10240\r\nContent-Length: 10240\r\n\r\n"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([60.0], Stalled),  # accepts, never answers
        ([b"HTTP/1.1 206 X\r\n", *[piece for n in range(99) for piece in (b"X-H%d: 1\r\n" % n, 0.1)]], Stalled),
        ([head(), 60.0], Stalled),
        ([head(), *[piece for n in range(99) for piece in (b"x", 0.1)]], Slow),
        ([head(), CLOSE], Cut),
        ([CLOSE], Cut),
        ([b"SMTP hello\r\n\r\n", CLOSE], Cut),
    ],
    ids=["never", "headers-trickle", "body-stalls", "body-trickles", "body-cut", "no-answer", "not-http"],
)
def test_one_try_ends_in_time_and_says_how(script, error):
    with Loopback(lambda r: script) as server:
        began = time.monotonic()
        client = hub(server, limits=replace(QUICK, retries=0))
        with pytest.raises(error) as caught:
            read(client)
        assert elapsed(began) < 4
        assert server.netloc in caught.value.message
        assert caught.value.retry


@pytest.mark.parametrize(
    "script",
    [
        [60.0],
        [b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n", *[piece for n in range(99) for piece in (b" ", 0.2)]],
        [*[piece for n in range(99) for piece in (b"HTTP/1.1 200 X"[n : n + 1], 0.2)]],
    ],
    ids=["never", "body-trickles", "headers-trickle"],
)
def test_api_calls_end_within_their_deadline(script):
    with Loopback(lambda r: script) as server:
        began = time.monotonic()
        with pytest.raises(HubUnavailable):
            hub(server, limits=replace(QUICK, floor_bytes_per_second=0)).resolve("org/name", "main", Cost())
        assert elapsed(began) < QUICK.call_seconds + 2


def test_a_late_first_byte_is_not_a_slow_body():
    with Loopback(lambda r: [0.8, *ranged(DATA, r)]) as server:
        floor = replace(CALM, floor_bytes_per_second=10**9, floor_window_seconds=0.7, retries=0)
        assert read(hub(server, limits=floor)) == DATA


@pytest.mark.parametrize("fault", ["cut", "stall", "slow"])
def test_streams_resume_where_they_stopped(fault):
    def answer(request):
        start, stop = request.span
        if len(server.requests) > 2 or fault == "cut":
            return ranged(DATA, request, upto=1024)
        trickle = [piece for byte in DATA[start + 2000 :][:99] for piece in (bytes([byte]), 0.2)]
        rest = [60.0] if fault == "stall" else trickle
        return [*ranged(DATA[:stop], request, upto=2000)[:1], *rest]

    with Loopback(answer) as server:
        cost = Cost()
        assert read(hub(server, limits=replace(QUICK, retries=9)), cost=cost) == DATA
        spans = [r.span for r in server.requests]
        assert spans[0] == (0, len(DATA))
        assert all(stop == len(DATA) for _, stop in spans)
        assert spans[1][0] >= 1024
        assert cost.bytes_read == len(DATA)


def test_retries_are_refilled_by_progress_only():
    with Loopback(lambda r: ranged(DATA, r, upto=512)) as server:
        assert read(hub(server)) == DATA  # 20 cuts with 2 retries
        assert len(server.requests) == 20
    with Loopback(lambda r: ranged(DATA, r, upto=512 if (r.span or (0, 0))[0] < 2048 else 0)) as server:
        with pytest.raises(Cut):
            read(hub(server))
        assert len(server.requests) == 4 + QUICK.retries


def test_any_range_survives_any_cuts():
    left = []
    with Loopback(lambda r: ranged(DATA, r, upto=left.pop(0) if left else None)) as server, hub(server) as client:

        @settings(max_examples=60, deadline=None)
        @given(st.lists(st.integers(1, 5000), max_size=6), st.integers(0, 10240), st.integers(0, 10240))
        def check(cuts, one, other):
            left[:] = cuts
            start, stop = sorted((one, other))
            assert read(client, start, stop) == DATA[start:stop]

        check()


def test_server_errors_are_retried():
    def answer(request):
        return reply(503, b"busy") if len(server.requests) in (1, 2) else ranged(DATA, request)

    with Loopback(answer) as server:
        assert read(hub(server)) == DATA
    with Loopback(lambda r: reply(502, b"")) as server:
        with pytest.raises(HubUnavailable, match="502") as caught:
            read(hub(server))
        assert caught.value.code == "server_error"
        assert len(server.requests) == 3


def test_429_waits_as_told_and_burns_no_retry():
    def answer(request):
        if len(server.requests) <= 3:
            return reply(429, b"", {"RateLimit": '"resolvers";r=0;t=0'})
        return ranged(DATA, request)

    waits = []
    with Loopback(answer) as server:
        assert read(hub(server, limits=replace(CALM, retries=0), on_event=waits.append)) == DATA
    assert len(waits) == 3
    assert all(wait.bucket == "resolvers" and "429" in wait.because for wait in waits)


def test_429_for_longer_than_we_wait_names_the_seconds():
    with Loopback(lambda r: reply(429, b"", {"RateLimit": '"api";r=0;t=290'})) as server:
        with pytest.raises(Throttled) as caught:
            hub(server).resolve("org/name", "main", Cost())
        assert caught.value.wait >= 290
        assert caught.value.code == "rate_limited"
        assert len(server.requests) == 1


def test_an_empty_bucket_is_not_asked_and_others_go_on():
    """The server would answer 429 within the second; it never has to. The other bucket is not held up."""
    empty_until = [0.0]

    def answer(request):
        if request.path.startswith("/api/"):
            if time.monotonic() < empty_until[0]:
                return reply(429)
            empty_until[0] = time.monotonic() + 1
            return reply(200, b'{"id":"org/name","sha":"%s"}' % COMMIT.encode(), {"RateLimit": '"api";r=0;t=1'})
        return ranged(DATA, request, headers={"RateLimit": '"resolvers";r=9;t=100'})

    waits = []
    with Loopback(answer) as server:
        client = hub(server, on_event=waits.append)
        client.resolve("org/name", "main", Cost())
        read(client)
        assert not waits
        client.resolve("org/name", "main", Cost())
        assert len(server.requests) == 3
    assert [wait.bucket for wait in waits] == ["api"]


def test_a_budget_is_not_overdrawn_by_many_threads():
    """Ten a second, forty wanted by eight threads: no request is sent that would be refused."""
    lock, window, refused = threading.Lock(), [time.monotonic(), 10], []

    def answer(request):
        with lock:
            if (now := time.monotonic()) > window[0] + 1:
                window[:] = now, 10
            window[1] -= 1
            if window[1] < 0:
                refused.append(request)
                return reply(429, b"", {"RateLimit": '"resolvers";r=0;t=1'})
            left = f'"resolvers";r={window[1]};t={math.ceil(window[0] + 1 - now)}'
            state = {"RateLimit": left, "RateLimit-Policy": '"fixed window";"resolvers";q=10;w=1'}
            return ranged(DATA, request, headers=state)

    with Loopback(answer) as server, ThreadPoolExecutor(8) as pool:
        client = hub(server, limits=replace(CALM, throttle_seconds=30))
        read(client, 0, 10)
        assert all(got == DATA[:10] for got in pool.map(lambda _: read(client, 0, 10), range(30)))
        assert len(refused) == 0


def test_a_signed_address_is_used_again_until_it_is_refused():
    valid = ["/signed/1"]

    def sign(request):
        return reply(302, b"", {"Location": f"{cdn.url}{valid[0]}"})

    def serve(request):
        return ranged(DATA, request) if request.path == valid[0] else reply(403, b"<Error>Expired</Error>")

    with Loopback(serve) as cdn, Loopback(sign) as server:
        client, cost = hub(server), Cost()
        assert read(client, 0, 100, cost) + read(client, 100, 200, cost) == DATA[:200]
        assert len(server.requests) == 1
        valid[0] = "/signed/2"
        assert read(client, 200, 300, cost) == DATA[200:300]
        assert len(server.requests) == 2
        assert [r.path for r in cdn.requests] == ["/signed/1"] * 3 + ["/signed/2"]
        assert (cost.requests, cost.cdn_requests) == (2, 4)


def test_an_address_that_expires_mid_file_is_asked_for_again():
    def serve(request):
        used = [r.path for r in cdn.requests].count(request.path)
        return ranged(DATA, request, upto=1000) if used == 1 else reply(403, b"")

    with Loopback(serve) as cdn:
        with Loopback(lambda r: reply(302, b"", {"Location": f"{cdn.url}/{len(server.requests)}"})) as server:
            assert read(hub(server)) == DATA
        with Loopback(lambda r: reply(302, b"", {"Location": f"{cdn.url}/same"})) as server:
            with pytest.raises(Expired) as caught:
                read(hub(server), 2000)
            assert "/same" not in caught.value.message


def test_one_bound_per_origin():
    def answer(request):
        return [0.02, *ranged(DATA, request)]

    with Loopback(answer) as server, ThreadPoolExecutor(16) as pool:
        client = hub(server, limits=replace(CALM, connections=3))
        assert all(got == DATA for got in pool.map(lambda _: read(client), range(30)))
        assert server.busiest == 3


def test_connections_are_kept():
    opened = []

    def wrap(connection):
        opened.append(connection)
        return connection

    with Loopback(lambda r: ranged(DATA, r), wrap) as server:
        client = hub(server)
        for _ in range(5):
            assert read(client) == DATA
    assert len(opened) == 1


def test_readinto_fills_the_callers_buffer():
    with Loopback(lambda r: ranged(DATA, r)) as server:
        client, cost, buffer = hub(server), Cost(), bytearray(len(DATA) + 10)
        with client.open_range("org/name", COMMIT, "m", 0, len(DATA), size=len(DATA), cost=cost) as body:
            done = 0
            while count := body.readinto(memoryview(buffer)[done : done + 1000]):
                done += count
        assert bytes(buffer[:done]) == DATA
        assert cost.bytes_read == len(DATA)


def test_chunked_and_unsized_bodies():
    start = b"HTTP/1.1 206 X\r\nContent-Range: bytes 0-10239/10240\r\n"
    pieces = (b"100\r\n%s\r\n" % DATA[n : n + 256] for n in range(0, len(DATA), 256))
    chunked = [start + b"Transfer-Encoding: chunked\r\n\r\n", *pieces, b"0\r\n\r\n"]
    for script in (chunked, [start + b"Connection: close\r\n\r\n" + DATA, CLOSE]):
        with Loopback(lambda r, script=script: script) as server:
            assert read(hub(server)) == DATA
            with hub(server).open_range("o/n", COMMIT, "m", 0, len(DATA), size=len(DATA), cost=Cost()) as body:
                buffer = bytearray(len(DATA))
                done = 0
                while done < len(DATA) and (count := body.readinto(memoryview(buffer)[done:])):
                    done += count
                assert bytes(buffer) == DATA


def test_close_ends_what_is_in_flight():
    with Loopback(lambda r: [head(), 60.0]) as server, ThreadPoolExecutor(1) as pool:
        client = hub(server, limits=Limits())
        future = pool.submit(read, client)
        while not server.requests:
            time.sleep(0.01)
        time.sleep(0.05)
        client.close()
        with pytest.raises(HubUnavailable):
            future.result(timeout=3)


def test_a_connection_that_is_never_made_ends_in_time():
    """A full queue: the kernel answers no further connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        began = time.monotonic()
        with pytest.raises(Stalled, match="no") as caught:
            Hub("http://{}:{}".format(*address), limits=QUICK).resolve("org/name", "main", Cost())
        assert caught.value.retry
        assert elapsed(began) < QUICK.call_seconds + 2
        for each in waiting:
            each.close()


def test_nobody_listening_is_unreachable_with_a_hint():
    with Loopback(lambda r: []) as server:
        pass
    with pytest.raises(HubUnavailable) as caught:
        hub(server).resolve("org/name", "main", Cost())
    assert caught.value.code == "unreachable"
    assert "HF_ENDPOINT" in caught.value.hint


def test_an_origin_nobody_reaches_is_not_tried_by_each_caller_anew():
    limits = replace(CALM, connect_seconds=0.3, retries=2, backoff_seconds=0.2)
    with Loopback(lambda r: reply(404)) as server:
        port = int(server.netloc.rpartition(":")[2])
    with hub(server, limits=limits) as client:
        costs = [Cost() for _ in range(30)]

        def code(cost):
            with pytest.raises(HubUnavailable) as caught:
                client.resolve("org/name", "main", cost)
            assert "Connection refused" in caught.value.message
            assert caught.value.hint
            return caught.value.code, caught.value.retry

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(code, costs)) == {("unreachable", True)}
        assert sum(cost.requests for cost in costs) < 4 * 3 + 5  # the first four in full; of the rest one a second
        with socket.create_server(("127.0.0.1", port)) as back:
            threading.Thread(target=answer_once, args=(back,)).start()
            time.sleep(1.05)  # the bound within which an origin that is back is found
            with pytest.raises(NotFound):
                client.resolve("org/name", "main", Cost())


def answer_once(server):
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")


def test_an_origin_that_can_be_reached_again_is_up_for_all():
    outages = Outages(2, 10.0)
    failed = HubUnavailable("no connection")
    for now in (0.0, 1.0, 9.0):
        outages.learn("a", failed, now)
        assert outages.claim("a", now) is None  # not for long enough yet
    assert outages.claim("b", 11.0) is None
    assert outages.claim("a", 11.0) is None  # this one tries
    assert outages.claim("a", 11.1) is failed
    outages.learn("a", failed, 12.0)
    assert outages.claim("a", 12.5) is failed
    assert outages.claim("a", 13.5) is None
    outages.learn("a", None, 13.6)
    assert outages.claim("a", 13.7) is outages.claim("a", 13.7) is None


def test_a_wait_is_said_once_for_all_threads():
    said = []
    show = once(said.append)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(show, [Wait("http://a", "api", 1.0, "it answered 429")] * 50))
    show(Wait("http://a", "api", 1.0, "its rate limit is used up"))
    show(Wait("http://b", "api", 1.0, "it answered 429"))
    assert [(wait.origin, wait.because) for wait in said] == [
        ("http://a", "it answered 429"), ("http://a", "its rate limit is used up"), ("http://b", "it answered 429"),
    ]  # fmt: skip


def test_a_socks_proxy_without_its_library_is_named_and_not_tried_again(monkeypatch):
    monkeypatch.setitem(sys.modules, "socks", None)  # importing it fails, as where it is not installed
    for variable in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, "" if "no" in variable.lower() else "socks5h://me:hushhush@127.0.0.1:1080")
    cost = Cost()
    with pytest.raises(HubUnavailable, match=r"socks5h://127\.0\.0\.1:1080") as caught:
        Hub("http://hub.invalid", limits=QUICK).resolve("o/n", "main", cost)
    assert (caught.value.code, caught.value.retry, cost.requests) == ("proxy", False, 0)
    assert "hushhush" not in caught.value.message


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://host", "http://", ""])
def test_endpoint_must_be_a_url(endpoint):
    with pytest.raises(BadInput):
        Hub(endpoint)


def test_mirrors_are_asked_for_bytes_without_a_token():
    """A mirror is a Hub without a token: no API request is made, 404 is NotFound, a whole-file mirror can be read."""

    def answer(request):
        if request.span:
            return reply(200, DATA)
        return reply(200, DATA) if "m.safetensors" in request.path else reply(404, b"gone")

    with Loopback(answer) as server:
        client = hub(server)
        with pytest.raises(RangeIgnored):
            read(client)
        with client.open_file("org/name", COMMIT, "m.safetensors", size=len(DATA), cost=Cost()) as body:
            assert body.read(len(DATA)) == DATA
        with pytest.raises(WrongRange):
            client.open_file("org/name", COMMIT, "m.safetensors", size=len(DATA) + 1, cost=Cost())
        with pytest.raises(NotFound):
            client.open_file("org/name", COMMIT, "other", size=1, cost=Cost())
        assert not any("authorization" in r.headers for r in server.requests)
