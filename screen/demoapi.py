"""What the demo Hub answers: the routes of the Hub's HTTP API and of its file resolver.

Source: huggingface_hub 2.4.0 hf_api.py (what is asked, and which fields of the answers are read), file_download.py
(the headers of a resolve), utils/_http.py (error codes), utils/_pagination.py (Link).
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from . import demomodels
from .demohttp import Request, Response, document, error
from .demorepo import Content, DemoRepo, is_lfs

if TYPE_CHECKING:
    from .demohub import DemoHub

_REPO = r"(?P<repo>[^/]+(?:/[^/]+)??)"
_RESOLVE = re.compile(rf"/{_REPO}/(?P<verb>resolve|raw)/(?P<rev>[^/]+)/(?P<path>.+)")
_CACHE = re.compile(r"/api/resolve-cache/models/(?P<repo>[^/]+/[^/]+)/(?P<rev>[^/]+)/(?P<path>.+)")
_MODEL = re.compile(
    rf"/api/models/{_REPO}(?:/(?P<verb>revision|tree|treesize|refs|commits|paths-info|safetensors-metadata|auth-check)"
    r"(?:/(?P<rest>.*))?)?"
)
_NO_LENGTH = frozenset({"content-length"})
_TEXT = (".json", ".md", ".txt", ".py", ".jinja")
_ROUTES = {"revision": "info", "paths-info": "paths_info", "safetensors-metadata": "headers"}


class Asked(NamedTuple):
    repo: str
    verb: str
    revision: str
    path: str


def parse_resolve(path: str) -> Asked | None:
    """What `/{repo}/resolve/{revision}/{path}` asks for, unquoted; None for any other URL."""
    if (match := _RESOLVE.fullmatch(path)) is None:
        return None
    return Asked(unquote(match["repo"]), match["verb"], unquote(match["rev"]), unquote(match["path"]))


def bucket(path: str) -> str:
    """The rate-limit bucket a request is charged to."""
    if path.startswith("/api/") and not path.startswith("/api/resolve-cache/"):
        return "api"
    return "resolvers" if path.startswith("/api/") or parse_resolve(path) else "pages"


def answer(hub: DemoHub, request: Request) -> Response:
    """The Hub's answer to one request."""
    if request.path == "/api/models":
        return demomodels.listing(hub, request)
    if match := _CACHE.fullmatch(request.path):
        return _cached(hub, request, Asked(unquote(match["repo"]), "cache", match["rev"], unquote(match["path"])))
    if asked := parse_resolve(request.path):
        return _resolve(hub, request, asked)
    if match := _MODEL.fullmatch(request.path.rstrip("/")):
        asked = Asked(unquote(match["repo"]), match["verb"] or "info", "", match["rest"] or "")
        return _model(hub, request, asked)
    return error(404, "Sorry, we can't find the page you are looking for.")


# Who may see what.


def _find(hub: DemoHub, request: Request, name: str, route: str) -> DemoRepo | Response:
    """The repo, or the answer that says why there is none: renamed, missing, private."""
    repo = hub.repos.get(name.lower())
    about: dict[str, Any] = {"route": route, "subject": name}
    target = repo.renamed_to if repo and repo.renamed_to else repo.name if repo and repo.name != name else None
    if target:
        return Response(307, {"Location": request.target.replace(name, target, 1)}, b"Temporary Redirect", **about)
    if repo is None or repo.missing or (repo.private and name not in hub.tokens.get(request.token or "", ())):
        if request.token in hub.tokens:
            return error(404, "Repository not found", "RepoNotFound", **about)
        return error(401, "Invalid username or password.", **about)
    return repo


def _refusal(hub: DemoHub, request: Request, repo: DemoRepo, route: str, subject: str) -> Response | None:
    """Why a repo's files are not served to this token, or None."""
    about = {"route": route, "subject": subject}
    if repo.disabled:
        return error(403, "Access to this resource is disabled.", **about)
    if repo.gated and repo.name not in hub.tokens.get(request.token or "", ()):
        known = request.token in hub.tokens
        message = f"Access to model {repo.name} is restricted" + (
            " and you are not in the authorized list." if known else ". You must be authenticated to access it.")
        return error(403 if known else 401, message, "GatedRepo", **about)
    return None


# Files.


