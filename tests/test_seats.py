"""Seat plans: the box file, the search against a brute force, plans of real checkpoints, what is said without one."""

import itertools
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from formulas.box import parse_box
from formulas.cards import find_card
from formulas.cli import app
from formulas.console import NO, USAGE, YES, run
from formulas.demands import Demand, Need, Site, Slot, host_bytes, start_order
from formulas.errors import BadInput
from formulas.options import deployment_from, parse_arguments
from formulas.placement import lack, place
from formulas.seat_report import BAR, bar, lines, verdict
from formulas.seats import NoFit, SeatPlan, plan_seats
from formulas.shipped import checkpoints, coefficients
from formulas.units import GIB
from screen.catalogue import descriptions
from screen.census import derive

EXAMPLES = Path(__file__).parents[1] / "examples"
FLASH = "RadixArk/Qwen3.8-Flash-Next-NVFP4"


def uuid(n):
    return f"GPU-{n:08x}-0000-4000-8000-{n:012x}"


def host(name, cards, ram="512GiB", used="16GiB"):
    """A [[host]] table: cards are (number, kind)."""
    memory = f'ram = "{ram}"\nused = "{used}"\n' if ram else ""
    tables = "".join(f'[[host.card]]\nuuid = "{uuid(n)}"\ncard = "{kind}"\n' for n, kind in cards)
    return f'[[host]]\nname = "{name}"\n{memory}{tables}'


def seat(name, checkpoint="Qwen/Qwen3-8B", **options):
    """A [[seat]] table."""
    values = {"max-model-len": 8192} | {key.replace("_", "-"): value for key, value in options.items()}
    body = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if not isinstance(value, dict))
    inline = "".join(f"{key} = {value['toml']}\n" for key, value in values.items() if isinstance(value, dict))
    return f'[[seat]]\nname = "{name}"\ncheckpoint = "{checkpoint}"\n{body}{inline}'


FP8_TABLE = {"toml": '{ text_config = { ple_embedding_dtype = "float8_e4m3fn" } }'}


def flash(name="flash-next", **options):
    """The Flash-Next seat of a published account: two 72 GB cards, 16 sequences, 8,192 tokens a step."""
    asked = {"max_model_len": 262144, "max_num_seqs": 16, "max_num_batched_tokens": 8192,
             "gpu_memory_utilization": 0.98, "hf_overrides": FP8_TABLE}  # fmt: skip
    return seat(name, FLASH, **(asked | options))


def described(name):
    """Facts of a repo of the demo catalogue, from its groups of tensors, its headers left unwritten."""
    found = descriptions()[name]
    config = json.loads(json.dumps(found.config))
    kinds = config["text_config"]["layer_types"]
    config["text_config"]["layer_types"] = kinds["repeat"] * kinds["times"]
    return derive(config, None, repo=name).model_copy(update={"tensor_groups": found.groups})


class Known(dict):
    """Facts by seat name, found by the checkpoint the seat names."""

    def __init__(self, box):
        shipped = checkpoints()
        super().__init__({s.group: shipped.get(s.checkpoint) or described(s.checkpoint) for s in box.seats})


def planned(text, **options):
    box = parse_box(text)
    return plan_seats(box, Known(box), coefficients(), **options)


