"""The command line of `screen`: environment, files, clock and terminal enter here and nowhere else."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from tqdm import tqdm

from formulas.console import INTERRUPTED, NO, PARTLY, YES, application, data, json_line, message, run
from formulas.console import report as tell
from formulas.engines import formats
from formulas.errors import BadInput, ToolkitError
from formulas.facts import Facts
from formulas.shipped import coefficients, engine_registries, engine_table, engine_tables
from formulas.units import MIB, human

from . import report
from .cache import Cache
from .chain import Criteria, Judged, Verdict
from .desk import Desk, default_cache_dir, opened, read_text
from .differences import differences
from .find import Query, Relation, find, repos_file
from .gates import GATES
from .policy import KEYS, Policy, parse_policy
from .repo import Entry
from .sides import read_and_compare
from .survey import survey
from .target import Engine, Target, parse_target
from .transport import Cost

app = application("screen", "A shortlist of checkpoints, from what their headers say: no weights are downloaded. "
                  "`screen SOURCE...` makes one; `screen run --help` has its options.")  # fmt: skip

Endpoint = Annotated[str | None, typer.Option(help="the Hub to ask [HF_ENDPOINT, else https://huggingface.co]")]
Token = Annotated[str | None, typer.Option(help="access token [as huggingface_hub finds it]")]
CacheDir = Annotated[Path | None, typer.Option(help="where headers and small files are kept")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object a line")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Markdown tables")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress on stderr")]
QuantsOf = Annotated[str | None, typer.Option(metavar="BASE", help="models made from this one, found on the Hub")]
Kinship = Annotated[Relation, typer.Option(help="how they were made from it")]
Search = Annotated[str | None, typer.Option(help="models whose name holds this, found on the Hub")]
Author = Annotated[str | None, typer.Option(help="models of this author, found on the Hub")]
Tags = Annotated[list[str] | None, typer.Option(help="of those found, only models with this tag; repeatable")]
Since = Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="of those found, only models changed since")]
Limit = Annotated[int, typer.Option(min=1, help="at most so many are found")]
WithCard = Annotated[bool, typer.Option("--card", help="read the model cards too, for notes on what they state")]
Demo = Annotated[bool, typer.Option("--demo", help="use the embedded demo Hub; without a SOURCE, all of its repos")]


def with_policy(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with an option for every policy key, `--max-size` for `max_size`; it is passed them as `flags`."""
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def with_flags(**given: Any) -> Any:
        flags = {key: given.pop(key) for key in KEYS}
        return command(**given, flags=flags)

    options = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=None,
            annotation=Annotated[str | None, typer.Option(help=field.description, metavar=_form(key))],
        )
        for key, field in Policy.model_fields.items()
    ]  # fmt: skip
    parameters = [*(parameter for name, parameter in own.items() if name != "flags"), *options]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def _form(key: str) -> str:
    """What a policy key takes, for its help."""
    choices = [choice for choice in get_args(Policy.model_fields[key].annotation) if isinstance(choice, str)]
    return "|".join(choices) or key.rpartition("_")[2].upper()


@app.callback(invoke_without_command=True)
def about(show_version: Annotated[bool, typer.Option("--version", help="print the version and stop")] = False) -> None:
    if show_version:
        data(f"screen {version('checkpoint-toolkit')}")
        raise typer.Exit(YES)


