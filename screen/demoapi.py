"""What the demo Hub answers: the routes of the Hub's HTTP API and of its file resolver.

Source: huggingface_hub 2.4.0 hf_api.py (what is asked, and which fields of the answers are read), file_download.py
(the headers of a resolve), utils/_http.py (error codes), utils/_pagination.py (Link).
"""

from __future__ import annotations

import base64
import binascii
import gzip
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode

import orjson

from .demorepo import Commit, Content, DemoRepo, directories, git_blob, is_lfs

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
_EXPANDABLE = set("""author baseModels cardData childrenModelCount config createdAt disabled downloads downloadsAllTime
    evalResults gated gguf inference inferenceProviderMapping lastModified library_name likes mask_token model-index
    pipeline_tag private resourceGroup safetensors sha siblings spaces tags transformersInfo trendingScore usedStorage
    widgetData xetEnabled""".split())  # noqa: SIM905
_ROUTES = {"revision": "info", "paths-info": "paths_info", "safetensors-metadata": "headers"}
_SORTS = {name: name for name in ("createdAt", "downloads", "lastModified", "likes", "trendingScore")} | {
    "created_at": "createdAt", "last_modified": "lastModified", "trending_score": "trendingScore"}  # fmt: skip


class Request(NamedTuple):
    """A request as received. Header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)

    def first(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else None


@dataclass
class Response:
    """An answer before faults: a file answers ranges, anything else is sent whole."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Content | None = None
    route: str = "other"
    subject: str = ""
    omit: frozenset[str] = frozenset()  # names, in lower case, of headers not to send


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
        return _listing(hub, request)
    if match := _CACHE.fullmatch(request.path):
        return _cached(hub, request, Asked(unquote(match["repo"]), "cache", match["rev"], unquote(match["path"])))
    if asked := parse_resolve(request.path):
        return _resolve(hub, request, asked)
    if match := _MODEL.fullmatch(request.path.rstrip("/")):
        asked = Asked(unquote(match["repo"]), match["verb"] or "info", "", match["rest"] or "")
        return _model(hub, request, asked)
    return error(404, "Sorry, we can't find the page you are looking for.")


def error(status: int, message: str, code: str | None = None, **about: Any) -> Response:
    """An error as the Hub sends it: in X-Error-Message, and for some in X-Error-Code."""
    headers = {"Content-Type": "application/json; charset=utf-8", "X-Error-Message": message}
    if code:
        headers["X-Error-Code"] = code
    return Response(status, headers, orjson.dumps({"error": message}), **about)


def document(value: object, headers: dict[str, str] | None = None, **about: Any) -> Response:
    return Response(200, {"Content-Type": "application/json; charset=utf-8"} | (headers or {}), orjson.dumps(value),
                    **about)  # fmt: skip


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
        return _headers(hub, repo, unquote(asked.path), about)
    if (commit := repo.find(revision)) is None:
        return error(404, f"Invalid rev id: {revision}", "RevisionNotFound", **about)
    if verb == "info":
        return _info(request, repo, commit, about)
    if verb == "tree":
        return _tree(hub, request, repo, commit, path, about)
    if verb == "treesize":
        return document({"path": path or "/", "size": sum(c.size for p, c in commit.files.items() if _under(p, path))},
                        **about)  # fmt: skip
    if verb == "commits":
        older = repo.history[: repo.history.index(commit) + 1]
        listed = [{"id": c.oid, "title": c.title, "message": "", "date": c.date, "authors": []} for c in older[::-1]]
        return document(listed, {"X-Total-Count": str(len(listed))}, **about)
    return _paths_info(request, repo, commit, about)


def _info(request: Request, repo: DemoRepo, commit: Commit, about: dict[str, Any]) -> Response:
    wanted = request.query.get("expand", []) + request.query.get("expand[]", [])
    if unknown := [name for name in wanted if name not in _EXPANDABLE]:
        return error(400, f'"expand" must be one of {sorted(_EXPANDABLE)}, not {unknown}', **about)
    full = describe(repo, commit)
    if wanted:
        return document({name: full[name] for name in ("_id", "id", *wanted) if name in full}, **about)
    if request.first("blobs").lower() in ("true", "1"):
        full["siblings"] = [_sibling(path, content) for path, content in commit.files.items()]
    if request.first("securityStatus").lower() in ("true", "1"):
        issues = [{"path": path, "level": level} for path, level in repo.unsafe.items()]
        full["securityRepoStatus"] = {"scansDone": True, "filesWithIssues": issues}
    return document(full, **about)


