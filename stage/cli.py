"""The command line of `stage`: environment, clock, terminal and network enter here and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from formulas.console import NO, YES, OutputLost, application, data, json_line, message, run
from formulas.console import report as show_error
from formulas.errors import BadInput, DiskFull, NotFound, ToolkitError
from formulas.units import KIB, human, parse_size
from screen.hub import Hub, connect
from screen.pacing import Wait
from screen.repo import parse_repo_line
from screen.wire import Limits

from . import execute, inventory, progress, report
from .asked import read_targets
from .board import Event
from .digests import HASHERS
from .disk import disk_free
from .execute import Places
from .job import Order, failed_event, find, plan_document, stage
from .lock import hold
from .manifest import Manifest
from .serve import Mirror
from .sources import Thresholds
from .store import Store
from .verify import verify

app = application("stage", "Verified checkpoints on this node's disk: resumable, from whichever source is fast.")
DEFAULTS, WIRE = Thresholds(), Limits()
SMALLEST_PART = 64 * KIB  # a smaller range costs more in its head than in its bytes


def _seconds(help: str) -> Any:
    """An option that is a span of time: never none, never less."""
    return typer.Option(min=0.01, help=help)


Repos = Annotated[list[str] | None, typer.Argument(metavar="REPO[@REV]...", help="the revision is main unless given")]
StoreDir = Annotated[Path | None, typer.Option("--store", help="the store [CKPT_STORE, else the user's data folder]")]
Endpoint = Annotated[str | None, typer.Option(help="the Hub to ask [HF_ENDPOINT, else https://huggingface.co]")]
Token = Annotated[str | None, typer.Option(help="access token [as huggingface_hub finds it]")]
From = Annotated[str | None, typer.Option("--from", help="lines of `screen --json`, a file or -: the rows it kept")]
Include = Annotated[list[str] | None, typer.Option(help="only files that match, e.g. '*.json'; repeatable")]
Exclude = Annotated[list[str] | None, typer.Option(help="no files that match; repeatable")]
Reuse = Annotated[list[Path] | None, typer.Option(help="a folder that may hold some of the bytes; repeatable")]
Lock = Annotated[Path | None, typer.Option("--lock", help="a manifest to take commit, sizes and digests from: no API")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object a line")]
Quiet = Annotated[bool, typer.Option("--quiet", help="nothing on stderr but errors")]
LockWait = Annotated[float, typer.Option(help="seconds to wait for another run on this store")]


@app.callback(invoke_without_command=True)
def about(show_version: Annotated[bool, typer.Option("--version", help="print the version and stop")] = False) -> None:
    if show_version:
        data(_tool())
        raise typer.Exit(YES)


@app.command("run", hidden=True)
def run_command(
    repos: Repos = None,
    verdicts: From = None,
    mirror: Annotated[list[str] | None, typer.Option(help="another place for the bytes; repeatable")] = None,
    to: Annotated[Path | None, typer.Option(help="also lay the snapshot out in this folder, as plain files")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="with --to: writable copies, no read-only links")] = False,
    hf_cache: Annotated[bool, typer.Option("--hf-cache", help="also publish in the Hugging Face cache")] = False,
    reuse: Reuse = None,
    include: Include = None,
    exclude: Exclude = None,
    lock: Lock = None,
    store: StoreDir = None,
    endpoint: Endpoint = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
    connections: Annotated[int, typer.Option(min=1, help="to one source, at most")] = DEFAULTS.connections,
    part_size: Annotated[str, typer.Option(help="smallest range of one request")] = "16MiB",
    stall_seconds: Annotated[float, _seconds("a connection without a byte so long is given up")] = 30.0,
    first_byte_seconds: Annotated[float, _seconds("until an answer begins")] = WIRE.first_byte_seconds,
    call_seconds: Annotated[float, _seconds("until an API call is answered, tries included")] = 120.0,
    slow_seconds: Annotated[float, _seconds("a source is judged by its rate over so long")] = 30.0,
    slow_floor: Annotated[str, typer.Option(help="under so many bytes a second a source is slow")] = "256KiB",
    slow_share: Annotated[float, typer.Option(min=0, help="or under this share of the best one's rate")] = 0.1,
    probe_seconds: Annotated[float, _seconds("until a failed or slow source is tried again")] = 60.0,
    retries: Annotated[int, typer.Option(min=0, help="of a source in a row, without progress")] = DEFAULTS.retries,
    backoff_seconds: Annotated[float, typer.Option(min=0, help="after the first failure; doubles")] = 0.5,
    throttle_seconds: Annotated[float, _seconds("at most, waiting for a rate limit")] = WIRE.throttle_seconds,
    reserve: Annotated[str, typer.Option(help="disk space to leave free")] = "1GiB",
    lock_wait: LockWait = 60.0,
) -> int:
    """Puts checkpoints on this disk, verified; run again to continue."""
    if copy and to is None:
        raise BadInput("--copy: expected --to DIR beside it, got none")
    show = _shown(as_json, quiet)
    smallest = parse_size(part_size)
    if smallest < SMALLEST_PART:
        raise BadInput(f"--part-size {part_size}: expected at least {human(SMALLEST_PART)}, got less")
    limits = Limits(
        first_byte_seconds=first_byte_seconds, stall_seconds=stall_seconds, call_seconds=call_seconds,
        floor_window_seconds=slow_seconds, throttle_seconds=throttle_seconds, retries=retries,
        backoff_seconds=backoff_seconds, connections=connections + 1,
    )  # fmt: skip
    order = Order(
        Store(_store_folder(store)),
        Places(
            _hf_cache(), tuple(reuse or ()), to, ("reflink", "copy") if copy else ("hard link", "reflink", "copy"),
            _hf_cache() if hf_cache else None,
        ),
        Thresholds(
            slow_seconds=slow_seconds, floor_bytes_per_second=parse_size(slow_floor), slow_share=slow_share,
            probe_seconds=probe_seconds, retries=retries, backoff_seconds=backoff_seconds, connections=connections,
            part_bytes=smallest, largest_part_bytes=4 * smallest, reserve_bytes=parse_size(reserve),
        ),
        _hub(endpoint, token, limits, show),
        tuple(_hub(url, "", limits, show) for url in mirror or ()),
        tuple(include or ()), tuple(exclude or ()), lock, _tool(),
    )  # fmt: skip
    targets = read_targets(repos, verdicts, lock, _skips(quiet))
    if to is not None and len(targets) > 1:
        raise BadInput(f"--to {to}: expected one repo for it, got {len(targets)}", hint="run `stage` once for each")
    with _interruptible(), _disk_errors():
        return _run_all(order, targets, lock_wait, show, as_json=as_json)


def _run_all(
    order: Order, targets: list[tuple[str, str]], lock_wait: float, show: Callable[[Event], None], *, as_json: bool
) -> int:  # fmt: skip
    """Stages one after the other, the highest exit code; each of them has its last event, begun or not."""
    codes, left = set[int](), [repo for repo, _ in targets]
    try:
        order.store.create()
        with hold(order.store.lock_path, wait_seconds=lock_wait, on_wait=_waits_for_lock(show)):
            order.store.tidy()
            for repo, revision in targets:
                del left[0]
                try:
                    folder = stage(order, repo, revision, show)
                    codes.add(YES)
                    if not as_json:
                        data(str(folder))
                except (DiskFull, OutputLost):
                    raise
                except ToolkitError as error:
                    show_error(error, as_json=as_json)
                    codes.add(error.exit_code)
    except (ToolkitError, OSError, KeyboardInterrupt) as error:
        for repo in left if not isinstance(error, BrokenPipeError | OutputLost) else ():
            show(failed_event(repo, error))
        raise
    return max(codes, default=NO)  # nothing to do: nothing was kept


@app.command("plan")
def plan_command(
    repos: Repos = None, verdicts: From = None, reuse: Reuse = None, include: Include = None, exclude: Exclude = None,
    lock: Lock = None, store: StoreDir = None, endpoint: Endpoint = None, token: Token = None, as_json: Json = False,
) -> int:  # fmt: skip
    """What a run would fetch, resume and reuse, and the disk space it needs; writes nothing."""
    order = Order(
        Store(_store_folder(store)), Places(_hf_cache(), tuple(reuse or ())), DEFAULTS,
        _hub(endpoint, token, WIRE, progress.Lines()), (), tuple(include or ()), tuple(exclude or ()), lock,
    )  # fmt: skip
    with _disk_errors():
        targets = read_targets(repos, verdicts, lock, message)
        for repo, revision in targets:
            steps = execute.plan(order.store, find(order, repo, revision), order.places)
            document = plan_document(steps, disk_free(order.store.root))
            _answer(document, report.plan_lines(document), as_json=as_json)
    return YES if targets else NO


@app.command("verify")
def verify_command(
    repos: Repos = None, store: StoreDir = None, as_json: Json = False, quiet: Quiet = False,
    threads: Annotated[int, typer.Option(min=1, help="files digested at once")] = HASHERS,
) -> int:  # fmt: skip
    """Digests what is staged again, in the store and wherever it was laid out, and checks every header."""
    codes = set[int]()
    with _interruptible(), _disk_errors():
        place = _opened(store)
        for manifest in _manifests(place, repos):
            total = sum(manifest.sizes.values())
            hidden = quiet or as_json or not sys.stderr.isatty()
            with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=hidden) as bar:
                found = verify(place, manifest, threads=threads, on_bytes=bar.update)
            _answer(report.verification(manifest, found), report.verification_lines(manifest, found), as_json=as_json)
            codes.add(NO if found.problems else YES)
    return max(codes)


@app.command("ls")
def ls_command(store: StoreDir = None, as_json: Json = False) -> int:
    """Which snapshots the store holds, and how much of each no other one has."""
    with _disk_errors():
        place = _opened(store)
        snapshots = inventory.list_snapshots(place)
        if as_json:
            for item in snapshots:
                json_line(report.snapshot(item))
        elif snapshots:
            data("\n".join(report.snapshot_lines(snapshots)))
        else:
            message(f"store {place.root}: no snapshot is staged")
    return YES


@app.command("gc")
def gc_command(
    drop: Annotated[list[str] | None, typer.Option(help="a snapshot to give up, REPO[@REV]; repeatable")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="remove what the plan lists")] = False,
    store: StoreDir = None, as_json: Json = False, lock_wait: LockWait = 60.0,
) -> int:  # fmt: skip
    """What no snapshot needs: unreferenced blobs, unfinished downloads. A plan, unless --apply is given."""
    place = _opened(store)
    dropped = [parse_repo_line(line) for line in drop or ()]
    with _interruptible(), _disk_errors():
        if not apply:
            removal = inventory.plan_gc(place, dropped)
            _answer(report.removal(removal), report.removal_lines(removal), as_json=as_json)
            return YES
        place.create()
        with hold(place.lock_path, wait_seconds=lock_wait, on_wait=_waits_for_lock(progress.Lines())):
            removal = inventory.plan_gc(place, dropped)
            _answer(report.removal(removal), report.removal_lines(removal), as_json=as_json)
            inventory.collect(place, removal)
    return YES


@app.command("serve")
def serve_command(
    store: StoreDir = None,
    host: Annotated[str, typer.Option(help="address to listen on; others than loopback are reachable")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8600,
) -> int:
    """The store as a read-only mirror: give its address to `stage --mirror` on other nodes."""
    place = _opened(store)
    try:
        mirror = Mirror(place, (host, port))
    except OSError as error:
        raise BadInput(f"--host {host} --port {port}: expected an address to listen on, got {error.strerror}") from None
    with mirror:
        data(mirror.url)
        sys.stdout.flush()
        mirror.serve_forever()
    return YES


def main() -> None:
    code = run(app)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # a connection that is just being made is not waited for; everything on disk is settled


def _answer(document: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    if as_json:
        json_line(document)
    else:
        data("\n".join(lines))


def _tool() -> str:
    return f"stage {version('checkpoint-toolkit')}"


def _store_folder(given: Path | None) -> Path:
    if given or os.environ.get("CKPT_STORE"):
        return Path(given or os.environ["CKPT_STORE"]).expanduser()
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    try:
        return Path(home).expanduser() / "checkpoint-toolkit" / "store"
    except RuntimeError:
        raise BadInput("store: expected a home folder, got none; name the store with --store or CKPT_STORE") from None


def _opened(given: Path | None) -> Store:
    """A store to look at. Raises BadInput for one of a later format, and for what is no folder."""
    store = Store(_store_folder(given))
    store.check()
    return store


def _hf_cache() -> Path:
    """Where huggingface_hub keeps its cache (2.4.0 constants.py `HF_HUB_CACHE`), without the price of importing it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def _skips(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else message


def _hub(url: str | None, token: str | None, limits: Limits, show: Callable[[Event], None]) -> Callable[[], Hub]:
    def tell(wait: Wait) -> None:
        because = f"{wait.origin} allows no more {wait.bucket} requests yet ({wait.because})"
        show({"event": "wait", "url": wait.origin, "seconds": wait.seconds, "because": because})

    return lambda: connect(url, token, limits=limits, on_event=tell)


def _shown(as_json: bool, quiet: bool) -> Callable[[Event], None]:
    if as_json:
        return progress.as_json()
    if quiet:
        return progress.silent
    return progress.Bar() if sys.stderr.isatty() else progress.Lines()


def _waits_for_lock(show: Callable[[Event], None]) -> Callable[[str], None]:
    return lambda because: show({"event": "locked", "because": because})


def _manifests(store: Store, repos: list[str] | None) -> list[Manifest]:
    if not repos:
        if manifests := list(store.read_manifests()):
            return manifests
        raise NotFound(f"store {store.root}: expected a staged snapshot, got none", hint="is it the right --store?")
    found = []
    for repo, revision in map(parse_repo_line, repos):
        commit = store.read_ref(repo, revision)
        manifest = store.read_manifest(repo, commit) if commit else None
        if manifest is None:
            raise NotFound(f"{repo}@{revision}: expected a staged snapshot, got none", hint="see `stage ls`")
        found.append(manifest)
    return found


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: what has arrived is noted, and running again continues."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """What a disk refuses, as a sentence: the paths and the numbers are the user's own."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of stdout, not a disk
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{error.filename or 'disk'}: expected room, got none; what was fetched is kept") from None
        raise ToolkitError(f"{error.filename or 'disk'}: {error.strerror or error}") from error