@app.command("run", hidden=True)
@with_policy
def run_command(
    *,
    sources: Annotated[list[str] | None, typer.Argument(metavar="SOURCE...", help="a file of org/name[@rev] lines, "
                       "- for stdin, a repo, or a local checkpoint folder or file")] = None,
    policy: Annotated[Path | None, typer.Option(help="a TOML file of policy keys; flags override it")] = None,
    like: Annotated[str | None, typer.Option(help="reference checkpoint: report tensors it does not have")] = None,
    fits: Annotated[str | None, typer.Option(metavar="CARD:N", help="cards it must fit, by the arithmetic of `fit`; "
                    "options of the engine may follow: 'h200:2 --mtp 2'")] = None,
    on: Annotated[str | None, typer.Option(metavar="CARD:N", help="cards an engine must run it on: kernels, attention "
                  "backends, ranks; options of the engine may follow, as with --fits")] = None,
    context: Annotated[str | None, typer.Option(metavar="TOKENS", help="the context it must hold, on the cards of "
                       "--fits or --on")] = None,
    engine: Annotated[str | None, typer.Option(metavar="vllm==V", help="that release of the engine [0.33.0]")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="the engine's option")] = None,
    enable_expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel", help="the engine's option")]
    = False,
    card: WithCard = False,
    quants_of: QuantsOf = None, relation: Kinship = Relation.QUANTIZED, search: Search = None, author: Author = None,
    tag: Tags = None, since: Since = None, limit: Limit = 100,
    save_list: Annotated[Path | None, typer.Option(help="write what was found as a file of repo lines")] = None,
    demo: Demo = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="comma-separated values, bytes as numbers")] = False,
    as_markdown: Markdown = False,
    endpoint: Endpoint = None,
    token: Token = None,
    cache_dir: CacheDir = None,
    quiet: Quiet = False,
    flags: dict[str, Any],
) -> int:  # fmt: skip
    """Screens candidates: a verdict a line, in the order of the lines."""
    if as_json + as_csv + as_markdown > 1:
        raise BadInput("--json, --csv, --markdown: expected one form of output, got several")
    text = read_text(policy) if policy else ""
    wanted = parse_policy(text, name=str(policy), flags=flags)
    given = _engine_words(engine=engine, kv_cache_dtype=kv_cache_dtype, enable_expert_parallel=enable_expert_parallel)
    if (context or given) and not (fits or on):
        raise BadInput(f"{'--context' if context else given[0]}: expected --fits or --on CARD:N with it, got none")
    target = parse_target(fits, context, coefficients(), more=given) if fits else None
    run_on = _engine_on(parse_target(on, context, coefficients(), flag="--on", more=given)) if on else None
    if run_on and context and not fits:
        target = run_on.target
    query = Query(quants_of, relation, search, author, tuple(tag or ()), since and since.date(), limit)
    if save_list and not query.asks:
        raise BadInput("--save-list: expected something to look for (--quants-of, --search, --author, --tag), got none")
    with opened(demo, endpoint, token, cache_dir) as (desk, cache, all_of_them):
        lines = desk.lines(sources or ([] if query.asks else all_of_them))
        if query.asks:
            found = find(desk.hub, query, Cost())
            lines += desk.also([model.id for model in found], lines)
            if save_list:
                _write_text(save_list, repos_file(query, found, desk.hub.endpoint, datetime.now(UTC)))
            if not lines:
                message("nothing was found, and nothing was named")
                return NO
        if not lines:
            raise BadInput("SOURCE: expected a file of repo lines, -, a repo or a folder, got no candidate")
        reference = _facts_of(like, desk, cache) if like else None
        judged = []
        criteria = Criteria(wanted, datetime.now(UTC), reference, card, target, run_on)
        deployed = run_on.target if run_on else target
        overrides = deployed.deployment.hf_overrides if deployed else {}
        for item in _watched(survey(lines, criteria, cache, overrides), len(lines), quiet):
            judged.append(item)
            if as_json:
                json_line(item.verdict.model_dump(mode="json"))
    verdicts = [item.verdict for item in judged]
    if as_csv:
        data(report.comma_separated(verdicts).removesuffix("\n"))
    elif not as_json:
        data("\n".join(report.shortlist(judged, report.MARKDOWN if as_markdown else report.TEXT)))
    return exit_code(verdicts)


@app.command("find")
def find_command(
    *,
    quants_of: QuantsOf = None, relation: Kinship = Relation.QUANTIZED, search: Search = None, author: Author = None,
    tag: Tags = None, since: Since = None, limit: Limit = 100,
    demo: Demo = False, as_json: Json = False, endpoint: Endpoint = None, token: Token = None,
) -> int:  # fmt: skip
    """Candidates on the Hub, as a file of repo lines: `screen find --quants-of BASE > repos.txt`."""
    query = Query(quants_of, relation, search, author, tuple(tag or ()), since and since.date(), limit)
    if not query.asks:
        raise BadInput("find: expected --quants-of, --search, --author or --tag, got nothing to look for")
    with opened(demo, endpoint, token, None) as (desk, _, _):
        found = find(desk.hub, query, Cost())
        if not as_json:
            data(repos_file(query, found, desk.hub.endpoint, datetime.now(UTC)).removesuffix("\n"))
    for model in found if as_json else ():
        json_line(model.model_dump(mode="json", include={"id", "last_modified", "created_at", "downloads", "likes",
                                                         "gated", "tags"}))  # fmt: skip
    return YES if found else NO