def describe(repo: DemoRepo, commit: Commit) -> dict[str, Any]:
    """Everything the Hub tells of a model at a commit."""
    card, config = repo.card, _json(commit.files.get("config.json"))
    bases = card.get("base_model", [])
    bases = [bases] if isinstance(bases, str) else bases
    relation = card.get("base_model_relation")
    tags = ["safetensors"] if any(p.endswith(".safetensors") for p in commit.files) else ["pytorch"]
    tags += [config["model_type"]] if "model_type" in config else []
    tags += [f"base_model:{base}" for base in bases]
    tags += [f"base_model:{relation}:{base}" for base in bases if relation]
    tags += [f"license:{card['license']}"] if "license" in card else []
    tags += [*repo.tags, "region:us"]
    quantization = config.get("quantization_config")
    short: dict[str, Any] = {name: config[name] for name in ("architectures", "model_type") if name in config}
    if isinstance(quantization, dict):
        short["quantization_config"] = {k: v for k, v in quantization.items() if isinstance(v, str | int | bool)}
    described = {
        "_id": git_blob(repo.name.encode())[:24], "id": repo.name, "modelId": repo.name,
        "author": repo.name.partition("/")[0], "sha": commit.oid, "lastModified": commit.date,
        "createdAt": repo.created, "private": repo.private, "gated": repo.gated, "disabled": repo.disabled,
        "downloads": repo.downloads, "likes": repo.likes, "trendingScore": repo.likes, "tags": tags,
        "pipeline_tag": repo.pipeline_tag, "library_name": "transformers", "cardData": card, "config": short,
        "siblings": [{"rfilename": path} for path in commit.files], "spaces": [],
        "usedStorage": sum(content.size for content in commit.files.values()),
    }  # fmt: skip
    if parameters := _parameters(commit):
        described["safetensors"] = {"parameters": parameters, "total": sum(parameters.values())}
    return described


def _sibling(path: str, content: Content) -> dict[str, Any]:
    if not is_lfs(path, content):
        return {"rfilename": path, "size": content.size, "blobId": content.git_sha1}
    lfs = {"sha256": content.sha256, "size": content.size, "pointerSize": len(content.pointer)}
    return {"rfilename": path, "size": content.size, "blobId": git_blob(content.pointer), "lfs": lfs}


def _parameters(commit: Commit) -> dict[str, int]:
    """Elements by dtype, as the Hub counts them: over every safetensors file, packed weights included."""
    counted: Counter[str] = Counter()
    for content in commit.files.values():
        counted.update(content.elements)
    return dict(counted)


def _json(content: Content | None) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        value = orjson.loads(content.head or b"".join(content.pieces(0, content.size)))
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


# Tree.


def _under(path: str, folder: str) -> bool:
    return not folder or path == folder or path.startswith(folder + "/")


def _tree(
    hub: DemoHub, request: Request, repo: DemoRepo, commit: Commit, folder: str, about: dict[str, Any]
) -> Response:
    folder = folder.rstrip("/")
    if folder and not any(path.startswith(folder + "/") for path in commit.files):
        return error(404, f'"{folder}" does not exist', "EntryNotFound", **about)
    expand = request.first("expand").lower() == "true"
    names = [*directories(iter(commit.files)), *commit.files]
    names = sorted(name for name in names if _under(name, folder) and name != folder)
    if request.first("recursive").lower() not in ("true", "1"):
        depth = folder.count("/") + 1 if folder else 0
        names = [name for name in names if name.count("/") == depth]
    size = min(int(request.first("limit", str(hub.page_size))), 100 if expand else hub.page_size)
    if (start := _start(request, commit.oid, names)) is None:
        return error(400, "Invalid cursor", **about)
    page = names[start : start + size]
    headers = {}
    if start + size < len(names):
        headers["Link"] = _next(hub, request, size, {"after": page[-1], "tree": commit.oid})
    return document([_entry(repo, commit, name, expand) for name in page], headers, **about)


def _entry(repo: DemoRepo, commit: Commit, path: str, expand: bool) -> dict[str, Any]:
    last = {"lastCommit": {"id": commit.oid, "title": commit.title, "date": commit.date}} if expand else {}
    content = commit.files.get(path)
    if content is None:
        return {"type": "directory", "oid": git_blob(path.encode()), "size": 0, "path": path, **last}
    entry: dict[str, Any] = {"type": "file", "oid": "", "size": content.size, "path": path, **last}
    if is_lfs(path, content):
        entry["oid"] = git_blob(content.pointer)
        entry["lfs"] = {"oid": content.sha256, "size": content.size, "pointerSize": len(content.pointer)}
    else:
        entry["oid"] = content.git_sha1
    if expand:
        level = repo.unsafe.get(path, "safe")
        scan = {"status": level, "message": None, "reportLink": None}
        entry["securityFileStatus"] = {"status": level, "avScan": scan, "pickleImportScan": None}
    return entry


