"""A Hugging Face Hub, or a mirror of one, behind a small interface: resolve, tree, files, ranges, listing.

Always by commit: a name is resolved once, and everything after asks for that commit. Sizes and digests come from the
tree of the endpoint; of a mirror (`Hub(url, token=None)`) nothing is needed but bytes. Wire facts: huggingface_hub
2.4.0 (hf_api.py, file_download.py), https://huggingface.co/docs/hub, and the checks of section 9 of the design.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit, urlunsplit

import orjson
from pydantic import ValidationError
from requests.utils import parse_header_links

from formulas.errors import BadInput, DigestMismatch, HubMisbehaved, HubUnavailable, NotFound
from formulas.units import MIB, human

from .pacing import Wait
from .refusals import refusal
from .repo import Entry, Revision, Tree, is_commit, is_repo, parse_tree
from .source import ModelInfo, RepoInfo, digest, name
from .transport import Cost, Exchange, Patience, Transport, chunks, origin
from .wire import Down, Limits, RangeIgnored, Throttled, WrongRange

PAGE_CAP = 64 * MIB  # of one API answer
METADATA_CAP = 1024 * MIB  # of the one-request header route
MAX_PAGES = 10_000  # of a listing: ten million files
_LOCATIONS_KEPT = 4096
Result = TypeVar("Result")
_CONTENT_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


class Hub:
    """An endpoint. Threads may share it; `close` (or leaving its `with`) ends what is in flight."""

    free = False

    def __init__(
        self, endpoint: str, *, token: str | None = None, limits: Limits | None = None,
        on_event: Callable[[Wait], None] = lambda event: None, user_agent: str = "checkpoint-toolkit",
    ):  # fmt: skip
        self.endpoint = _checked_endpoint(endpoint)
        self.limits = limits or Limits()
        self._transport = Transport(
            self.endpoint, token=_checked_token(token), limits=self.limits, on_event=on_event, user_agent=user_agent
        )
        self._locations: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def resolve(self, repo: str, revision: str, cost: Cost) -> RepoInfo:
        """The commit a revision names now, and the repo's page; 1 request. Raises NotFound, AccessDenied."""
        url = f"{self._api(repo)}/revision/{quote(revision, safe='')}?securityStatus=true"
        info = _model(self._json(url, f"{repo}@{revision}", cost), f"{repo}@{revision}")
        if info.sha is None or not is_commit(info.sha) or (is_commit(revision) and info.sha != revision):
            raise HubMisbehaved(f"{repo}@{revision}: expected the commit it stands for, got {info.sha!r}")
        if not is_repo(info.id):  # it becomes part of URLs, of cache keys and of folders
            raise HubMisbehaved(f"{repo}@{revision}: expected the name of a repo, got {info.id!r:.100}")
        return RepoInfo(Revision(revision, info.sha), info.id, info)

    def tree(self, repo: str, commit: str, cost: Cost) -> Tree:
        """All files of a commit with sizes and digests; 1 request for each 1000 files and folders."""
        url = f"{self._api(repo)}/tree/{quote(commit, safe='')}?recursive=true&expand=false"
        return parse_tree(item for page in self._pages(url, name(repo, commit, "tree"), "path", cost) for item in page)

    def models(
        self, *, search: str | None = None, author: str | None = None, filters: Sequence[str] = (),
        expand: Sequence[str] = (), sort: str | None = None, limit: int = 100, cost: Cost,
    ) -> list[ModelInfo]:  # fmt: skip
        """At most `limit` models the Hub finds, in its order. `filters` are tags, such as `base_model:quantized:ID`;
        `expand` names the fields to be told instead of the usual ones."""
        asked = [("search", search), ("author", author), *(("filter", tag) for tag in filters), ("sort", sort),
                 *(("expand[]", field) for field in expand)]  # fmt: skip
        query = urlencode([(key, value) for key, value in asked if value] + [("limit", str(min(limit, 1000)))])
        found: list[ModelInfo] = []
        for page in self._pages(f"{self.endpoint}/api/models?{query}", "model listing", "id", cost):
            found += [_model(item, "model listing") for item in page]
            if len(found) >= limit:
                break
        return found[:limit]

    def read_file(self, repo: str, commit: str, entry: Entry, cost: Cost, limit: int) -> bytes:
        """A whole small file, its size and digest checked against the tree. Raises DigestMismatch, HubMisbehaved."""
        subject = name(repo, commit, entry.path)
        if entry.blob.size > limit:
            raise HubMisbehaved(f"{subject}: expected at most {human(limit)}, the tree says {human(entry.blob.size)}")

        def read(patience: Patience, ends: float) -> bytes:
            with self._open(repo, commit, entry.path, {}, cost, patience) as exchange:
                if exchange.status != 200:
                    raise refusal(exchange, repo, self.endpoint)
                return exchange.read(entry.blob.size)

        data = self._again(read)
        if len(data) != entry.blob.size or (entry.blob.known and digest(data, entry.blob.oid) != entry.blob.oid):
            got = digest(data, entry.blob.oid) if entry.blob.known else "other bytes"
            raise DigestMismatch(
                f"{subject}: expected {entry.blob.size} bytes with digest {entry.blob.oid}, got {len(data)} with {got}"
            )
        return data

    def read_range(self, repo: str, commit: str, entry: Entry, start: int, stop: int, cost: Cost) -> bytes:
        """Bytes [start, stop) of a file. Raises as `stream` does."""
        return b"".join(self.stream(repo, commit, entry.path, start, stop, size=entry.blob.size, cost=cost))

    def stream(
        self, repo: str, commit: str, path: str, start: int, stop: int, *, size: int, cost: Cost
    ) -> Iterator[bytes]:
        """Exactly bytes [start, stop) of a file of `size` bytes, in pieces as they arrive.

        A broken, stalled or slow connection is resumed where it ended. Progress refills the retries, if it is no slower
        than a connection may be, pauses included. Raises HubUnavailable when they are used up; at once RangeIgnored,
        WrongRange, RangeRefused, NotFound, AccessDenied.
        """
        failures, patience = 0, Patience(self.limits)
        got, since = 0, time.monotonic()  # bytes, and when the last failure was; waits for rate limits do not count
        while start < stop:
            try:
                with self.open_range(repo, commit, path, start, stop, size=size, cost=cost, patience=patience) as body:
                    for data in chunks(body, stop - start):
                        start, got = start + len(data), got + len(data)
                        yield data
            except (Throttled, Down):
                raise
            except HubUnavailable as error:
                self.renew(repo, commit, path)
                seconds = time.monotonic() - patience.waited - since
                since = time.monotonic() - patience.waited
                failures = 1 if got > seconds * self.limits.floor_bytes_per_second else failures + 1
                got = 0
                if failures > self.limits.retries or not error.retry:
                    raise
                self._transport.pause(failures)

    def open_range(
        self, repo: str, commit: str, path: str, start: int, stop: int, *, size: int, cost: Cost,
        patience: Patience | None = None,
    ) -> Exchange:  # fmt: skip
        """One try at bytes [start, stop) of a file of `size` bytes: the answer, its range checked, its body unread.

        The address a Hub redirects to is used for the later ranges of that file, in this process only, until it is
        refused. Raises what tells a caller what to do next: see `wire`.
        """
        span = {"Range": f"bytes={start}-{stop - 1}"}  # HTTP's inclusive end exists on this line
        exchange = self._open(repo, commit, path, span, cost, patience or Patience(self.limits))
        try:
            self._check_range(exchange, repo, start, stop, size)
        except BaseException:
            exchange.close()
            raise
        return exchange

    def open_file(self, repo: str, commit: str, path: str, *, size: int, cost: Cost) -> Exchange:
        """One try at a whole file from its first byte, for mirrors that ignore ranges; the body is unread."""
        exchange = self._open(repo, commit, path, {}, cost, Patience(self.limits))
        length = exchange.headers.get("Content-Length")
        try:
            if exchange.status != 200:
                raise refusal(exchange, repo, self.endpoint)
            if (length is not None and length != str(size)) or _encoded(exchange):
                raise WrongRange(f"{exchange.subject}: expected {size} bytes as they are, got other ones")
        except BaseException:
            exchange.close()
            raise
        return exchange

    def renew(self, repo: str, commit: str, path: str) -> None:
        """Forgets where the Hub redirected a file: the next range asks the Hub again and may land elsewhere."""
        with self._lock:
            self._locations.pop((repo, commit, path), None)

    def metadata_in_one(self, repo: str, revision: Revision, index: str, cost: Cost) -> bytes | None:
        """The Hub's own reading of all shard headers, {"index", "headers": {shard: header}}, as JSON; 2 or 3 requests.

        Served for `main` only: None unless the commit is what `main` is before and after, or where it is not served.
        Source: huggingface_hub 2.4.0 hf_api.py `get_sharded_safetensors_metadata`.
        """
        try:
            if revision.requested != "main" and self._main(repo, cost) != revision.commit:
                return None
            url = f"{self._api(repo)}/safetensors-metadata/{quote(index, safe='')}"
            body = self._call(url, name(repo, revision.commit, "safetensors-metadata"), cost, METADATA_CAP)[1]
            if self._main(repo, cost) != revision.commit:
                return None
        except (NotFound, HubMisbehaved):
            return None
        return body

    def _main(self, repo: str, cost: Cost) -> Any:
        answer = self._json(f"{self._api(repo)}/revision/main?expand%5B%5D=sha", f"{repo}@main", cost)
        return answer.get("sha") if isinstance(answer, dict) else None

    def _open(
        self, repo: str, commit: str, path: str, headers: Mapping[str, str], cost: Cost, patience: Patience
    ) -> Exchange:
        key, subject = (repo, commit, path), name(repo, commit, path)
        with self._lock:
            known = self._locations.get(key)
        if known is not None:
            exchange = self._transport.get(known, subject=subject, cost=cost, headers=headers, patience=patience)
            if exchange.status < 400:
                return exchange
            with exchange:  # signed addresses live for about an hour: ask for a new one
                exchange.drain()
            self.renew(*key)
        url = f"{self.endpoint}/{quote(repo)}/resolve/{quote(commit, safe='')}/{quote(path)}"
        exchange = self._transport.get(url, subject=subject, cost=cost, headers=headers, patience=patience)
        if origin(exchange.url) != self._transport.home and exchange.status < 400:
            with self._lock:
                self._locations[key] = exchange.url
                while len(self._locations) > _LOCATIONS_KEPT:
                    self._locations.popitem(last=False)
        return exchange

    def _check_range(self, exchange: Exchange, repo: str, start: int, stop: int, size: int) -> None:
        if exchange.status == 200:
            raise RangeIgnored(f"{exchange.subject}: expected bytes {start}-{stop} alone, got the whole file; not read")
        if exchange.status != 206:
            raise refusal(exchange, repo, self.endpoint)
        stated = exchange.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(stated.strip())
        first, last, total = (int(n) for n in match.groups()) if match else (-1, -1, -1)
        if (first, last + 1, total) != (start, stop, size):
            raise WrongRange(f"{exchange.subject}: expected bytes {start}-{stop} of {size}, got {stated or 'no'} range")
        length = exchange.headers.get("Content-Length")
        if (length is not None and length != str(stop - start)) or _encoded(exchange):
            raise WrongRange(f"{exchange.subject}: expected {stop - start} bytes as they are, got other ones")

    def _api(self, repo: str) -> str:
        return f"{self.endpoint}/api/models/{quote(repo)}"

    def _pages(self, url: str, subject: str, key: str, cost: Cost) -> Iterator[list[dict[str, Any]]]:
        """The pages of a listing. The next one is asked of our endpoint, whoever the `Link` header names."""
        first_items: set[object] = set()
        for _ in range(MAX_PAGES):
            headers, body = self._call(url, subject, cost, PAGE_CAP)
            page = _parse_json(body, subject)
            if not isinstance(page, list) or not all(isinstance(item, dict) for item in page):
                raise HubMisbehaved(f"{subject}: expected a list of objects, got something else")
            first = page[0].get(key) if page else None
            if first is not None and first in first_items:
                raise HubMisbehaved(
                    f"{subject}: expected a new page, got one again; {urlsplit(self.endpoint).netloc} ignores its own "
                    "cursor, use another endpoint"
                )
            first_items.add(first)
            yield page
            links = {link.get("rel"): link["url"] for link in parse_header_links(headers.get("Link", ""))}
            if "next" not in links:
                return
            url = self._here(url, links["next"], subject)
        raise HubMisbehaved(f"{subject}: expected an end within {MAX_PAGES} pages, got none")

    def _here(self, url: str, link: str, subject: str) -> str:
        """The API address a page links to, at our endpoint: mirrors pass on links to the Hub they mirror."""
        try:
            parts, base = urlsplit(urljoin(url, link)), urlsplit(self.endpoint)
        except ValueError:
            raise HubMisbehaved(f"{subject}: expected the URL of a next page, got {link[:80]!r}") from None
        _, api, rest = parts.path.partition("/api/")
        if not api:
            raise HubMisbehaved(f"{subject}: expected a next page under /api/, got {parts.path!r}")
        return urlunsplit((base.scheme, base.netloc, base.path + api + rest, parts.query, ""))

    def _json(self, url: str, subject: str, cost: Cost) -> Any:
        return _parse_json(self._call(url, subject, cost, PAGE_CAP)[1], subject)

    def _call(self, url: str, subject: str, cost: Cost, limit: int) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of one API answer."""

        def call(patience: Patience, ends: float) -> tuple[Mapping[str, str], bytes]:
            with self._transport.get(url, subject=subject, cost=cost, patience=patience, ends=ends) as exchange:
                if exchange.status != 200:
                    raise refusal(exchange, subject.partition("@")[0], self.endpoint)
                return exchange.headers, exchange.read(limit)

        return self._again(call)

    def _again(self, attempt: Callable[[Patience, float], Result]) -> Result:
        """What `attempt` returns, tried again after failures that can pass, within the call's deadline."""
        failures, patience, began = 0, Patience(self.limits), time.monotonic()
        while True:
            ends = began + self.limits.call_seconds + patience.waited
            try:
                return attempt(patience, ends)
            except (Throttled, Down):
                raise
            except HubUnavailable as error:
                failures += 1
                late = time.monotonic() >= began + self.limits.call_seconds + patience.waited
                if failures > self.limits.retries or late or not error.retry:
                    raise
                self._transport.pause(failures)


