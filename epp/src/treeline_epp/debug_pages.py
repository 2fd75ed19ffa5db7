"""The debug pages of decisions: the last ones that were taken, and what would be decided of a request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from treeline_epp.admin import Handler, Page, Question
from treeline_epp.options import Options
from treeline_epp.requests.body import Body
from treeline_epp.requests.decision_log import KEPT, DecisionLog
from treeline_epp.requests.messages import RouteRequest
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import is_large
from treeline_epp.requests.router import Router

DECISIONS, EXPLAIN = "/debug/decisions", "/debug/explain"
LAST = "20"
"""So many decisions are shown, if nobody says how many."""
_MOST_BODY_BYTES = 4 << 20


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to be explained: its path, further headers (lower-case names), and its body."""

    path: str
    body: bytes
    headers: dict[str, str] = {}


def decisions(log: DecisionLog, *, prompts: bool) -> dict[str, Handler]:
    """The page that shows them; `prompts`: with the beginnings of prompts for whoever asks."""

    def listing(query: Mapping[str, str]) -> Page:
        last, asked = query.get("last", LAST), query.get("prompts", "") in ("1", "true")
        if not (last.isascii() and last.isdecimal() and len(last) < 6):
            return Page({"error": f"last={last[:20]!r} is no number of decisions (at most {KEPT} are kept)"}, 400)
        if asked and not prompts:
            return Page({"error": "prompts are shown only by a picker that runs with --show-prompts"}, 403)
        return Page({"decisions": log.listing(int(last), prompts=asked)})

    return {DECISIONS: listing}


def questions(router: Router) -> Mapping[str, Question]:
    """What may be asked by POST."""
    return {EXPLAIN: lambda data: _explain(router, data)}


def question_bytes(options: Options) -> int:
    """The longest question: a body in base64, and what is around it. Others wait while it is read."""
    return min(options.max_body_bytes, _MOST_BODY_BYTES) * 4 // 3 + (1 << 16)


def encode(asked: Asked) -> bytes:
    """The body of a POST to `EXPLAIN`."""
    return msgspec.json.encode(asked)


def _explain(router: Router, data: bytes) -> Page:
    try:
        asked = msgspec.json.decode(data, type=Asked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Page({"error": f"not a question: {error}; it is {{path, body (base64), headers}}"}, 400)
    headers = {name.lower(): value for name, value in asked.headers.items()}
    headers |= {":path": asked.path, ":method": "POST" if asked.body else "GET"}
    request = RouteRequest(headers, asked.body or None, None)
    outline: Outline | None = None
    if request.body is not None and is_large(request.body):
        body = Body([asked.body])
        request, outline = msgspec.structs.replace(request, body=body), Outline()
        for piece in body.pieces():
            outline.feed(piece)
        outline.finish(body)
    return Page(router.explain(request, outline))
