"""What a Hub means by an answer that is no success, and what a person can do about it."""

from __future__ import annotations

import json
import re

from formulas.errors import AccessDenied, HubMisbehaved, HubUnavailable, NotFound, ToolkitError

from .transport import SMALL_BODY, Exchange, origin
from .wire import Expired, RangeRefused

_TOKEN = "if it is private, set HF_TOKEN (or --token) to a token that may read it"


def refusal(exchange: Exchange, repo: str, endpoint: str) -> ToolkitError:
    """The error an answer with this status stands for; reads its short body for the reason.

    The order follows huggingface_hub 2.4.0 utils/_http.py `hf_raise_for_status`: the error code decides before the
    status does. Anonymous requests get 401 for a repo that is private and for one that never was.
    """
    status, said = exchange.status, exchange.headers.get("X-Error-Code", "")
    message = _message(exchange)
    subject, page = exchange.subject, f"{endpoint}/{repo}"
    foreign = origin(exchange.url) != origin(endpoint)
    because = f" ({message})" if message else ""

    if said == "GatedRepo":
        return AccessDenied(
            f"{subject}: access to {repo} is gated{because}", code="gated",
            hint=f"ask for access at {page}, then set HF_TOKEN (https://huggingface.co/settings/tokens)",
        )  # fmt: skip
    if status == 403 and "is disabled" in message:
        return AccessDenied(f"{subject}: the Hub has disabled {repo}{because}", code="disabled", hint=f"see {page}")
    if said == "RevisionNotFound":
        return NotFound(f"{subject}: no such revision{because}", code="revision_not_found", hint=f"see {page}")
    if said == "EntryNotFound":
        return NotFound(f"{subject}: no such file{because}", code="entry_not_found", hint=f"see {page}/tree/main")
    if status == 401 and "Invalid credentials" in message:
        return AccessDenied(
            f"{subject}: the token is not accepted{because}", code="bad_token",
            hint="log in again (hf auth login), or unset HF_TOKEN for public repos",
        )  # fmt: skip
    if foreign and status in (401, 403):
        return Expired(f"{subject}: expected the file, got {status}; its signed address has expired or is not for us")
    if said == "RepoNotFound" or status == 401:
        return NotFound(f"{subject}: no such repo, or not for this token{because}", code="repo_not_found", hint=_TOKEN)
    if status == 403:
        return AccessDenied(f"{subject}: access refused{because}", code="forbidden", hint=f"see {page}")
    if status in (404, 410):
        return NotFound(f"{subject}: not there{because}", code="not_found")
    if status == 416:
        return RangeRefused(f"{subject}: expected the range, got 416 with {exchange.headers.get('Content-Range')}")
    if status >= 500 or status == 408:
        return HubUnavailable(f"{subject}: expected an answer, got server error {status}{because}", code="server_error")
    return HubMisbehaved(f"{subject}: expected 200 or 206, got {status}{because}", code="refused")


def _message(exchange: Exchange) -> str:
    """The reason in X-Error-Message, or in a JSON body; "" when there is neither."""
    if header := exchange.headers.get("X-Error-Message"):
        return header[:300]
    length = exchange.headers.get("Content-Length", "")
    if not re.fullmatch("[0-9]{1,9}", length) or int(length) > SMALL_BODY:
        return ""
    try:
        body = json.loads(exchange.read(SMALL_BODY))
    except (ValueError, ToolkitError):
        return ""
    reason = body.get("error") if isinstance(body, dict) else None
    return str(reason)[:300] if reason else ""
