"""`screen` met by an unlucky user and by a hostile server: odd endpoints and tokens, answers that are no sense."""

import copy
import io
import itertools
import json
import os
import threading
import time

import pytest
from loopback import Loopback, reply

from formulas.console import run
from screen.cli import app
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
COMMIT = "3f" * 20


def weights(seed):
    parts = ("gate", "up", "down")
    return safetensors_file([Tensor(f"model.layers.0.mlp.{p}_proj.weight", "BF16", (8, 8)) for p in parts], seed=seed)


@pytest.fixture
def screen(tmp_path, capsys, monkeypatch):
    """Runs `screen` with a cache of this test's own: (exit code, stdout, stderr)."""
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def ran(*argv):
        capsys.readouterr()
        code = run(app, [*argv, "--cache-dir", str(tmp_path / "cache")])
        return code, *capsys.readouterr()

    return ran


@pytest.mark.parametrize("endpoint", [
    "ftp://x", "huggingface.co", "http://", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:0",
    "http://127.0.0.1:1?x=1", "http://127.0.0.1:1#x", "http://exa mple", "http://user:hushhush@127.0.0.1:1",
    "ftp://user:hushhush@127.0.0.1",
])  # fmt: skip
def test_an_endpoint_that_is_none_is_said_and_a_password_in_it_is_not(screen, endpoint):
    code, out, err = screen("a/b", "--endpoint", endpoint, "--token", "")
    assert (code, out) == (2, "")
    assert err.startswith("error: endpoint")
    assert "hushhush" not in err


@pytest.mark.parametrize("endpoint", ["{}/", " {}\n"])
def test_slashes_and_blanks_around_an_endpoint_do_not_matter(hub, screen, endpoint):
    server = hub(DemoRepo("a/b", {"model.safetensors": weights(0), "config.json": CONFIG}))
    assert screen("a/b", "--endpoint", endpoint.format(server.endpoint), "--token", "")[0] == 0


@pytest.mark.parametrize("token", ["hf_hush\nhush", "hf_hush\u2603hush", "hf_hush hush"])
def test_a_token_no_header_can_carry_is_refused_and_not_shown(screen, token):
    code, out, err = screen("a/b", "--endpoint", "http://127.0.0.1:1", "--token", token, "--json")
    assert (code, out) == (2, "")
    assert json.loads(err)["error"]["message"].startswith("token: expected printable ASCII")
    assert "hush" not in err


def page(**fields):
    return {"id": "a/b", "sha": COMMIT, "lastModified": "2026-08-01T00:00:00.000Z"} | fields


def answered(info, headers=None, tree=b"[]", status=200):
    """What a server says that has one repo, without files."""

    def answer(request):
        if "/revision/" in request.path:
            return reply(status, json.dumps(info).encode(), headers)
        return reply(200, tree, headers)

    return answer


def row(screen, answer, *argv):
    with Loopback(answer) as server:
        code, out, err = screen("a/b", "--json", "--endpoint", server.url, "--token", "", *argv)
    [found] = map(json.loads, out.splitlines())
    assert "Traceback" not in err
    assert not (found["error"] and found["error"]["code"] == "bug"), found["error"]
    return code, found


@pytest.mark.parametrize("name", ["../../etc", "a/../b", "", "a/b/c", "a/b?x", "/etc/passwd", "a\nb"])
def test_a_name_the_hub_gives_is_a_repo_s(screen, name):
    code, found = row(screen, answered(page(id=name)))
    assert (code, found["error"]["code"]) == (4, "misbehaved")


DIGITS = "9" * 5000


@pytest.mark.parametrize("headers", [
    {"RateLimit": f'"api";r=1;t={DIGITS}'}, {"RateLimit": f'"api";r={DIGITS};t=1'},
    {"RateLimit": '"api";r=5;t=5', "RateLimit-Policy": f'"fixed window";"api";q={DIGITS};w=300'},
    {"Link": '<http://[::1>; rel="next"'}, {"Link": "<<>>;;=;rel"}, {"Link": '<//x:99999/api/y>; rel="next"'},
])  # fmt: skip
def test_headers_that_are_no_sense(screen, headers):
    code, found = row(screen, answered(page(), headers))
    assert code in (3, 4)
    assert found["outcome"] in ("drop", "error")