def connect(
    endpoint: str | None, token: str | None, *, limits: Limits | None = None,
    on_event: Callable[[Wait], None] = lambda event: None,
) -> Hub:  # fmt: skip
    """The Hub the user means: HF_ENDPOINT and the token huggingface_hub itself would use, unless given here."""
    from huggingface_hub import get_token  # slow to import, and not needed where a token is given

    return Hub(
        endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co",
        token=get_token() if token is None else token or None, limits=limits, on_event=on_event,
    )  # fmt: skip


def _checked_endpoint(text: str) -> str:
    """The endpoint without its last slash. Raises BadInput, which does not repeat a password that stands in it."""
    endpoint = text.strip().rstrip("/")
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, a port that is none
        sound = False
    if sound and parts.username is not None:
        raise BadInput(
            "endpoint: expected a URL without user and password, got one with both; nothing was asked",
            hint="a token is given by HF_TOKEN or --token",
        )
    if not sound or parts.query or parts.fragment or any(c.isspace() for c in endpoint):
        shown = endpoint.rpartition("@")[2]
        raise BadInput(f"endpoint {shown!r}: expected a URL such as https://huggingface.co, got something else")
    return endpoint


def _checked_token(text: str | None) -> str | None:
    """The token, None for a blank one. Raises BadInput, which does not repeat it, where no header could carry it."""
    token = (text or "").strip()
    if not all("!" <= c <= "~" for c in token):
        raise BadInput("token: expected printable ASCII without blanks, got other characters in it; nothing was asked")
    return token or None


def _encoded(exchange: Exchange) -> bool:
    return exchange.headers.get("Content-Encoding", "identity").lower() != "identity"


def _model(value: Any, subject: str) -> ModelInfo:
    try:
        return ModelInfo.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise HubMisbehaved(f"{subject}: expected a repo's page, got {where} that is not ({first['msg']})") from None


def _parse_json(body: bytes, subject: str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HubMisbehaved(f"{subject}: expected JSON, got {body[:60]!r} ({error})") from None
