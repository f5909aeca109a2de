"""The picture of `fit --plot`, read back: one row a candidate, in the form the name asks for."""

import re
import struct
import xml.etree.ElementTree as ElementTree

import pytest

from formulas.cards import find_card
from formulas.deployment import Deployment
from formulas.errors import BadInput
from formulas.estimate import estimate
from formulas.plot import plot
from formulas.shipped import checkpoints, coefficients


@pytest.fixture(scope="module")
def answers():
    facts = checkpoints()["Qwen/Qwen3-8B"]
    return [estimate(facts, find_card(name), Deployment(), coefficients()) for name in ("l4", "h200", "24GiB")]


def test_svg_has_a_bar_of_every_part_for_every_candidate(answers, tmp_path):
    path = tmp_path / "a.svg"
    plot(answers, path)
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    text = path.read_text()
    for word in ("card", "requested", "weights", "KV cache", "longest context", "fits", "does not fit"):
        assert f"<!-- {word} -->" in text
    assert text.count("<!-- Qwen3-8B -->") == 3
    assert "<!-- MTP -->" not in text  # nothing of it in any candidate
    weights = answers[0].per_rank.weights_bytes / 2**30
    assert text.count(f"<!-- {weights:.1f} -->") == 3


def test_png_is_as_tall_as_it_has_rows(answers, tmp_path):
    heights = []
    for count in (1, 3):
        path = tmp_path / f"{count}.png"
        plot(answers[:count], path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        heights.append(struct.unpack(">I", data[20:24])[0])
    assert heights[1] > heights[0]


def test_html_holds_the_picture_and_the_verdicts(answers, tmp_path):
    path = tmp_path / "a.HTML"
    plot(answers, path)
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 1
    assert len(re.findall("<li>", page)) == 3
    assert "--max-model-len" in page


@pytest.mark.parametrize("name", ["a.pdf", "a", "folder/none/a.svg"])
def test_another_form_or_a_missing_folder_is_refused(answers, tmp_path, name):
    with pytest.raises(BadInput, match="--plot"):
        plot(answers[:1], tmp_path / name)
