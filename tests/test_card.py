"""What model cards state: sentences as such cards write them, what was not found, and policies that ask."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.console import run
from screen.cli import app
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo
from screen.readme import PROVENANCE, WARNINGS, parse_readme, read_card

TOPICS = (*PROVENANCE, *WARNINGS)


def topics(body, **front):
    return set(read_card(front, body).stated)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("This checkpoint requires a patched vLLM to load the n-gram table.", {"patched"}),
        ("Needs vLLM PR #53896 until the next release.", {"patched"}),
        ("It only loads with our fork of SGLang.", {"patched"}),
        ("Use the patched loader from the scripts folder.", {"patched"}),
        ("No patched build is needed: it runs on stock vLLM.", set()),
        ("This does not require a custom kernel.", set()),
        ("The vision tower needs a patch size of 14.", set()),
        ("64 of 512 experts were removed by activation score.", {"pruned"}),
        ("Built with REAP at 12.5 %.", {"pruned"}),
        ("Pruned model, 448 experts a layer.", {"pruned"}),
        ("All experts are kept; no experts removed.", set()),
        ("We reap the benefits of sparsity.", set()),
        ("Experts are quantized to NVFP4, everything else is BF16.", {"quantisation"}),
        ("AWQ quantization with group size 128.", {"quantisation"}),
        ("Fast and quantized.", set()),
        ("Quantized from [Qwen/Qwen3-8B](https://example.org).", {"base-model"}),
        ("Every shard's SHA-256 is listed in MANIFEST.txt.", {"byte-audit"}),
        ("Unquantised tensors are byte-identical to the base model's.", {"byte-audit"}),
        ("The weights are not bit-exact.", set()),
    ],
)
def test_a_sentence_and_what_it_states(line, expected):
    assert topics(f"# A model\n\n{line}\n") == expected


EVALUATION = """
## Evaluation

| model | MMLU-Pro | GSM8K |
|---|---|---|
| BF16  | 78.31 | 95.2 |
| NVFP4 | 77.94 | 94.8 |

lm-eval 0.4.9, 5-shot, greedy; mean of 3 runs.

## Serving

Use temperature 0.7, and 2 seeds if you like.
"""


def test_evaluation_with_protocol_and_repeats():
    card = read_card({}, EVALUATION)
    assert set(card.stated) == {"evaluation", "protocol", "repeats"}
    assert card.first("evaluation") == "| model | MMLU-Pro | GSM8K | | BF16 | 78.31 | 95.2 |"
    assert "lm-eval 0.4.9" in card.first("protocol")
    assert len(card.stated["protocol"]) == 1  # how to serve is no protocol


def test_scores_without_a_protocol():
    assert topics("Scores 71.2 % on GPQA.\n\n## Usage\n\ntemperature = 0.6\n") == {"evaluation"}
    assert topics("GPQA and MMLU will follow.") == set()


def test_front_matter():
    results = [{"results": [{"dataset": {"name": "GSM8K"}, "metrics": [{"type": "acc", "value": 94.8}]}]}]
    card = read_card({"base_model": ["Qwen/Qwen3-8B"], "base_model_relation": "quantized", "tags": ["nvfp4", "reap", 3],
                      "model-index": results}, "")  # fmt: skip
    assert card.stated == {"base-model": ("Qwen/Qwen3-8B (quantized)",), "quantisation": ("tag nvfp4",),
                           "evaluation": ("GSM8K acc 94.8",), "pruned": ("tag reap",)}  # fmt: skip


def test_readme_is_front_matter_and_body():
    assert parse_readme("---\nbase_model: a/b\n---\n# Title\n") == ({"base_model": "a/b"}, "# Title\n")
    assert parse_readme("# Title\n---\n") == ({}, "# Title\n---\n")
    assert parse_readme("---\n- a\n---\nx") == ({}, "x")
    assert parse_readme("---\na: [\n---\nx") == ({}, "x")
    assert parse_readme("---\na: 2026-99-99\n---\nx")[1] == "x"


WORDS = st.text(max_size=8)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | WORDS,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
                      max_leaves=8)  # fmt: skip
KEYS = st.sampled_from(["base_model", "base_model_relation", "tags", "model-index"])


@given(st.dictionaries(KEYS, VALUES), st.text())
def test_any_card_is_read(front, text):
    matter, body = parse_readme(text)
    for card in (read_card(front, body), read_card(matter, text)):
        assert set(card.stated) <= set(TOPICS)
        assert all(quotes and all(len(quote) <= 160 for quote in quotes) for quotes in card.stated.values())


# The command


README = f"""---
license: mit
---
# Model NVFP4