def _paths_info(request: Request, repo: DemoRepo, commit: Commit, about: dict[str, Any]) -> Response:
    if request.headers.get("content-type", "").startswith("application/json"):
        asked = orjson.loads(request.body)
        paths, expand = asked.get("paths", []), bool(asked.get("expand"))
        paths = [paths] if isinstance(paths, str) else paths
    else:
        form = parse_qs(request.body.decode())
        paths, expand = form.get("paths", []), form.get("expand", [""])[0].lower() == "true"
    known = {*commit.files, *directories(iter(commit.files))}
    return document([_entry(repo, commit, path, expand) for path in paths if path in known], **about)


def _start(request: Request, bound_to: str, names: Sequence[str]) -> int | None:
    """Where the page a cursor names begins; None for a cursor of another tree, or none of ours."""
    if not (cursor := request.first("cursor")):
        return 0
    try:
        known = orjson.loads(base64.urlsafe_b64decode(cursor))
        return names.index(known["after"]) + 1 if known["tree"] == bound_to else None
    except (binascii.Error, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def _next(hub: DemoHub, request: Request, size: int, cursor: dict[str, str]) -> str:
    query = {name: values for name, values in request.query.items() if name not in ("cursor", "limit")}
    opaque = base64.urlsafe_b64encode(orjson.dumps(cursor)).decode()
    encoded = urlencode(query | {"limit": size, "cursor": opaque}, doseq=True)
    return f'<{hub.endpoint}{request.path}?{encoded}>; rel="next"'


# All shard headers in one answer.


def _headers(hub: DemoHub, repo: DemoRepo, index: str, about: dict[str, Any]) -> Response:
    files = repo.main.files
    if not hub.one_request_headers or index not in files:
        return error(404, "Entry not found", "EntryNotFound", **about)
    known = _json(files[index])
    shards = sorted(set(known.get("weight_map", {}).values()) & files.keys())
    parts = [orjson.dumps(shard) + b":" + header_json(files[shard]) for shard in shards]
    metadata = orjson.dumps({"metadata": known["metadata"]} if "metadata" in known else {})
    body = b'{"index":' + metadata + b',"headers":{' + b",".join(parts) + b"}}"
    return Response(200, {"Content-Type": "application/json; charset=utf-8"}, body, **about)


def header_json(shard: Content) -> bytes:
    """The JSON of a safetensors file's header."""
    length = int.from_bytes(b"".join(shard.pieces(0, 8)), "little")
    return b"".join(shard.pieces(8, 8 + length))


# The model listing.


def _listing(hub: DemoHub, request: Request) -> Response:
    about: dict[str, Any] = {"route": "list", "subject": ""}
    sort = request.first("sort", "trendingScore")
    if sort not in _SORTS:
        return error(400, f'"sort" must be one of {sorted(_SORTS)}', **about)
    wanted = request.query.get("expand", []) + request.query.get("expand[]", [])
    found = [describe(repo, repo.main) for repo in _listed(hub, request)]
    found.sort(key=lambda model: model["id"])
    found.sort(key=lambda model: model[_SORTS[sort]], reverse=True)
    names = [model["id"] for model in found]
    if (start := _start(request, "models", names)) is None:
        return error(400, "Invalid cursor", **about)
    size = min(int(request.first("limit", str(hub.page_size))), hub.page_size)
    page = found[start : start + size]
    headers = {}
    if start + size < len(found):
        headers["Link"] = _next(hub, request, size, {"after": page[-1]["id"], "tree": "models"})
    fields = ["_id", "id", "modelId", "likes", "trendingScore", "private", "downloads", "tags", "pipeline_tag",
              "library_name", "createdAt"]  # fmt: skip
    if request.first("full").lower() == "true":
        fields += ["author", "sha", "lastModified", "gated", "disabled", "siblings"]
    fields += ["config"] if request.first("config").lower() == "true" else []
    fields += ["cardData"] if request.first("cardData").lower() == "true" else []
    fields = ["_id", "id", *wanted] if wanted else fields
    return document([{name: model[name] for name in fields if name in model} for model in page], headers, **about)


def _listed(hub: DemoHub, request: Request) -> Iterator[DemoRepo]:
    search, author = request.first("search").lower(), request.first("author").lower()
    filters = {tag for value in request.query.get("filter", []) for tag in value.split(",")}
    for repo in hub.repos.values():
        if repo.renamed_to or repo.private or search not in repo.name.lower():
            continue
        if author and repo.name.lower().partition("/")[0] != author:
            continue
        if filters and not filters <= set(describe(repo, repo.main)["tags"]):
            continue
        yield repo