# The box file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[hosts]]\n", r"box hosts: .*'host' meant"),
        ('[[host]]\nname = "a"\nrma = "1GiB"\n', r"box host 1 rma: .*'ram' meant"),
        ('[[host]]\nname = "a"\n[[host.card]]\nuid = "x"\n', r"host 1 \(a\) card 1 uid: .*'uuid' meant"),
        ('[[host]]\nname = "a"\n[[host.card]]\nuuid = "0"\ncard = "h200"\n', r"card 1 uuid: .*nvidia-smi -L"),
        ('[[host]]\nname = "a"\n[[host.card]]\nuuid = "GPU-6f1c8a52"\ncard = "h200"\n', r"all of a card's UUID"),
        (f'[[host]]\nname = "a"\n[[host.card]]\nuuid = "{uuid(1)}"\n', r"expected card, or memory and capability"),
        (f'[[host]]\nname = "a"\n[[host.card]]\nuuid = "{uuid(1)}"\ncard = "h2000"\n', r"card 1: gpu 'h2000'"),
        (host("a", [(1, "h200"), (1, "h200")]) + seat("s"), r"each card once, got 'GPU-0{7}1.* 2 times"),
        (host("a", [(1, "h200")]) + host("a", [(2, "h200")]) + seat("s"), r"each host name once"),
        (host("a", [(1, "h200")]) + seat("s") + seat("s"), r"each seat name once"),
        (host("a", [(1, "h200")], used="600GiB") + seat("s"), r"expected used memory below 0.95 of ram"),
        (host("a", [(1, "h200")]), r"one \[\[seat\]\] or more, got none"),
        (host("a", [(1, "h200")]) + seat("s", hosts=["b"]), r"seat 1 \(s\) hosts: .* got 'b'"),
        (host("a", [(1, "h200")]) + seat("s", spread="wide"), r"spread: expected 'one card per host' or"),
        (host("a", [(1, "h200")]) + seat("s", count=0), r"count: expected a number of seats, got 0"),
        (host("a", [(1, "h200")]) + seat("s", tensor_paralel_size=2), r"\(s\).*--tensor-parallel-size meant"),
        (host("a", [(1, "h200")]) + seat("s", comit="x"), r"\(s\).*'commit' meant"),
        (host("a", [(1, "h200")]) + seat("s", max_model_len="long"), r"\(s\): --max-model-len 'long'"),
        (host("a", [(1, "h200")]) + seat("s", tensor_parallel_size=0), r"\(s\): tp: .*greater than or equal to 1"),
        (host("a", [(1, "h200")]) + seat("s", gpu_memory_utilization=1.5), r"\(s\): gpu_memory_utilization"),
        ("name = ", r"box: expected TOML"),
    ],
)
def test_a_wrong_box_says_what_and_where(text, said):
    with pytest.raises(BadInput, match=said):
        parse_box(text)


def test_options_are_the_engines_own_in_any_of_three_places():
    direct = seat("s", enforce_eager=True, enable_prefix_caching=False, served_model_name="x", seed=7)
    table = seat("s") + "[seat.args]\nenforce-eager = true\nno-enable-prefix-caching = true\n"
    table += 'served-model-name = "x"\nseed = 7\n'
    words = seat("s", args=["--enforce-eager", "--no-enable-prefix-caching", "--served-model-name", "x", "--seed=7"])
    boxes = [parse_box(host("a", [(1, "h200")]) + text) for text in (direct, table, words)]
    assert boxes[0] == boxes[1] == boxes[2]
    [one] = boxes[0].seats
    assert one.deployment.enforce_eager
    assert one.deployment.enable_prefix_caching is False
    assert one.words == ("--served-model-name=x", "--seed=7")
    assert not one.unmodelled


def test_speculation_sizes_and_the_engine_of_the_box():
    text = 'engine = "vllm==0.25.1"\n' + host("a", [(1, "h200")])
    drafts = {"toml": '{ method = "mtp", num_speculative_tokens = 3 }'}
    text += seat("s", max_model_len="256k", speculative_config=drafts)
    text += seat("t", engine="0.33.0", max_model_len="256K", count=2)
    box = parse_box(text)
    s, t1, t2 = box.seats
    assert (s.deployment.mtp, s.deployment.max_model_len, s.deployment.version) == (3, 256_000, "0.25.1")
    assert (t1.name, t2.name, t1.group) == ("t-1", "t-2", "t")
    assert (t1.deployment.version, t1.deployment.max_model_len) == ("0.33.0", 262_144)


def test_a_card_by_its_memory():
    text = f'[[host]]\nname = "a"\n[[host.card]]\nuuid = "{uuid(1)}"\nmemory = "71.2GiB"\ncapability = "12.0"\n'
    [card] = parse_box(text + seat("s")).hosts[0].cards
    assert card.card.total_bytes == round(71.2 * GIB)
    assert card.card.capability == "12.0"


# The search

KINDS = {"small": 10, "large": 16}


@st.composite
def puzzles(draw):
    """A few hosts of a few cards and a few seats, small enough to try every way."""
    sites = []
    for i in range(draw(st.integers(1, 3))):
        kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
        slots = tuple(Slot(f"{i}/{n}", kind, KINDS[kind]) for n, kind in enumerate(kinds))
        sites.append(Site(f"h{i}", draw(st.sampled_from([None, 4, 8])), slots))
    demands = []
    for i in range(draw(st.integers(1, 4))):
        ranks = draw(st.sampled_from([1, 1, 2, 2, 3]))
        spans = draw(st.sampled_from([(1,), (1, ranks), (ranks,)]))
        asks = draw(st.integers(2, 12))
        need = Need(asks, draw(st.integers(1, asks)), draw(st.integers(0, 3)), draw(st.integers(0, 2)), 1)
        kinds = draw(st.sampled_from([["small", "large"], ["large"]]))
        needs = {(kind, crosses): need for kind in kinds for crosses in (False, True)}
        pinned = draw(st.sampled_from([frozenset(), frozenset(), frozenset({"h0"})]))
        demands.append(Demand(f"s{i}", ranks, tuple(dict.fromkeys(spans)), pinned, needs, dict.fromkeys(kinds, "sm")))
    return sites, demands


