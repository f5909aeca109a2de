"""Verdicts as text: the funnel, the shortlist, what was dropped and why; and one checkpoint's census.

Rows are built once and laid out as text or as Markdown; everything returns lines, nothing prints. Figures stand in
tables; what is said in sentences stands below the name it is said of, in lines of at most `WIDTH` characters.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from formulas.console import table
from formulas.facts import Facts, Mtp, Ple, Stack
from formulas.units import human

from .chain import Evidence, Failure, Gate, Judged, Spent, Verdict, total
from .contents import weight_formats
from .findings import Finding, Outcome

Rows = Sequence[Sequence[str]]
Layout = Callable[[Rows, str], list[str]]

WIDTH = 120  # of a line of text, whatever the terminal; names that are longer are not cut
_LEAST = 40  # characters of a sentence beside other columns


def aligned(rows: Rows, right: str = "") -> list[str]:
    """Rows as aligned columns; `right` names the heads of the columns that are numbers. The first row is the head.

    Sentences of the last column go on in the next line where the table were wider than WIDTH."""
    numbers = {i for i, head in enumerate(rows[0]) if head in right.split()}
    room = WIDTH - sum(max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]) - 1))
    if room >= _LEAST and len(rows[0]) - 1 not in numbers:
        rows = [line for row in rows for line in _continued(row, room)]
    return table(rows, right=numbers.__contains__)


def _continued(row: Sequence[str], room: int) -> list[list[str]]:
    first, *rest = _wrapped(row[-1], room) or [""]
    return [[*row[:-1], first], *([*[""] * (len(row) - 1), line] for line in rest)]


def markdown(rows: Rows, right: str = "") -> list[str]:
    """Rows as a Markdown table; as `aligned`. What a cell holds is shown as it is, never read as Markdown."""
    head, *body = [[_MARKS.sub(r"\\\g<0>", " ".join(cell.split())) for cell in row] for row in rows]
    rule = ["---:" if cell in right.split() else "---" for cell in head]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


# Not: an underscore inside a word, a bracket that makes no link.
_MARKS = re.compile(r"[\\|`*~<]|&(?=#?\w+;)|\](?=\()|(?<![^\W_])_|_(?![^\W_])")


class Told(NamedTuple):
    """Sentences about a repo, and what they are about."""

    repo: str
    about: str
    sentences: Sequence[str]


def said(told: Iterable[Told]) -> list[str]:
    """A line with the repo's name and what it is about, then each sentence, indented."""
    lines = []
    for repo, about, sentences in told:
        lines.append(f"{repo}  {about}")
        lines += [f"    {line}" for sentence in sentences for line in _wrapped(sentence, WIDTH - 4)]
    return lines


def said_in_table(told: Iterable[Told]) -> list[str]:
    """The same as a Markdown table."""
    return markdown([["repo", "what", "because"], *([repo, about, "; ".join(told)] for repo, about, told in told)])


class Form(NamedTuple):
    """How a report is laid out: its tables, and its sentences."""

    table: Layout
    said: Callable[[Iterable[Told]], list[str]]


TEXT, MARKDOWN = Form(aligned, said), Form(markdown, said_in_table)


def _wrapped(sentence: str, room: int) -> list[str]:
    return textwrap.wrap(sentence, room, break_long_words=False, break_on_hyphens=False)


# One cell each


def experts_cell(facts: Facts) -> str:
    experts = facts.experts
    if experts is None:
        return "unknown"
    if not experts.found:
        return "-" if not experts.declared else f"{experts.declared} declared"
    return f"{experts.found} x {experts.layers}" + (" uneven" if experts.uneven else "")


def mtp_cell(mtp: Mtp | None) -> str:
    if mtp is None or mtp.tensors is None:
        return "unknown"
    if not mtp.tensors:
        return "absent" if mtp.declared else "-"
    return f"{human(mtp.bytes)} {'+'.join(sorted(mtp.dtypes, key=lambda dtype: -mtp.dtypes[dtype])[:2])}"


def ple_cell(ple: Ple | None) -> str:
    if ple is None:
        return "unknown"
    return "-" if ple.kind == "none" else f"{human(ple.bytes)} {ple.kind} {ple.format or 'unknown'}"