@pytest.mark.parametrize("length", ["\u00b2".encode().decode("latin-1"), DIGITS])
def test_a_refusal_of_no_readable_length(screen, length):
    code, found = row(screen, answered({}, {"Content-Length": length, "Connection": "close"}, status=403))
    assert (code, found["error"]["code"]) == (4, "forbidden")


def age(found):
    return [finding["outcome"] for finding in found["findings"] if finding["gate"] == "age"]


@pytest.mark.parametrize("changed", ["2026-08-01", "2026-08-01T00:00:00", "2026-08-01T00:00:00Z"])
def test_a_time_of_no_zone_can_be_compared(screen, changed):
    info = page(lastModified=changed)
    assert age(row(screen, answered(info), "--max-age-days", "1")[1]) == ["reject"]
    assert age(row(screen, answered(info), "--max-age-days", "9" * 11)[1]) == ["pass"]


def test_sizes_beyond_floating_point(screen):
    assert row(screen, answered(page()), "--max-size", "9" * 400)[0] == 3


ODD = (None, True, -1, 0, 10**22, 1e308, float("nan"), "", "x\x1b[31m\ud800", [], [[]], [None, 1], {}, {"a": []})
QUANTISED = [
    {"quant_method": "compressed-tensors", "ignore": ["re:.*"], "kv_cache_scheme": {"num_bits": 8, "type": "float"},
     "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
                             "targets": ["Linear"], "input_activations": {"dynamic": False}}}},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False, "dynamic": {"a": {"bits": 4}}},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["a"]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
    {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 16}}},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
]  # fmt: skip


def places(value, path=()):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(document, path, value):
    copied = place = copy.deepcopy(document)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


