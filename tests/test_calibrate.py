"""Formulas against every shipped point: the accuracy the README states, and what a run of one's own teaches."""

import json
import statistics
from pathlib import Path

import pytest

from formulas.calibrate import case_of, checked, correction, deployment_of, point_of
from formulas.cards import find_card
from formulas.deployment import Deployment
from formulas.errors import BadInput
from formulas.estimate import estimate
from formulas.logs import parse_log
from formulas.own import keep, read_cases
from formulas.scoring import FORMULAS, part_bytes, score, summaries, worst_first
from formulas.shipped import checkpoints, coefficients, passed_over, points

GIB = 2**30
LOGS = Path(__file__).parent / "golden" / "logs"
HERE = "one or two NVIDIA H200"  # runs made for this project, read from the worker itself
CASES = [case_of(point, checkpoints()[point.checkpoint], coefficients()) for point in points()]


@pytest.fixture(scope="module")
def scores():
    return score(CASES)


def errors(scores, formula, **wanted):
    """Errors in percent of one formula, of points for which `wanted` holds."""
    chosen = {p.point for p in points() if all(test(getattr(p, name)) for name, test in wanted.items())}
    return [s.error_percent for s in scores if s.formula == formula and s.point in chosen and s.error is not None]


def bound(found, mean, worst):
    assert found
    assert statistics.mean(map(abs, found)) <= mean
    assert max(map(abs, found)) <= worst


@pytest.mark.parametrize("held_out", [False, True])
def test_model_loading_on_h200_is_within_the_stated_bounds(scores, held_out):
    where = {"source": lambda s: s.startswith(HERE), "held_out": lambda h: h is held_out}
    for formula in ("weights: tensor by tensor", "weights: from the config alone"):
        bound(errors(scores, formula, **where), 0.15, 0.6)


@pytest.mark.parametrize(("held_out", "mean", "worst"), [(False, 0.001, 0.5), (True, 0.5, 1.5)])
def test_tokens_from_the_memory_that_was_left(scores, held_out, mean, worst):
    found = errors(scores, "tokens: planned from the bytes left", held_out=lambda h: h is held_out)
    bound(found, mean, worst)


@pytest.mark.parametrize("held_out", [False, True])
def test_free_kv_memory_on_h200(scores, held_out):
    wanted = {p.point for p in points() if p.source.startswith(HERE) and p.held_out is held_out}
    pool = next(f.name for f in FORMULAS if f.term == "available_kv")
    found = [abs(s.error) / GIB for s in scores if s.formula == pool and s.point in wanted]
    assert len(found) >= 19
    assert statistics.mean(found) < 0.1
    assert max(found) < 1.2


@pytest.mark.parametrize("part", ["experts", "attention", "embed", "PLE", "vision", "rest", "total"])
def test_engine_modules_by_part_from_the_config_alone(scores, part):
    formula = f"weights by part, from the config alone: {part}"
    bound(errors(scores, formula, held_out=lambda h: not h), 0.3, 1.5)
    if part != "rest":  # of one held-out build the drafter's own matrices are counted there
        bound(errors(scores, formula, held_out=lambda h: h), 0.3, 1.5)


def test_ours_is_nearer_than_every_other_weight_formula_on_the_running_checkpoint(scores):
    """62.12 GiB a card, 64.36 with MTP: total / 2 is 62.94, (MoE + rest) / 2 + PLE / 2 60.51, total - PLE 78.13."""
    for point, reported in (("flash-next-tp2", 62.12), ("flash-next-tp2-mtp", 64.36)):
        off = {s.formula: abs(s.error) for s in scores if s.point == point and s.term == "model_memory"}
        ours = off.pop("weights: tensor by tensor")
        off.pop("weights: from the config alone")
        assert len(off) == 5
        assert all(ours < other for other in off.values())
        assert next(s for s in scores if s.point == point and s.term == "model_memory").measured / GIB == pytest.approx(
            reported
        )
    plain = {s.formula: s.predicted / GIB for s in scores if s.point == "flash-next-tp2" and s.predicted}
    assert plain["weights: total / TP"] == pytest.approx(62.94, abs=0.01)
    assert plain["weights: (MoE + rest) / TP + PLE / TP"] == pytest.approx(60.51, abs=0.01)
    assert plain["weights: total - PLE"] == pytest.approx(78.13, abs=0.01)
    assert plain["weights: (total - PLE) / TP"] == pytest.approx(39.06, abs=0.01)


def test_every_formula_is_scored_once_a_point_and_worst_come_first(scores):
    assert len({(s.formula, s.point) for s in scores}) == len(scores)
    ordered = [s.error_percent for s in worst_first(scores)]
    said = [abs(e) for e in ordered if e is not None]
    assert said == sorted(said, reverse=True)
    assert None not in ordered[: len(said)]
    for each in summaries(scores):
        rows = [s for s in scores if s.formula == each.formula]
        assert each.points + each.silent == len(rows)


