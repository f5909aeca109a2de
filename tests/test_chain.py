"""The chain: levels in order, outcomes, what makes two checkpoints the same, and the report made of verdicts."""

import csv
import io
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.errors import AccessDenied
from formulas.facts import Cell, Experts, Facts, Mtp, Ple
from screen import report
from screen.chain import (
    Criteria,
    Evidence,
    Gate,
    Identity,
    Judged,
    Known,
    Spent,
    Twin,
    Verdict,
    identity,
    judge,
    stops,
    verdict,
)
from screen.findings import Finding, Outcome, Source, note, passed, reject, unknown
from screen.policy import Policy
from screen.repo import Blob, Entry, Tree

CRITERIA = Criteria(Policy(), datetime(2026, 11, 29, tzinfo=UTC))
ANSWERS = {Outcome.PASS: passed, Outcome.REJECT: reject, Outcome.UNKNOWN: unknown, Outcome.NOTE: note}


def gate(name, needs, *outcomes):
    return Gate(name, needs, Source.TREE, lambda known, criteria: iter([ANSWERS[o]("because") for o in outcomes]), "")


def finding(outcome, name="size"):
    return Finding(gate=name, outcome=outcome, source=Source.TREE, because="because")


@given(st.lists(st.tuples(st.sampled_from(Evidence), st.lists(st.sampled_from(Outcome), max_size=3)), max_size=8))
def test_every_gate_of_a_level_runs_and_no_other(gates):
    table = [gate(f"g{i}", needs, *outcomes) for i, (needs, outcomes) in enumerate(gates)]
    for level in Evidence:
        found = judge(level, Known("a/b", "main"), CRITERIA, table)
        expected = [(g.name, o) for g, (needs, os) in zip(table, gates, strict=True) for o in os if needs is level]
        assert [(f.gate, f.outcome) for f in found] == expected
        assert stops(found) == any(outcome is Outcome.REJECT for _, outcome in expected)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], "keep"),
        ([Outcome.PASS, Outcome.NOTE], "keep"),
        ([Outcome.PASS, Outcome.UNKNOWN], "unknown"),
        ([Outcome.UNKNOWN, Outcome.REJECT], "drop"),
    ],
)
def test_outcome_of_findings(outcomes, expected):
    known = Known("a/b", "main", reached=Evidence.HEADERS)
    assert verdict(known, [finding(outcome) for outcome in outcomes]).outcome == expected


def test_an_error_keeps_what_was_found_before_it():
    known = Known("a/b", "main", canonical="a/c", commit="c" * 40, reached=Evidence.TREE,
                  spent={Evidence.INFO: Spent(requests=1), Evidence.TREE: Spent(requests=2)})  # fmt: skip
    denied = AccessDenied("a/c: access is gated", code="gated", hint="ask for access at /a/c")
    result = verdict(known, [finding(Outcome.PASS)], denied)
    assert (result.outcome, result.reached, result.canonical) == ("error", "tree", "a/c")
    assert (result.error.code, result.error.hint, result.error.retry) == ("gated", "ask for access at /a/c", False)
    assert result.cost.requests == 3
    assert len(result.findings) == 1


def test_the_same_name_is_not_repeated_as_canonical():
    assert verdict(Known("a/b", "main", canonical="a/b"), []).canonical is None


def test_json_has_the_documented_fields():
    twin = Twin("a/a", "d" * 40)
    result = verdict(Known("a/b", "main", commit="c" * 40, twin=twin, facts=Facts()), [finding(Outcome.REJECT)])
    document = json.loads(result.model_dump_json())
    assert list(document) == ["repo", "canonical", "revision", "commit", "outcome", "reached", "duplicate_of",
                              "same_weights_as", "findings", "facts", "cost", "error"]  # fmt: skip
    assert document["duplicate_of"] == twin.name
    assert document["same_weights_as"] is None
    assert list(document["findings"][0]) == ["gate", "outcome", "observed", "limit", "source", "because"]
    assert list(document["cost"]) == ["requests", "cdn_requests", "bytes_read", "cached_headers"]
    assert Verdict.model_validate(document) == result


def tree(**blobs):
    return Tree(tuple(Entry(path.replace("__", "."), Blob(oid, 1)) for path, oid in sorted(blobs.items())))


def mark(files):
    return identity(files, [entry for entry in files.entries if entry.path.endswith(".safetensors")])


def test_identity_ignores_names_of_shards_and_all_but_the_configs():
    config = {"config__json": "git-sha1:3"}
    ours = tree(a__safetensors="sha256:1", b__safetensors="sha256:2", README__md="git-sha1:4", **config)
    theirs = tree(x__safetensors="sha256:2", y__safetensors="sha256:1", **config)
    one = mark(ours)
    assert one == mark(theirs)
    assert one == Identity(("sha256:1", "sha256:2"), (("config.json", "git-sha1:3"),))
    other = mark(tree(a__safetensors="sha256:1", config__json="git-sha1:9"))
    assert other.weights != one.weights


