"""The command line of `fit`: the engine's own option names in, an account per rank out."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from screen.cache import Cache
from screen.desk import Desk, default_data_dir, opened, read_text
from screen.intake import Taken, config_files, take

from . import own, report, seat_report, shipped
from .beside import beside, beside_lines
from .box import parse_box
from .calibrate import Case, case_of, checked, correction, deployment_of, point_of
from .cards import CARDS, Card, find_card
from .console import NO, PARTLY, YES, application, data, json_line, message, run, table
from .console import report as tell
from .engines import build_question
from .errors import BadInput, ToolkitError
from .estimate import Estimate, estimate
from .facts import Facts
from .gates import HEAD_SIZES_OF, USUAL_LAYERS, Needed, gates_document, is_accepted, needed, show_gates, usual_layers
from .live import ask, narrow_table
from .logs import parse_log, parse_metrics
from .options import OPTIONS, deployment_from, parse_arguments, read_option, speculative
from .plot import picture_form, plot
from .readings import against, parse_reading
from .releases import READ_ON
from .scoring import FORMULAS, score, summaries, worst_first
from .seats import plan_seats
from .units import GIB, gib

app = application("fit", "VRAM per rank, KV cache and longest context of a checkpoint, before it is downloaded. "
                  "`fit CHECKPOINT --gpu CARD` answers; `fit run --help` has its options.")  # fmt: skip

NO_CARD = "h100-80gb"  # answered for, where no card is named

Endpoint = Annotated[str | None, typer.Option(help="the Hub to ask [HF_ENDPOINT, else https://huggingface.co]")]
Token = Annotated[str | None, typer.Option(help="access token [as huggingface_hub finds it]")]
CacheDir = Annotated[Path | None, typer.Option(help="where headers and small files are kept")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object a line")]
Demo = Annotated[bool, typer.Option("--demo", help="read repos from the embedded demo Hub")]
Points = Annotated[Path | None, typer.Option("--points", help="your own measured points [in the user's data dir]")]
EnginePython = Annotated[str | None, typer.Option(metavar="PATH", help="with --live: the python of an environment with "
                         "vllm, or a command that starts it")]
Gpu = Annotated[list[str] | None, typer.Option("--gpu", metavar="CARD", help="a card or a size; again for several")]


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with an option for every engine option; it is passed the fields they set as `engine`."""
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def with_flags(**given: Any) -> Any:
        fields: dict[str, Any] = {}
        for option in OPTIONS:
            value = given.pop(f"engine_{option.field}")
            if option.is_switch and value:
                value = "true"
            if value not in (None, False):
                fields[option.field] = read_option(option.flags[0], value)[1]
        return command(**given, engine=fields)

    extra = [
        inspect.Parameter(
            f"engine_{option.field}", inspect.Parameter.KEYWORD_ONLY, default=False if option.is_switch else None,
            annotation=Annotated[bool if option.is_switch else str | None,
                                 typer.Option(*option.flags, help=option.help, show_default=False)],
        )
        for option in OPTIONS
    ]  # fmt: skip
    parameters = [*(parameter for name, parameter in own.items() if name != "engine"), *extra]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


@app.callback(invoke_without_command=True)
def about(show_version: Annotated[bool, typer.Option("--version", help="print the version and stop")] = False) -> None:
    if show_version:
        data(f"fit {version('checkpoint-toolkit')} (engine tables of {READ_ON})")
        raise typer.Exit(YES)


