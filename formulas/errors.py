"""The toolkit's errors. Each knows its exit code, a stable code word for --json, and what to do next.

    ToolkitError                 1  failed
    +-- BadInput                 2  what the user typed or handed over cannot be used
    +-- NotFound                 4  repo, revision or file does not exist (or is hidden from this token)
    +-- AccessDenied             4  gated, private or disabled: a person has to act
    +-- HubUnavailable           4  network or server failed; running again can help
    +-- HubMisbehaved            4  the server answered something the protocol forbids
    +-- HeaderError              4  a safetensors header is malformed
    +-- DigestMismatch           4  bytes are not the bytes the digest names
    +-- DiskFull                 4  no room; nothing is lost
    +-- StoreLocked              5  a living process holds the store

Text grammar: *subject: expected X, got Y; consequence or next step.*
"""

from __future__ import annotations


class ToolkitError(Exception):
    """A failure with a sentence for people, a code word for programs, and the documented exit code."""

    code = "failed"
    exit_code = 1
    retry = False  # whether running the same command again can help

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None, retry: bool | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code
        if retry is not None:
            self.retry = retry


class BadInput(ToolkitError):
    code = "bad_input"
    exit_code = 2


class NotFound(ToolkitError):
    code = "not_found"
    exit_code = 4


class AccessDenied(ToolkitError):
    code = "access_denied"
    exit_code = 4


class HubUnavailable(ToolkitError):
    code = "unavailable"
    exit_code = 4
    retry = True


class HubMisbehaved(ToolkitError):
    code = "misbehaved"
    exit_code = 4


class HeaderError(ToolkitError):
    code = "malformed_header"
    exit_code = 4


class DigestMismatch(ToolkitError):
    code = "digest_mismatch"
    exit_code = 4


class DiskFull(ToolkitError):
    code = "disk_full"
    exit_code = 4
    retry = True


class StoreLocked(ToolkitError):
    code = "store_locked"
    exit_code = 5
    retry = True
