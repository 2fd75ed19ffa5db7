"""Error types for an API server's refusal or silence.

KubeError
├── NotFound          no such object, or no such kind
├── AlreadyExists     a create found the name taken
├── Conflict          the object is not as assumed (resourceVersion, uid, field ownership): observe again
├── Gone              a list or watch is too old to go on: start again
├── Invalid           the object is refused, `causes` say which fields
├── Forbidden         not allowed, or a quota is full, or the namespace is going away
├── Unauthorized      the credentials are not accepted
├── Throttled         too many requests
├── Unavailable       the server cannot answer, or cannot be reached
│   └── Unreachable   no answer
│       ├── Timeout       none in time, or a watch that fell silent
│       └── NoCluster     not asked: there are no credentials that lead to a server
├── Malformed         an answer that no API server gives
└── LostLease         not asked: we may no longer write
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, NamedTuple

import msgspec


class Cause(NamedTuple):
    """One detail of a refusal: the field's path (may be empty), a word for the kind of fault, a sentence."""

    field: str
    reason: str
    message: str


class KubeError(Exception):
    """A request that did not succeed. `code` is the HTTP status, 0 without an answer; 422 for a wrong field that the
    server took for an error of its own."""

    word: ClassVar[str] = "refused"
    """The type in one word, for the label of a metric and the beginning of a message."""

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        causes: tuple[Cause, ...] = (),
        retry_after_s: float | None = None,
        sent: bool = True,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.causes = causes
        self.retry_after_s = retry_after_s
        self.sent = sent
        """Whether the server may have acted on the request."""

    def has_cause(self, reason: str) -> bool:
        """Whether one of the causes has this type, such as `NamespaceTerminating`."""
        return any(cause.reason == reason for cause in self.causes)


class NotFound(KubeError):
    """No such object, or no such kind."""

    word = "not_found"


class AlreadyExists(KubeError):
    """A create found the name taken."""


class Conflict(KubeError):
    """The object is not as the request assumed."""


class Gone(KubeError):
    """A list or a watch is too old to be continued."""

    word = "expired"


class Invalid(KubeError):
    """The server refuses the object itself; sending it again is useless."""


class Forbidden(KubeError):
    """The server refuses us, or the namespace cannot take the object."""

    word = "forbidden"


class Unauthorized(KubeError):
    """The server does not know us."""

    word = "unauthorized"


class Throttled(KubeError):
    """Too many requests."""

    word = "throttled"


class Unavailable(KubeError):
    """The server cannot answer, or cannot be reached."""

    word = "server"


class Unreachable(Unavailable):
    """There was no answer."""

    word = "unreachable"


class Timeout(Unreachable):
    """No answer in time, or a watch that fell silent."""


class NoCluster(Unreachable):
    """No credentials lead to an API server. The message lists the attempts and says what to do."""


class Malformed(KubeError):
    """An answer that no API server gives: something else listens there, or a proxy has cut it off."""

    word = "malformed"


class LostLease(KubeError):
    """The write was not sent: the lease that allows it has run out, or will before an answer can come."""


_BY_CODE: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: Invalid,
    415: Invalid,
    422: Invalid,
    429: Throttled,
    504: Timeout,
}


class _Details(msgspec.Struct):
    causes: list[dict[str, Any]] | None = None
    retryAfterSeconds: int = 0


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    details: _Details | None = None


# The answer to an apply with an unknown field: an internal error without a reason.
_UNTYPED = re.compile(r"failed to create typed patch object \([^)]*\): (?P<details>.*)", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"(?P<field>\.\S+): (?P<fault>[^\n]+)")


def error_of(code: int, body: bytes, retry_after: str | None, what: str) -> KubeError:
    """The error of an answer. `what` names the request; `retry_after` is the header of that name."""
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, RecursionError):
        # not the API server's own answer but a proxy's, or none
        status = _Status(message=body[:200].decode(errors="replace").strip() or f"HTTP {code}")
    details = status.details or _Details()
    listed = (Cause(c.get("field", ""), c.get("reason", ""), c.get("message", "")) for c in details.causes or ())
    causes = tuple(dict.fromkeys(listed))
    kind = _BY_CODE.get(code, Unavailable if code >= 500 else KubeError)
    if status.reason == "AlreadyExists":
        kind = AlreadyExists
    elif status.reason == "Expired":
        kind = Gone
    elif untyped := _UNTYPED.search(status.message):
        kind, code = Invalid, 422
        unknown = _UNKNOWN_FIELD.finditer(untyped["details"])
        causes = tuple(Cause(u["field"].removeprefix("."), "FieldValueUnknown", u["fault"]) for u in unknown)
    elif any(cause.field == "metadata.uid" for cause in causes):
        # a patch that names a uid: there is another object of that name
        kind = Conflict
    wait = _seconds(retry_after)
    if wait is None and details.retryAfterSeconds:
        wait = float(details.retryAfterSeconds)
    return kind(f"{what}: {status.message}", code=code, reason=status.reason, causes=causes, retry_after_s=wait)


def _seconds(header: str | None) -> float | None:
    # API servers send seconds; a date, as proxies may, is not worth a clock
    return float(header) if header is not None and header.isdecimal() else None
