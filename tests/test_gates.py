"""Gates, each with evidence that decides it one way and evidence that decides it the other."""

from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.errors import BadInput
from formulas.facts import Cell, Experts, Facts, Mtp, Ple, Quantization
from formulas.tensors import fold
from screen.chain import Bundle, Criteria, Known, Page, Twin, judge
from screen.findings import Outcome
from screen.gates import GATES
from screen.policy import KEYS, Policy, parse_policy
from screen.repo import Blob, Entry, Tree
from screen.shards import Index, Problem, shard_set

NOW = datetime(2026, 11, 29, tzinfo=UTC)
GIB = 2**30


def files(*paths, size=GIB):
    return Tree(tuple(Entry(path, Blob("sha256:" + f"{i:064x}", size)) for i, path in enumerate(sorted(paths))))


def known(*paths, config=None, **parts):
    """A candidate with these files; `config` is its config.json, where it has one."""
    index = parts.pop("index", None)
    bundle = Bundle({"config.json": config} if config is not None else {}, {})
    tree = files(*paths)
    given = {"tree": tree, "index": index, "shards": shard_set(tree, index), "page": Page(), "bundle": bundle}
    return Known(**{"repo": "org/name", "revision": "main", "commit": "c" * 40, "facts": Facts()} | given | parts)


def ask(name, candidate, like=None, **policy):
    """(outcome, because) of every answer of one gate."""
    gate = next(gate for gate in GATES if gate.name == name)
    findings = judge(gate.needs, candidate, Criteria(Policy(**policy), NOW, like), [gate])
    assert all(finding.gate == name for finding in findings)
    return [(str(finding.outcome), finding.because) for finding in findings]


def outcomes(name, candidate, like=None, **policy):
    return [outcome for outcome, _ in ask(name, candidate, like, **policy)]


def test_every_gate_is_named_once_and_cheaper_levels_come_first():
    names = [gate.name for gate in GATES]
    assert len(names) == len(set(names))
    assert [gate.needs for gate in GATES] == sorted(gate.needs for gate in GATES)


def test_every_policy_key_is_obeyed_by_a_gate():
    assert {key for gate in GATES for key in gate.keys} == set(KEYS)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_a_gate_asked_before_its_evidence_never_rejects(gate):
    asked = Policy(licences="mit", changed_after=date(2026, 1, 1), scan="clean", max_size=1, architectures="x",
                   model_types="x", remote_code="deny", methods="x", formats="x", dtypes="x", experts=512,
                   mtp="required", ple_formats="fp8", undeclared_table="deny")  # fmt: skip
    found = judge(gate.needs, Known("org/name", "main"), Criteria(asked, NOW), [gate])
    assert all(finding.outcome is not Outcome.REJECT for finding in found)


@pytest.mark.parametrize(
    ("page", "policy", "outcome"),
    [
        (Page(licence="mit"), {"licences": "apache-2.0, MIT"}, "pass"),
        (Page(licence="qwen-community-1.0"), {"licences": "apache-2.0, mit"}, "reject"),
        (Page(licence="cc-by-nc-4.0"), {"deny_licences": "*-nc-*"}, "reject"),
        (Page(), {"licences": "mit"}, "unknown"),
    ],
)
def test_licence(page, policy, outcome):
    assert outcomes("licence", known(page=page), **policy) == [outcome]


def test_a_silent_policy_asks_nothing_of_the_licence():
    assert outcomes("licence", known(page=Page(licence="mit"))) == []


@pytest.mark.parametrize(
    ("changed", "policy", "outcome"),
    [
        (datetime(2026, 11, 1, tzinfo=UTC), {"max_age_days": 60}, "pass"),
        (datetime(2026, 8, 1, tzinfo=UTC), {"max_age_days": 60}, "reject"),
        (datetime(2026, 8, 1, tzinfo=UTC), {"changed_after": date(2026, 8, 1)}, "pass"),
        (datetime(2026, 8, 1, tzinfo=UTC), {"changed_after": date(2026, 1, 1), "max_age_days": 60}, "reject"),
        (None, {"max_age_days": 60}, "unknown"),
    ],
)
def test_age(changed, policy, outcome):
    assert outcomes("age", known(page=Page(last_modified=changed)), **policy) == [outcome]


@pytest.mark.parametrize(
    ("page", "policy", "expected"),
    [
        (Page(unsafe_files=("model.pt",)), {}, ["reject"]),
        (Page(unsafe_files=("model.pt",)), {"scan": "ignore"}, []),
        (Page(scan_done=True), {"scan": "clean"}, ["pass"]),
        (Page(), {"scan": "clean"}, ["unknown"]),
        (Page(), {}, []),
    ],
)
def test_scan(page, policy, expected):
    assert outcomes("scan", known(page=page), **policy) == expected