def test_no_value_in_a_config_is_a_bug(hub, screen, tmp_path):
    layered = {**CONFIG, "num_hidden_layers": 1, "layer_types": ["full_attention"], "num_experts": 2,
               "num_nextn_predict_layers": 1, "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
               "text_config": {"ple_embedding_dtype": "float8_e4m3fn"}, "vision_config": {"depth": 2}}  # fmt: skip
    whole = [layered, *({**CONFIG, "quantization_config": quantised} for quantised in QUANTISED)]
    configs = [changed(config, path, odd) for config in whole for path, odd in itertools.product(places(config), ODD)]
    texts = [json.dumps(config).encode() for config in configs]
    deep = b'{"model_type": "llama", "quantization_config": {"quant_method": "fp8", "x": %b}}'
    texts += [deep % (b"[" * n + b"]" * n) for n in (500, 1_000, 100_000)]
    texts += [b"", b"null", b"\xef\xbb\xbf{}", b'{"model_type": NaN}', b'{"a": 1e999}', b'{"a": %b}' % (b"9" * 5000)]
    repos = [DemoRepo(f"f/r{n}", {"model.safetensors": weights(n), "config.json": text})
             for n, text in enumerate(texts)]  # fmt: skip
    server, lines = hub(*repos), tmp_path / "repos.txt"
    lines.write_text("\n".join(repo.name for repo in repos))
    code, out, _ = screen(str(lines), "--json", "--endpoint", server.endpoint, "--token", "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [found["repo"] for found in rows] == [repo.name for repo in repos]
    assert {texts[n]: found["error"] for n, found in enumerate(rows) if found["error"]} == {}
    assert "\x1b" not in screen(str(lines), "--endpoint", server.endpoint, "--token", "")[1]
    assert code in (0, 3)


def small(hub):
    return hub(DemoRepo("a/b", {"model.safetensors": weights(0), "config.json": CONFIG}))


def test_a_list_as_windows_writes_it(hub, screen, tmp_path):
    lines = tmp_path / "repos.txt"
    lines.write_bytes(b"\xef\xbb\xbfa/b\r\n\r\n\t a/none\t# gone\r\n  # nothing\r\na/b@main\r\n")
    code, out, _ = screen(str(lines), "--json", "--endpoint", small(hub).endpoint, "--token", "")
    rows = [json.loads(line) for line in out.splitlines()]
    outcomes = [(found["repo"], found["outcome"]) for found in rows]
    assert outcomes == [("a/b", "keep"), ("a/none", "error"), ("a/b", "drop")]
    assert code == 4


def test_a_list_through_a_pipe(hub, screen, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a/b\n",))
    writer.start()
    assert screen(str(pipe), "--endpoint", small(hub).endpoint, "--token", "")[0] == 0
    writer.join()


@pytest.mark.parametrize(("source", "said"), [
    ("", "nothing there"), ("nofile.txt", "nothing there"), ("./nofile", "nothing there"), ("/no", "nothing there"),
    ("gone.safetensors", "nothing there"), ("https://huggingface.co/a/b", "only the org/name after the host"),
    ("a" * 300 + "/x y", "expected org/name"), ("/dev/null", "no candidate"), ("bytes", "in UTF-8"),
    ("long", "at most 64.0 MiB"),
])  # fmt: skip
def test_a_source_that_is_none(screen, tmp_path, monkeypatch, source, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").write_bytes(b"a/b\n\xff\xfe")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**40)  # a checkpoint named by mistake
    code, out, err = screen(source, "--endpoint", "http://127.0.0.1:1", "--token", "")
    assert (code, out) == (2, "")
    assert said in err


def test_a_name_too_long_for_a_file_is_asked_of_the_hub(hub, screen):
    code, out, _ = screen("a" * 5000, "--json", "--endpoint", small(hub).endpoint, "--token", "")
    assert (code, json.loads(out)["outcome"]) == (4, "error")


def test_stdin_in_another_encoding(screen, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a/b\n\xff"), encoding="utf-8"))
    code, _, err = screen("-", "--endpoint", "http://127.0.0.1:1", "--token", "")
    assert (code, "in UTF-8" in err) == (2, True)


@pytest.mark.parametrize("argv", [
    ["--json", "show", "a/b"], ["--token", "", "--json", "show", "a/b"], ["--cache-dir", "show", "a/b", "--json"],
    ["--json", "--", "a/b"], ["--json", "a/b", "show/me"],
])  # fmt: skip
def test_options_may_come_before_the_command(hub, tmp_path, capsys, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    run(app, ["--token", "", "--endpoint", small(hub).endpoint, *argv])
    repos = [json.loads(line)["repo"] for line in capsys.readouterr().out.splitlines()]
    assert repos == [word for word in argv if word.count("/") == 1]


@pytest.mark.parametrize("argv", [["shwo", "a/b"], ["--json", "shwo", "a/b"], ["gate"], ["comapre", "a/b", "c/d"]])
def test_a_command_mistyped_is_not_a_repo(screen, argv):
    code, out, err = screen(*argv, "--endpoint", "http://127.0.0.1:1", "--token", "")
    assert (code, out) == (2, "")
    assert "did you mean" in err


def test_a_repo_whose_name_is_like_a_command(hub, screen, tmp_path, monkeypatch):
    server = small(hub)
    assert screen("gpt2", "--json", "--endpoint", server.endpoint, "--token", "")[0] == 4
    assert screen("run", "shwo", "--json", "--endpoint", server.endpoint, "--token", "")[0] == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gate").write_text("a/b\n")
    assert screen("gate", "--endpoint", server.endpoint, "--token", "")[0] == 0


@pytest.mark.parametrize(("flag", "value", "said"), [
    ("--max-mtp", "big", "a size such as 20GiB"), ("--experts", "1.5", "a whole number"),
    ("--gated", "x", "allow or deny"), ("--changed-after", "then", "a day as YYYY-MM-DD"),
    ("--card-states", "foo", "words among base-model, quantisation"), ("--mtp", "no", "any or required or forbidden"),
])  # fmt: skip
def test_a_policy_value_that_is_none(screen, flag, value, said):
    code, _, err = screen("a/b", flag, value, "--endpoint", "http://127.0.0.1:1", "--token", "")
    assert code == 2
    assert err.startswith(f"error: {flag}: expected {said}")
    assert f"got {value!r}; nothing was screened\n  {flag[2:].replace('-', '_')}: " in err


def test_both_spellings_of_help_are_one(screen, capsys):
    assert run(app, ["-h"]) == run(app, ["--help"]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]


def test_a_cache_that_cannot_be_written_costs_the_cache_only_and_is_said(hub, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    where = ["--endpoint", small(hub).endpoint, "--token", "", "--cache-dir", str(file)]
    assert run(app, ["a/b", *where]) == 0
    assert f"cache {file}: Not a directory; what was read is not kept" in capsys.readouterr().err
    assert run(app, ["cache", "--clear", "--cache-dir", str(file)]) == 2
    assert "expected a folder that can be emptied" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_files_that_hold_nothing_are_no_model(hub, screen):
    hollow = safetensors_file([Tensor("a", "BF16", (0, 4))])
    server = hub(DemoRepo("a/hollow", {"model.safetensors": hollow, "config.json": CONFIG}),
                 DemoRepo("a/none", {"model.safetensors": safetensors_file([]), "config.json": CONFIG}))  # fmt: skip
    code, out, _ = screen("a/hollow", "a/none", "--json", "--endpoint", server.endpoint, "--token", "")
    rejected = [finding["gate"] for line in out.splitlines() for finding in json.loads(line)["findings"]
                if finding["outcome"] == "reject"]  # fmt: skip
    assert (code, rejected) == (3, ["empty", "empty"])


def test_names_that_promise_a_hundred_million_shards(hub, screen):
    files = {f"a{n}-00001-of-99999.safetensors": weights(0) for n in range(900)}
    began = time.monotonic()
    code, out, _ = screen("a/b", "--json", "--endpoint", hub(DemoRepo("a/b", files)).endpoint, "--token", "")
    assert (code, json.loads(out)["outcome"]) == (3, "drop")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("stem", ["a b", "a%2Fb", "mödel ☃#?&+=", "'\"<>"])
def test_every_file_name_is_asked_for_as_it_is(hub, screen, stem):
    server = hub(DemoRepo("a/b", {f"{stem}.safetensors": weights(0), "config.json": CONFIG}))
    code, out, _ = screen("a/b", "--json", "--endpoint", server.endpoint, "--token", "")
    assert (code, json.loads(out)["facts"]["tensors"]) == (0, 3)


# `screen --json`, key by key: the types a value may have; a list or an object of one is of all its items.
NONE, TEXT, WHOLE, TRUTH = type(None), str, int, bool
FINDING = {"gate": (TEXT,), "outcome": ("pass", "reject", "unknown", "note"), "observed": (), "limit": (),
           "source": ("api", "card", "tree", "config", "header", "engine"), "because": (TEXT,)}  # fmt: skip
CELL = {"stack": ("main", "mtp", "vision", "audio"), "role": (TEXT,), "dtype": (TEXT,), "tensors": (WHOLE,),
        "elements": (WHOLE,), "bytes": (WHOLE,)}  # fmt: skip
FACTS = {
    "tensor_bytes": (WHOLE, NONE), "file_bytes": (WHOLE,), "shards": (WHOLE,), "tensors": (WHOLE, NONE),
    "architecture": (TEXT, NONE), "model_type": (TEXT, NONE), "census": ([CELL], NONE),
    "quantization": ({"method": (TEXT, NONE), "format": (TEXT, NONE), "ignore": (["*"],),
                      "kv_cache_dtype": (TEXT, NONE)}, NONE),
    "experts": ({"declared": (WHOLE, NONE), "found": (WHOLE, NONE), "layers": (WHOLE, NONE), "uneven": (dict,)}, NONE),
    "mtp": ({"declared": (WHOLE, NONE), "tensors": (WHOLE, NONE), "bytes": (WHOLE, NONE), "dtypes": (dict,)}, NONE),
    "ple": ({"kind": ("none", "ngram", "engram", "per_layer"), "tensors": (WHOLE, NONE), "bytes": (WHOLE, NONE),
             "table_bytes": (WHOLE, NONE), "format": (TEXT, NONE), "declared_dtype": (TEXT, NONE)}, NONE),
}  # fmt: skip
ROW = {
    "repo": (TEXT,), "canonical": (TEXT, NONE), "revision": (TEXT, NONE), "commit": (TEXT, NONE),
    "outcome": ("keep", "drop", "unknown", "error"), "reached": ("info", "tree", "config", "headers", NONE),
    "duplicate_of": (TEXT, NONE), "same_weights_as": (TEXT, NONE), "findings": ([FINDING],), "facts": (FACTS, NONE),
    "cost": ({"requests": (WHOLE,), "cdn_requests": (WHOLE,), "bytes_read": (WHOLE,), "cached_headers": (WHOLE,)},),
    "error": ({"code": (TEXT,), "message": (TEXT,), "hint": (TEXT, NONE), "retry": (TRUTH,)}, NONE),
}  # fmt: skip


def unlike(value, forms, where="row"):
    """Where a value is not of one of these forms; None where it is."""
    if not forms or value in [form for form in forms if isinstance(form, str)]:
        return None
    for form in forms:
        if isinstance(form, type) and type(value) is form:
            return None
        if isinstance(form, list) and isinstance(value, list):
            each = (TEXT,) if form == ["*"] else (form[0],)
            return next(filter(None, (unlike(item, each, f"{where}[{n}]") for n, item in enumerate(value))), None)
        if isinstance(form, dict) and isinstance(value, dict):
            if missing := form.keys() - value.keys():
                return f"{where}: no {sorted(missing)}"
            return next(filter(None, (unlike(value[key], form[key], f"{where}.{key}") for key in form)), None)
    return f"{where}: {value!r}"


def test_rows_are_what_the_contract_says(hub, screen, tmp_path):
    moe = [Tensor(f"model.layers.{layer}.mlp.experts.{n}.w", "BF16", (8, 8))
           for layer in (0, 1) for n in range(3 - layer)]  # fmt: skip
    repos = [
        DemoRepo("a/whole", {"model.safetensors": weights(0), "config.json": CONFIG}),
        DemoRepo("a/copy", {"model.safetensors": weights(0), "config.json": CONFIG}),
        DemoRepo("a/twin", {"model.safetensors": weights(0), "config.json": {**CONFIG, "x": 1}}),
        DemoRepo("a/quantised", {"model.safetensors": weights(1), "config.json":
                                 {**CONFIG, "quantization_config": QUANTISED[0]}}),
        DemoRepo("a/uneven", {"model.safetensors": safetensors_file(moe, seed=3), "config.json": CONFIG}),
        DemoRepo("a/bare", {"model.safetensors": weights(2)}),
        DemoRepo("a/empty"), DemoRepo("a/gated", {"model.safetensors": weights(4)}, gated="auto"),
        DemoRepo("a/old", renamed_to="a/whole"), DemoRepo("a/off", disabled=True),
    ]  # fmt: skip
    names = [*(repo.name for repo in repos), "a/none", "no repo", "a/whole@nowhere"]
    lines = tmp_path / "repos.txt"
    lines.write_text("\n".join(names))
    _, out, _ = screen(str(lines), "--json", "--endpoint", hub(*repos).endpoint, "--token", "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [f"{row['repo']}@{row['revision']}".removesuffix("@main").removesuffix("@None") for row in rows] == names
    assert {row["outcome"] for row in rows} == set(ROW["outcome"])
    assert [unlike(row, (ROW,)) for row in rows] == [None] * len(rows)
    assert all((row["outcome"] == "error") is (row["error"] is not None) for row in rows)
