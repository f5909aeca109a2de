"""How fast each origin may be asked: what its rate-limit headers said, per bucket, obeyed before it has to refuse.

A Hub counts requests in fixed windows, one budget a bucket (`api`, `resolvers`), and says on every answer how many
are left and when the window ends: `RateLimit: "api";r=499;t=295`, `RateLimit-Policy: "fixed window";"api";q=500;w=300`
(https://huggingface.co/docs/hub/rate-limits; IETF draft 9).
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from formulas.errors import HubUnavailable

_LEFT = re.compile(r'"([^"]+)"\s*;\s*r=([0-9]{1,9})\s*;\s*t=([0-9]{1,9})(?![0-9])')
_QUOTA = re.compile(r'"([^"]+)"\s*;\s*q=([0-9]{1,9})(?![0-9])')


class Budget(NamedTuple):
    """One bucket as an answer states it: requests left, seconds to the next window, requests a window (if said)."""

    bucket: str
    left: int
    seconds: int
    quota: int | None


class Wait(NamedTuple):
    """Why a request is not sent yet: what `on_event` callbacks are told."""

    origin: str
    bucket: str
    seconds: float
    because: str


@dataclass
class _Window:
    left: int
    quota: int | None
    ends: float


def parse_budget(headers: Mapping[str, str]) -> Budget | None:
    """The budget an answer states, or None when it states none that can be read."""
    left = _LEFT.search(headers.get("RateLimit", ""))
    if left is None:
        return None
    bucket, requests, seconds = left.groups()
    quotas = {name: int(quota) for name, quota in _QUOTA.findall(headers.get("RateLimit-Policy", ""))}
    return Budget(bucket, int(requests), int(seconds), quotas.get(bucket))


def parse_retry_after(headers: Mapping[str, str]) -> int | None:
    """Seconds a 429 or 503 asks to wait; None when it does not say, or says it as a date."""
    text = headers.get("Retry-After", "").strip()
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


class Pacer:
    """The budgets of every origin. A claim takes one request out of a bucket, or says how long to wait for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, str], _Window] = {}
        self._names: dict[tuple[str, str], str] = {}  # (origin, kind of URL) -> the bucket the server counts it in

    def claim(self, origin: str, url: str, now: float) -> Wait | None:
        """None and one request fewer in the bucket; or, with the bucket empty, the wait until its window ends."""
        with self._lock:
            bucket = self._names.get((origin, _kind(url)), _kind(url))
            window = self._windows.get((origin, bucket))
            if window is None:
                return None
            if now >= window.ends:
                if window.quota is None:
                    del self._windows[origin, bucket]
                    return None
                window.left, window.ends = window.quota, now + 1  # until an answer says when this window ends
            if window.left > 0:
                window.left -= 1
                return None
            return Wait(origin, bucket, window.ends - now, "its rate limit is used up")

    def learn(self, origin: str, url: str, headers: Mapping[str, str], now: float) -> None:
        """Takes in what an answer says. Claims not yet answered stay claimed: the lower count wins in one window."""
        budget = parse_budget(headers)
        if budget is None:
            return
        ends = now + _margin(budget.seconds)
        with self._lock:
            self._names[origin, _kind(url)] = budget.bucket
            window = self._windows.get((origin, budget.bucket))
            if window is None or now >= window.ends or ends > window.ends + 2:  # `t` is rounded: 2 s are no new window
                self._windows[origin, budget.bucket] = _Window(budget.left, budget.quota, ends)
            else:
                window.left, window.quota = min(window.left, budget.left), budget.quota
                window.ends = max(window.ends, ends)

    def refused(self, origin: str, url: str, headers: Mapping[str, str], refusals: int, now: float) -> Wait:
        """How long to stay away after the `refusals`-th 429 in a row: as told, else 1, 2, 4 ... 30 seconds."""
        budget, retry_after = parse_budget(headers), parse_retry_after(headers)
        told = budget.seconds if budget is not None and not budget.left else retry_after
        seconds = min(30.0, 2.0 ** (refusals - 1)) * (0.75 + random.random() / 2) if told is None else _margin(told)
        bucket = budget.bucket if budget is not None else _kind(url)
        with self._lock:
            window = self._windows.setdefault((origin, bucket), _Window(0, None, 0.0))
            window.left, window.ends = 0, now + seconds
        return Wait(origin, bucket, seconds, "it answered 429")


class Outages:
    """Origins that no connection reaches: after `tries` failures in a row and `seconds` without one that did not fail,
    one caller at a time still tries, and the others are told at once what the last one was told."""

    def __init__(self, tries: int, seconds: float) -> None:
        self._tries, self._seconds, self._lock = tries, seconds, threading.Lock()
        self._down: dict[str, _Outage] = {}

    def claim(self, origin: str, now: float) -> HubUnavailable | None:
        """None for a caller that may try; else why it need not."""
        with self._lock:
            outage = self._down.get(origin)
            if outage is None or outage.failures < self._tries or now - outage.since < self._seconds:
                return None
            if now < outage.tried + _BETWEEN_TRIES or outage.trying:
                return outage.error
            outage.trying = True
            return None

    def learn(self, origin: str, error: HubUnavailable | None, now: float) -> None:
        """Takes in that a connection was had, or why not."""
        with self._lock:
            if error is None:
                self._down.pop(origin, None)
                return
            outage = self._down.setdefault(origin, _Outage(error, now))
            outage.failures += 1
            outage.error, outage.tried, outage.trying = error, now, False


@dataclass
class _Outage:
    error: HubUnavailable
    since: float
    failures: int = 0
    tried: float = 0.0
    trying: bool = False


_BETWEEN_TRIES = 1.0  # seconds


def once(show: Callable[[Wait], None]) -> Callable[[Wait], None]:
    """`show` for the first of the threads that wait for the same, and again when that wait has long been over."""
    lock, shown = threading.Lock(), dict[tuple[str, str], float]()

    def show_once(wait: Wait) -> None:
        now, key = time.monotonic(), (wait.origin, wait.because)
        with lock:
            new = now >= shown.get(key, 0.0)
            if new:
                shown[key] = now + max(_QUIET_SECONDS, wait.seconds)
        if new:
            show(wait)

    return show_once


_QUIET_SECONDS = 10.0  # a server that says no once a second is reported less often


def _kind(url: str) -> str:
    path = urlsplit(url).path
    return "api" if path.startswith("/api/") and not path.startswith("/api/resolve-cache/") else "resolvers"


def _margin(seconds: int) -> float:
    """A little more than told: `t` is whole seconds, and everybody else wakes up at the same moment."""
    return seconds + 0.1 + random.random() / 4
