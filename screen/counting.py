"""One repo's index and headers as they come, and what follows of them once all are there.

A tally may be kept by another process (`apart`), so what passes in and out of it is bytes, and small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from formulas.errors import HeaderError
from formulas.facts import Facts

from .census import derive
from .header import Header, parse_header
from .shards import Index, Placed, Problem, parse_index, placed, reconcile
from .stated import Headers, parse_stated


class Origin(NamedTuple):
    """What is known of a repo beside its headers."""

    config: Mapping[str, Any] | None
    hf_quant: Mapping[str, Any] | None
    repo: str
    commit: str | None
    file_bytes: int


class Counted(NamedTuple):
    """Where index and headers disagree, and the facts."""

    problems: tuple[Problem, ...]
    facts: Facts


class Count(Protocol):
    """What counts a repo, here or in another process; threads may share it."""

    def index(self, data: bytes) -> Placed:
        """Takes the index in; what it places where. Raises HubMisbehaved."""

    def header(self, path: str, data: bytes, file_size: int, name: str) -> None:
        """Takes in the first 8 + N bytes of a file, which messages call `name`."""

    def refuse(self, path: str, error: HeaderError) -> None:
        """Takes in why a file has no header."""

    def stated(self, texts: dict[str, bytes], sizes: dict[str, int], names: dict[str, str]) -> bool:
        """Takes in headers as the Hub states them; whether all are sound."""

    def counted(self, origin: Origin) -> Counted:
        """What follows of all that was taken in. Raises HeaderError, of the first file by path that has one."""


class Tally:
    """Counts a repo in this process."""

    def __init__(self) -> None:
        self.headers: Headers = {}
        self._index: Index | None = None

    def index(self, data: bytes) -> Placed:
        self._index = parse_index(data)
        return placed(self._index)

    def header(self, path: str, data: bytes, file_size: int, name: str) -> None:
        try:
            self.headers[path] = parse_header(data, file_size=file_size, name=name)
        except HeaderError as error:
            self.headers[path] = error

    def refuse(self, path: str, error: HeaderError) -> None:
        self.headers[path] = error

    def stated(self, texts: dict[str, bytes], sizes: dict[str, int], names: dict[str, str]) -> bool:
        found = parse_stated(texts, sizes, names)
        self.headers |= found
        return not any(isinstance(header, HeaderError) for header in found.values())

    def counted(self, origin: Origin) -> Counted:
        headers: dict[str, Header] = {}
        for path, header in sorted(self.headers.items()):
            if isinstance(header, HeaderError):
                raise header
            headers[path] = header
        facts = derive(
            origin.config, headers, hf_quant=origin.hf_quant, repo=origin.repo, commit=origin.commit,
            file_bytes=origin.file_bytes,
        )  # fmt: skip
        return Counted(reconcile(self._index, headers), facts)