def test_gated_is_a_note_until_the_policy_refuses_it():
    assert outcomes("access", known(page=Page(gated="manual"))) == ["note"]
    assert outcomes("access", known(page=Page(gated="manual")), gated="deny") == ["reject"]
    assert outcomes("access", known()) == ["pass"]


@pytest.mark.parametrize(
    ("paths", "outcome", "words"),
    [
        (["model.safetensors"], "pass", "1 safetensors"),
        (["pytorch_model.bin", "config.json"], "reject", "pickle"),
        (["model-q4.gguf"], "reject", "GGUF"),
        (["README.md"], "reject", "no weight files"),
    ],
)
def test_safetensors(paths, outcome, words):
    [(seen, because)] = ask("safetensors", known(*paths))
    assert (seen, words in because) == (outcome, True)


def test_missing_shard_is_named():
    paths = [f"model-{n:05}-of-00004.safetensors" for n in (1, 2, 4)]
    [(outcome, because)] = ask("shards", known(*paths))
    assert outcome == "reject"
    assert "model-00003-of-00004.safetensors" in because


@given(st.integers(1, 40), st.sampled_from([0, 1]), st.data())
def test_numbering_rejects_exactly_incomplete_sets(parts, first, data):
    numbers = list(range(first, first + parts))
    kept = data.draw(st.sets(st.sampled_from(numbers), min_size=1))
    paths = [f"m-{n:06}-of-{parts:06}.safetensors" for n in kept]
    complete = sorted(kept) == list(range(min(kept), min(kept) + parts)) and min(kept) in (0, 1)
    assert outcomes("shards", known(*paths)) == (["reject"] if not complete else ["pass"] if parts > 1 else [])


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        ({"max_size": "10GiB"}, "reject"),
        ({"max_size": "12GiB", "min_size": "11GiB"}, "pass"),
        ({"min_size": "12GiB"}, "reject"),
    ],
)
def test_size(policy, outcome):
    assert outcomes("size", known(facts=Facts(file_bytes=11 * GIB)), **policy) == [outcome]


def test_duplicates():
    copy, other = Twin("a/b", "c" * 40), Twin("a/b", "c" * 40, ("config.json",))
    assert outcomes("duplicate", known(twin=copy)) == ["reject"]
    assert outcomes("duplicate", known(twin=copy), duplicates="keep") == ["note"]
    assert outcomes("duplicate", known(twin=copy._replace(readable=False))) == ["note"]
    assert outcomes("duplicate", known(twin=other)) == ["note"]


def test_config_keys_that_differ_are_named():
    ours = {"hidden_size": 8, "text_config": {"ple_embedding_dtype": "float8_e4m3fn", "layers": 2}}
    theirs = Bundle({"config.json": {"hidden_size": 8, "text_config": {"layers": 2}}}, {})
    candidate = known(config=ours, twin=Twin("a/b", "c" * 40, ("config.json",)), twin_bundle=theirs)
    [(outcome, because)] = ask("twin-config", candidate)
    assert outcome == "note"
    assert because.endswith("differs in text_config.ple_embedding_dtype")
    assert "hidden_size" not in because


def test_names_that_differ_by_case_only():
    [(outcome, because)] = ask("names", known("a.safetensors", "Readme.md", "README.md"))
    assert outcome == "note"
    assert "Readme.md" in because


def test_config_absent_and_broken_are_unknown():
    assert outcomes("config", known("a.safetensors")) == ["unknown"]
    assert outcomes("config", known(bundle=Bundle({}, {"config.json": "not JSON"}))) == ["unknown"]
    assert outcomes("config", known(config={})) == ["pass"]


def test_remote_code():
    needs = known(config={"auto_map": {"AutoModel": "modeling.X"}})
    assert outcomes("remote-code", needs) == ["note"]
    assert outcomes("remote-code", needs, remote_code="deny") == ["reject"]
    assert outcomes("remote-code", known(config={}), remote_code="deny") == ["pass"]
    assert outcomes("remote-code", known(), remote_code="deny") == ["unknown"]


def test_architecture_and_model_type():
    facts = Facts(architecture="Qwen3ForCausalLM", model_type="qwen3")
    assert outcomes("architecture", known(facts=facts), architectures="Qwen3*") == ["pass"]
    assert outcomes("architecture", known(facts=facts), deny_architectures="qwen3forcausallm") == ["reject"]
    assert outcomes("model-type", known(facts=facts), model_types="llama") == ["reject"]
    assert outcomes("model-type", known(), model_types="llama") == ["unknown"]


def test_index_names_a_file_the_tree_lacks():
    index = Index({"x": "model-1.safetensors", "y": "mtp.safetensors"}, None)
    [(outcome, because)] = ask("index-files", known("model-1.safetensors", index=index))
    assert outcome == "reject"
    assert "mtp.safetensors" in because
    assert outcomes("index-files", known("model-1.safetensors", "mtp.safetensors", index=index)) == ["pass"]