@app.command("run", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_engine_options
def run_command(
    *,
    context: typer.Context,
    checkpoints: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="a repo, a local folder, or facts "
                           "JSON from screen (a file, or - for stdin)")],
    gpu: Gpu = None,
    speculative_config: Annotated[str | None, typer.Option(help="the engine's own JSON; method mtp is known")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="where the config is silent")] = None,
    head_dim: Annotated[int | None, typer.Option(help="where the config is silent")] = None,
    compare_kv: Annotated[str | None, typer.Option(metavar="DTYPES", help="a row for each KV dtype: bf16,fp8")] = None,
    compare_mtp: Annotated[str | None, typer.Option(metavar="DEPTHS", help="a row for each MTP depth: 0,2,4")] = None,
    compare_ple: Annotated[bool, typer.Option("--compare-ple", help="a row each for the table on the card and in host "
                           "memory")] = False,
    kv_reading: Annotated[str | None, typer.Option(metavar="LEFT,NEEDED@TOKENS", help="what your running engine said, "
                          "2.07GiB,5.68GiB@262144: the longest context that implies")] = None,
    live: Annotated[bool, typer.Option("--live", help="have the engine build it for the card, beside the formulas")]
    = False,
    engine_python: EnginePython = None,
    points: Points = None,
    save_plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="picture: .svg .png .html")] = None,
    demo: Demo = False, as_json: Json = False,
    endpoint: Endpoint = None, token: Token = None, cache_dir: CacheDir = None,
    engine: dict[str, Any],
) -> int:  # fmt: skip
    """Whether it fits, with how much KV cache and how long a context; per rank, tensor by tensor."""
    given = parse_arguments([*checkpoints, *context.args])
    fields, reasons = engine | given.fields, given.reasons
    if save_plot:
        picture_form(save_plot)  # before anything is read
    if not given.words:
        raise BadInput("CHECKPOINT: expected a repo, a local folder, or facts JSON, got none")
    if speculative_config:
        fields["mtp"], more = speculative(speculative_config)
        reasons += more
    silent = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    overrides = {name: value for name, value in silent.items() if value is not None} | fields.get("hf_overrides", {})
    cards = [find_card(name, fields.get("capability")) for name in gpu or [NO_CARD]]
    variants = list(_variants(fields, compare_kv, compare_mtp, compare_ple))
    reading = parse_reading(kv_reading) if kv_reading else None
    if reading and len(cards) * len(variants) * len(given.words) > 1:
        raise BadInput("--kv-reading: expected one checkpoint, card and deployment, got several")
    cases = _own_cases(points)
    answers: list[Estimate] = []
    failed = False
    with opened(demo, endpoint, token, cache_dir) as (desk, cache, _):
        for taken in _all_taken(given.words, desk, cache, overrides):
            if taken is None or taken.facts is None:
                failed = True
                continue
            for card, variant in itertools.product(cards, variants):
                asked = deployment_from(variant | {"capability": variant.get("capability") or card.capability})
                taught = correction(cases, asked, card.name, taken.facts.repo)
                answer = estimate(taken.facts, card, asked, shipped.coefficients(), correction=taught,
                                  unmodelled=(*reasons, *taken.reasons))  # fmt: skip
                said = checked(cases, taken.facts, card.name, asked) if cases else ()
                answer = answer.model_copy(update={"remarks": (*said, *answer.remarks)})
                if reading:
                    answer = answer.model_copy(update={"kv_reading": against(reading, taken.facts, card, asked)})
                if live:
                    question = build_question(config_files(taken, cache), asked)
                    built = beside(ask(_engine_command(engine_python), question), taken.facts, asked)
                    answer = answer.model_copy(update={"live": built})
                answers.append(answer)
    if as_json:
        for each in answers:
            json_line(each.model_dump(mode="json"))
    elif answers:
        data("\n".join(report.account(answers[0]) if len(answers) == 1 else report.comparison(answers)))
    for each in [] if as_json else answers:
        if each.live:
            data("\n".join(["", *beside_lines(each.live)]))
    if gpu is None:
        message(f"no --gpu given: answered for an {NO_CARD}; `fit gpus` lists the cards")
    if save_plot and answers:
        plot(answers, save_plot)
    if failed:
        return PARTLY
    return YES if answers and all(each.fits and not (each.live and each.live.refused) for each in answers) else NO


def _all_taken(words: Sequence[str], desk: Desk, cache: Cache, overrides: Mapping[str, Any]) -> Iterator[Taken | None]:
    """What the words name. Where there are several, one that cannot be read is told of, and the others go on: None."""
    for word in words:
        try:
            for taken in take(word, desk, cache, overrides):
                if taken.skipped:
                    message(f"{taken.name}: not planned for, screen did not keep it: {taken.skipped}")
                else:
                    yield taken
        except ToolkitError as error:
            if len(words) == 1:
                raise
            tell(error, as_json=False)
            yield None


