"""A Hub on loopback: two origins (hub and CDN) that speak the Hub's protocol, and mirrors that only know `resolve`.

huggingface_hub works against it unmodified; that is its test of fidelity. It serves `DemoRepo`s, counts what was asked,
keeps the Hub's rate-limit budgets, and commits the `Fault`s it is told to.
Source: the wire facts are huggingface_hub 2.4.0's (hf_api.py, file_download.py, utils/_http.py, utils/_pagination.py)
and the Hub's documentation of rate limits and of downloads (huggingface.co/docs/hub).
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from . import demoapi
from .demofaults import Fault, Kind
from .demohttp import Request, Response, Server, document
from .demorepo import Content, DemoRepo
from .demowire import Served, misanswered, ranged, send_file

BUDGETS = {"api": 6_000, "resolvers": 50_000, "pages": 600}  # requests per window: the Hub's Enterprise plan

COUNTS = "/-/counts"  # `counts` as JSON, for a Hub in another process; itself not counted
Answer = Callable[[Request], Response]


class Traffic(NamedTuple):
    requests: int
    body_bytes: int


class DemoHub:
    """A running Hub. A context manager: the ports are open inside the `with`, and every thread ends with it.

    `latency` is seconds a request takes before its answer, `page_size` tree entries or models a page, `cdn_ttl` seconds
    a signed URL lives, `budgets` requests per `window` seconds in each of the Hub's three buckets, `tokens` the repos
    (their names) each token may read, `one_request_headers` whether /safetensors-metadata is served, `xet` whether Xet
    is advertised (nothing answers there: a client that cannot do without is told so).
    """

    def __init__(
        self,
        repos: Iterable[DemoRepo] = (),
        *,
        faults: Iterable[Fault] = (),
        latency: float = 0,
        page_size: int = 1000,
        cdn_ttl: float = 3600,
        budgets: Mapping[str, int] = BUDGETS,
        window: float = 300,
        tokens: Mapping[str, Iterable[str]] | None = None,
        one_request_headers: bool = True,
        xet: bool = False,
        mirrors: int = 0,
        port: int = 0,
    ):
        self.repos = {repo.name.lower(): repo for repo in repos}
        self.page_size, self.cdn_ttl, self.latency, self.window = page_size, cdn_ttl, latency, window
        self.budgets = dict(budgets)
        self.tokens = {token: frozenset(names) for token, names in (tokens or {}).items()}
        self.one_request_headers, self.xet = one_request_headers, xet
        self.log: list[Served] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._struck: Counter[int] = Counter()
        self._spent: dict[tuple[str, str | None], tuple[float, int]] = {}
        self._signed: dict[str, tuple[str, Content, float]] = {}
        self.set_fault(*faults)
        answers: dict[str, Answer] = {"hub": self._answer_hub, "cdn": self._answer_cdn}
        answers |= {name: self._answer_mirror(name) for name in (f"mirror{number}" for number in range(mirrors))}
        self._servers = {
            name: Server(port if name == "hub" else 0, functools.partial(self._serve, name, answer))
            for name, answer in answers.items()
        }

    @property
    def endpoint(self) -> str:
        return self._servers["hub"].url

    @property
    def cdn(self) -> str:
        return self._servers["cdn"].url

    @property
    def mirrors(self) -> list[str]:
        return [server.url for name, server in self._servers.items() if name.startswith("mirror")]

    @property
    def counts(self) -> dict[str, Traffic]:
        """Requests and body bytes by route: info tree refs commits paths_info list headers raw resolve cache cdn
        mirror0... other."""
        return self.counts_of("")

    def counts_of(self, suffix: str) -> dict[str, Traffic]:
        """The same of requests for files, or of repos, whose names end so."""
        with self._lock:
            log = [line for line in self.log if line.subject.endswith(suffix)]
        routes = {line.route for line in log}
        return {
            route: Traffic(sum(1 for s in log if s.route == route), sum(s.body_bytes for s in log if s.route == route))
            for route in sorted(routes)
        }

    def requests_to(self, origin: str) -> int:
        """Requests one origin (hub, cdn, mirror0...) has answered, redirect hops counted."""
        with self._lock:
            return sum(1 for line in self.log if line.origin == origin)

    def reset(self) -> None:
        """Forgets the log and the rate-limit windows."""
        with self._lock:
            self.log.clear()
            self._spent.clear()

    def add(self, repo: DemoRepo) -> DemoRepo:
        self.repos[repo.name.lower()] = repo
        return repo

    def set_fault(self, *faults: Fault) -> None:
        """The faults from now on; none clears them."""
        with self._lock:
            self._faults = list(faults)
            self._struck.clear()

    def expire_urls(self) -> None:
        """Every signed URL handed out so far is refused from now on."""
        with self._lock:
            self._signed.clear()

    def __enter__(self) -> DemoHub:
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    # What the three kinds of origin answer.

    def _answer_hub(self, request: Request) -> Response:
        if request.path == COUNTS:
            counts = self.counts_of(request.first("suffix"))
            return document({route: traffic._asdict() for route, traffic in counts.items()}, route=COUNTS)
        bucket = demoapi.bucket(request.path)
        left, reset = self._spend(bucket, request.token)
        response = demoapi.answer(self, request) if left >= 0 else Response(429, body=b"Too many requests", route="api")
        response.headers |= {
            "RateLimit": f'"{bucket}";r={max(left, 0)};t={reset}',
            "RateLimit-Policy": f'"fixed window";"{bucket}";q={self.budgets[bucket]};w={int(self.window)}',
        }
        return response

    def _answer_cdn(self, request: Request) -> Response:
        signature = request.first("Signature")
        with self._lock:
            subject, content, expires = self._signed.get(signature, ("", None, 0.0))
        about: dict[str, Any] = {"route": "cdn", "subject": subject}
        if "authorization" in request.headers:
            return Response(400, body=b"<Error><Code>InvalidArgument</Code>"
                            b"<Message>Only one auth mechanism allowed</Message></Error>", **about)  # fmt: skip
        if content is None or time.time() >= expires:
            return Response(403, {"Content-Type": "application/xml"},
                            b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
                            **about)  # fmt: skip
        # The CDN's ETag looks like a sha256 and is none: the Hub's is of the Xet file, and so is this one's kind.
        return Response(200, {"ETag": f'"{content.xet_hash}"'}, file=content, **about)

    def _answer_mirror(self, name: str) -> Answer:
        def answer(request: Request) -> Response:
            asked = demoapi.parse_resolve(request.path)
            repo = self.repos.get(asked.repo.lower()) if asked else None
            commit = repo.find(asked.revision) if asked and repo and not repo.missing else None
            if asked is None or commit is None or asked.path not in commit.files:
                return Response(404, body=b"not found", route=name)
            return Response(file=commit.files[asked.path], route=name, subject=f"{asked.repo}/{asked.path}")

        return answer

    def sign(self, subject: str, path: str, content: Content) -> str:
        """A CDN URL for these bytes that lives for `cdn_ttl` seconds."""
        expires = time.time() + self.cdn_ttl
        signature = hashlib.sha256(f"{subject} {expires} {os.urandom(8).hex()}".encode()).hexdigest()
        with self._lock:
            self._signed[signature] = (subject, content, expires)
        name = quote(f"inline; filename=\"{path.rpartition('/')[2]}\";", safe="")
        query = urlencode({"X-Amz-Expires": int(self.cdn_ttl), "Expires": int(expires), "Signature": signature})
        return f"{self.cdn}/xet-bridge/{content.xet_hash}?response-content-disposition={name}&{query}"

    def _spend(self, bucket: str, token: str | None) -> tuple[int, int]:
        """(requests left after this one, seconds to the next window); negative when the budget was spent."""
        now = time.monotonic()
        with self._lock:
            since, used = self._spent.get((bucket, token), (now, 0))
            if now - since >= self.window:
                since, used = now, 0
            used += 1
            self._spent[bucket, token] = (since, used)
        return self.budgets[bucket] - used, max(1, round(since + self.window - now))

    # Delivery, with what is wrong with it.

    def _strike(self, route: str, subject: str) -> list[Fault]:
        """The faults that strike this request; each uses up one of its `times`."""
        struck = []
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.strikes(route, subject) and (fault.times is None or self._struck[number] < fault.times):
                    self._struck[number] += 1
                    struck.append(fault)
        return struck

    def _serve(self, origin: str, answer: Answer, connection: socket.socket, request: Request) -> bool:
        """Sends the answer; whether the connection can carry another request."""
        response = answer(request)
        faults = self._strike(response.route, response.subject)
        for fault in faults:
            response = misanswered(fault, request, response)
        if self.closing.wait(self.latency + sum(f.seconds for f in faults if f.kind is Kind.SLOW)):
            return False
        if any(fault.kind is Kind.NEVER for fault in faults):
            self.closing.wait()
            return False
        response, start, stop = ranged(request, response, {fault.kind for fault in faults})
        head = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
        status = f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n"
        body = b"" if request.method == "HEAD" or response.file else response.body
        line = Served(origin, response.route, response.subject, request.method, request.target,
                      request.headers.get("range"), request.headers.get("authorization"),
                      request.headers.get("accept-encoding"), response.status, len(body))  # fmt: skip
        with self._lock:
            self.log += [line] if response.route != COUNTS else []
        try:
            connection.sendall((status + head + "\r\n").encode() + body)
            if response.file is not None and request.method != "HEAD":
                send_file(connection, line, response.file, (start, stop), faults, self.closing)
                if line.body_bytes < stop - start:
                    return False
        except OSError:
            return False
        return "Content-Length" in response.headers
