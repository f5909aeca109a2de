"""What has to happen until a snapshot is on this disk: from the tree and from what is there, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from formulas.errors import BadInput, HubMisbehaved
from screen.repo import Blob, Entry, Revision, Tree

from .spans import Spans, clip, missing, total

# Weights that repeat the safetensors weights in another format, by the name each exporter gives them.
_DUPLICATES = (
    ("pytorch_model*.bin", "PyTorch pickle"), ("pytorch_model*.bin.index.json", "PyTorch pickle"),
    ("model*.pt", "PyTorch pickle"), ("*.pth", "PyTorch pickle"), ("*.ckpt", "training checkpoint"),
    ("tf_model*.h5", "TensorFlow"), ("tf_model*.h5.index.json", "TensorFlow"),
    ("flax_model*.msgpack", "Flax"), ("flax_model*.msgpack.index.json", "Flax"),
    ("rust_model.ot", "Rust"), ("*.onnx", "ONNX"), ("*.onnx_data*", "ONNX"), ("*.gguf", "GGUF"), ("*.tflite", "TFLite"),
    ("openvino_*.bin", "OpenVINO"), ("openvino_*.xml", "OpenVINO"),
)  # fmt: skip
# Folders in which a publisher keeps the weights a second time, in the layout of its own code.
_DUPLICATE_FOLDERS = ("original/", "metal/", "coreml/")


class Skipped(NamedTuple):
    """A file of the tree that is not staged, and why."""

    path: str
    because: str


class Candidate(NamedTuple):
    """A local file that may hold a blob. Its bytes are digested before they are trusted.

    `shares`: taking it costs no disk space (it can be hard-linked); otherwise it is copied.
    """

    path: str
    size: int
    shares: bool


class Presence(NamedTuple):
    """What the disk holds for one tree."""

    proven: frozenset[str] = frozenset()  # blobs that look as they did when they were published
    unproven: Mapping[str, int] = {}  # blobs that do not -> bytes the file has
    parts: Mapping[str, Spans] = {}  # partial files -> bytes on disk according to the journal
    candidates: Mapping[str, tuple[Candidate, ...]] = {}
    links: frozenset[tuple[str, str]] = frozenset()  # (path, oid) laid out in the snapshot
    manifest: frozenset[tuple[str, str]] | None = None  # (path, oid) the manifest of this commit names
    ref: str | None = None  # the commit the requested revision stands for in the store


class Fetch(NamedTuple):
    """Get the bytes of a blob that are not on this disk. `salvage`: bytes of a damaged blob's file worth topping up."""

    oid: str
    size: int
    path: str
    have: Spans
    salvage: int

    @property
    def missing_bytes(self) -> int:
        return self.size - total(self.have) - self.salvage


class Reuse(NamedTuple):
    """Digest local bytes; the first candidate with the right ones becomes the blob. If none is: fetch."""

    oid: str
    size: int
    path: str
    candidates: tuple[Candidate, ...]  # empty: the store's own blob, of the right size, seen touched since


class Link(NamedTuple):
    path: str
    oid: str


class WriteManifest(NamedTuple):
    files: int


class WriteRef(NamedTuple):
    revision: str
    commit: str


Step = Fetch | Reuse | Link | WriteManifest | WriteRef


class StagePlan(NamedTuple):
    """Frozen, sorted, in the order of execution: blobs, links, manifest, ref. No step: the snapshot is complete."""

    repo: str
    revision: Revision
    entries: tuple[Entry, ...]
    steps: tuple[Step, ...]
    skipped: tuple[Skipped, ...]

    def only(self, kind: type[Step]) -> list[Step]:
        return [step for step in self.steps if isinstance(step, kind)]

    @property
    def fetches(self) -> list[Fetch]:
        return [step for step in self.steps if isinstance(step, Fetch)]

    @property
    def reuses(self) -> list[Reuse]:
        return [step for step in self.steps if isinstance(step, Reuse)]

    @property
    def fetch_bytes(self) -> int:
        """Bytes that have to come over the network."""
        return sum(step.missing_bytes for step in self.fetches)

    @property
    def resume_bytes(self) -> int:
        """Bytes of unfinished or damaged blobs that are already here."""
        return sum(step.size - step.missing_bytes for step in self.fetches)

    @property
    def total_bytes(self) -> int:
        """Bytes of the snapshot on disk: each blob once."""
        return sum({entry.blob.oid: entry.blob.size for entry in self.entries}.values())

    @property
    def reuse_bytes(self) -> int:
        """Bytes of blobs that are wholly here: in the store, or in local files whose digest will be taken."""
        return self.total_bytes - sum(step.size for step in self.fetches)

    @property
    def disk_bytes(self) -> int:
        """Bytes the target file system has to have free: what is fetched, copied from local files, or salvaged."""
        copied = sum(s.size for s in self.reuses if s.candidates and not any(c.shares for c in s.candidates))
        return self.fetch_bytes + copied + sum(step.salvage for step in self.fetches)