def test_shard_numbers_yield_to_the_index():
    """MiniMax-M2.7 has shards 0 to 124, all named `-of-00130`, and an index that names exactly those."""
    shards = [f"model-{n:05}-of-00130.safetensors" for n in range(125)]
    index = Index({f"tensor{n}": shard for n, shard in enumerate(shards)}, None)
    assert outcomes("shards", known(*shards)) == ["reject"]
    with_index = known(*shards, "model.safetensors.index.json")
    assert outcomes("shards", with_index) == ["note"]
    assert outcomes("index-files", known(*shards, "model.safetensors.index.json", index=index)) == ["pass"]


def test_copies_and_adapters_are_not_the_model():
    candidate = known("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors")
    assert [outcome for outcome, _ in ask("beside", candidate)] == ["note", "note"]
    assert outcomes("safetensors", known("adapter_model.safetensors")) == ["reject"]
    assert outcomes("safetensors", known("unet/model.safetensors")) == ["reject"]


@pytest.mark.parametrize(
    ("kind", "policy", "outcome"),
    [
        ("not_in_header", {}, "reject"),
        ("shard_missing", {}, "reject"),
        ("not_in_index", {}, "note"),
        ("not_in_index", {"unindexed": "deny"}, "reject"),
        ("total_size", {}, "note"),
        ("twice", {"unindexed": "deny"}, "note"),
    ],
)
def test_index_against_headers(kind, policy, outcome):
    problem = Problem(kind, 3, "mtp.fc.weight", "3 tensors differ")
    [(seen, because)] = ask("index", known(problems=(problem,)), **policy)
    assert (seen, "3 tensors differ" in because) == (outcome, True)


def test_pruned_model_is_not_a_smaller_quantisation():
    facts = Facts(experts=Experts(declared=448, found=448, layers=48))
    assert outcomes("experts", known(facts=facts)) == ["pass"]
    [(outcome, because)] = ask("experts", known(facts=facts), experts=512)
    assert outcome == "reject"
    assert "448 of 512" in because
    assert "pruned" in because
    [(outcome, because)] = ask("declared-experts", known(facts=facts), experts=512)
    assert (outcome, "448 of 512" in because) == ("reject", True)
    full = Facts(repo="org/full", experts=Experts(declared=512, found=512, layers=48))
    assert outcomes("experts", known(facts=facts), like=full) == ["reject"]


def test_experts_against_their_own_config():
    assert outcomes("experts", known(facts=Facts(experts=Experts(declared=512, found=448, layers=1)))) == ["reject"]
    uneven = Facts(experts=Experts(declared=512, found=512, layers=48, uneven={7: 500}))
    [(outcome, because)] = ask("experts", known(facts=uneven))
    assert (outcome, "layer 7 has 500" in because) == ("reject", True)


MTP = Facts(mtp=Mtp(declared=1, tensors=31, bytes=5 * GIB, dtypes={"BF16": 5 * GIB}))
NO_MTP = Facts(mtp=Mtp(declared=1, tensors=0, bytes=0))


@pytest.mark.parametrize(
    ("facts", "policy", "expected"),
    [
        (MTP, {}, []),
        (MTP, {"mtp": "required", "mtp_dtypes": "bf16", "max_mtp": "6GiB"}, ["pass", "pass", "pass"]),
        (MTP, {"mtp": "forbidden"}, ["reject"]),
        (MTP, {"max_mtp": "4GiB"}, ["reject"]),
        (MTP, {"mtp_dtypes": "F8_E4M3"}, ["reject"]),
        (NO_MTP, {}, ["note"]),
        (NO_MTP, {"mtp": "required"}, ["note", "reject"]),
        (NO_MTP, {"mtp": "forbidden"}, ["note", "pass"]),
        (Facts(), {"mtp": "required"}, ["unknown"]),
    ],
)
def test_mtp(facts, policy, expected):
    assert outcomes("mtp", known(facts=facts), **policy) == expected


def test_declared_but_absent_mtp_is_named():
    [(_, because)] = ask("mtp", known(facts=NO_MTP))
    assert "declares 1 MTP layer, the files have no MTP tensors" in because


def test_fp8_table_without_its_declaration():
    ple = Ple(kind="ngram", tensors=131, bytes=48 * GIB, table_bytes=47 * GIB, format="fp8")
    bare = known(config={}, facts=Facts(ple=ple))
    [(outcome, because)] = ask("table", bare)
    assert outcome == "note"
    assert "loads as bf16, 47.00 GiB more, or fails" in because
    assert outcomes("table", bare, undeclared_table="deny") == ["reject"]
    declared = known(config={}, facts=Facts(ple=ple.model_copy(update={"declared_dtype": "float8_e4m3fn"})))
    assert outcomes("table", declared, undeclared_table="deny") == []
    assert outcomes("table", declared, ple_formats="fp8,nvfp4") == ["pass"]
    assert outcomes("table", known(facts=Facts(ple=Ple())), ple_formats="fp8") == ["reject"]


