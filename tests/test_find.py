"""Candidates found on a demo Hub: what is asked, what it costs, the file of repo lines, screening what was found."""

import json
from datetime import UTC, date, datetime

import pytest

from formulas.console import run
from screen.cli import app
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo
from screen.find import Query, Relation, find, repos_file
from screen.hub import Hub
from screen.repo import parse_repo_line
from screen.transport import Cost

BASE = "Qwen/Qwen3-8B"
NOW = datetime(2026, 11, 29, 18, 0, tzinfo=UTC)


def made(name, relation="quantized", base=BASE, **about):
    card = {"base_model": base, "base_model_relation": relation}
    return DemoRepo(name, {"README.md": "# card\n"}, card=card, **about)


MODELS = [
    made("a/awq", downloads=10, tags=("awq",), created="2026-11-01T00:00:00.000Z"),
    made("a/nvfp4", downloads=30, tags=("nvfp4", "modelopt"), created="2026-09-01T00:00:00.000Z"),
    made("b/tuned", "finetune", downloads=20),
    made("b/merged", "merge", downloads=5),
    made("b/other", base="Qwen/Qwen3-32B"),
    DemoRepo("c/unrelated", {"README.md": ""}, tags=("nvfp4",)),
]


@pytest.fixture
def found(hub):
    def names(**query):
        with Hub(hub(*MODELS).endpoint) as client:
            return [model.id for model in find(client, Query(**query), Cost())]

    return names


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"base": BASE}, ["a/nvfp4", "a/awq"]),
        ({"base": BASE, "relation": Relation.FINETUNE}, ["b/tuned"]),
        ({"base": BASE, "relation": Relation.MERGE}, ["b/merged"]),
        ({"base": BASE, "relation": Relation.ADAPTER}, []),
        ({"base": BASE, "relation": Relation.ANY}, ["a/nvfp4", "b/tuned", "a/awq", "b/merged"]),
        ({"base": BASE, "tags": ("nvfp4",)}, ["a/nvfp4"]),
        ({"base": BASE, "tags": ("nvfp4", "awq")}, []),
        ({"tags": ("nvfp4",)}, ["a/nvfp4", "c/unrelated"]),
        ({"author": "b"}, ["b/tuned", "b/merged", "b/other"]),
        ({"search": "RGED"}, ["b/merged"]),
        ({"search": "u", "author": "c"}, ["c/unrelated"]),
        ({"base": BASE, "since": date(2026, 11, 1)}, ["a/awq"]),
        ({"base": BASE, "since": date(2026, 9, 1)}, ["a/awq", "a/nvfp4"]),
        ({"base": BASE, "limit": 1}, ["a/nvfp4"]),
    ],
)
def test_what_is_asked_is_what_is_found(found, query, expected):
    assert found(**query) == expected


@pytest.mark.parametrize(("page_size", "requests"), [(1000, 1), (100, 3)])
def test_three_hundred_candidates_cost_a_few_requests(hub, page_size, requests):
    server = hub(*(made(f"org/model-{n}", downloads=n) for n in range(300)), page_size=page_size)
    cost = Cost()
    with Hub(server.endpoint) as client:
        models = find(client, Query(base=BASE, limit=500), cost)
    assert [model.downloads for model in models] == list(range(299, -1, -1))
    assert cost.requests == len(server.log) == requests


def test_the_file_says_what_was_asked_and_is_read_back(hub):
    server = hub(*MODELS, made("d/gated", gated="auto"))
    query = Query(base=BASE, since=date(2026, 8, 1), tags=())
    with Hub(server.endpoint) as client:
        models = find(client, query, Cost())
    text = repos_file(query, models, server.endpoint, NOW)
    head, asked, *lines = text.splitlines()
    assert head == f"# 3 models, as {server.endpoint} listed them at 2026-11-29 18:00 UTC"
    assert asked == f"# screen find --quants-of {BASE} --relation quantized --since 2026-08-01 --limit 100"
    assert [parse_repo_line(line.partition("#")[0])[0] for line in lines] == [model.id for model in models]
    assert "a/awq  # changed 2026-11-01, 10 downloads" in lines
    assert any(line.startswith("d/gated") and line.endswith("gated") for line in lines)


# The command


def checkpoint(name, seed, **about):
    weights = safetensors_file([Tensor("model.layers.0.mlp.up_proj.weight", "BF16", (8, 8))], seed=seed)
    return DemoRepo(name, {"model.safetensors": weights, "config.json": {"model_type": "llama"}}, **about)


@pytest.fixture
def screen(hub, tmp_path, capsys):
    card = {"base_model": BASE, "base_model_relation": "quantized"}
    server = hub(checkpoint("a/one", 1, card=card, downloads=1), checkpoint("a/two", 2, card=card, downloads=2),
                 checkpoint("b/three", 3))  # fmt: skip

    def ran(*argv):
        capsys.readouterr()
        code = run(app, [*argv, "--endpoint", server.endpoint, "--token", ""])
        return code, *capsys.readouterr()

    return ran


def test_what_is_found_is_screened_after_what_is_named(screen, tmp_path):
    saved = tmp_path / "found.txt"
    code, out, _ = screen("b/three", "A/One", "--quants-of", BASE, "--json", "--cache-dir", str(tmp_path / "cache"),
                          "--save-list", str(saved))  # fmt: skip
    assert code == 0
    assert [json.loads(line)["repo"] for line in out.splitlines()] == ["b/three", "A/One", "a/two"]
    assert [line.split()[0] for line in saved.read_text().splitlines() if line[0] != "#"] == ["a/two", "a/one"]
    code, out, _ = screen(str(saved), "--json", "--cache-dir", str(tmp_path / "cache"))
    assert (code, [json.loads(line)["outcome"] for line in out.splitlines()]) == (0, ["keep", "keep"])


def test_find_prints_the_file_and_as_json_a_line_each(screen):
    code, out, _ = screen("find", "--author", "a")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["#", "#", "a/two", "a/one"])
    code, out, _ = screen("find", "--author", "a", "--json")
    assert (code, [json.loads(line)["downloads"] for line in out.splitlines()]) == (0, [2, 1])


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("find", "--author", "nobody"), 3),
        (("--search", "nothing-like-it", "--json"), 3),
        (("find",), 2),
        (("find", "--author", "a", "--since", "yesterday"), 2),
        (("find", "--author", "a", "--limit", "0"), 2),
        (("find", "--quants-of", BASE, "--relation", "copied"), 2),
        (("b/three", "--save-list", "x.txt"), 2),
        (("--author", "a", "--save-list", "/no/such/folder/x.txt"), 2),
    ],
)
def test_exit_codes(screen, argv, code):
    assert screen(*argv)[0] == code