def ways(sites, demand):
    """Every set of cards the demand may have, by the rules alone."""
    slots = [(site.name, slot) for site in sites for slot in site.slots]
    for chosen in itertools.combinations(slots, demand.ranks):
        per_host = Counter(name for name, _ in chosen)
        crosses = len(per_host) > 1
        if (
            len(per_host) in demand.spans
            and len(set(per_host.values())) == 1
            and (not demand.sites or set(per_host) <= demand.sites)
            and all((slot.kind, crosses) in demand.needs for _, slot in chosen)
        ):
            yield tuple((name, slot.uuid) for name, slot in chosen)


def holds(sites, demands, cards):
    """Whether seats with these cards are within every card and every host, by the rules alone."""
    needs = {d.name: next(iter(d.needs.values())) for d in demands}
    for site in sites:
        for slot in site.slots:
            loads = [needs[name] for name, on in cards.items() if (site.name, slot.uuid) in on]
            starts = any(
                all(slot.free - sum(first.takes for first in order[:i]) >= load.asks for i, load in enumerate(order))
                for order in itertools.permutations(loads)
            )
            if not starts or sum(load.takes for load in loads) > slot.free:
                return False
        taken = 0
        for name, on in cards.items():
            ranks = sum(1 for where, _ in on if where == site.name)
            taken += needs[name].host * ranks + needs[name].shared * min(ranks, needs[name].sharers)
        if site.free is not None and taken > site.free:
            return False
    return True


def fewest_hosts(sites, demands):
    """The fewest hosts all demands can span, by trying every way; None where there is no way."""
    best = None
    for choice in itertools.product(*(list(ways(sites, d)) for d in demands)):
        cards = dict(zip((d.name for d in demands), choice, strict=True))
        hosts = sum(len({name for name, _ in on}) for on in choice)
        if (best is None or hosts < best) and holds(sites, demands, cards):
            best = hosts
    return best


@settings(deadline=None, max_examples=150)
@given(puzzles())
def test_the_search_finds_what_trying_every_way_finds(puzzle):
    sites, demands = puzzle
    size = 1
    for demand in demands:
        size *= max(1, len(list(ways(sites, demand))))
    assume(size <= 3_000)
    found = place(sites, demands)
    best = fewest_hosts(sites, demands)
    assert found.is_proof
    assert (found.seatings is None) == (best is None)
    if found.seatings is not None:
        cards = {seating.name: seating.cards for seating in found.seatings}
        assert sum(len(seating.hosts) for seating in found.seatings) == best
        assert holds(sites, demands, cards)
        assert all(cards[d.name] in {tuple(sorted(w)) for w in ways(sites, d)} for d in demands)
        assert all(len(set(on)) == len(on) for on in cards.values())
    assert place(sites, demands) == found


@settings(deadline=None, max_examples=100)
@given(puzzles(), st.integers(1, 6))
def test_a_search_cut_short_claims_no_more_than_it_saw(puzzle, most_steps):
    sites, demands = puzzle
    whole, short = place(sites, demands), place(sites, demands, most_steps)
    assert short.steps <= 2 * most_steps + 2
    if short.is_proof:
        assert (short.seatings is None) == (whole.seatings is None)
    if short.seatings is not None:
        assert holds(sites, demands, {seating.name: seating.cards for seating in short.seatings})
        hosts, fewest = (sum(len(s.hosts) for s in found.seatings) for found in (short, whole))
        assert hosts == fewest if short.is_proof else hosts >= fewest


@settings(deadline=None, max_examples=100)
@given(puzzles())
def test_the_seat_without_a_place_lacks_something(puzzle):
    sites, demands = puzzle
    found = place(sites, demands)
    if found.seatings is None:
        short = lack(sites, demands, found.partial, found.stuck)
        assert short is None or any(short)
    else:
        alone = lack(sites, demands, (), found.seatings[0].name)
        assert alone == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), st.integers(0, 30))
