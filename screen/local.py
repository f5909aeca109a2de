"""A checkpoint on this machine as a source: a folder, one safetensors file, or a repo in the Hugging Face cache."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from formulas.errors import BadInput, HubMisbehaved, NotFound
from formulas.units import human

from .repo import Blob, Entry, Revision, Tree, check_path, is_commit
from .source import ModelInfo, RepoInfo
from .transport import Cost

LOCAL = "local"
UNKNOWN = "unknown"  # the commit of a folder that states none
_CACHE_NAME = re.compile(r"models--(?:(.+?)--)?(.+)")
_OIDS = {40: "git-sha1:", 64: "sha256:"}  # by the length of a blob's name in the Hugging Face cache


class Local:
    """One folder or file. Methods ignore the repo and commit they are given: there is only one of each here."""

    free = True

    def __init__(self, path: Path | str):
        self._root = _snapshot(Path(path))
        if not self._root.exists():
            raise BadInput(f"{path}: expected a folder or a .safetensors file, got nothing there")
        self.repo, self.commit = _known_as(self._root)

    def resolve(self, repo: str, revision: str, cost: Cost) -> RepoInfo:
        """The folder itself. The commit is that of a Hugging Face cache snapshot, else `unknown`."""
        return RepoInfo(Revision(LOCAL, self.commit), self.repo, ModelInfo.model_validate({"id": self.repo}))

    def tree(self, repo: str, commit: str, cost: Cost) -> Tree:
        """All files below the folder but in hidden folders. A digest is known only where the cache's link states it."""
        if self._root.is_file():
            return Tree((Entry(check_path(self._root.name), _blob(self._root)),))
        entries = []
        for folder, folders, files in os.walk(self._root):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            for each in files:
                path = Path(folder, each)
                if path.is_file():  # no socket, no broken link
                    if not _is_text(each):
                        raise BadInput(f"{each!a}: expected a file name in UTF-8, got other bytes; rename it")
                    entries.append(Entry(check_path(path.relative_to(self._root).as_posix()), _blob(path)))
        return Tree(tuple(sorted(entries)))

    def read_file(self, repo: str, commit: str, entry: Entry, cost: Cost, limit: int) -> bytes:
        """A whole small file, as long as the tree said. Raises NotFound, HubMisbehaved."""
        if entry.blob.size > limit:
            raise HubMisbehaved(f"{entry.path}: expected at most {human(limit)}, got {human(entry.blob.size)}")
        return self.read_range(repo, commit, entry, 0, entry.blob.size, cost)

    def read_range(self, repo: str, commit: str, entry: Entry, start: int, stop: int, cost: Cost) -> bytes:
        """Bytes [start, stop) of a file. Raises NotFound, and HubMisbehaved for a file that has become shorter."""
        path = self._root if self._root.is_file() else self._root / check_path(entry.path)
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), stop - start, start)
        except OSError as error:
            raise NotFound(f"{path}: expected a readable file, got {error.strerror}", code="entry_not_found") from None
        cost.add(bytes_read=len(data))
        if len(data) != stop - start:
            raise HubMisbehaved(f"{path}: expected bytes {start}-{stop}, got {len(data)}; it changed while it was read")
        return data

    def metadata_in_one(self, repo: str, revision: Revision, index: str, cost: Cost) -> bytes | None:
        """None: ranges of a local file are as cheap."""


def _blob(path: Path) -> Blob:
    """Size of the file a path leads to, and the digest that a Hugging Face cache link's target claims to have."""
    target = Path(os.readlink(path)).name if path.is_symlink() else ""
    kind = _OIDS.get(len(target)) if re.fullmatch(r"[0-9a-f]+", target) else None
    return Blob(kind + target if kind else "unknown", path.stat()[stat.ST_SIZE])


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _snapshot(path: Path) -> Path:
    """The snapshot `main` stands for, of a repo folder in the Hugging Face cache; any other path as it is."""
    ref = path / "refs" / "main"
    if path.name.startswith("models--") and ref.is_file():
        return path / "snapshots" / ref.read_text().strip()
    return path


def _known_as(root: Path) -> tuple[str, str]:
    """(repo, commit) as the Hugging Face cache's folder names say, else the path's own name and `unknown`."""
    full = root.absolute()
    match = _CACHE_NAME.fullmatch(full.parent.parent.name)
    if match and full.parent.name == "snapshots" and is_commit(full.name):
        organisation, repo = match.groups()
        return (f"{organisation}/{repo}" if organisation else repo), full.name
    return full.name, UNKNOWN
