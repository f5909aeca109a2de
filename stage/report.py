"""What the commands of `stage` answer, as lines of text and as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formulas.console import table
from formulas.units import human

from .inventory import Removal, Snapshot
from .manifest import Manifest
from .verify import Verification


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """A plan's document as text."""
    return [
        f"{plan['repo']}@{plan['commit'][:8]}: {plan['files']} files",
        f"  fetch   {human(plan['fetch_bytes'])}",
        f"  resume  {human(plan['resume_bytes'])}",
        f"  reuse   {human(plan['reuse_bytes'])}",
        f"  disk    {human(plan['free_bytes_needed'])} needed, {human(plan['free_bytes'])} free",
        *(f"  skip    {skipped['path']}: {skipped['because']}" for skipped in plan["skipped"]),
    ]


def verification(manifest: Manifest, found: Verification) -> dict[str, Any]:
    """What `stage verify --json` prints for one snapshot."""
    structure = found.structure
    return {
        "repo": manifest.repo, "commit": manifest.commit, "files": found.files, "bytes": found.bytes,
        "seconds": round(found.seconds, 3), "shards": structure.shards, "tensors": structure.tensors,
        "broken_headers": len(structure.broken), "differences": [d._asdict() for d in found.problems],
    }  # fmt: skip


def verification_lines(manifest: Manifest, found: Verification) -> list[str]:
    structure, problems = found.structure, found.problems
    rate = human(found.bytes / found.seconds) if found.seconds else "unknown"
    return [
        f"{manifest.repo}@{manifest.commit[:8]}: {found.files} files, {human(found.bytes)} at {rate}/s; "
        f"{structure.shards} shards, {len(structure.broken)} broken headers, {structure.tensors} tensors; "
        + (f"{len(problems)} differences" if problems else "all as the manifest says"),
        *(f"  {problem.path}: {problem.because}" for problem in problems),
    ]


def snapshot(item: Snapshot) -> dict[str, Any]:
    """What `stage ls --json` prints for one snapshot."""
    return item._asdict() | {"shared_bytes": item.shared_bytes}


def snapshot_lines(snapshots: Sequence[Snapshot]) -> list[str]:
    rows = [("repo", "commit", "refs", "files", "size", "shared", "own", "laid out in")]
    rows += [
        (s.repo, s.commit[:8], " ".join(s.refs), str(s.files), human(s.bytes), human(s.shared_bytes),
         human(s.own_bytes), " ".join(s.placements))
        for s in snapshots
    ]  # fmt: skip
    return table(rows, right=lambda column: 3 <= column <= 6)


def removal(plan: Removal) -> dict[str, Any]:
    """What `stage gc --json` prints."""
    return {"remove": _names(plan), "blobs": len(plan.blobs), "bytes": plan.bytes}


def removal_lines(plan: Removal) -> list[str]:
    total = f"{len(plan.blobs)} blobs and {len(plan.partials)} unfinished files, {human(plan.bytes)}"
    return [*(f"remove {name}" for name in _names(plan)), total]


def _names(plan: Removal) -> list[str]:
    paths = (*plan.refs, *plan.manifests, *plan.snapshots, *(path for path, _ in plan.partials))
    return [*map(str, paths), *(oid for oid, _ in plan.blobs)]