def quantization_cell(facts: Facts) -> str:
    return "+".join(weight_formats(facts) or ["unknown"])


def commit_cell(verdict: Verdict) -> str:
    return (verdict.commit or "")[:8]


def name_cell(verdict: Verdict) -> str:
    return f"{verdict.repo} -> {verdict.canonical}" if verdict.canonical else verdict.repo


# The funnel


def funnel(judged: Sequence[Judged]) -> list[list[str]]:
    """A row a level: how many entered, how many left and why, and what the level cost in requests and bytes."""
    rows = [["level", "entered", "dropped", "errors", "requests", "cdn", "read", "why"]]
    entered = len(judged)
    for level in Evidence:
        leaving = [item.verdict for item in judged if _left_at(item.verdict) is level]
        dropped = [finding.gate for verdict in leaving if not verdict.error and (finding := verdict.decisive())]
        failed = [verdict.error.code for verdict in leaving if verdict.error]
        why = [f"{word} {count}" for words in (dropped, failed) for word, count in Counter(words).most_common()]
        spent = total(item.spent.get(level, Spent()) for item in judged)
        rows.append([level.word, str(entered), str(len(dropped)), str(len(failed)), *_paid(spent), ", ".join(why)])
        entered -= len(leaving)
    undecided = sum(item.verdict.outcome == "unknown" for item in judged)
    everything = total(spent for item in judged for spent in item.spent.values())
    rest = f"unknown {undecided}" if undecided else ""
    rows.append(["kept", str(entered - undecided), "", "", *_paid(everything), rest])
    return rows


def _left_at(verdict: Verdict) -> Evidence | None:
    """The level at which a repo left: where it was rejected, or whose evidence could not be had; None if it stayed."""
    reached = next((level for level in Evidence if level.word == verdict.reached), None)
    if verdict.outcome == "error":
        return Evidence.INFO if reached is None else Evidence(min(reached + 1, Evidence.HEADERS))
    return reached if verdict.outcome == "drop" else None


def _paid(spent: Spent) -> list[str]:
    return [str(spent.requests), str(spent.cdn_requests), human(spent.bytes_read)]


# The report


def shortlist(judged: Sequence[Judged], form: Form) -> list[str]:
    """The whole report: funnel, kept with their notes, not decided, dropped with the deciding reason, errors."""
    verdicts = [item.verdict for item in judged]
    lines = form.table(funnel(judged), "entered dropped errors requests cdn read")
    for outcome, title in (("keep", "kept"), ("unknown", "unknown")):
        chosen = [verdict for verdict in verdicts if verdict.outcome == outcome]
        if chosen:
            lines += ["", f"{title}:", "", *form.table([_HEAD, *map(_row, chosen)], "weights")]
            if remarks := [remark for verdict in chosen for remark in _remarks(verdict)]:
                lines += ["", *form.said(remarks)]
    dropped = [(verdict, verdict.decisive()) for verdict in verdicts if verdict.outcome == "drop"]
    if reasons := [_told(verdict, finding) for verdict, finding in dropped if finding is not None]:
        lines += ["", "dropped:", "", *form.said(reasons)]
    if failed := [_failure(verdict, verdict.error) for verdict in verdicts if verdict.error is not None]:
        lines += ["", "errors:", "", *form.said(failed)]
    return lines


_HEAD = ["repo", "commit", "weights", "experts", "mtp", "ple", "format"]


def _row(verdict: Verdict) -> list[str]:
    facts = verdict.facts or Facts()
    size = facts.file_bytes if facts.tensor_bytes is None else facts.tensor_bytes
    return [name_cell(verdict), commit_cell(verdict), human(size), experts_cell(facts), mtp_cell(facts.mtp),
            ple_cell(facts.ple), quantization_cell(facts)]  # fmt: skip


def _remarks(verdict: Verdict) -> list[Told]:
    wanted = (Outcome.UNKNOWN, Outcome.NOTE)
    found = [finding for finding in verdict.findings if finding.outcome in wanted]
    return [_told(verdict, finding, f"{finding.outcome}: ") for finding in found]


def _told(verdict: Verdict, finding: Finding, outcome: str = "") -> Told:
    return Told(name_cell(verdict), f"{outcome}{finding.gate} ({finding.source})", [finding.because])