def select(tree: Tree, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> tuple[Tree, tuple[Skipped, ...]]:
    """The files to stage, and those left out with the reason.

    Patterns are those of `hf download`: `*.json`, `sub/*`, a trailing slash means the folder. What `include` names is
    taken even if it repeats the weights in another format. Raises BadInput if nothing is left.
    """
    kept, skipped = [], []
    weights = [e.path for e in tree.entries if e.path.endswith(".safetensors") and not _in_copy_folder(e.path)]
    for entry in tree.entries:
        path = entry.path
        if include and not _matches(path, include):
            skipped.append(Skipped(path, "no --include pattern matches"))
        elif pattern := _matches(path, exclude):
            skipped.append(Skipped(path, f"--exclude {pattern}"))
        elif not include and (because := _duplicate(path, weights)):
            skipped.append(Skipped(path, because))
        else:
            kept.append(entry)
    if not kept:
        raise BadInput(f"selection: expected at least one of {len(tree.entries)} files, got none; nothing to stage")
    return Tree(tuple(kept)), tuple(skipped)


def make_plan(repo: str, revision: Revision, tree: Tree, here: Presence, skipped: Iterable[Skipped] = ()) -> StagePlan:
    """The steps that complete the snapshot; each blob is fetched or reused once, however many paths have it.

    Raises HubMisbehaved for a file whose digest the Hub does not state: its bytes could never be verified.
    """
    paths: dict[Blob, str] = {}
    for entry in tree.entries:
        if not entry.blob.known:
            raise HubMisbehaved(
                f"{repo}@{revision.commit[:8]} {entry.path}: expected a sha256 or git-sha1, got none; "
                "its bytes could not be verified (leave it out with --exclude)"
            )
        paths.setdefault(entry.blob, entry.path)
    # Small files first: a gated or vanished repo shows at once, and config.json is there while weights arrive.
    blobs = sorted(paths.items(), key=lambda item: (item[0].oid.startswith("sha256:"), item[1]))
    steps: list[Step] = [s for blob, path in blobs if (s := _blob_step(blob, path, here)) is not None]
    changed = {step.oid for step in steps if isinstance(step, Fetch | Reuse)}
    wanted = frozenset((entry.path, entry.blob.oid) for entry in tree.entries)
    steps += [Link(*pair) for pair in sorted(wanted) if pair not in here.links or pair[1] in changed]
    if steps or here.manifest is None or not wanted <= here.manifest:
        steps.append(WriteManifest(len(wanted)))
    if here.ref != revision.commit and revision.requested != revision.commit:
        steps.append(WriteRef(revision.requested, revision.commit))
    return StagePlan(repo, revision, tree.entries, tuple(steps), tuple(skipped))


def case_clash(paths: Iterable[str]) -> tuple[str, str] | None:
    """Two different names (files or folders) that are one on a file system that folds case; None if there are none."""
    seen: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for name in ("/".join(parts[: i + 1]) for i in range(len(parts))):
            if seen.setdefault(name.casefold(), name) != name:
                return seen[name.casefold()], name
    return None


def _blob_step(blob: Blob, path: str, here: Presence) -> Step | None:
    if blob.oid in here.proven:
        return None
    found = here.unproven.get(blob.oid)
    if found == blob.size:
        return Reuse(blob.oid, blob.size, path, ())
    if candidates := tuple(c for c in here.candidates.get(blob.oid, ()) if c.size == blob.size):
        return Reuse(blob.oid, blob.size, path, candidates)
    have = clip(here.parts.get(blob.oid, ()), blob.size)
    salvage = min(found, blob.size) if found is not None and not have else 0
    return Fetch(blob.oid, blob.size, path, have, salvage)


def missing_spans(step: Fetch) -> Spans:
    """What of the blob is not on this disk."""
    return missing(step.have, step.size)


def _matches(path: str, patterns: Sequence[str]) -> str | None:
    """The first pattern that the path matches."""
    return next((p for p in patterns if fnmatchcase(path, p + "*" if p.endswith("/") else p)), None)


def _in_copy_folder(path: str) -> bool:
    return path.startswith(_DUPLICATE_FOLDERS)


def _duplicate(path: str, weights: Sequence[str]) -> str | None:
    if not weights:
        return None
    if _in_copy_folder(path):
        return f"{path.split('/')[0]}/ repeats the weights in another layout"
    name = path.rsplit("/", 1)[-1]
    folder = path[: len(path) - len(name)]
    if fnmatchcase(name, "consolidated*.safetensors") and any(fnmatchcase(w, f"{folder}model*") for w in weights):
        return "repeats the weights of model*.safetensors in another layout"
    kind = next((kind for pattern, kind in _DUPLICATES if fnmatchcase(name, pattern)), None)
    return f"repeats the safetensors weights as {kind}" if kind else None
