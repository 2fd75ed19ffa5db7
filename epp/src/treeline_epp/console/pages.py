"""The console's pages: the files that it is made of, for everybody who sees the port, and its data, which is private.

A page of HTML, a style sheet and modules of JavaScript as they are in this folder: no build, nothing from other hosts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from treeline_epp.admin import Handler, Page
from treeline_epp.console import view
from treeline_epp.console.series import Series
from treeline_epp.console.turns import Turns
from treeline_epp.fleet import Fleet
from treeline_epp.requests.decision_log import DecisionLog

ROOT: Final = "/console/"
DATA: Final = f"{ROOT}data"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text can become an element or a script, even by a mistake of the page's own.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": _POLICY,
}


def console_pages(fleet: Fleet, log: DecisionLog, series: Series, *, texts: bool) -> dict[str, Handler]:
    """The pages by their paths, and what leads to them. `texts`: prompts are shown to clients that ask for them."""
    run, turns = secrets.token_hex(8), Turns()

    async def data(query: Mapping[str, str]) -> Page:
        asked = query.get("texts") == "1"
        if asked and not texts:
            return Page({"error": "prompts are shown only by a picker that runs with --show-prompts"}, 403)
        after, since = query.get("after", "0"), query.get("since", "0")
        for name, value in (("after", after), ("since", since)):
            if not (value.isascii() and value.isdecimal() and len(value) < 16):
                return Page({"error": f"`{name}` is a number: of a decision, or of seconds"}, 400)

        def answer() -> bytes:
            return msgspec.json.encode(shown(int(after), int(since), query.get("prefixes") == "1", asked))

        body = await turns.take(answer)
        if body is None:
            return Page(
                {"error": "many ask for this at once: ask again in a second"}, 503, headers={"Retry-After": "1"}
            )
        return Page(body, headers=_HEADERS)

    def shown(after: int, since: int, prefixes: bool, asked: bool) -> dict[str, object]:
        now = time.monotonic()
        found: dict[str, object] = {
            # Decisions are numbered anew by a picker that was restarted.
            "run": run,
            "now": time.time(),
            "ready": fleet.discovered.is_set(),
            "texts_allowed": texts,
            "decisions": {"count": log.count, "shown": view.decisions(log, after, texts=asked)},
            "endpoints": view.endpoints(fleet, now),
            "series": series.since(since),
        }
        if prefixes:
            found["prefixes"] = view.prefixes(log, fleet, now, texts=asked)
        return found

    return {**dict.fromkeys(("/", ROOT.rstrip("/")), _lead), **files(), DATA: data}


def _lead(_query: Mapping[str, str]) -> Page:
    """To the page, by the scheme and the name that the client used, which a proxy in front may have changed."""
    return Page(f"The console is at {ROOT}\n".encode(), 302, "text/plain", _HEADERS | {"Location": ROOT})


def files() -> dict[str, Handler]:
    """What the page is made of, by path."""
    found = (file for file in Path(__file__).parent.iterdir() if file.suffix in _TYPES)
    return {ROOT if file.name == "page.html" else f"{ROOT}{file.name}": _shown(file) for file in found}


def _shown(file: Path) -> Handler:
    page = Page(file.read_bytes(), content_type=f"{_TYPES[file.suffix]}; charset=utf-8", headers=_HEADERS)
    return lambda _query: page
