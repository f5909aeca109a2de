"""Many candidates at once: buys evidence level by level, lets the gates judge it, and answers in the order asked.

Requests overlap freely; the answers do not depend on it. Whether a candidate is a copy is decided in the order of the
lines, once every earlier tree is known, and a copy's headers are read only after those of its original.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, NamedTuple

from formulas.errors import ToolkitError

from .apart import Apart
from .cache import Cache
from .chain import (
    Criteria,
    Evidence,
    Identity,
    Judged,
    Known,
    Spent,
    Twin,
    identity,
    judge,
    stops,
    verdict,
)
from .evidence import Means, buy
from .findings import Finding
from .gates import GATES
from .source import Source
from .transport import Cost

_log = logging.getLogger(__name__)

REPOS_AT_ONCE = 16
SHARDS_AT_ONCE = 64


class Line(NamedTuple):
    """One candidate: what was asked for, and where it is read; or the error its line is."""

    repo: str
    revision: str
    source: Source | None
    error: ToolkitError | None = None


class Case(NamedTuple):
    """What is known and found of one candidate so far, and what stopped it if something did."""

    known: Known
    source: Source | None
    findings: tuple[Finding, ...] = ()
    error: ToolkitError | None = None

    @property
    def open(self) -> bool:
        """Whether more evidence is worth buying."""
        return self.error is None and not stops(self.findings)


class _Original(NamedTuple):
    """An earlier candidate whose bytes later ones may repeat."""

    known: Known
    identity: Identity
    study: Future[Case]

    @property
    def readable(self) -> bool:
        """Whether its files may be read; of a gated repo that shows only when they are."""
        return not (self.known.page and self.known.page.gated) or self.study.result().error is None


Originals = dict[tuple[str, ...], list[_Original]]
"""Earlier candidates by the digests of their weights."""


def survey(
    lines: Sequence[Line], criteria: Criteria, cache: Cache, overrides: Mapping[str, Any] | None = None
) -> Iterator[Judged]:
    """A verdict a line, in the order of the lines. Left early, it starts nothing more; what was read stays cached.

    `overrides` are laid over every config.json, as the engine's --hf-overrides."""
    repos = ThreadPoolExecutor(REPOS_AT_ONCE, thread_name_prefix="repo")
    shards = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
    apart = Apart()
    means = Means(cache, shards, overrides or {}, criteria.reads_card, apart)
    originals: Originals = {}
    studies: deque[Future[Case]] = deque()
    try:
        for glance in [repos.submit(_glance, line, criteria, means) for line in lines]:
            while not glance.done():
                wait([glance, *itertools.islice(studies, 1)], return_when=FIRST_COMPLETED)
                yield from _finished(studies)
            case = glance.result()
            mine = _identity(case)
            original = _original(mine, originals) if mine else None
            if mine and original:
                twin = Twin(original.known.reads, original.known.at, mine.differs(original.identity), original.readable)
                case = case._replace(known=replace(case.known, twin=twin))
            case = _judge(case, Evidence.TREE, criteria)
            study = repos.submit(_study, case, original and original.study, criteria, means)
            studies.append(study)
            if mine and case.open:
                originals.setdefault(mine.weights, []).append(_Original(case.known, mine, study))
        while studies:
            wait([studies[0]])
            yield from _finished(studies)
    finally:
        for pool in (repos, shards):
            pool.shutdown(wait=False, cancel_futures=True)
        apart.close()


def _finished(studies: deque[Future[Case]]) -> Iterator[Judged]:
    """Takes from the front all that are done."""
    while studies and studies[0].done():
        case = studies.popleft().result()
        yield Judged(verdict(case.known, case.findings, case.error), case.known.spent)


def _identity(case: Case) -> Identity | None:
    tree, shards = case.known.tree, case.known.shards
    return identity(tree, shards.shards) if case.open and tree and shards else None


def _original(mine: Identity, originals: Originals) -> _Original | None:
    """The earlier candidate to compare with: of the identical ones the first that can be read, else the first; else
    the first with equal weights."""
    equal = originals.get(mine.weights, [])
    same = [original for original in equal if original.identity == mine]
    return next((original for original in same if original.readable), None) or next(iter([*same, *equal]), None)


def _glance(line: Line, criteria: Criteria, means: Means) -> Case:
    """INFO, judged, and TREE, which is judged when it is known what came earlier."""
    case = Case(Known(line.repo, line.revision), line.source, error=line.error)
    return _bought(_judge(_bought(case, Evidence.INFO, means), Evidence.INFO, criteria), Evidence.TREE, means)


def _study(case: Case, original: Future[Case] | None, criteria: Criteria, means: Means) -> Case:
    """CONFIG and HEADERS, each judged."""
    case = _bought(case, Evidence.CONFIG, means)
    if case.open and original is not None:
        # When it is done its headers are in the cache: equal bytes are read once.
        case = case._replace(known=replace(case.known, twin_bundle=original.result().known.bundle))
    case = _bought(_judge(case, Evidence.CONFIG, criteria), Evidence.HEADERS, means)
    case = _judge(case, Evidence.HEADERS, criteria)
    return case._replace(known=replace(case.known, twin_bundle=None))


def _bought(case: Case, level: Evidence, means: Means) -> Case:
    """The case with one more level, or with the error that kept it away; what it cost counts either way."""
    if not case.open or case.source is None:
        return case
    cost, known, error = Cost(), case.known, case.error
    try:
        known = replace(buy(level, known, case.source, cost, means), reached=level)
    except ToolkitError as caught:
        error = caught
    except Exception as caught:
        error = _bug(known, caught)
    spent = Spent(**{name: getattr(cost, name) for name in Spent.model_fields})
    return case._replace(known=replace(known, spent={**known.spent, level: spent}), error=error)


def _judge(case: Case, level: Evidence, criteria: Criteria) -> Case:
    if not case.open or case.known.reached is not level:
        return case
    try:
        return case._replace(findings=case.findings + judge(level, case.known, criteria, GATES))
    except Exception as caught:
        return case._replace(error=_bug(case.known, caught))


def _bug(known: Known, caught: Exception) -> ToolkitError:
    """A fault of this program, as an error of the one row it met: the other rows are not lost for it."""
    _log.debug("%s", known.name, exc_info=caught)
    text = f"{known.name}: expected no {type(caught).__name__}, got one ({caught}); this row is not judged"
    return ToolkitError(text, code="bug", hint="this is a bug: please report it with the name of the repo")