def test_seats_that_can_start_in_any_order_start_in_ours(pairs, free):
    loads = [Need(max(pair), min(pair)) for pair in pairs]
    possible = any(
        all(free - sum(earlier.takes for earlier in order[:i]) >= load.asks for i, load in enumerate(order))
        for order in itertools.permutations(loads)
    )
    assert (start_order(free, loads) is not None) == possible


def test_swaps_are_tried_once():
    """Nine seats on eight equal cards: the proof that there is no way takes steps, not factorials."""
    sites = [Site(f"h{i}", None, tuple(Slot(f"{i}/{n}", "k", 10) for n in range(4))) for i in range(2)]
    demands = [Demand(f"s{i}", 1, (1,), frozenset(), {("k", False): Need(6, 6)}, {"k": "sm"}) for i in range(9)]
    found = place(sites, demands)
    assert found.seatings is None
    assert found.is_proof
    assert found.steps < 200
    assert len(found.partial) == 8


def test_the_bound_is_said():
    sites = [Site("h", None, (Slot("a", "k", 10), Slot("b", "k", 10)))]
    demands = [Demand(f"s{i}", 1, (1,), frozenset(), {("k", False): Need(6, 6)}, {"k": "sm"}) for i in range(2)]
    assert not place(sites, demands, most_steps=1).is_proof
    text = host("a", [(1, "h200"), (2, "h200")]) + seat("s", count=2)
    answer = planned(text, most_steps=1)
    assert answer.fits is None
    assert "whether there is one is unknown" in verdict(answer)
    assert planned(text).fits


# Plans of real checkpoints


def check(plan, box):
    """What must hold of any plan: nobody over budget, distinct cards, evenly over hosts, everything accounted for."""
    cards = {c.uuid: c for h in plan.hosts for c in h.cards}
    assert {seat.seat for seat in plan.seats} == {seat.name for seat in box.seats}
    for card in cards.values():
        held = sum(sum(parts.values()) for parts in card.by_seat.values())
        assert held + card.used_bytes + card.free_bytes == card.total_bytes
        assert card.free_bytes >= 0
        assert len(bar(card)) == BAR
    for seat in plan.seats:
        assert len(set(seat.cards)) == len(seat.cards)
        assert all(seat.seat in cards[on].by_seat for on in seat.cards)
        assert max(Counter(h.host for h in plan.hosts for c in h.cards if c.uuid in seat.cards).values()) * len(
            seat.hosts
        ) == len(seat.cards)
    for one in plan.hosts:
        assert one.limit_bytes is None or one.pinned_bytes <= one.limit_bytes
    assert sum(h.pinned_bytes for h in plan.hosts) == sum(s.host_pinned_bytes for s in plan.seats)


@st.composite
def boxes(draw):
    """Hosts of real cards and seats of small models, some of them sharing, some pinned, some over hosts."""
    number = itertools.count(1)
    kinds = st.sampled_from(["rtx-4090", "h100-80gb", "a100-80gb"])
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    text = "".join(host(name, [(next(number), draw(kinds)) for _ in range(draw(st.integers(1, 3)))]) for name in names)
    for i in range(draw(st.integers(1, 4))):
        asked = {"gpu_memory_utilization": draw(st.sampled_from([0.3, 0.45, 0.9])), "max_num_seqs": 64}
        asked["tensor_parallel_size"] = draw(st.sampled_from([1, 1, 2]))
        if draw(st.booleans()):
            asked["hosts"] = draw(st.sampled_from(names))
        if asked["tensor_parallel_size"] == 2 and draw(st.booleans()):
            asked["spread"] = draw(st.sampled_from(["one card per host", "over hosts"]))
        text += seat(f"s{i}", draw(st.sampled_from(["Qwen/Qwen3-8B", "openai/gpt-oss-20b"])), **asked)
    return text


@settings(deadline=None, max_examples=25)
@given(boxes())
def test_any_plan_is_within_every_budget(text):
    box = parse_box(text)
    plan = planned(text)
    assert lines(plan)[0] == verdict(plan)
    if isinstance(plan, SeatPlan):
        check(plan, box)
        for one, asked in zip(plan.seats, box.seats, strict=True):
            assert not asked.hosts or set(one.hosts) <= set(asked.hosts)
            assert asked.spread != "one card per host" or len(one.hosts) == len(one.cards)
            assert one.kv.tokens >= asked.deployment.max_model_len
            assert len(one.serve) == len(one.hosts)
    else:
        assert plan.seat in {seat.name for seat in box.seats}
        assert plan.fits is False


