"""Evidence is bought in order of price; gates judge what was bought; a verdict says what was found and what it cost.

    INFO     1 request         what the Hub says of the repo
    TREE     1 request or more every file: path, size, digest
    CONFIG   1-2 small files   config.json, hf_quant_config.json
    HEADERS  1 request a shard the index, and every tensor: name, dtype, shape

All gates of a level run, because they cost nothing more and every reason is wanted; the repo stops after a level that
rejected it. Nothing here does I/O: whoever buys the evidence hands it over as `Known`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from formulas.errors import ToolkitError
from formulas.facts import Document, Facts

from .findings import Answer, Finding, Outcome, Source
from .policy import Policy
from .readme import Card
from .repo import Entry, Tree
from .shards import INDEX, Placed, Problem, ShardSet
from .target import Engine, Target


@enum.unique
class Evidence(enum.IntEnum):
    """How much is known of a repo, cheapest first."""

    INFO = 1
    TREE = 2
    CONFIG = 3
    HEADERS = 4

    @property
    def word(self) -> str:
        return self.name.lower()


class Spent(Document):
    """What evidence cost: requests to the endpoint's origin (redirect hops included), requests to others, bytes."""

    requests: int = 0
    cdn_requests: int = 0
    bytes_read: int = 0
    cached_headers: int = 0


def total(parts: Iterable[Spent]) -> Spent:
    """The sum of what was spent, field by field."""
    parts = list(parts)
    return Spent(**{name: sum(getattr(part, name) for part in parts) for name in Spent.model_fields})


class Page(NamedTuple):
    """What the Hub's API says of a repo at a revision. A field it does not state is None."""

    licence: str | None = None
    last_modified: datetime | None = None
    gated: str | None = None  # auto | manual
    private: bool | None = None
    scan_done: bool | None = None
    unsafe_files: tuple[str, ...] = ()
    card: Mapping[str, Any] | None = None  # the front matter of its README, as the API has it


class Twin(NamedTuple):
    """An earlier candidate with the same weight bytes, and which of the files that say how to load them differ."""

    repo: str
    commit: str
    differs: tuple[str, ...] = ()
    readable: bool = True  # False when the earlier one cannot be fetched with this token (gated)

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.commit}"

    @property
    def short(self) -> str:
        """The name as people read it."""
        return f"{self.repo}@{self.commit[:8]}"


class Bundle(NamedTuple):
    """The small files of a commit: parsed JSON by path, and a sentence for each file that is no JSON object."""

    files: Mapping[str, Mapping[str, Any]]
    broken: Mapping[str, str]


@dataclass(frozen=True)
class Known:
    """All evidence on one repo so far. A part that was not bought is None."""

    repo: str
    revision: str
    canonical: str | None = None
    commit: str | None = None
    page: Page | None = None
    tree: Tree | None = None
    shards: ShardSet | None = None  # by the tree's names, once the index is read by that too
    twin: Twin | None = None
    bundle: Bundle | None = None
    card: Card | None = None  # read where it is asked for
    twin_bundle: Bundle | None = None  # the configs of the twin
    index: Placed | None = None
    index_broken: str | None = None  # why there is none, where there is such a file
    problems: tuple[Problem, ...] | None = None  # where the index and the headers disagree
    header_source: Source = Source.HEADER  # `api` where the Hub read the headers for us
    facts: Facts | None = None
    reached: Evidence | None = None
    spent: Mapping[Evidence, Spent] = field(default_factory=dict)

    @property
    def reads(self) -> str:
        """The name it is read by: the Hub's own once that is known."""
        return self.canonical or self.repo

    @property
    def at(self) -> str:
        """The commit it is read at; the revision asked for until that is resolved."""
        return self.commit or self.revision

    @property
    def name(self) -> str:
        """`org/name@commit`, under the Hub's own name."""
        return f"{self.reads}@{self.at}"


class Criteria(NamedTuple):
    """What candidates are held against: the user's policy, a reference checkpoint, and the time of the run."""

    policy: Policy
    now: datetime
    like: Facts | None = None
    card: bool = False  # whether notes on what its card states are wanted
    target: Target | None = None  # graphics cards it must fit
    engine: Engine | None = None  # an engine on such cards, which must take it

    @property
    def reads_card(self) -> bool:
        """Whether the card is worth a request: notes are wanted, or the policy asks for what it states."""
        return self.card or self.policy.card_states is not None or self.policy.card_refuses is not None