@app.command()
def show(
    repo: Annotated[str, typer.Argument(help="a repo, or a local checkpoint folder or file")],
    card: WithCard = False,
    demo: Demo = False, as_json: Json = False, as_markdown: Markdown = False,
    endpoint: Endpoint = None, token: Token = None, cache_dir: CacheDir = None,
) -> int:  # fmt: skip
    """One checkpoint's census: bytes by stack, role and dtype, experts, MTP, PLE, quantisation."""
    with opened(demo, endpoint, token, cache_dir) as (desk, cache, _):
        [item] = survey([desk.line(repo)], Criteria(Policy(scan="ignore"), datetime.now(UTC), card=card), cache)
    if as_json:
        json_line(item.verdict.model_dump(mode="json"))
    elif (error := item.verdict.error) is not None:
        tell(ToolkitError(error.message, hint=error.hint), as_json=False)
    else:
        data("\n".join(report.census(item.verdict, (report.MARKDOWN if as_markdown else report.TEXT).table)))
    return exit_code([item.verdict])


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="a repo (org/name[@rev]), or a local checkpoint folder or file")],
    b: Annotated[str, typer.Argument(help="another one")],
    demo: Demo = False, as_json: Json = False, as_markdown: Markdown = False,
    endpoint: Endpoint = None, token: Token = None, cache_dir: CacheDir = None,
) -> int:  # fmt: skip
    """Two checkpoints: the same bytes, by digests alone? And if not, the same structure? Exit 0 for the same bytes."""
    with opened(demo, endpoint, token, cache_dir) as (desk, cache, _):
        found = read_and_compare(desk.line(a), desk.line(b), cache, on_read=_show_digest)
    if as_json:
        json_line(found.model_dump(mode="json"))
    else:
        data("\n".join(differences(found, (report.MARKDOWN if as_markdown else report.TEXT).table)))
    return YES if found.same_bytes else NO


@app.command()
def gates(as_json: Json = False, as_markdown: Markdown = False) -> int:
    """Every gate: the evidence it needs, what it decides by, the policy keys it obeys."""
    for gate in GATES if as_json else ():
        json_line({"gate": gate.name, "needs": gate.needs.word, "source": gate.source, "decides_by": gate.decides_by,
                   "keys": ", ".join(gate.keys)})  # fmt: skip
    if not as_json:
        data("\n".join((report.MARKDOWN if as_markdown else report.TEXT).table(report.gates(GATES), "")))
    return YES


@app.command("cache")
def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="empty it")] = False,
    as_json: Json = False, cache_dir: CacheDir = None,
) -> int:  # fmt: skip
    """What the cache of headers and small files holds."""
    cache = Cache(cache_dir or default_cache_dir())
    usage = cache.clear() if clear else cache.usage()
    if as_json:
        json_line(usage._asdict() | {"cleared": clear})
        return YES
    kinds = [[kind, str(entries), human(size)] for kind, (entries, size) in usage.by_kind.items()]
    rows = [["kind", "entries", "size"], *kinds, ["total", str(usage.entries), human(usage.bytes)]]
    data("\n".join([*report.aligned(rows, "entries size"), "", f"{usage.folder}, at most {human(usage.limit_bytes)}"]))
    if clear:
        message("cleared")
    return YES


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """4 if any repo could not be judged, else 0 if any is kept, else 3."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return PARTLY if "error" in outcomes else YES if "keep" in outcomes else NO


def _engine_words(**given: str | bool | None) -> tuple[str, ...]:
    """Options of the engine as its own command line has them."""
    words = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)] if value else []
    return tuple(words)


def _engine_on(target: Target) -> Engine:
    """What the release says of itself on those cards. Raises BadInput for a card its table does not know."""
    version, capability = target.deployment.version, target.deployment.capability
    if capability is None:
        raise BadInput(f"--on {target.card.name}: expected a card whose compute capability is known, got none; "
                       "pass it: --on '71.2GiB:2 --capability 12.0'")  # fmt: skip
    table = engine_table(version) if version in engine_tables() else None
    if table is not None:
        formats(table, capability)
    return Engine(target, table, engine_registries())


def _watched(items: Iterator[Judged], count: int, quiet: bool) -> Iterator[Judged]:
    """The items, with a bar on stderr where that is a terminal."""
    return iter(tqdm(items, total=count, unit="repo", file=sys.stderr, leave=False,
                     disable=quiet or not sys.stderr.isatty()))  # fmt: skip


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadInput(f"{path}: expected a file that can be written, got {error.strerror}") from None


def _show_digest(entry: Entry) -> None:
    if entry.blob.size >= MIB:
        message(f"{entry.path}: digesting {human(entry.blob.size)}")


def _facts_of(reference: str, desk: Desk, cache: Cache) -> Facts:
    """The facts of a reference checkpoint, read whole. Raises BadInput where it cannot be."""
    [item] = survey(desk.lines([reference]), Criteria(Policy(scan="ignore"), datetime.now(UTC)), cache)
    if item.verdict.facts is None or item.verdict.facts.tensor_groups is None:
        decisive, error = item.verdict.decisive(), item.verdict.error
        because = error.message if error else decisive.because if decisive else "its headers were not reached"
        raise BadInput(f"--like {reference}: expected a checkpoint to compare with, got none; {because}")
    return item.verdict.facts


def main() -> None:
    """The console script."""
    code = run(app)
    sys.stdout.flush()
    if code == INTERRUPTED:
        os._exit(code)  # reads still on the wire would be waited for; the cache is whole at any moment
    sys.exit(code)