TWO_HOSTS = host("north", [(1, "rtx-pro-5000-72gb")]) + host("south", [(2, "rtx-pro-5000-72gb")])


def test_one_card_per_host_where_no_host_has_two():
    text = TWO_HOSTS + flash(tensor_parallel_size=2, ple="gpu")
    plan = planned(text)
    check(plan, parse_box(text))
    [one] = plan.seats
    assert plan.fits
    assert one.hosts == ("north", "south")
    assert one.per_rank.weights_bytes / GIB == pytest.approx(62.12, rel=0.005)  # as the running engine reported
    assert [argv[1] for argv in one.serve] == [f"CUDA_VISIBLE_DEVICES={uuid(n)}" for n in (1, 2)]
    head, other = (shlex.join(argv) for argv in one.serve)
    assert "--nnodes 2 --master-addr north --node-rank 0" in head
    assert "--headless" not in head
    assert other.endswith("--node-rank 1 --headless")
    assert any("NCCL crosses the network" in warning for warning in one.warnings)
    assert any("71.22 GiB is an estimate" in warning for warning in one.warnings)


def test_mtp_takes_the_room_of_the_context_and_the_host_table_gives_it_back():
    text = TWO_HOSTS + flash(tensor_parallel_size=2, ple="gpu", mtp=2)
    answer = planned(text)
    assert isinstance(answer, NoFit)
    assert answer.fits is False
    assert answer.shortfall_bytes > GIB
    context, other = answer.nearest_fit.split(" or ")
    assert other == "--ple host"
    longest = int(context.split()[1])
    assert planned(TWO_HOSTS + flash(tensor_parallel_size=2, ple="gpu", mtp=2, max_model_len=longest)).fits
    assert not planned(TWO_HOSTS + flash(tensor_parallel_size=2, ple="gpu", mtp=2, max_model_len=longest + 4096)).fits
    on_host = planned(TWO_HOSTS + flash(tensor_parallel_size=2, ple="host", mtp=2))
    assert on_host.fits
    for one in on_host.hosts:  # half of the table each
        assert one.pinned_bytes / GIB == pytest.approx(47.684 / 2, abs=0.05)


def test_a_pinned_table_counts_against_the_hosts_kill_threshold():
    def on(ram):
        table = flash(max_model_len=131072, gpu_memory_utilization=0.95)
        return planned(host("a", [(1, "rtx-pro-6000")], ram=ram) + table)

    fits = on("68GiB")  # 0.95 x 68 - 16 = 48.6
    assert fits.fits
    assert fits.hosts[0].pinned_bytes / GIB == pytest.approx(47.69, abs=0.02)
    assert any("torch pins 64.00 GiB" in warning for warning in fits.seats[0].warnings)
    assert "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1024" in fits.seats[0].serve[0]
    tight = on("66GiB")  # 46.7
    assert tight.fits is False
    assert "pins more host memory than the best host may give" in verdict(tight)
    assert tight.shortfall_bytes == pytest.approx(47.69 * GIB - (66 * 0.95 - 16) * GIB, abs=0.02 * GIB)
    unknown = on(None)
    assert unknown.fits is None
    assert "no ram given" in verdict(unknown)


def test_a_hybrid_on_four_small_cards():
    text = host("desk", [(n, "rtx-pro-4000") for n in range(4)])
    asked = {"tensor_parallel_size": 4, "max_model_len": 262144, "max_num_seqs": 8, "gpu_memory_utilization": 0.85}
    seats = [seat("coder", "Qwen/Qwen3.5-27B", kv_cache_dtype=kv, **asked) for kv in ("fp8", "auto")]
    eight, sixteen = (planned(text + one) for one in seats)
    assert eight.fits
    check(eight, parse_box(text + seat("coder", "Qwen/Qwen3.5-27B", **asked)))
    assert eight.seats[0].cards == tuple(uuid(n) for n in range(4))
    assert eight.seats[0].hosts == ("desk",)
    assert sixteen.fits is False
    assert "--kv-cache-dtype fp8" in sixteen.nearest_fit or "--max-model-len" in sixteen.nearest_fit


