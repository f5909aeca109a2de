"""The bottom of the HTTP client: deadlines at the socket's own reads, and the errors of a conversation.

A timeout of the HTTP library ends where a byte arrives; a server that sends one byte every five seconds never meets
it. Here every read of the socket, below the HTTP parser, is given what is left of all deadlines. Errors tell apart
what a caller acts on differently:

    HubUnavailable   Stalled (no byte in time), Slow (under the floor), Cut, Expired (signed URL), Throttled (429),
                     Down (an origin that others could not reach just now)
    HubMisbehaved    RangeIgnored (200), WrongRange (Content-Range), RangeRefused (416)
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from formulas.errors import HubMisbehaved, HubUnavailable, ToolkitError


class Stalled(HubUnavailable):
    """No byte, or no complete answer, within the deadline."""

    code = "stalled"


class Slow(HubUnavailable):
    """Bytes arrive, but under the floor."""

    code = "slow"


class Cut(HubUnavailable):
    """The connection ended before the body did."""

    code = "cut"


class Expired(HubUnavailable):
    """A signed URL is no longer accepted; the canonical URL gives a new one."""

    code = "expired"


class Throttled(HubUnavailable):
    """The origin refuses further requests for longer than we are willing to wait; `wait` is how long."""

    code = "rate_limited"

    def __init__(self, message: str, *, wait: float):
        super().__init__(message, hint="run again later; a token (HF_TOKEN) raises the limit")
        self.wait = wait


class Down(HubUnavailable):
    """The origin could not be reached for so long that this request was not tried; the code is the last failure's."""


class RangeIgnored(HubMisbehaved):
    """The whole file was offered in answer to a range."""

    code = "range_ignored"


class WrongRange(HubMisbehaved):
    """A 206 with another range, total or encoding than was asked for."""

    code = "wrong_range"


class RangeRefused(HubMisbehaved):
    """416 for a range inside the file."""

    code = "range_refused"


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines and bounds of a client. Seconds are wall time; a wait for a rate limit is outside all but its own."""

    connect_seconds: float = 10.0  # TCP and TLS, each address
    first_byte_seconds: float = 30.0  # from the request sent to the answer's last header
    stall_seconds: float = 30.0  # without a new byte of the body
    floor_bytes_per_second: int = 1024  # slower than this over the window is `Slow`
    floor_window_seconds: float = 30.0
    call_seconds: float = 120.0  # an API call or a small file, retries included
    throttle_seconds: float = 900.0  # waiting for rate limits, per call
    retries: int = 5  # failures in a row without progress
    backoff_seconds: float = 0.5  # doubles up to 8 s, with jitter
    connections: int = 48  # per origin


class Meter:
    """The deadlines of one answer, asked before and told after every read of its socket."""

    def __init__(self, limits: Limits, subject: str, *, ends: float):
        self.limits, self.subject, self.ends = limits, subject, ends
        self.headers_by: float | None = None
        self.answer: http.client.HTTPResponse | None = None
        self.socket: socket.socket | None = None
        self._window_seconds, self._window_bytes = 0.0, 0

    def starts(self, answer: http.client.HTTPResponse, sock: Any) -> None:
        """A request was sent on this socket, and its answer's headers are due."""
        self.answer, self.socket = answer, sock
        self.headers_by = min(self.ends, time.monotonic() + self.limits.first_byte_seconds)

    def patience(self) -> float:
        """Seconds the next read may take. Raises Stalled when none are left."""
        now = time.monotonic()
        in_body = min(self.limits.stall_seconds, self.ends - now)
        left = in_body if self.headers_by is None else self.headers_by - now
        if left <= 0:
            raise self.overdue()
        return left

    def took(self, count: int, seconds: float) -> None:
        """Notes a read of the body. Time the caller spends elsewhere is not counted against the server. Raises Slow."""
        if self.headers_by is not None:
            return
        self._window_seconds += seconds
        self._window_bytes += count
        if self._window_seconds >= self.limits.floor_window_seconds:
            rate = self._window_bytes / self._window_seconds
            if rate < self.limits.floor_bytes_per_second:
                raise Slow(
                    f"{self.subject}: expected at least {self.limits.floor_bytes_per_second} bytes/s, "
                    f"got {rate:.1f} over {self._window_seconds:.0f} s; gave this connection up"
                )
            self._window_seconds, self._window_bytes = 0.0, 0

    def overdue(self) -> Stalled:
        if self.headers_by is not None:
            return Stalled(f"{self.subject}: expected an answer within its deadline, got none; gave it up")
        if time.monotonic() >= self.ends:
            return Stalled(f"{self.subject}: expected the whole answer within its deadline, got a part; gave it up")
        return Stalled(f"{self.subject}: expected more bytes within {self.limits.stall_seconds:g} s, got none")

    def abort(self) -> None:
        """Ends a read that another thread is blocked in."""
        if self.socket is not None:
            with contextlib.suppress(OSError):  # already closed: nothing to end
                self.socket.shutdown(socket.SHUT_RDWR)