def test_dtypes_and_formats_look_at_the_main_stack():
    cells = (Cell(stack="main", role="mlp", dtype="U8", tensors=1, elements=1, bytes=1),
             Cell(stack="mtp", role="mlp", dtype="BF16", tensors=1, elements=1, bytes=2))  # fmt: skip
    assert outcomes("dtypes", known(facts=Facts(census=cells)), deny_dtypes="BF16") == ["pass"]
    assert outcomes("dtypes", known(facts=Facts(census=cells)), dtypes="BF16") == ["reject"]
    mixed = Facts(quantization=Quantization(format="mixed", by_role={"main/expert": "nvfp4", "mtp/expert": "fp8"}))
    assert outcomes("format", known(facts=mixed), formats="nvfp4") == ["pass"]
    assert outcomes("format", known(facts=mixed), deny_formats="nvfp*") == ["reject"]


def reference(*names):
    return Facts(repo="org/reference", tensor_groups=fold((name, "BF16", (2,)) for name in names))


LAYERS = [f"model.layers.{n}.mlp.{part}_proj.weight" for n in range(3) for part in ("gate", "up", "down")]
EXPERTS = [f"model.layers.0.mlp.experts.{n}.{part}_proj.weight" for n in range(8) for part in ("gate", "up", "down")]


def test_tensors_a_reference_does_not_know_are_grouped():
    strange = [f"model.layers.1.ple.ngram_embedding.shard_{n}.weight" for n in range(128)]
    [(outcome, because)] = ask("like", known(facts=reference(*LAYERS, *strange)), like=reference(*LAYERS))
    assert outcome == "reject"
    assert "128 modules" in because
    assert "shard_{0-127}" in because
    assert outcomes("like", known(facts=reference(*LAYERS, *strange)), reference(*LAYERS), unplaced="allow") == ["note"]


def test_missing_main_tensors_reject_and_a_missing_mtp_head_is_a_note():
    full = reference(*LAYERS, "mtp.fc.weight")
    assert outcomes("like", known(facts=reference(*LAYERS)), full) == ["note"]
    assert outcomes("like", known(facts=reference(*LAYERS[1:], "mtp.fc.weight")), full) == ["reject"]


def test_quantisation_and_packing_of_experts_are_no_difference():
    ends = (".weight_packed", ".weight_scale", ".input_scale")
    quantised = [name.replace(".weight", end) for name in EXPERTS for end in ends]
    packed = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    for names in (EXPERTS, EXPERTS[:12], quantised, packed):
        for others in (EXPERTS, quantised, packed):
            assert outcomes("like", known(facts=reference(*names)), reference(*others)) == ["pass"]
    renamed = [name.replace("experts", "moe") for name in EXPERTS]
    assert outcomes("like", known(facts=reference(*renamed)), reference(*EXPERTS)) == ["reject", "reject"]


def test_scales_shared_by_the_parts_of_a_table_are_no_module():
    parts = [f"model.layers.1.ple.ngram_embedding.shard_{n}.weight" for n in range(4)]
    scaled = reference(*parts, "model.layers.1.ple.ngram_embedding.weight_scale", "model.layers.1.self_attn.k_scale")
    assert outcomes("like", known(facts=reference(*parts)), scaled) == ["pass"]
    assert outcomes("like", known(facts=scaled), reference(*parts)) == ["pass"]
    assert outcomes("like", known(facts=reference(*parts[1:], f"{parts[0]}_scale")), scaled) == ["reject"]


def test_misspelt_key_names_the_nearest():
    with pytest.raises(BadInput) as caught:
        parse_policy('max_sise = "10GiB"', name="box.toml", flags={})
    assert "max_sise" in caught.value.message
    assert caught.value.hint == "did you mean max_size?"


def test_flags_override_the_file():
    policy = parse_policy('max_size = "10GiB"\nlicences = ["mit"]', name="box.toml", flags={"max_size": "20GiB"})
    assert (policy.max_size, policy.licences) == (20 * GIB, ("mit",))


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("max_size =", {}, "expected TOML"),
        ("", {"max_size": "ten"}, "--max-size: expected"),
        ('mtp = "yes"', {}, "box.toml: mtp: expected"),
        ("experts = -1", {}, "experts"),
        ('changed_after = "soon"', {}, "changed_after"),
    ],
)
def test_bad_values_name_their_key(text, flags, words):
    with pytest.raises(BadInput, match=words):
        parse_policy(text, name="box.toml", flags=flags)
