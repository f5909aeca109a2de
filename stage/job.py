"""One order to stage: what the user asked for, how the sources are reached, and the documents that tell of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formulas.errors import BadInput, NotFound, ToolkitError
from screen.hub import Hub
from screen.repo import Tree
from screen.transport import Cost

from . import execute
from .board import Event
from .disk import disk_free
from .execute import Outcome, Places, Wanted
from .manifest import Manifest, parse_manifest
from .plan import StagePlan, select
from .sources import Source, Thresholds
from .store import Store
from .verify import Structure, read_structure


class Incomplete(ToolkitError):
    """Some files are missing; the others are kept."""

    code = "incomplete"
    exit_code = 4


@dataclass(frozen=True)
class Order:
    """Where to, from where, which files, and within what bounds. `endpoint` and `mirrors` open a client each."""

    store: Store
    places: Places
    thresholds: Thresholds
    endpoint: Callable[[], Hub]
    mirrors: tuple[Callable[[], Hub], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lock: Path | None = None
    tool: str = "stage"


def find(order: Order, repo: str, revision: str) -> Wanted:
    """The files to stage with sizes and digests: from the lock file, else from the endpoint, never from a mirror."""
    if order.lock is not None:
        locked = read_lock(order.lock)
        if repo != locked.repo or revision not in (locked.requested, locked.commit, "main"):
            raise BadInput(f"{order.lock}: expected {repo}@{revision}, got {locked.repo}@{locked.requested}")
        return Wanted(locked.repo, locked.revision, *_selected(order, locked.tree))
    with order.endpoint() as hub:
        cost = Cost()
        info = hub.resolve(repo, revision, cost)
        try:
            tree = hub.tree(info.canonical, info.revision.commit, cost)
        except NotFound:
            # After a force-push a Hub has named a commit that was gone already (huggingface_hub#3406): ask once more.
            info = hub.resolve(repo, revision, cost)
            tree = hub.tree(info.canonical, info.revision.commit, cost)
    return Wanted(info.canonical, info.revision, *_selected(order, tree))


def read_lock(path: Path) -> Manifest:
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise BadInput(f"{path}: expected a manifest, got no such file") from None


def stage(order: Order, repo: str, revision: str, on_event: Callable[[Event], None]) -> Path:
    """Stages one snapshot; the folder it can be used from. The caller holds the store's lock.

    The last event is `done` or `failed`, whatever ended it. Raises Incomplete when files are missing, and what plan
    and disk raise.
    """
    began = time.monotonic()
    steps: StagePlan | None = None
    progress: Event = {"bytes": 0, "sources": []}

    def tell(event: Event) -> None:
        nonlocal progress
        progress = event if event["event"] == "progress" else progress
        on_event(event)

    try:
        wanted = find(order, repo, revision)
        steps = execute.plan(order.store, wanted, order.places)
        tell({"event": "plan", **plan_document(steps, disk_free(order.store.root))})
        for skipped in steps.skipped:
            tell({"event": "skipped", **skipped._asdict()})
        execute.check_room(order.store, steps, order.places, order.thresholds.reserve_bytes)
        outcome = _execute(order, steps, tell)
        folder = order.store.snapshot(steps.repo, steps.revision.commit)
        structure = read_structure(folder, outcome.manifest) if outcome.manifest else None
    except BrokenPipeError:
        raise  # nobody is left to tell
    except (ToolkitError, OSError, KeyboardInterrupt) as error:
        tell(failed_event(repo, error, steps, progress, time.monotonic() - began))
        raise
    for problem in (*structure.broken, *structure.misplaced) if structure else ():
        tell({"event": "warning", "path": problem.path, "because": f"{problem.because}; the Hub has it so"})
    tell(_last_event(steps, outcome, structure, folder, time.monotonic() - began))
    if outcome.failed:
        first = next(iter(outcome.failed.values()))
        raise Incomplete(
            f"{steps.repo}@{steps.revision.commit[:8]}: expected {len(steps.entries)} files, "
            f"{len(outcome.failed)} are missing; {first.message}",
            hint=first.hint or ("run again to continue" if first.retry else None), code=first.code, retry=first.retry,
        )  # fmt: skip
    return order.places.to or folder


def _execute(order: Order, steps: StagePlan, on_event: Callable[[Event], None]) -> Outcome:
    """Carries the plan out with the sources of the order, each place once however often it is named."""
    most, sources = order.thresholds.connections, dict[str, Source]()
    try:
        for number, client in enumerate((order.endpoint, *order.mirrors)):
            hub = client()
            if sources.setdefault(hub.endpoint, source := Source(hub, trusted=not number, connections=most)) != source:
                hub.close()
        return execute.execute(
            order.store, steps, order.places, list(sources.values()), order.thresholds, on_event, order.tool
        )
    finally:
        for source in sources.values():
            source.hub.close()


def plan_document(steps: StagePlan, free_bytes: int) -> dict[str, Any]:
    """The plan as `stage plan --json` prints it."""
    return {
        "repo": steps.repo, "commit": steps.revision.commit, "files": len(steps.entries),
        "fetch_bytes": steps.fetch_bytes, "resume_bytes": steps.resume_bytes, "reuse_bytes": steps.reuse_bytes,
        "free_bytes": free_bytes, "free_bytes_needed": steps.disk_bytes,
        "skipped": [skipped._asdict() for skipped in steps.skipped],
    }  # fmt: skip


def _selected(order: Order, tree: Tree) -> tuple[Tree, Any]:
    return select(tree, order.include, order.exclude)


def failed_event(
    repo: str, error: BaseException, steps: StagePlan | None = None, progress: Event | None = None,
    seconds: float = 0.0,
) -> Event:  # fmt: skip
    """The last event of a snapshot that something ended before its time; null is what is not known."""
    text = error.message if isinstance(error, ToolkitError) else str(error) or "interrupted"
    about = progress or {"bytes": 0, "sources": []}
    return {
        "event": "failed", "repo": steps.repo if steps else repo, "commit": steps.revision.commit if steps else None,
        "path": None, "files": len(steps.entries) if steps else None,
        "bytes_total": steps.total_bytes if steps else None, "bytes_fetched": about["bytes"],
        "bytes_reused": steps.reuse_bytes + steps.resume_bytes if steps else None,
        "shards": None, "tensors": None, "broken_headers": None,
        "sources": [{"url": source["url"], "bytes": source["bytes"]} for source in about["sources"]],
        "seconds": round(seconds, 3), "because": text,
    }  # fmt: skip


def _last_event(
    steps: StagePlan, outcome: Outcome, structure: Structure | None, folder: Path, seconds: float
) -> Event:  # fmt: skip
    missing = [{"path": path, "because": error.message, "retry": error.retry} for path, error in outcome.failed.items()]
    return {
        "event": "failed" if outcome.failed else "done", "repo": steps.repo, "commit": steps.revision.commit,
        "path": str(folder) if structure else None, "files": len(steps.entries), "bytes_total": steps.total_bytes,
        "bytes_fetched": sum(outcome.received.values()), "bytes_reused": steps.reuse_bytes + steps.resume_bytes,
        "shards": structure.shards if structure else None, "tensors": structure.tensors if structure else None,
        "broken_headers": len(structure.broken) if structure else None,
        "sources": [
            {"url": url, "bytes": count, "hosts": outcome.hosts.get(url, ())} for url, count in outcome.received.items()
        ],
        "seconds": round(seconds, 3), **({"missing": missing} if missing else {}),
    }  # fmt: skip