def test_a_box_of_eight_packs_tight():
    text = host("box", [(n, "h100-80gb") for n in range(8)])
    text += seat("big", "Qwen/Qwen3.5-27B", tensor_parallel_size=2) + seat("eight", count=3)
    text += seat("small", "openai/gpt-oss-20b", gpu_memory_utilization=0.45, count=4)
    plan = planned(text)
    check(plan, parse_box(text))
    assert plan.fits
    used = [card for card in plan.hosts[0].cards if card.by_seat]
    assert len(used) == 7  # 2 + 3 + two pairs that share
    shared = [card for card in used if len(card.by_seat) == 2]
    assert len(shared) == 2
    later = list(shared[0].by_seat)[1]
    [report] = [one for one in plan.seats if one.seat == later]
    assert any("start it when" in warning for warning in report.warnings)
    assert plan == planned(text)


def test_sharing_ends_where_the_sum_does():
    one_card = host("a", [(1, "h100-80gb")])
    asked = {"checkpoint": "Qwen/Qwen3-8B", "count": 2}
    assert planned(one_card + seat("s", gpu_memory_utilization=0.49, **asked)).fits
    answer = planned(one_card + seat("s", gpu_memory_utilization=0.5, **asked))  # each also holds a CUDA context
    assert answer.fits is False
    assert answer.seat in ("s-1", "s-2")
    share = float(answer.nearest_fit.split()[1])
    assert answer.nearest_fit.startswith("--gpu-memory-utilization")
    assert planned(one_card + seat("s", gpu_memory_utilization=share, **asked)).fits


def test_the_nearest_change_touches_as_few_seats_as_do():
    text = host("a", [(n, "h100-80gb") for n in range(3)])
    text += seat("big", "Qwen/Qwen3.5-27B", tensor_parallel_size=2) + seat("one") + seat("two", count=2)
    answer = planned(text)
    assert answer.fits is False
    said = re.findall(r"--gpu-memory-utilization ([0-9.]+) for (\w+)", answer.nearest_fit)
    shares = {group: float(share) for share, group in said}
    assert set(shares) == {"one", "two"}
    text = host("a", [(n, "h100-80gb") for n in range(3)])
    text += seat("big", "Qwen/Qwen3.5-27B", tensor_parallel_size=2)
    text += seat("one", gpu_memory_utilization=shares["one"])
    assert planned(text + seat("two", count=2, gpu_memory_utilization=shares["two"])).fits
    assert not planned(text + seat("two", count=2)).fits


def test_seats_stay_on_the_hosts_they_are_pinned_to():
    text = host("a", [(1, "h100-80gb")]) + host("b", [(2, "h100-80gb")])
    plan = planned(text + seat("first") + seat("second", hosts=["a"]))
    assert {one.seat: one.hosts for one in plan.seats} == {"first": ("b",), "second": ("a",)}
    answer = planned(text + seat("first", hosts="a") + seat("second", hosts=["a"]))
    assert answer.fits is False
    assert answer.seat in ("first", "second")


def test_more_cards_than_there_are():
    answer = planned(host("a", [(1, "h100-80gb")]) + seat("wide", tensor_parallel_size=2))
    assert answer.fits is False
    assert "expected 2 cards of one compute capability" in verdict(answer)
    assert answer.nearest_fit == "one more h100-80gb on a"
    assert answer.shortfall_bytes is None


def test_cards_of_one_seat_share_a_capability():
    mixed = host("a", [(1, "h100-80gb"), (2, "rtx-pro-6000"), (3, "h200")])
    plan = planned(mixed + seat("wide", tensor_parallel_size=2))
    assert plan.seats[0].cards == (uuid(1), uuid(3))  # both 9.0
    answer = planned(mixed + seat("wide", tensor_parallel_size=4))
    assert answer.fits is False
    assert "2 short on the best host" in verdict(answer)


def test_a_host_is_crossed_only_where_asked_or_needed():
    text = host("a", [(1, "h100-80gb"), (2, "h100-80gb")]) + host("b", [(3, "h100-80gb"), (4, "h100-80gb")])
    assert planned(text + seat("s", tensor_parallel_size=2)).seats[0].hosts == ("a",)
    apart = planned(text + seat("s", tensor_parallel_size=2, spread="one card per host")).seats[0]
    assert apart.hosts == ("a", "b")
    four = planned(text + seat("s", tensor_parallel_size=4)).seats[0]
    assert [argv.count("--nnodes") for argv in four.serve] == [1, 1]
    assert four.serve[0][1] == f"CUDA_VISIBLE_DEVICES={uuid(1)},{uuid(2)}"