def test_a_point_whose_facts_stand_in_compares_its_cache_only(scores):
    standing = {p.point for p in points() if p.stands_in}
    assert standing
    for each in scores:
        if each.point in standing and each.term in ("available_kv", "model_memory"):
            assert each.predicted is None
            assert "only its cache" in each.because


def test_rows_without_enough_to_predict_state_a_reason():
    assert len(passed_over()) > 5
    assert all(source and because for source, because in passed_over())
    assert all(p.source for p in points())
    assert len({p.point for p in points()}) == len(points())


def test_parts_add_up():
    by = {"expert": 5, "attention": 3, "linear_attention": 2, "norm": 1, "embed": 7, "ple": 11, "audio": 4}
    parts = ("experts", "attention", "embed", "PLE", "vision", "rest")
    assert sum(part_bytes(by, part) for part in parts) == part_bytes(by, "total") == sum(by.values())
    assert part_bytes(by, "rest") == 1


def own_case(log, checkpoint, **options):
    """A point as `fit calibrate` makes it of a real log."""
    readings = parse_log((LOGS / log).read_text())
    base = Deployment(capability="9.0", without=frozenset({"flashinfer", "deep_gemm"}), **options)
    facts = checkpoints()[checkpoint]
    point = point_of(readings, facts, deployment_of(readings, base), find_card("h200"), Path(log).stem, {})
    return case_of(point, facts, coefficients()), facts


def test_a_log_becomes_a_point_and_the_point_a_correction(tmp_path):
    case, facts = own_case("qwen3-30b-a3b_h200_0.25.1.log", "Qwen/Qwen3-30B-A3B#config")
    asked = case.point.deployment
    assert (asked.version, asked.max_num_seqs, asked.max_model_len) == ("0.25.1", 64, 8192)
    taught = correction([case], asked.model_copy(update={"version": "0.25.3"}), "h200", facts.repo)
    assert taught.is_own
    assert abs(taught.weights) < 10 * 2**20
    moved = estimate(facts, find_card("h200"), asked, coefficients(), correction=taught)
    measured = case.point.measured
    assert moved.per_rank.activation_bytes == pytest.approx(measured["peak_activation"], abs=2)
    assert moved.per_rank.available_kv_bytes == pytest.approx(measured["available_kv"], abs=12 * 2**20)
    assert moved.kv.tokens == pytest.approx(measured["kv_tokens"], rel=1e-3)
    [said] = checked([case], facts, "h200", asked)
    assert "56.88 GiB reported, 56.88 predicted" in said
    # Another checkpoint on that engine and card learns of the terms, not of these weights.
    other = correction([case], asked, "h200", "some/other")
    assert (other.weights, other.is_own) == (None, False)
    assert other.activation == taught.activation
    # Another engine, card or TP learns nothing.
    for change, card in (({"version": "0.26.0"}, "h200"), ({"tp": 2}, "h200"), ({}, "h100-80gb")):
        assert correction([case], asked.model_copy(update=change), card, facts.repo).source is None
    # Started otherwise, the same checkpoint keeps its weights and loses the certainty of what is left.
    fewer = correction([case], asked.model_copy(update={"max_num_seqs": 8}), "h200", facts.repo)
    assert (taught.is_same_start, fewer.is_own, fewer.is_same_start) == (True, True, False)


def test_a_log_that_states_no_parts_still_corrects_what_is_left():
    case, facts = own_case("gpt-oss-20b_h200-tp2_0.25.1.log", "openai/gpt-oss-20b#config")
    assert case.point.deployment.without >= {"custom_all_reduce"}
    assert "peak_activation" not in case.point.measured
    # Say the run had 2 GiB less than the log: nothing else explains them.
    less = dict(case.point.measured) | {"available_kv": case.point.measured["available_kv"] - 2 * GIB}
    poor = case._replace(point=case.point.model_copy(update={"measured": less}))
    taught = correction([poor], poor.point.deployment, "h200", facts.repo)
    assert taught.activation is None
    assert taught.unexplained == pytest.approx(2 * GIB, abs=0.03 * GIB)
    moved = estimate(facts, find_card("h200"), case.point.deployment, coefficients(), correction=taught)
    assert moved.per_rank.available_kv_bytes == pytest.approx(less["available_kv"], abs=12 * 2**20)


def test_own_points_are_kept_replaced_and_read(tmp_path):
    where = tmp_path / "data" / "points.jsonl"
    assert read_cases(where, coefficients()) == []
    case, facts = own_case("llama-3.1-8b_h200_0.25.1.log", "meta-llama/Meta-Llama-3.1-8B#config")
    keep(where, case.point, facts)
    keep(where, case.point, facts)
    [again] = read_cases(where, coefficients())
    assert again.point == case.point
    assert again.facts == facts
    where.write_text(where.read_text() + json.dumps({"point": 3}) + "\n")
    with pytest.raises(BadInput, match=r"points\.jsonl:2"):
        read_cases(where, coefficients())