def _variants(fields: dict[str, Any], kv: str | None, mtp: str | None, ple: bool) -> Iterator[dict[str, Any]]:
    """The deployments asked for: the one given, or a product of what is compared."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    dtypes = [names.get(d.strip(), d.strip()) for d in kv.split(",")] if kv else [fields.get("kv_cache_dtype")]
    depths = [read_option("--mtp", depth.strip())[1] for depth in mtp.split(",")] if mtp else [fields.get("mtp")]
    for dtype, depth, place in itertools.product(dtypes, depths, ["gpu", "host"] if ple else [fields.get("ple")]):
        yield fields | {"kv_cache_dtype": dtype, "mtp": depth, "ple": place}


def _facts(word: str, desk: Desk, cache: Cache, overrides: Mapping[str, Any]) -> list[Facts]:
    """Facts of all that one CHECKPOINT word names. Raises BadInput where an override cannot reach them."""
    found = []
    for taken in take(word, desk, cache, overrides):
        if taken.facts is None or taken.reasons:
            because = "; ".join(taken.reasons) or taken.skipped
            raise BadInput(f"{taken.name}: expected facts to plan by, got none; {because}")
        found.append(taken.facts)
    return found


@app.command("plan")
def plan_command(
    box: Annotated[Path, typer.Argument(metavar="BOX.toml", help="hosts, their cards by UUID, and the seats")],
    points: Points = None,
    demo: Demo = False, as_json: Json = False,
    endpoint: Endpoint = None, token: Token = None, cache_dir: CacheDir = None,
) -> int:  # fmt: skip
    """Which seats go on which cards of which hosts, with the commands that start them; or what is missing."""
    asked = parse_box(read_text(box), box.name)
    cases = _own_cases(points)
    facts: dict[str, Facts] = {}
    with opened(demo, endpoint, token, cache_dir) as (desk, cache, _):
        for seat in asked.seats:
            if seat.group not in facts:
                word = f"{seat.checkpoint}@{seat.commit}" if seat.commit else seat.checkpoint
                found = _facts(word, desk, cache, seat.deployment.hf_overrides)
                if len(found) != 1:
                    raise BadInput(f"seat {seat.group} checkpoint: expected one checkpoint, got {len(found)} in {word}")
                facts[seat.group] = found[0]
    planned = plan_seats(
        asked, facts, shipped.coefficients(),
        correct=lambda card, one: correction(cases, one, card.name),
    )  # fmt: skip
    if as_json:
        json_line(planned.model_dump(mode="json"))
    else:
        data("\n".join(seat_report.lines(planned)))
    return YES if planned.fits else NO


@app.command("score")
def score_command(
    points: Points = None,
    formula: Annotated[str | None, typer.Option(help="only formulas whose name holds this")] = None,
    every: Annotated[bool, typer.Option("--all", help="every formula against every point, not only the worst")] = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Every formula against every measured point, worst first: the accuracy table."""
    chosen = [f for f in FORMULAS if formula is None or formula in f.name]
    if not chosen:
        names = ", ".join(each.name for each in FORMULAS)
        raise BadInput(f"--formula {formula!r}: expected part of a formula's name, got none of them", hint=names)
    cases = [case_of(p, shipped.checkpoints()[p.checkpoint], shipped.coefficients()) for p in shipped.points()]
    scores = score([*cases, *_own_cases(points)], chosen)
    ordered = list(worst_first(scores))
    if as_json:
        for each in ordered:
            json_line({
                "formula": each.formula, "term": each.term, "point": each.point, "predicted_bytes": each.predicted,
                "measured_bytes": each.measured, "error_percent": each.error_percent, "held_out": each.held_out,
            })  # fmt: skip
        return YES
    off_logs = {case.point.point for case in cases if case.point.rounding}  # printed figures, by other people's engines
    held = [s for s in scores if s.held_out]
    groups = [
        ("seen while fitting", [s for s in scores if not s.held_out]),
        ("held out, read from the engine", [s for s in held if s.point not in off_logs]),
        ("held out, read off public logs", [s for s in held if s.point in off_logs]),
    ]
    shown = ordered if every else [s for s in ordered if s.formula == chosen[0].name or len(chosen) == 1][:20]
    data("\n".join([*report.scores(shown), "", *report.summary([(t, summaries(rows)) for t, rows in groups if rows]),
                    "", *report.how_to_read()]))
    if formula is None:
        data("\n".join(["", *report.passed_over(shipped.passed_over())]))
    return YES


@app.command("calibrate")
@with_engine_options
def calibrate_command(
    *,
    log: Annotated[Path, typer.Argument(help="an engine's start-up log; `/metrics` may be appended to it")],
    checkpoint: Annotated[str, typer.Argument(help="the checkpoint it served: a repo, a local folder, or facts JSON")],
    gpu: Annotated[str, typer.Option("--gpu", metavar="CARD", help="the card it ran on")],
    name: Annotated[str | None, typer.Option(help="a name for the point [the log's file name]")] = None,
    points: Points = None,
    demo: Demo = False, as_json: Json = False,
    endpoint: Endpoint = None, token: Token = None, cache_dir: CacheDir = None,
    engine: dict[str, Any],
) -> int:  # fmt: skip
    """Reads a start-up log into a point of your own, which from then on corrects answers for that engine and card."""
    text = read_text(log)
    readings = parse_log(text)
    card = find_card(gpu, engine.get("capability"))
    with opened(demo, endpoint, token, cache_dir) as (desk, cache, _):
        [facts] = _facts(checkpoint, desk, cache, engine.get("hf_overrides", {}))
    base = deployment_from({"capability": card.capability} | engine)
    asked = deployment_of(readings, base)
    point = point_of(readings, facts, asked, card, name or log.stem, parse_metrics(text))
    case = case_of(point, facts, shipped.coefficients())
    where = points or _own_points()
    own.read_cases(where, shipped.coefficients())  # a damaged file is reported, not overwritten
    own.keep(where, point, facts)
    rows = [s for s in score([case]) if s.predicted is not None]
    if as_json:
        json_line(point.model_dump(mode="json"))
    else:
        data("\n".join([*report.scores(rows), "", *checked([case], facts, card.name, asked)]))
    message(f"{point.point}: {len(point.measured)} readings kept in {where}")
    return YES


