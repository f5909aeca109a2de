"""What a person sees of a running stage: a bar by bytes at a terminal, a line a finished file elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from formulas.console import json_line, message
from formulas.units import human

from .board import Event


def as_json() -> Callable[[Event], None]:
    """Prints each event as one JSON line on stdout; threads may share it."""
    lock = threading.Lock()

    def show(event: Event) -> None:
        with lock:
            json_line(event)
            sys.stdout.flush()

    return show


def silent(event: Event) -> None:
    """Shows nothing."""


class Lines:
    """One line on stderr for each finished file and for each reason to wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if text := describe(event):
            with self._lock:
                message(text)


class Bar:
    """A bar on stderr over the bytes of one snapshot, with each source's rate; reasons to wait above it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: tqdm[Any] | None = None

    def __call__(self, event: Event) -> None:
        with self._lock:
            kind = event["event"]
            if kind == "plan" and event["fetch_bytes"]:
                self._bar = tqdm(total=event["fetch_bytes"], unit="B", unit_scale=True, unit_divisor=1024, leave=False)
            elif kind == "progress" and self._bar is not None:
                self._bar.update(max(0, event["bytes"] - self._bar.n))
                rates = [f"{urlsplit(s['url']).netloc} {human(s['bytes_per_second'])}/s x{s['connections']}"
                         for s in event["sources"] if s["bytes_per_second"]]  # fmt: skip
                self._bar.set_postfix_str(", ".join(rates))
            elif kind in ("done", "failed") and self._bar is not None:
                self._bar.close()
                self._bar = None
            elif kind != "file" and (text := describe(event)):
                tqdm.write(text, file=sys.stderr)


def describe(event: Event) -> str | None:
    """An event as a sentence; None for those that are no news."""
    match event["event"]:
        case "plan":
            return (
                f"{event['repo']}@{event['commit'][:8]}: {event['files']} files, "
                f"{human(event['fetch_bytes'])} to fetch, {human(event['resume_bytes'])} to resume, "
                f"{human(event['reuse_bytes'])} here"
            )
        case "skipped":
            return f"skipped {event['path']}: {event['because']}"
        case "file":
            return f"{event['path']}  {human(event['bytes'])}  {event['how']} from {event['source'] or 'this disk'}"
        case "wait":
            return f"waiting {event['seconds']:.0f} s: {event['because']}"
        case "locked" | "hashing":
            return f"waiting: {event['because']}"
        case "source":
            return f"{event['state']}: {event['because']}"
        case "quarantined":
            return f"quarantined: {event['because']}"
        case "warning":
            return f"warning: {event['path']}: {event['because']}"
        case "laid out":
            return f"{event['folder']}: laid out by {event['how']}"
    return None
