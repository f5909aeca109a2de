"""What can be wrong with a Hub, a CDN or a mirror, as records: the demo Hub commits them on request."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fnmatch import fnmatchcase


@enum.unique
class Kind(enum.StrEnum):
    """What happens. The fields of `Fault` each one reads are named in brackets."""

    STALL = "stall"  # sends `after_bytes` of the body, then nothing, with the socket open [after_bytes]
    CUT = "cut"  # sends `after_bytes` of the body, then closes [after_bytes]
    RATE = "rate"  # sends the body at `bytes_per_second` [bytes_per_second]; a trickle is 1
    NEVER = "never"  # reads the request and does not answer
    SLOW = "slow"  # answers after `seconds` [seconds]
    STATUS = "status"  # answers `status` [status, headers, seconds]: a 429 is over after `seconds`
    REDIRECT = "redirect"  # answers `status` to `location`, `{target}` in it being the request's own [status, location]
    IGNORE_RANGE = "ignore_range"  # 200 and the whole file
    WRONG_RANGE = "wrong_range"  # a Content-Range (and body) that starts one byte late
    SHIFTED = "shifted"  # the right Content-Range over bytes that start one byte late
    GZIP = "gzip"  # compresses, whatever the client accepts, and ignores Range
    FLIP = "flip"  # one bit of the file is wrong, at `after_bytes` [after_bytes]
    DROP_HEADERS = "drop_headers"  # [headers: names only]; without Content-Length the body ends where the socket does
    SET_HEADERS = "set_headers"  # [headers]; `{target}` in a value is the request's own target


@dataclass(frozen=True)
class Fault:
    """One fault: where it strikes and how often.

    `route` is one of the routes of `DemoHub.counts` (`info tree resolve cdn mirror0`..., fnmatch); `path` is matched
    (fnmatch) with `org/name/path/of/file` for files and with `org/name` for API calls; None for `times` is always.
    """

    kind: Kind
    route: str = "*"
    path: str = "*"
    times: int | None = None
    after_bytes: int = 0
    bytes_per_second: float = 1
    seconds: float = 0
    status: int = 503
    location: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def strikes(self, route: str, subject: str) -> bool:
        return fnmatchcase(route, self.route) and fnmatchcase(subject, self.path)
