"""HTTP exchanges, done carefully: redirects by hand, budgets obeyed, one bound per origin, no token abroad."""

from __future__ import annotations

import contextlib
import functools
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import urllib3

from formulas.errors import HubMisbehaved, HubUnavailable

from .pacing import Outages, Pacer, Wait
from .wire import Cut, Down, Limits, Lines, Meter, Throttled, WireErrors, current

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 10
SMALL_BODY = 64 * 1024  # bodies of redirects and errors: read to keep the connection, up to here


class Cost:
    """What a run has paid so far; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = 0  # to the endpoint's own origin, each redirect hop included
        self.cdn_requests = 0  # to all others
        self.bytes_read = 0  # of bodies
        self.cached_headers = 0

    def add(self, *, requests: int = 0, cdn_requests: int = 0, bytes_read: int = 0, cached_headers: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.cdn_requests += cdn_requests
            self.bytes_read += bytes_read
            self.cached_headers += cached_headers


class Patience:
    """How much longer one call waits for rate limits, and how long it has."""

    def __init__(self, limits: Limits):
        self.left, self.waited, self.refusals = limits.throttle_seconds, 0.0, 0


class Hop(NamedTuple):
    """A redirect that was followed: where from, and the headers it carried."""

    url: str
    status: int
    headers: Mapping[str, str]


class Exchange:
    """One answer whose body is still on the wire. Close it (or leave its `with`) to give the connection back."""

    def __init__(
        self, url: str, response: urllib3.BaseHTTPResponse, meter: Meter, cost: Cost, hops: tuple[Hop, ...],
        release: Callable[[], None],
    ):  # fmt: skip
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.url, self.hops, self.subject = url, hops, meter.subject
        self._response, self._meter, self._cost, self._release = response, meter, cost, release
        self._open = True

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host(self) -> str:
        """Host and port that sent this answer."""
        return urlsplit(self.url).netloc

    def read(self, limit: int) -> bytes:
        """The whole body, decoded. Raises HubMisbehaved when longer than `limit` bytes, Cut when it ends early."""
        parts, count = list[bytes](), 0
        while True:
            with WireErrors(self.subject):
                part = self._response.read(min(limit + 1, 2**20), decode_content=True)
            if not part:
                return b"".join(parts)
            count += len(part)
            self._cost.add(bytes_read=len(part))
            if count > limit:
                raise HubMisbehaved(f"{self.subject}: expected at most {limit} bytes, got more; not read")
            parts.append(part)

    def readinto(self, view: memoryview) -> int:
        """Bytes put into `view`: at least one, as soon as there are any; 0 at the end of the body. No copies."""
        answer = self._meter.answer
        if answer is None or answer.fp is None:
            return 0
        with WireErrors(self.subject):
            if answer.chunked or answer.length is None:
                data = answer.read1(len(view))
                view[: len(data)] = data
                count = len(data)
            else:
                count = answer.fp.readinto1(view[: answer.length])
                self._took(answer, count)
        self._cost.add(bytes_read=count)
        return count

    def read1(self, count: int) -> bytes:
        """The next bytes of the body, at most `count`, as soon as there are any; b"" at its end."""
        answer = self._meter.answer
        if answer is None or answer.fp is None:
            return b""
        with WireErrors(self.subject):
            if answer.chunked or answer.length is None:
                data = answer.read1(count)
            else:
                data = answer.fp.read1(min(count, answer.length))
                self._took(answer, len(data))
        self._cost.add(bytes_read=len(data))
        return data

    def _took(self, answer: http.client.HTTPResponse, count: int) -> None:
        """Keeps the library's own count of what is left, which its `read1` forgets before Python 3.12."""
        answer.length = (answer.length or 0) - count
        if not answer.length:
            answer.close()

    def drain(self) -> None:
        """Reads a short body nobody wants, so that the connection can serve again."""
        length = self.headers.get("Content-Length", "")
        if length.isdigit() and int(length) <= SMALL_BODY:
            self.read(SMALL_BODY)

    def close(self) -> None:
        """Gives the connection back when the body was read to its end, else ends it."""
        if not self._open:
            return
        self._open = False
        try:
            answer = self._meter.answer
            if answer is not None and answer.isclosed():
                self._response.release_conn()
            else:
                self._response.close()
        finally:
            self._release()