def _failure(verdict: Verdict, error: Failure) -> Told:
    again = " (running again can help)" if error.retry else ""
    return Told(name_cell(verdict), error.code + again, [error.message, *([error.hint] if error.hint else [])])


COLUMNS = (
    "repo", "canonical", "commit", "outcome", "reached", "tensor_bytes", "file_bytes", "shards", "tensors",
    "architecture", "model_type", "method", "format", "experts", "mtp_bytes", "mtp_dtypes", "ple_kind", "ple_bytes",
    "ple_format", "duplicate_of", "same_weights_as", "gate", "source", "because",
)  # fmt: skip


def comma_separated(verdicts: Iterable[Verdict]) -> str:
    """CSV with one row a verdict and bytes as whole numbers; what is not known is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for verdict in verdicts:
        writer.writerow(_columns(verdict))
    return text.getvalue()


def _columns(verdict: Verdict) -> list[object]:
    facts = verdict.facts or Facts()
    quantization, mtp, ple, finding = facts.quantization, facts.mtp, facts.ple, verdict.decisive()
    decided: list[object] = [finding.gate, finding.source, finding.because] if finding else [None] * 3
    if verdict.error:
        decided = [verdict.error.code, None, verdict.error.message]
    return [verdict.repo, verdict.canonical, verdict.commit, verdict.outcome, verdict.reached, facts.tensor_bytes,
            facts.file_bytes, facts.shards, facts.tensors, facts.architecture, facts.model_type,
            quantization and quantization.method, quantization and quantization.format,
            facts.experts and facts.experts.found, mtp and mtp.bytes, mtp and "+".join(sorted(mtp.dtypes)),
            ple and ple.kind, ple and ple.bytes, ple and ple.format, verdict.duplicate_of, verdict.same_weights_as,
            *decided]  # fmt: skip


def census(verdict: Verdict, layout: Layout) -> list[str]:
    """One checkpoint: what it is, its bytes by stack x role x dtype, and every finding."""
    facts = verdict.facts or Facts()
    quantization = facts.quantization
    count = "unknown" if facts.tensors is None else f"{facts.tensors:,} tensors in {facts.shards} files"
    method = f" by {quantization.method}" if quantization and quantization.method else ""
    lines = layout([
        ["repo", f"{name_cell(verdict)}@{verdict.commit or verdict.revision}"],
        ["weights", f"{human(facts.tensor_bytes)}, {count}"],
        ["architecture", f"{facts.architecture or 'unknown'} ({facts.model_type or 'unknown'})"],
        ["format", quantization_cell(facts) + method],
        ["kv cache", (quantization and quantization.kv_cache_dtype) or "-"],
        ["experts", experts_cell(facts)],
        ["mtp", mtp_cell(facts.mtp)],
        ["ple", ple_cell(facts.ple)],
    ], "")  # fmt: skip
    if facts.census is not None:
        order = list(Stack)
        cells = sorted(facts.census, key=lambda cell: (order.index(cell.stack), -cell.bytes))
        lines += ["", *layout([
            ["stack", "role", "dtype", "tensors", "elements", "size"],
            *([c.stack, c.role, c.dtype, f"{c.tensors:,}", f"{c.elements:,}", human(c.bytes)] for c in cells),
            ["total", "", "", f"{facts.tensors:,}", f"{sum(c.elements for c in cells):,}", human(facts.tensor_bytes)],
        ], "tensors elements size")]  # fmt: skip
    findings = [[str(f.outcome), f.gate, str(f.source), f.because] for f in verdict.findings]
    if findings:
        lines += ["", *layout([["outcome", "gate", "source", "because"], *findings], "")]
    return lines


def gates(table: Iterable[Gate]) -> list[list[str]]:
    """Every gate: the evidence it needs, what it decides by, and the policy keys it obeys."""
    rows = [[gate.name, gate.needs.word, str(gate.source), gate.decides_by + _keys(gate)] for gate in table]
    return [["gate", "needs", "source", "decides by [policy keys]"], *rows]


def _keys(gate: Gate) -> str:
    return f" [{', '.join(gate.keys)}]" if gate.keys else ""
