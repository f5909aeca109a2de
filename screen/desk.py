"""Where candidates are read: the Hub the user means, a demo Hub, files of repo lines, local checkpoints.

What the command lines of `screen` and `fit` share; environment and files enter through it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from formulas.console import message
from formulas.errors import BadInput
from formulas.units import MIB, human

from .cache import Cache
from .hub import Hub, connect
from .local import Local
from .pacing import Wait, once
from .repo import parse_repo_line
from .survey import Line


class Desk:
    """Where candidates are read: the Hub the user means, connected when one is first asked for, and local paths."""

    def __init__(self, connect: Callable[[], Hub]):
        self._connect = connect
        self._hub: Hub | None = None

    @property
    def hub(self) -> Hub:
        self._hub = self._hub or self._connect()
        return self._hub

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close()

    def lines(self, sources: Sequence[str]) -> list[Line]:
        """A line for every candidate the sources name, in order. Raises BadInput for a source that is none."""
        return [line for source in sources for line in self._lines(source)]

    def line(self, source: str) -> Line:
        """The one candidate a source names. Raises BadInput where it names none or several."""
        lines = self.lines([source])
        if len(lines) != 1:
            raise BadInput(f"{source}: expected one checkpoint, got {len(lines)}")
        return lines[0]

    def also(self, repos: Sequence[str], lines: Sequence[Line]) -> list[Line]:
        """Lines for repos of the Hub at `main`, but for those that are among the lines already."""
        named = {line.repo.lower() for line in lines}
        return [Line(repo, "main", self.hub) for repo in repos if repo.lower() not in named]

    def _lines(self, source: str) -> Iterator[Line]:
        path = Path(source)
        if source == "-":
            yield from self._listed(_stdin())
        elif os.path.isdir(source) or path.suffix == ".safetensors":
            local = Local(path)
            yield Line(local.repo, local.commit, local)
        elif os.path.exists(source):  # a pipe, too: `screen <(grep ...)`
            yield from self._listed(read_text(path))
        elif source[:1] in ("", "/", ".", "~") or path.suffix in _LISTS:
            raise BadInput(f"{source!r}: expected a file of repo lines, a repo or a folder, got nothing there")
        else:
            repo, revision = parse_repo_line(source)
            yield Line(repo, revision, self.hub)

    def _listed(self, text: str) -> Iterator[Line]:
        """A line of a file that names no repo is a row of its own: the other lines are screened."""
        for written in text.removeprefix("\ufeff").splitlines():
            if not (named := written.partition("#")[0].strip()):
                continue
            try:
                repo, revision = parse_repo_line(named)
                yield Line(repo, revision, self.hub)
            except BadInput as error:
                yield Line(named, "", None, error)


@contextlib.contextmanager
def opened(
    demo: bool, endpoint: str | None, token: str | None, cache_dir: Path | None
) -> Iterator[tuple[Desk, Cache, list[str]]]:
    """A desk, a cache, and the sources meant when none is named: of the demo Hub all repos, with a cache that ends
    with it."""
    with contextlib.ExitStack() as ending:
        # Headers are millions of small objects and hold no cycles: looking for some would take half the time.
        ending.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(1_000_000, 50, 50)
        names: list[str] = []
        if demo:
            from .catalogue import descriptions  # these take a quarter of the time all others do to import
            from .demoserve import served

            names = list(descriptions())
            endpoint, token = ending.enter_context(served()).endpoint, ""
            cache_dir = cache_dir or Path(ending.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        desk = Desk(lambda: connect(endpoint, token, on_event=once(_show_wait)))
        ending.callback(desk.close)
        cache = Cache(cache_dir or default_cache_dir())
        yield desk, cache, names
        if cache.broken:
            message(f"cache {cache.broken}; what was read is not kept, the next run reads it again")


def default_cache_dir() -> Path:
    """Where the user's other caches are (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "checkpoint-toolkit"


def default_data_dir() -> Path:
    """Where the user's other programs keep what they were told (XDG base directories)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "checkpoint-toolkit"


def _show_wait(wait: Wait) -> None:
    tqdm.write(f"{wait.origin}: waiting {wait.seconds:.0f} s, {wait.because}", file=sys.stderr)


_LISTS = (".txt", ".list", ".lst", ".csv", ".tsv", ".md", ".json", ".jsonl", ".toml", ".yaml", ".yml")
_LIST_CAP = 64 * MIB  # of a file of lines or of a policy; a checkpoint named by mistake is not read


def read_text(path: Path) -> str:
    """A text file in UTF-8, its byte order mark left out. Raises BadInput."""
    try:
        with path.open("rb") as file:
            data = file.read(_LIST_CAP + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: expected a text file in UTF-8, got other bytes at byte {error.start}") from None
    except OSError as error:
        raise BadInput(f"{path}: expected a text file, got {error.strerror}") from None
    if len(data) > _LIST_CAP:
        raise BadInput(f"{path}: expected a text file of at most {human(_LIST_CAP)}, got more")
    return text


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadInput(f"-: expected repo lines in UTF-8, got other bytes at byte {error.start}") from None
