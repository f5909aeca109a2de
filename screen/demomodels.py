"""What the demo Hub tells of its models: info, tree, paths-info, all headers at once, and the listing.

Source: huggingface_hub 2.4.0 hf_api.py (ModelInfo, RepoFile, RepoFolder, list_models, get_sharded_safetensors_metadata)
and utils/_pagination.py.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

import orjson

from .demohttp import Request, Response, document, error
from .demorepo import Commit, Content, DemoRepo, directories, git_blob, is_lfs

if TYPE_CHECKING:
    from .demohub import DemoHub

_EXPANDABLE = set("""author baseModels cardData childrenModelCount config createdAt disabled downloads downloadsAllTime
    evalResults gated gguf inference inferenceProviderMapping lastModified library_name likes mask_token model-index
    pipeline_tag private resourceGroup safetensors sha siblings spaces tags transformersInfo trendingScore usedStorage
    widgetData xetEnabled""".split())  # noqa: SIM905
_SORTS = {name: name for name in ("createdAt", "downloads", "lastModified", "likes", "trendingScore")} | {
    "created_at": "createdAt", "last_modified": "lastModified", "trending_score": "trendingScore"}  # fmt: skip


def info(request: Request, repo: DemoRepo, commit: Commit, about: dict[str, Any]) -> Response:
    """One model: everything, or the fields `expand` names."""
    wanted = request.query.get("expand", []) + request.query.get("expand[]", [])
    if unknown := [name for name in wanted if name not in _EXPANDABLE]:
        return error(400, f'"expand" must be one of {sorted(_EXPANDABLE)}, not {unknown}', **about)
    full = describe(repo, commit)
    if wanted:
        return document({name: full[name] for name in ("_id", "id", *wanted) if name in full}, **about)
    if request.flag("blobs"):
        full["siblings"] = [_sibling(path, content) for path, content in commit.files.items()]
    if request.flag("securityStatus"):
        issues = [{"path": path, "level": level} for path, level in repo.unsafe.items()]
        full["securityRepoStatus"] = {"scansDone": True, "filesWithIssues": issues}
    return document(full, **about)


def describe(repo: DemoRepo, commit: Commit) -> dict[str, Any]:
    """Everything the Hub tells of a model at a commit."""
    config = _json(commit.files.get("config.json"))
    short: dict[str, Any] = {name: config[name] for name in ("architectures", "model_type") if name in config}
    if isinstance(quantization := config.get("quantization_config"), dict):
        short["quantization_config"] = {k: v for k, v in quantization.items() if isinstance(v, str | int | bool)}
    described = _summary(repo) | {
        "sha": commit.oid, "lastModified": commit.date, "config": short, "spaces": [],
        "siblings": [{"rfilename": path} for path in commit.files],
        "usedStorage": sum(content.size for content in commit.files.values()),
    }  # fmt: skip
    if parameters := _parameters(commit):
        described["safetensors"] = {"parameters": parameters, "total": sum(parameters.values())}
    return described


def _summary(repo: DemoRepo) -> dict[str, Any]:
    """What is known of a model without its files."""
    return {
        "_id": git_blob(repo.name.encode())[:24], "id": repo.name, "modelId": repo.name,
        "author": repo.name.partition("/")[0], "createdAt": repo.created, "lastModified": repo.modified,
        "private": repo.private, "gated": repo.gated, "disabled": repo.disabled, "downloads": repo.downloads,
        "likes": repo.likes, "trendingScore": repo.likes, "tags": _tags(repo), "pipeline_tag": repo.pipeline_tag,
        "library_name": "transformers", "cardData": repo.card,
    }  # fmt: skip


def _tags(repo: DemoRepo) -> list[str]:
    card, tags = repo.card, list(repo.tags)
    if isinstance(repo.files, Mapping):  # else its description says so in its tags
        tags += ["safetensors"] if any(path.endswith(".safetensors") for path in repo.files) else []
        config = repo.files.get("config.json")
        tags += [config["model_type"]] if isinstance(config, Mapping) and "model_type" in config else []
    bases = card.get("base_model", [])
    bases = [bases] if isinstance(bases, str) else bases
    relation = card.get("base_model_relation")
    tags += [f"base_model:{base}" for base in bases]
    tags += [f"base_model:{relation}:{base}" for base in bases if relation]
    tags += [f"license:{card['license']}"] if "license" in card else []
    return [*tags, "region:us"]


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


def tree_size(commit: Commit, folder: str, about: dict[str, Any]) -> Response:
    """Bytes of all files under a folder."""
    size = sum(content.size for path, content in commit.files.items() if _under(path, folder))
    return document({"path": folder or "/", "size": size}, **about)


def tree(
    hub: DemoHub, request: Request, repo: DemoRepo, commit: Commit, folder: str, about: dict[str, Any]
) -> Response:
    """A page of the files and folders under a folder."""
    folder = folder.rstrip("/")
    if folder and not any(path.startswith(folder + "/") for path in commit.files):
        return error(404, f'"{folder}" does not exist', "EntryNotFound", **about)
    expand = request.flag("expand")
    names = [*directories(iter(commit.files)), *commit.files]
    names = sorted(name for name in names if _under(name, folder) and name != folder)
    if request.first("recursive").lower() not in ("true", "1"):
        depth = folder.count("/") + 1 if folder else 0
        names = [name for name in names if name.count("/") == depth]
    size = _page_size(request, 100 if expand else hub.page_size)
    if (start := _start(request, commit.oid, names)) is None:
        return error(400, "Invalid cursor", **about)
    page = names[start : start + size]
    headers = {}
    if start + size < len(names):
        headers["Link"] = _next(hub, request, size, {"after": page[-1], "tree": commit.oid})
    return document([_entry(hub, repo, commit, name, expand) for name in page], headers, **about)


def _entry(hub: DemoHub, repo: DemoRepo, commit: Commit, path: str, expand: bool) -> dict[str, Any]:
    last = {"lastCommit": {"id": commit.oid, "title": commit.title, "date": commit.date}} if expand else {}
    content = commit.files.get(path)
    if content is None:
        return {"type": "directory", "oid": git_blob(path.encode()), "size": 0, "path": path, **last}
    entry: dict[str, Any] = {"type": "file", "oid": "", "size": content.size, "path": path, **last}
    if is_lfs(path, content):
        entry["oid"] = git_blob(content.pointer)
        entry["lfs"] = {"oid": content.sha256, "size": content.size, "pointerSize": len(content.pointer)}
        entry |= {"xetHash": content.xet_hash} if hub.xet else {}
    else:
        entry["oid"] = content.git_sha1
    if expand:
        level = repo.unsafe.get(path, "safe")
        scan = {"status": level, "message": None, "reportLink": None}
        entry["securityFileStatus"] = {"status": level, "avScan": scan, "pickleImportScan": None}
    return entry


def paths_info(
    hub: DemoHub, request: Request, repo: DemoRepo, commit: Commit, about: dict[str, Any]
) -> Response:
    """The tree entries of the paths asked for, in a form or in JSON; unknown paths are left out."""
    if request.headers.get("content-type", "").startswith("application/json"):
        asked = orjson.loads(request.body)
        paths, expand = asked.get("paths", []), bool(asked.get("expand"))
        paths = [paths] if isinstance(paths, str) else paths
    else:
        form = parse_qs(request.body.decode())
        paths, expand = form.get("paths", []), form.get("expand", [""])[0].lower() == "true"
    known = {*commit.files, *directories(iter(commit.files))}
    return document([_entry(hub, repo, commit, path, expand) for path in paths if path in known], **about)


def _page_size(request: Request, most: int) -> int:
    asked = request.first("limit")
    return max(1, min(int(asked), most)) if asked.isdecimal() else most


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


def headers(hub: DemoHub, repo: DemoRepo, index: str, about: dict[str, Any]) -> Response:
    """The headers of every shard an index names, on `main`, in one answer; the weight map is left out."""
    files = repo.main.files
    if not hub.one_request_headers or index not in files:
        return error(404, "Entry not found", "EntryNotFound", **about)
    metadata, shards = _indexed(files[index])
    parts = [orjson.dumps(shard) + b":" + header_json(files[shard]) for shard in shards if shard in files]
    body = b'{"index":' + metadata + b',"headers":{' + b",".join(parts) + b"}}"
    return Response(200, {"Content-Type": "application/json; charset=utf-8"}, body, **about)


@functools.lru_cache(64)
def _indexed(index: Content) -> tuple[bytes, list[str]]:
    """An index without its weight map, as JSON, and the shards the map names: it is as long as the headers."""
    known = _json(index)
    metadata = orjson.dumps({"metadata": known["metadata"]} if "metadata" in known else {})
    return metadata, sorted(set(known.get("weight_map", {}).values()))


def prepare(repo: DemoRepo) -> None:
    """Generates what a repo's first requests would wait for: its files, their digests, the shards of its index."""
    files = repo.main.files
    for path, content in files.items():
        _ = content.sha256 if is_lfs(path, content) else content.git_sha1
        if path.endswith(".safetensors.index.json"):
            _indexed(content)