Check = Callable[[Known, Criteria], Iterator[Answer]]


class Gate(NamedTuple):
    """One question, asked of every candidate that reaches `needs`. `keys` are the policy keys it obeys."""

    name: str
    needs: Evidence
    source: Source
    check: Check
    decides_by: str
    keys: tuple[str, ...] = ()


class Failure(Document):
    """Why a repo could not be judged, and whether running again can help."""

    code: str
    message: str
    hint: str | None = None
    retry: bool = False


class Verdict(Document):
    """What `screen --json` prints for one input line."""

    repo: str
    canonical: str | None
    revision: str | None
    commit: str | None
    outcome: str  # keep | drop | unknown | error
    reached: str | None
    duplicate_of: str | None
    same_weights_as: str | None
    findings: tuple[Finding, ...]
    facts: Facts | None
    cost: Spent
    error: Failure | None

    def decisive(self) -> Finding | None:
        """The finding that decided: the first reject, else the first unknown, else None."""
        for outcome in (Outcome.REJECT, Outcome.UNKNOWN):
            for finding in self.findings:
                if finding.outcome is outcome:
                    return finding
        return None


class Judged(NamedTuple):
    """A verdict, and what each level of evidence cost it."""

    verdict: Verdict
    spent: Mapping[Evidence, Spent]


def judge(level: Evidence, known: Known, criteria: Criteria, gates: Iterable[Gate]) -> tuple[Finding, ...]:
    """The findings of every gate that needs exactly this level, in the gates' order."""
    return tuple(
        Finding(gate=gate.name, outcome=answer.outcome, observed=answer.observed, limit=answer.limit,
                source=answer.source or _source(gate, known), because=answer.because)
        for gate in gates if gate.needs is level for answer in gate.check(known, criteria)
    )  # fmt: skip


def _source(gate: Gate, known: Known) -> Source:
    return known.header_source if gate.source is Source.HEADER else gate.source


def stops(findings: Iterable[Finding]) -> bool:
    """Whether no further evidence is bought: some gate rejected."""
    return any(finding.outcome is Outcome.REJECT for finding in findings)


def verdict(known: Known, findings: Iterable[Finding], error: ToolkitError | None = None) -> Verdict:
    """The verdict on one repo: `error` if it could not be judged, `drop` if any gate rejected, `unknown` if one could
    not decide what it was asked, else `keep`."""
    findings = tuple(findings)
    seen = {finding.outcome for finding in findings}
    if error is not None:
        outcome = "error"
    elif Outcome.REJECT in seen:
        outcome = "drop"
    else:
        outcome = "unknown" if Outcome.UNKNOWN in seen else "keep"
    twin = known.twin
    return Verdict(
        repo=known.repo,
        canonical=known.canonical if known.canonical != known.repo else None,
        revision=known.revision or None,
        commit=known.commit,
        outcome=outcome,
        reached=known.reached.word if known.reached else None,
        duplicate_of=twin.name if twin and not twin.differs else None,
        same_weights_as=twin.name if twin and twin.differs else None,
        findings=findings,
        facts=known.facts,
        cost=total(known.spent.values()),
        error=failure(error) if error is not None else None,
    )


def failure(error: ToolkitError) -> Failure:
    return Failure(code=error.code, message=error.message, hint=error.hint, retry=error.retry)


class Identity(NamedTuple):
    """What makes two checkpoints the same: digests of the weights, and (path, digest) of what says how to load them."""

    weights: tuple[str, ...]
    files: tuple[tuple[str, str], ...]

    def differs(self, other: Identity) -> tuple[str, ...]:
        """Paths of the files that are not the same bytes, or are there on one side only."""
        return tuple(sorted({path for path, _ in set(self.files) ^ set(other.files)}))


CONFIG_FILES = ("config.json", "hf_quant_config.json")


def identity(tree: Tree, weights: Iterable[Entry]) -> Identity | None:
    """The digests to compare with other candidates; None when there are no weights or a digest is not known.

    The index counts too: with another one an engine loads other tensors from the same files.
    """
    blobs = [entry.blob for entry in weights]
    files = [(entry.path, entry.blob) for entry in tree.entries if entry.path in (*CONFIG_FILES, INDEX)]
    if not blobs or not all(blob.known for blob in [*blobs, *(blob for _, blob in files)]):
        return None
    return Identity(tuple(sorted(blob.oid for blob in blobs)), tuple((path, blob.oid) for path, blob in files))