Experts are quantized to NVFP4. It requires a patched vLLM.
{EVALUATION}"""


def checkpoint(name, seed, readme=None, **about):
    weights = safetensors_file([Tensor("model.layers.0.mlp.up_proj.weight", "BF16", (8, 8))], seed=seed)
    card = {"README.md": readme} if readme else {}
    return DemoRepo(name, {"model.safetensors": weights, "config.json": {"model_type": "llama"}, **card}, **about)


@pytest.fixture
def rows(hub, tmp_path, capsys):
    """Runs `screen --json` on three repos; returns (exit code, verdicts, the Hub's log of README reads)."""
    server = hub(checkpoint("a/told", 1, README, card={"base_model": "x/base", "base_model_relation": "quantized"}),
                 checkpoint("b/silent", 2, "# A model\n"), checkpoint("c/none", 3))  # fmt: skip

    def ran(*options):
        capsys.readouterr()
        before = len(server.log)
        code = run(app, ["a/told", "b/silent", "c/none", *options, "--json", "--endpoint", server.endpoint,
                         "--token", "", "--cache-dir", str(tmp_path / "cache")])  # fmt: skip
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        verdicts = {row["repo"]: row for row in lines}
        asked = [line for line in server.log[before:] if "README" in line.target and line.route == "resolve"]
        return code, verdicts, asked

    return ran


def said(row):
    return [(found["outcome"], found["because"]) for found in row["findings"] if found["gate"] == "card"]


def test_the_card_is_read_only_when_asked_for(rows):
    _, verdicts, asked = rows()
    assert not asked
    assert not any(said(row) for row in verdicts.values())
    _, _, asked = rows("--card")
    assert len(asked) == 2


def test_notes_name_what_is_stated_and_what_is_not(rows):
    code, verdicts, _ = rows("--card")
    assert code == 0
    assert {row["outcome"] for row in verdicts.values()} == {"keep"}
    [(_, patched), (outcome, provenance)] = said(verdicts["a/told"])
    assert patched == "patched, says the card: Experts are quantized to NVFP4. It requires a patched vLLM."
    assert outcome == "note"
    assert "base-model: x/base (quantized)" in provenance
    assert provenance.endswith("Not found: byte-audit")
    [(outcome, silent)] = said(verdicts["b/silent"])
    assert (outcome, silent) == ("note", f"the card states nothing. Not found: {', '.join(PROVENANCE)}")
    assert said(verdicts["c/none"]) == [("note", "there is no card")]
    [finding] = [found for found in verdicts["b/silent"]["findings"] if found["gate"] == "card"]
    assert finding["source"] == "card"


def test_a_policy_can_ask_for_what_the_card_states(rows):
    code, verdicts, asked = rows("--card-states", "evaluation,repeats")
    assert (code, len(asked)) == (0, 2)
    assert {name: row["outcome"] for name, row in verdicts.items()} == {
        "a/told": "keep", "b/silent": "drop", "c/none": "unknown"}  # fmt: skip
    code, verdicts, _ = rows("--card-refuses", "patched")
    assert verdicts["a/told"]["outcome"] == "drop"
    assert verdicts["b/silent"]["outcome"] == "keep"
    assert rows("--card-states", "praise")[0] == 2


def test_show_has_the_notes_too_and_reads_a_folders_front_matter(tmp_path, capsys):
    repo = checkpoint("a/told", 1, "---\nbase_model: x/base\n---\n" + README)
    for path, content in repo.main.files.items():
        (tmp_path / path).write_bytes(b"".join(content.pieces(0, content.size)))
    assert run(app, ["show", str(tmp_path), "--card", "--cache-dir", str(tmp_path / "cache")]) == 0
    out = capsys.readouterr().out
    assert "base-model: x/base" in out
    assert "requires a patched vLLM" in out