class Transport:
    """Connections to an endpoint and to where it redirects. The token goes to the endpoint's origin, nowhere else."""

    def __init__(
        self, endpoint: str, *, token: str | None = None, limits: Limits | None = None, user_agent: str = "ckpt",
        on_event: Callable[[Wait], None] = lambda event: None,
    ):  # fmt: skip
        self.home, self.limits = origin(endpoint), limits or Limits()
        self._token, self._on_event, self._agent = token, on_event, user_agent
        self._pacer, self._closed, self._lock = Pacer(), threading.Event(), threading.Lock()
        self._lanes: dict[str, threading.Semaphore] = {}
        self._live: set[Meter] = set()
        self._lines = Lines(self.limits.connections)
        self._outages = Outages(self.limits.retries + 1, self.limits.connect_seconds)

    def close(self) -> None:
        """Ends every wait and every read in flight: their threads raise, new requests are refused."""
        self._closed.set()
        with self._lock:
            live = list(self._live)
        for meter in live:
            meter.abort()
        self._lines.close()

    def get(
        self, url: str, *, subject: str, cost: Cost, headers: Mapping[str, str] | None = None,
        patience: Patience | None = None, ends: float = float("inf"),
    ) -> Exchange:  # fmt: skip
        """The answer to one GET, redirects followed; any status but a redirect or 429 is the caller's to judge.

        `ends` is the monotonic time by which the whole answer must be in; waits for rate limits, bounded by
        `patience`, move it. Raises Throttled, Down, Stalled, Slow, Cut, HubUnavailable, HubMisbehaved.
        """
        patience = patience or Patience(self.limits)
        waited_before, trusted, hops = patience.waited, True, list[Hop]()
        while True:
            self._pace(url, subject, patience)
            trusted = trusted and origin(url) == self.home
            late = patience.waited - waited_before
            exchange = self._send(url, subject, cost, headers or {}, tuple(hops), trusted, ends + late)
            now = time.monotonic()
            if exchange.status == 429:
                patience.refusals += 1
                with exchange:
                    exchange.drain()
                wait = self._pacer.refused(origin(url), url, exchange.headers, patience.refusals, now)
                self._wait(wait, subject, patience)
                continue
            patience.refusals = 0
            self._pacer.learn(origin(url), url, exchange.headers, now)
            location = exchange.headers.get("Location")
            if exchange.status not in REDIRECTS or location is None:
                return exchange
            with exchange:
                exchange.drain()
            hops.append(Hop(url, exchange.status, exchange.headers))
            url = _follow(url, location, subject)
            if urlsplit(url).scheme not in ("http", "https"):
                raise HubMisbehaved(f"{subject}: expected a redirect over HTTP, got one to {url[:80]!r}; not followed")
            if len(hops) > MAX_REDIRECTS:
                raise HubMisbehaved(f"{subject}: expected at most {MAX_REDIRECTS} redirects, got another; not followed")

    def pause(self, failures: int) -> None:
        """Backs off after the `failures`-th failure in a row: the base doubled each time, up to 8 s, with jitter."""
        self._sleep(min(8.0, self.limits.backoff_seconds * 2.0 ** (failures - 1)) * (0.5 + random.random() / 2))

    def _send(
        self, url: str, subject: str, cost: Cost, headers: Mapping[str, str], hops: tuple[Hop, ...], trusted: bool,
        ends: float,
    ) -> Exchange:  # fmt: skip
        place, limits, subject = origin(url), self.limits, f"{subject} from {urlsplit(url).netloc}"
        lane = self._lane(place)
        lane.acquire()
        meter = Meter(limits, subject, ends=ends)
        with self._lock:
            self._live.add(meter)

        def release() -> None:
            with self._lock:
                self._live.discard(meter)
            lane.release()

        try:
            if self._closed.is_set():
                raise HubUnavailable(f"{subject}: this client was closed; nothing was asked")
            if (error := self._outages.claim(place, time.monotonic())) is not None:
                raise Down(f"{subject}: {error.message}; not tried again", hint=error.hint, code=error.code)
            with WireErrors(subject):
                line = self._lines.line(place)
            cost.add(requests=1) if place == self.home else cost.add(cdn_requests=1)
            current.meter = meter
            connect = min(limits.connect_seconds, max(0.01, ends - time.monotonic()))
            asked = {"User-Agent": self._agent, "Accept-Encoding": "identity", "Accept": "*/*", **headers}
            if trusted and self._token:
                asked["Authorization"] = f"Bearer {self._token}"
            with self._noting(place, meter), WireErrors(subject):
                response = line.pool.urlopen(
                    "GET", url if line.whole_urls else _target(url), headers=asked | line.headers,
                    retries=False, redirect=False, assert_same_host=False, preload_content=False, decode_content=False,
                    timeout=urllib3.Timeout(connect=connect, read=limits.first_byte_seconds),
                )  # fmt: skip
            meter.headers_by = None
            return Exchange(url, response, meter, cost, hops, release)
        except BaseException:
            release()
            raise
        finally:
            current.meter = None

    @contextlib.contextmanager
    def _noting(self, place: str, meter: Meter) -> Iterator[None]:
        """Notes whether the request inside got a connection to send it on."""
        failed: HubUnavailable | None = None
        try:
            yield
        except HubUnavailable as error:
            if meter.socket is None:
                reason = error.message.removeprefix(f"{meter.subject}: ")
                failed = HubUnavailable(reason, hint=error.hint, code=error.code)
            raise
        finally:
            self._outages.learn(place, failed, time.monotonic())

    def _lane(self, place: str) -> threading.Semaphore:
        with self._lock:
            return self._lanes.setdefault(place, threading.Semaphore(self.limits.connections))

    def _pace(self, url: str, subject: str, patience: Patience) -> None:
        while (wait := self._pacer.claim(origin(url), url, time.monotonic())) is not None:
            self._wait(wait, subject, patience)

    def _wait(self, wait: Wait, subject: str, patience: Patience) -> None:
        if wait.seconds > patience.left:
            raise Throttled(
                f"{subject}: {wait.origin} allows no more {wait.bucket} requests for {wait.seconds:.0f} s "
                f"({wait.because}); that is longer than this run waits",
                wait=wait.seconds,
            )
        self._on_event(wait)
        patience.left -= wait.seconds
        patience.waited += wait.seconds
        self._sleep(wait.seconds)

    def _sleep(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise HubUnavailable("this client was closed while it waited; run again to continue", code="closed")


def origin(url: str) -> str:
    """Scheme, host and port of a URL, spelled one way."""
    parts = urlsplit(url)
    return _origin(parts.scheme, parts.netloc)


@functools.lru_cache
def _origin(scheme: str, netloc: str) -> str:
    parts = urlsplit(f"{scheme}://{netloc}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{scheme}://{host}:{parts.port or {'http': 80, 'https': 443}.get(scheme)}"


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + ("?" + parts.query if parts.query else "")


def _follow(url: str, location: str, subject: str) -> str:
    """Where a redirect leads, query kept. Header bytes beyond ASCII are UTF-8 in practice, latin-1 to the library."""
    try:
        following = urljoin(url, location.encode("latin-1").decode("utf-8"))
        origin(following)
    except ValueError:
        raise HubMisbehaved(f"{subject}: expected a redirect to a URL, got one to {location[:80]!r}") from None
    return following


def chunks(exchange: Exchange, count: int, *, size: int = 256 * 1024) -> Iterator[bytes]:
    """The next `count` bytes of a body in pieces as they arrive. Raises Cut when it ends before."""
    while count:
        data = exchange.read1(min(size, count))
        if not data:
            raise Cut(f"{exchange.subject}: the body ended {count} bytes early")
        count -= len(data)
        yield data
