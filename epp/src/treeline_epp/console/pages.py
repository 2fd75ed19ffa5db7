"""The console's two pages: HTML that loads nothing, and the JSON that its script asks for."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import Path

from treeline_epp.admin import Handler, Page
from treeline_epp.console import view
from treeline_epp.fleet import Fleet
from treeline_epp.requests.decision_log import DecisionLog

PAGE, DATA = "/debug/console", "/debug/console.json"
_HTML = Path(__file__).with_name("page.html")
_TOKEN = "CONSOLE-TOKEN"


def console_pages(fleet: Fleet, log: DecisionLog, *, token: str, texts: bool) -> dict[str, Handler]:
    """The pages by their paths. `texts`: prompts are shown to clients that ask for them."""
    page = page_of(token)

    def data(query: Mapping[str, str]) -> Page:
        asked = query.get("texts") == "1"
        if asked and not texts:
            return Page({"error": "prompts are shown only by a picker that runs with --show-prompts"}, 403)
        after = query.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 16):
            return Page({"error": "`after` is the number of a decision"}, 400)
        now = time.monotonic()
        shown: dict[str, object] = {
            "ready": fleet.discovered.is_set(),
            "texts_allowed": texts,
            "decisions": {
                "count": log.count,
                "next": log.count,
                "shown": view.decisions(log, int(after), texts=asked),
            },
            "endpoints": view.endpoints(fleet, now),
        }
        if query.get("prefixes") == "1":
            shown["prefixes"] = view.prefixes(log, fleet, now, texts=asked)
        return Page(shown, headers=ALWAYS)

    return {PAGE: lambda _query: page, DATA: data}


def page_of(token: str) -> Page:
    """The HTML, for a server that knows this token."""
    html = _HTML.read_text(encoding="utf-8").replace(_TOKEN, token)
    return Page(html.encode(), content_type="text/html; charset=utf-8", headers=_headers(html))


ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def _headers(html: str) -> dict[str, str]:
    """Only the page's own script and style run, and they reach nothing but this port."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash(html, "script"),
        "style-src": _hash(html, "style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    written = "; ".join(f"{name} {value}" for name, value in policy.items())
    return {**ALWAYS, "Content-Security-Policy": written, "Cross-Origin-Opener-Policy": "same-origin"}


def _hash(html: str, tag: str) -> str:
    """The one element of this tag, as a policy names it."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