def test_another_index_is_another_checkpoint():
    one = mark(tree(a__safetensors="sha256:1", config__json="git-sha1:3"))
    index = {"model.safetensors.index.json": "git-sha1:5"}
    two = mark(tree(a__safetensors="sha256:1", config__json="git-sha1:4", **index))
    assert one.weights == two.weights
    assert one.differs(two) == two.differs(one) == ("config.json", "model.safetensors.index.json")


def test_an_unknown_digest_is_equal_to_nothing():
    assert mark(tree(a__safetensors="unknown")) is None
    assert mark(tree(a__safetensors="sha256:1", config__json="unknown")) is None
    assert mark(tree(config__json="git-sha1:3")) is None


# The report


def judged(repo, outcomes, *, reached=Evidence.HEADERS, error=None, facts=None, spent=None):
    known = Known(repo, "main", commit="c" * 40, reached=reached, facts=facts, spent=spent or {})
    return Judged(verdict(known, [finding(outcome) for outcome in outcomes], error), known.spent)


FACTS = Facts(
    tensor_bytes=3 * 2**30, file_bytes=3 * 2**30 + 999, shards=2, tensors=5,
    census=(Cell(stack="main", role="mlp", dtype="BF16", tensors=4, elements=2**30, bytes=2**31),
            Cell(stack="mtp", role="mlp", dtype="BF16", tensors=1, elements=2**29, bytes=2**30)),
    experts=Experts(declared=8, found=8, layers=2), mtp=Mtp(declared=1, tensors=1, bytes=2**30, dtypes={"BF16": 2**30}),
    ple=Ple(),
)  # fmt: skip
RESULTS = [
    judged("a/kept", [Outcome.PASS, Outcome.NOTE], facts=FACTS, spent={Evidence.INFO: Spent(requests=1)}),
    judged("a/large", [Outcome.REJECT], reached=Evidence.TREE, spent={Evidence.TREE: Spent(requests=2, bytes_read=20)}),
    judged("a/vague", [Outcome.UNKNOWN], facts=Facts()),
    judged("a/gone", [], reached=None, error=AccessDenied("a/gone: disabled", code="disabled")),
    judged("a/gated", [], reached=Evidence.TREE, error=AccessDenied("a/gated: gated", code="gated", hint="ask")),
]


def test_funnel_adds_up():
    rows = report.funnel(RESULTS)
    head, *levels, kept = rows
    table = {row[0]: dict(zip(head, row, strict=True)) for row in levels}
    assert [row[1] for row in levels] == ["5", "4", "3", "2"]
    assert table["info"]["why"] == "disabled 1"
    assert table["tree"]["why"] == "size 1"
    assert table["config"]["why"] == "gated 1"
    assert (kept[1], kept[-1]) == ("1", "unknown 1")
    assert kept[head.index("requests")] == "3"


def test_report_shows_every_repo_once_in_its_part():
    text = "\n".join(report.shortlist(RESULTS, report.TEXT))
    titles = ("kept", "unknown", "dropped", "errors")
    kept, unknown_, dropped, errors = (text.index(f"\n{title}:\n") for title in titles)
    assert kept < text.index("a/kept") < unknown_ < text.index("a/vague") < dropped < text.index("a/large") < errors
    assert errors < text.index("a/gone") < text.index("a/gated")
    assert "8 x 2" in text
    assert "1.00 GiB BF16" in text
    assert "\n    ask" in text


def test_markdown_is_a_table_of_equal_width():
    lines = report.markdown([["repo", "why"], ["a/b", "this | that"]])
    assert lines == ["| repo | why |", "| --- | --- |", "| a/b | this \\| that |"]


def test_csv_has_a_row_a_verdict_and_bytes_as_numbers():
    rows = list(csv.DictReader(io.StringIO(report.comma_separated(item.verdict for item in RESULTS))))
    assert [row["repo"] for row in rows] == ["a/kept", "a/large", "a/vague", "a/gone", "a/gated"]
    assert rows[0]["tensor_bytes"] == str(3 * 2**30)
    assert rows[1]["gate"] == "size"
    assert rows[2]["mtp_bytes"] == ""
    assert rows[3]["gate"] == "disabled"


def test_census_table_sums_up():
    lines = report.census(RESULTS[0].verdict, report.aligned)
    total = next(line for line in lines if line.startswith("total"))
    assert total.split()[1:] == ["5", f"{2**30 + 2**29:,}", "3.00", "GiB"]