def header_json(shard: Content) -> bytes:
    """The JSON of a safetensors file's header."""
    length = int.from_bytes(b"".join(shard.pieces(0, 8)), "little")
    return b"".join(shard.pieces(8, 8 + length))


# The model listing.


def listing(hub: DemoHub, request: Request) -> Response:
    """A page of the models that match; what a listing does not show is not generated for it."""
    about: dict[str, Any] = {"route": "list", "subject": ""}
    sort = request.first("sort", "trendingScore")
    if sort not in _SORTS:
        return error(400, f'"sort" must be one of {sorted(_SORTS)}', **about)
    wanted = request.query.get("expand", []) + request.query.get("expand[]", [])
    found = [_summary(repo) for repo in _listed(hub, request)]
    found.sort(key=lambda model: model["id"])
    found.sort(key=lambda model: model[_SORTS[sort]], reverse=True)
    names = [model["id"] for model in found]
    if (start := _start(request, "models", names)) is None:
        return error(400, "Invalid cursor", **about)
    size = _page_size(request, hub.page_size)
    page = found[start : start + size]
    headers = {}
    if start + size < len(found):
        headers["Link"] = _next(hub, request, size, {"after": page[-1]["id"], "tree": "models"})
    fields = ["_id", "id", "modelId", "likes", "trendingScore", "private", "downloads", "tags", "pipeline_tag",
              "library_name", "createdAt"]  # fmt: skip
    for asked, more in (("full", ["author", "sha", "lastModified", "gated", "disabled", "siblings"]),
                        ("config", ["config"]), ("cardData", ["cardData"])):  # fmt: skip
        fields += more if request.flag(asked) else []
    fields = ["_id", "id", *wanted] if wanted else fields
    shown = [_with(model, fields, hub) for model in page]
    return document(shown, headers, **about)


def _with(model: dict[str, Any], fields: list[str], hub: DemoHub) -> dict[str, Any]:
    """These fields of a model; its files are looked at only where one of them needs it."""
    if not set(fields) <= model.keys():
        repo = hub.repos[model["id"].lower()]
        model = model if repo.missing else describe(repo, repo.main)
    return {name: model[name] for name in fields if name in model}


def _listed(hub: DemoHub, request: Request) -> Iterator[DemoRepo]:
    search, author = request.first("search").lower(), request.first("author").lower()
    filters = {tag for value in request.query.get("filter", []) for tag in value.split(",")}
    for repo in hub.repos.values():
        if repo.renamed_to or repo.private or search not in repo.name.lower():
            continue
        if author and repo.name.lower().partition("/")[0] != author:
            continue
        if filters and not filters <= set(_tags(repo)):
            continue
        yield repo