def _own_cases(points: Path | None) -> list[Case]:
    if points and not points.exists():
        raise BadInput(f"--points {points}: expected a file that `fit calibrate` wrote, got nothing there")
    return own.read_cases(points or _own_points(), shipped.coefficients())


def _own_points() -> Path:
    return default_data_dir() / "points.jsonl"


@app.command("gates")
def gates_command(
    card: Annotated[str | None, typer.Option("--card", "--gpu", metavar="CARD", help="a card of `fit gpus`")] = None,
    capability: Annotated[str | None, typer.Option(help="such as 12.0, for a card not listed")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="only what this repo, folder or facts JSON needs")] = None,
    attention: Annotated[str | None, typer.Option(help=" | ".join(HEAD_SIZES_OF))] = None,
    head_size: Annotated[int | None, typer.Option(help="of the attention layer")] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", "--kv-cache-dtype", help="of the KV cache")] = None,
    engine: Annotated[str, typer.Option(metavar="vllm==V", help="that release's shipped table")] = "vllm==0.33.0",
    enable_expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel")] = False,
    live: Annotated[bool, typer.Option("--live", help="ask the engine itself, not the shipped table")] = False,
    engine_python: EnginePython = None,
    demo: Demo = False, as_json: Json = False,
    endpoint: Endpoint = None, token: Token = None, cache_dir: CacheDir = None,
) -> int:  # fmt: skip
    """Which kernels and attention backends an engine version accepts on a card, and what it picks."""
    capability = capability or (find_card(card).capability if card else None)
    if capability is None and not live:
        raise BadInput("fit gates: expected --card CARD or --capability 12.0, got neither; `fit gpus` lists the cards")
    fields = {"version": read_option("--engine", engine)[1], "capability": capability}
    asked = deployment_from(fields | {"expert_parallel": enable_expert_parallel, "kv_cache_dtype": kv_dtype})
    wanted = Needed(usual_layers(attention, head_size, kv_dtype))
    if wanted.layers is not USUAL_LAYERS:
        wanted = wanted._replace(linear=(), experts=())
    if checkpoint:
        with opened(demo, endpoint, token, cache_dir) as (desk, cache, _):
            [facts] = _facts(checkpoint, desk, cache, {})
        wanted = needed(facts, asked)
    if live:
        today = datetime.now(UTC).date().isoformat()
        layers = [(kind, size) for kind, size, _ in wanted.layers]
        names = None if wanted.linear is None else [*wanted.linear, *(wanted.experts or ())]
        gates = narrow_table(_engine_command(engine_python), capability, layers, names, date=today)
        capability = next(iter(gates["capabilities"]))
    else:
        gates = shipped.engine_table(asked.version)
    parallel = "ep" if enable_expert_parallel else "tp"
    document = gates_document(gates, capability or "", wanted, source="live" if live else "shipped", parallel=parallel)
    if as_json:
        json_line(document)
    else:
        data("\n".join(show_gates(document)))
    return YES if (checkpoint is None and attention is None) or is_accepted(document) else NO


def _engine_command(given: str | None) -> list[str]:
    """The words that start the engine's interpreter; this one's, where vllm is importable here."""
    if given is not None:
        return shlex.split(given)
    if importlib.util.find_spec("vllm") is None:
        raise BadInput("--live: expected --engine-python PATH, got none, and no vllm is importable here")
    return [sys.executable]


@app.command("gpus")
def gpus_command(as_json: Json = False) -> int:
    """The card table: the memory an engine sees, and where each number was read."""
    if as_json:
        for card in CARDS:
            json_line(card._asdict())
        return YES
    data("\n".join(table([["card", "capability", "GiB", "estimated", "source"], *map(_card_row, CARDS)],
                         right=lambda column: column == 2)))  # fmt: skip
    return YES


def _card_row(card: Card) -> list[str]:
    margin = f"+- {card.margin_bytes / GIB:.2f}" if card.estimated else "-"
    return [card.name, card.capability or "unknown", gib(card.total_bytes), margin, card.source]


def main() -> None:
    """The console script."""
    code = run(app)
    sys.stdout.flush()
    sys.exit(code)