def _resolve(hub: DemoHub, request: Request, asked: Asked) -> Response:
    route, subject = asked.verb, f"{asked.repo}/{asked.path}"
    repo = _find(hub, request, asked.repo, route)
    if isinstance(repo, Response):
        repo.subject = subject
        return repo
    if refused := _refusal(hub, request, repo, route, subject):
        return refused
    about: dict[str, Any] = {"route": route, "subject": subject}
    if (commit := repo.find(asked.revision)) is None:
        return error(404, f"Invalid rev id: {asked.revision}", "RevisionNotFound", **about)
    if (content := commit.files.get(asked.path)) is None:
        missing = error(404, "Entry not found", "EntryNotFound", **about)
        missing.headers["X-Repo-Commit"] = commit.oid
        return missing
    lfs = is_lfs(asked.path, content)
    if asked.verb == "raw":
        body = Content(content.pointer) if lfs else content
        return Response(200, {"ETag": f'"{body.git_sha1}"', "X-Repo-Commit": commit.oid}, file=body, **about)
    headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes", "Cache-Control": "no-store",
               "X-Linked-Size": str(content.size)}  # fmt: skip
    if lfs:
        headers |= {"X-Linked-ETag": f'"{content.sha256}"', "Location": hub.sign(subject, asked.path, content)}
        if hub.xet:
            token = f"{hub.endpoint}/api/models/{repo.name}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": content.xet_hash, "Link": f'<{token}>; rel="xet-auth"'}
        return Response(302, headers, f"Found. Redirecting to {headers['Location']}".encode(), **about)
    etag = f'"{content.git_sha1}"'
    query = f"?{quote(request.path, safe='')}=&etag={quote(etag, safe='')}"
    location = f"/api/resolve-cache/models/{repo.name}/{commit.oid}/{quote(asked.path)}{query}"
    headers |= {"X-Linked-ETag": etag, "Location": location}
    return Response(307, headers, f"Temporary Redirect. Redirecting to {location}".encode(), **about)


def _cached(hub: DemoHub, request: Request, asked: Asked) -> Response:
    about: dict[str, Any] = {"route": "cache", "subject": f"{asked.repo}/{asked.path}"}
    repo = _find(hub, request, asked.repo, "cache")
    if isinstance(repo, Response):
        return repo
    if refused := _refusal(hub, request, repo, "cache", about["subject"]):
        return refused
    if not re.fullmatch("[0-9a-f]{40}", asked.revision):
        return error(400, "expected a commit", **about)
    commit = repo.find(asked.revision)
    if commit is None or (content := commit.files.get(asked.path)) is None:
        return error(404, "Entry not found", "EntryNotFound", **about)
    headers = {"ETag": f'"{content.git_sha1}"', "X-Repo-Commit": commit.oid, "Content-Type": "text/plain"}
    if "gzip" in request.headers.get("accept-encoding", "") and asked.path.endswith(_TEXT):
        # The edge compresses text for whoever lets it; then there is no length and no range.
        packed = gzip.compress(b"".join(content.pieces(0, content.size)), 1)
        return Response(200, headers | {"Content-Encoding": "gzip"}, packed, omit=_NO_LENGTH, **about)
    return Response(200, headers, file=content, **about)


# The API of one model.


def _model(hub: DemoHub, request: Request, asked: Asked) -> Response:
    verb = _ROUTES.get(asked.verb, asked.verb)
    repo = _find(hub, request, asked.repo, verb)
    if isinstance(repo, Response):
        return repo
    about: dict[str, Any] = {"route": verb, "subject": repo.name}
    revision, _, path = asked.path.partition("/")
    revision, path = unquote(revision) or "main", unquote(path)
    if verb in ("commits", "headers", "auth-check") and (refused := _refusal(hub, request, repo, verb, repo.name)):
        return refused
    if verb == "refs":
        branches = {"main": repo.main.oid} | repo.branches
        refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in branches.items()]
        return document({"branches": refs, "tags": [], "converts": []}, **about)
    if verb == "auth-check":
        return document({}, **about)
    if verb == "headers":
        return demomodels.headers(hub, repo, unquote(asked.path), about)
    if (commit := repo.find(revision)) is None:
        return error(404, f"Invalid rev id: {revision}", "RevisionNotFound", **about)
    if verb == "info":
        return demomodels.info(request, repo, commit, about)
    if verb == "tree":
        return demomodels.tree(hub, request, repo, commit, path, about)
    if verb == "treesize":
        return demomodels.tree_size(commit, path, about)
    if verb == "commits":
        older = repo.history[: repo.history.index(commit) + 1]
        listed = [{"id": c.oid, "title": c.title, "message": "", "date": c.date, "authors": []} for c in older[::-1]]
        return document(listed, {"X-Total-Count": str(len(listed))}, **about)
    return demomodels.paths_info(hub, request, repo, commit, about)