def test_replicas_on_one_host_share_their_table():
    cards = [(n, "rtx-pro-6000") for n in range(4)]
    asked = {"max_model_len": 8192, "gpu_memory_utilization": 0.92}
    alone = planned(host("a", cards) + flash(tensor_parallel_size=2, **asked))
    twice = {"data_parallel_size": 2, "enable_expert_parallel": True} | asked
    both = planned(host("a", cards) + flash(tensor_parallel_size=2, **twice))
    apart = planned(host("a", cards) + flash(tensor_parallel_size=2, count=2, **asked))
    check(both, parse_box(host("a", cards) + flash(tensor_parallel_size=2, **twice)))
    tables = [plan.hosts[0].pinned_bytes / GIB for plan in (alone, both, apart)]
    assert tables == pytest.approx([47.7, 47.7, 2 * 47.7], abs=0.05)
    assert any("/dev/shm" in warning for warning in both.seats[0].warnings)
    assert both.hosts[0].cards[2].by_seat


def test_stages_over_hosts_are_accounted_for_one_by_one():
    text = host("a", [(1, "h100-80gb")]) + host("b", [(2, "h100-80gb")])
    text += seat("s", "Qwen/Qwen3.5-27B", pipeline_parallel_size=2, tensor_parallel_size=1)
    plan = planned(text)
    check(plan, parse_box(text))
    first, last = (one.cards[0].by_seat["s"]["weights"] for one in plan.hosts)
    assert first != last  # the embedding is on the first, the head on the last


def test_a_card_that_shares_the_hosts_memory_counts_there():
    text = host("spark", [(1, "gb10")], ram="121GiB", used="8GiB") + seat("s")
    plan = planned(text)
    assert plan.fits is False  # 0.92 of its memory is more than 0.95 of the host's less what is used
    share = plan.nearest_fit
    assert share.startswith("--gpu-memory-utilization")
    fits = planned(host("spark", [(1, "gb10")], ram="121GiB", used="8GiB") + seat("s", gpu_memory_utilization=0.8))
    assert fits.fits
    assert fits.hosts[0].pinned_bytes > 0.8 * fits.hosts[0].cards[0].total_bytes


def test_what_is_not_modelled_makes_the_answer_unknown():
    answer = planned(host("a", [(1, "h200")]) + seat("s", cpu_offload_gb=4))
    assert answer.fits is None
    assert answer.unmodelled == ("--cpu-offload-gb is not modelled",)


def test_older_engines_and_ray():
    asked = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "engine": "0.23.0"}
    [one] = planned(TWO_HOSTS + seat("s", **asked)).seats
    assert [argv[-2:] for argv in one.serve[:2]] == [("--head", "--port=6379"), ("start", "--address=north:6379")]
    assert one.serve_on == ("north", "south", "north")
    assert "--nnodes" not in one.serve[-1]
    assert any("reads numbers only" in warning for warning in one.warnings)


def test_what_the_engine_makes_of_a_flag_is_passed_on():
    text = host("a", [(1, "h200")]) + seat("s", kv_cache_dtype="fp8")
    plan = planned(text, warn=lambda seat, card: [f"{card.name} ignores {seat.deployment.kv_cache_dtype}"])
    assert plan.seats[0].warnings[-1] == "h200 ignores fp8"


def test_flags_the_release_is_known_to_ignore_are_warned_of():
    text = host("a", [(1, "h200")])
    [one] = planned(text + seat("s", disable_cascade_attn=True)).seats
    assert any(warning.startswith("--disable-cascade-attn becomes nothing") for warning in one.warnings)
    assert not planned(text + seat("s", disable_cascade_attn=True, engine="0.25.1")).seats[0].warnings
    [one] = planned(text + seat("s", kv_cache_dtype="fp8")).seats
    assert any(warning.startswith("--kv-cache-dtype fp8 becomes fp8_ds_mla") for warning in one.warnings)
    assert not planned(text + seat("s", kv_cache_dtype="bfloat16", engine="0.25.1")).seats[0].warnings


