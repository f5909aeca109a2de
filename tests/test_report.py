"""Reports as text, Markdown and CSV: held against readers of those forms, with cells that try to be more than text."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from screen.chain import Judged, Spent, Verdict
from screen.findings import Finding, Outcome, Source
from screen.report import MARKDOWN, TEXT, WIDTH, Told, aligned, comma_separated, markdown, said, shortlist

HOSTILE = [
    "a|b", "a\\|b", "\\", "a\\", "||", "`a|b`", "**bold**", "_a_", "__init__", "*.w, *.v", "[x](http://h)", "![x](y)",
    "<script>alert(1)</script>", "&amp;", "a\nb", "a\r\nb", "~~no~~", "model.layers.{0-3}.*.weight", "=1+1", '"q"', "",
]  # fmt: skip


def cells(lines):
    """The rows of the one table in a Markdown text, as a reader of GitHub's dialect has them."""
    rows = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse("\n".join(lines)):
        if token.type == "tr_open":
            rows.append([])
        if token.type == "inline":
            assert {child.type for child in token.children} <= {"text", "text_special"}, token.content
            rows[-1].append("".join(child.content for child in token.children))
    return rows


@pytest.mark.parametrize("cell", HOSTILE)
def test_markdown_shows_cells_as_they_are(cell):
    assert cells(markdown([["a", "b"], [cell, "end"]])) == [["a", "b"], [" ".join(cell.split()), "end"]]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"])), min_size=1))
def test_markdown_shows_any_cell_as_it_is(row):
    assert cells(markdown([["x"] * len(row), row]))[1] == row


def verdict(repo, outcome, *findings):
    return Verdict(repo=repo, canonical=None, revision="main", commit=None, outcome=outcome, reached="tree", facts=None,
                   duplicate_of=None, same_weights_as=None, findings=findings, cost=Spent(), error=None)  # fmt: skip


def test_csv_is_read_back_cell_by_cell():
    rejected = [Finding(gate="size", outcome=Outcome.REJECT, source=Source.TREE, because=text) for text in HOSTILE]
    text = comma_separated(verdict(f"a/{n}", "drop", finding) for n, finding in enumerate(rejected))
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [(row["repo"], row["because"]) for row in rows] == [(f"a/{n}", cell) for n, cell in enumerate(HOSTILE)]


def test_sentences_stand_below_the_name_in_lines_of_bounded_length():
    long = "every word of this " * 20
    lines = said([Told("a/b", "size (tree)", [long, "and what to do"])])
    assert lines[0] == "a/b  size (tree)"
    assert " ".join(line.strip() for line in lines[1:-1]) == long.strip()
    assert lines[-1] == "    and what to do"
    assert max(map(len, lines)) <= WIDTH
    assert said([Told("a/b", "x", ["y" * 300])])[1] == "    " + "y" * 300  # a name is not cut


def test_a_table_of_sentences_goes_on_below():
    lines = aligned([["gate", "n", "because"], ["size", "1", "some words " * 30], ["age", "22", "few"]], "n")
    assert max(map(len, lines)) <= WIDTH
    assert lines[1].startswith("size   1  some words")
    assert lines[2].startswith(" " * 10 + "some words") or lines[2].startswith(" " * 10 + "words")
    assert lines[-1] == "age   22  few"


@pytest.mark.parametrize("form", [TEXT, MARKDOWN])
def test_a_report_says_each_reason_once(form):
    told = Finding(gate="table", outcome=Outcome.NOTE, source=Source.HEADER, because="it is large")
    refused = Finding(gate="size", outcome=Outcome.REJECT, source=Source.TREE, because="it is larger")
    judged = [Judged(verdict("a/kept", "keep", told), {}), Judged(verdict("a/large", "drop", refused), {})]
    text = "\n".join(shortlist(judged, form))
    assert text.index("kept:") < text.index("it is large") < text.index("dropped:") < text.index("it is larger")
    assert "note: table (header)" in text
    assert "size (tree)" in text