current = threading.local()  # .meter: of the request this thread is sending


class _MeteredReads(io.RawIOBase):
    """A socket's read side with the meter's deadline on each read."""

    def __init__(self, raw: Any, sock: Any, meter: Meter):
        self._raw, self._socket, self._meter = raw, sock, meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._meter.patience())
        began = time.monotonic()
        try:
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            raise self._meter.overdue() from None
        self._meter.took(count or 0, time.monotonic() - began)
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        meter: Meter | None = getattr(current, "meter", None)
        if meter is not None:
            meter.starts(self, sock)
            self.fp = io.BufferedReader(_MeteredReads(self.fp.detach(), sock, meter))


class _PlainConnection(HTTPConnection):
    response_class = _Answer


class _TlsConnection(HTTPSConnection):
    response_class = _Answer


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS: Final[Any] = {"http": _PlainPool, "https": _TlsPool}


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager


class Line(NamedTuple):
    """Connections to one origin, straight or through the proxy the environment names."""

    pool: HTTPConnectionPool
    whole_urls: bool  # a plain proxy wants the URL, everybody else the path
    headers: dict[str, str]


class Lines:
    """The connections of a client by origin. Proxies and certificates are found by requests, in its usual places.

    Requests themselves go to the pools below it: its sessions take twice the time of the request, keep cookies, send
    passwords from ~/.netrc, and read the whole body of a redirect.
    """

    def __init__(self, connections: int):
        self._adapter = _Adapter(pool_connections=1024, pool_maxsize=connections)
        self._lines: dict[str, Line] = {}

    def line(self, place: str) -> Line:
        """The line to an origin. Raises HubUnavailable where its proxy is of a kind that needs a library we lack."""
        found = self._lines.get(place)
        if found is None:
            session, url = requests.Session(), f"{place}/"
            request = session.prepare_request(requests.Request("GET", url, auth=lambda request: request))
            settings = session.merge_environment_settings(url, {}, True, None, None)
            proxies, verify = settings["proxies"], settings["verify"]
            proxy = select_proxy(url, proxies)
            try:
                pool: Any = self._adapter.get_connection_with_tls_context(request, verify, proxies)
            except requests.exceptions.InvalidSchema as error:
                raise HubUnavailable(
                    f"{place}: expected a proxy that can be used, got {_unsigned(proxy)} ({error}); nothing was asked",
                    code="proxy", retry=False, hint="unset ALL_PROXY, HTTPS_PROXY, HTTP_PROXY, or pip install pysocks",
                ) from None  # fmt: skip
            whole = self._adapter.request_url(request, proxies) == url
            headers = self._adapter.proxy_headers(proxy) if proxy and whole else {}
            found = self._lines[place] = Line(pool, whole, headers)
        return found

    def close(self) -> None:
        self._adapter.close()


class WireErrors:
    """A `with` that turns what the HTTP libraries raise into our errors: Cut for a broken conversation."""

    def __init__(self, subject: str):
        self._subject = subject

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ToolkitError):
            return
        subject, root = self._subject, _root(error)
        reason = f"{type(root).__name__}: {root}"[:200]
        match error:
            case requests.exceptions.InvalidURL() | urllib3.exceptions.LocationValueError() | UnicodeError():
                raise HubMisbehaved(f"{subject}: expected a usable URL, got one that is not ({reason})") from None
            case urllib3.exceptions.ProxyError() | requests.exceptions.InvalidProxyURL():
                hint = "see HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
                raise HubUnavailable(f"{subject}: the proxy failed ({reason})", code="proxy", hint=hint) from None
            case urllib3.exceptions.SSLError():
                raise HubUnavailable(
                    f"{subject}: its TLS certificate is not accepted ({reason})", code="tls", retry=False,
                    hint="behind a company proxy, set REQUESTS_CA_BUNDLE to its certificate file",
                ) from None  # fmt: skip
            case urllib3.exceptions.NewConnectionError():
                raise HubUnavailable(
                    f"{subject}: no connection ({_POOL_WORDS.sub('', reason)})", code="unreachable",
                    hint="is the network up, and HF_ENDPOINT (or --endpoint) right?",
                ) from None  # fmt: skip
            case urllib3.exceptions.TimeoutError() | TimeoutError():
                raise Stalled(f"{subject}: expected an answer, got none in time ({reason})") from None
            case urllib3.exceptions.HTTPError() | http.client.HTTPException() | OSError():
                raise Cut(f"{subject}: the connection broke ({reason})") from None


_POOL_WORDS = re.compile(r"^\w+: \w+\(host=.*?\): (?:Failed to establish a new connection: )?")


def _unsigned(proxy: str | None) -> str:
    """A proxy without the user and password that may stand in it."""
    scheme, mark, rest = (proxy or "").rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _root(error: BaseException) -> BaseException:
    """The exception that the libraries wrapped, however deep."""
    inner = getattr(error, "reason", None) or (error.args[-1] if error.args else None)
    return _root(inner) if isinstance(inner, BaseException) and inner is not error else error