def test_the_command_says_what_was_planned():
    """The words after `vllm serve MODEL`, read back, are the deployment."""
    text = TWO_HOSTS + flash(tensor_parallel_size=2, ple="host", mtp=2, commit="7b719225", seed=3)
    [asked] = parse_box(text).seats
    argv = planned(text).seats[0].serve[0]
    start = argv.index("serve")
    assert argv[start + 1] == FLASH
    assert argv[argv.index("--revision") + 1] == "7b719225"
    words = [word for word in argv[start + 2 :] if not word.startswith("--engram")]
    words.remove('{"cpu_offload": true}')
    fields = parse_arguments(words).fields
    assert deployment_from(fields) == asked.deployment.model_copy(update={"ple": "default"})
    assert "--seed=3" in argv


def test_documents_hold_what_the_contract_names():
    plan = planned(TWO_HOSTS + flash(tensor_parallel_size=2, ple="gpu")).model_dump(mode="json")
    answer = planned(host("a", [(1, "l4")]) + flash()).model_dump(mode="json")
    for body in (plan, answer):
        assert {"fits", "seats", "hosts", "shortfall_bytes", "nearest_fit"} <= set(body)
        assert {"host", "ram_bytes", "pinned_bytes", "limit_bytes"} <= set(body["hosts"][0])
    assert {"seat", "checkpoint", "commit", "hosts", "cards", "per_rank", "host_pinned_bytes", "serve"} <= set(
        plan["seats"][0]
    )
    assert answer["fits"] is False
    assert answer["shortfall_bytes"] > 0


@pytest.mark.parametrize("name", ["two-hosts", "four-cards", "eight-cards"])
def test_examples_are_boxes(name):
    box = parse_box((EXAMPLES / f"{name}.toml").read_text(), f"{name}.toml")
    assert all(not seat.unmodelled for seat in box.seats)
    assert {seat.checkpoint for seat in box.seats} <= set(descriptions())


def test_the_report_shows_who_takes_what():
    plan = planned(host("a", [(1, "h100-80gb")]) + seat("s", gpu_memory_utilization=0.45, count=2))
    assert isinstance(plan, SeatPlan)
    text = "\n".join(lines(plan))
    assert text.startswith("2 seats on 1 of 1 card of 1 host: fits")
    [drawn] = [line for line in text.splitlines() if uuid(1) in line and "[" in line]
    shape = drawn[drawn.index("[") + 1 : drawn.index("]")]
    assert shape.count("|") == 1
    total = find_card("h100-80gb").total_bytes
    free = plan.hosts[0].cards[0].free_bytes
    assert shape.count(".") == pytest.approx(BAR * free / total, abs=1)
    assert host_bytes(Need(1, 1, 3, 5, 2), 4) == 3 * 4 + 5 * 2


# The command


@pytest.fixture
def small_box(tmp_path):
    """A box whose checkpoints are facts documents: no Hub is asked."""
    for name in ("Qwen/Qwen3-8B", "openai/gpt-oss-20b"):
        facts = checkpoints()[name].model_copy(update={"commit": "ab" * 20})
        (tmp_path / f"{name.split('/')[1]}.json").write_text(facts.model_dump_json())

    def write(text):
        path = tmp_path / "box.toml"
        for name in ("Qwen/Qwen3-8B", "openai/gpt-oss-20b"):
            text = text.replace(f'"{name}"', json.dumps(str(tmp_path / f"{name.split('/')[1]}.json")))
        path.write_text(text)
        return str(path)

    return write


def test_fit_plan_prints_one_document(small_box, capsys):
    box = small_box(host("a", [(1, "h100-80gb")]) + seat("s"))
    assert run(app, ["plan", box, "--json"]) == YES
    said = capsys.readouterr()
    body = json.loads(said.out)
    [one] = body["seats"]
    assert (one["checkpoint"], one["commit"]) == ("Qwen/Qwen3-8B", "ab" * 20)
    assert one["serve"] == [["env", f"CUDA_VISIBLE_DEVICES={uuid(1)}", "vllm", "serve", "Qwen/Qwen3-8B", "--revision",
                            "ab" * 20, "--max-model-len", "8192"]]  # fmt: skip
    assert not said.err


def test_fit_plan_says_no_and_what_is_wrong(small_box, capsys):
    assert run(app, ["plan", small_box(host("a", [(1, "rtx-4090")]) + seat("s", "Qwen/Qwen3-8B", count=2))]) == NO
    assert "seat s-" in capsys.readouterr().out
    assert run(app, ["plan", small_box(host("a", [(1, "rtx-4090")]) + seat("s", hots=["a"])), "--json"]) == USAGE
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "bad_input"
    assert "'hosts' meant" in error["message"]
    assert run(app, ["plan", "no-such-box.toml"]) == USAGE
