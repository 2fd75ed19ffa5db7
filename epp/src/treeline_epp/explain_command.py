"""`treeline pick explain`: how a running picker would route a request, and why; or how it routed earlier ones."""

from __future__ import annotations

import argparse
import http.client
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from treeline_wire import ports
from treeline_wire.command_line import Parser

from treeline_epp.explain_api import DECISIONS, EXPLAIN, Asked, Verdict

T = TypeVar("T")

_TIMEOUT_S = 30.0
_MOST_BYTES = 64 * 1024 * 1024
_TOKENS = ("cached", "host", "disk", "uncached", "queued")
_TERMS = (
    *("cost_s", "queue_s", "prefill_s", "load_s", "slots_s", "full_s"),
    *("decode_s", "others_s", "evict_s", "follow_s", "adapter_s"),
)


class CannotAsk(Exception):
    """The picker cannot be asked; the message says why and what to do."""


class Shown(msgspec.Struct, frozen=True):
    """An explanation, or a decision of the log: `terms` by endpoint, the best first, where not all endpoints were
    scored. `forms` are the seconds of the forms that were compared; `source_endpoint` has the prompt in that chosen.
    """

    policy: str = ""
    refusal: str = ""
    endpoint: str = ""
    request_id: str | None = None
    endpoints: list[Verdict] = []
    terms: dict[str, dict[str, float | None]] = {}
    form: str = ""
    source_endpoint: str | None = None
    forms: dict[str, dict[str, float]] | None = None


class _Decisions(msgspec.Struct, frozen=True):
    decisions: list[Shown]


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 1 where the request would be refused or no picker can be asked."""
    given = _parser().parse_args(argv)
    try:
        if given.last is not None:
            answer = _ask(given.url, "GET", f"{DECISIONS}?last={given.last}")
            shown = _read(answer, _Decisions, given.url).decisions
        else:
            asked = Asked(given.path, _body(given.body), dict(given.header))
            answer = _ask(given.url, "POST", EXPLAIN, msgspec.json.encode(asked))
            shown = [_read(answer, Shown, given.url)]
    except CannotAsk as error:
        sys.stderr.write(f"treeline pick explain: {error}\n")
        return 1
    text = "\n\n".join(map(table, shown)) or "no decision has been taken yet"
    if given.json:
        text = msgspec.json.format(answer, indent=2).decode()
    sys.stdout.write(text + "\n")
    return 1 if any(one.refusal for one in shown) else 0


def table(shown: Shown) -> str:
    """Return the decision as lines of text."""
    head = f"policy {shown.policy or '-'}"
    if shown.endpoint:
        head = f"{shown.request_id or '(no id)'}: {shown.endpoint}, {head}"
    lines = [head]
    if shown.refusal:
        lines.append(f"refused: {shown.refusal}")
    verdicts = shown.endpoints or [
        Verdict(name, "", "", rank, terms=terms) for rank, (name, terms) in enumerate(shown.terms.items(), 1)
    ]
    ranked = [_row(one) for one in verdicts if one.rank is not None]
    if ranked:
        lines += _aligned([("rank", "endpoint", *_TOKENS, *_TERMS), *ranked])
    lines += [f"   -  {one.endpoint}: {one.why}" for one in verdicts if one.rank is None]
    for form, terms in (shown.forms or {}).items():
        chosen = form == shown.form
        where = f", prompt at {shown.source_endpoint}" if chosen and shown.source_endpoint else ""
        parts = ", ".join(f"{name} {value:.4f}" for name, value in terms.items())
        lines.append(f"{'*' if chosen else ' '} {form}{where}: {sum(terms.values()):.4f} s ({parts})")
    return "\n".join(lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
    terms = {name: value or 0.0 for name, value in verdict.terms.items()}
    tokens = (f"{terms.get(f'{name}_tokens', 0.0):.0f}" for name in _TOKENS)
    return (str(verdict.rank), verdict.endpoint, *tokens, *(f"{terms.get(name, 0.0):.4f}" for name in _TERMS))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[1] = row[1].ljust(widths[1])
        lines.append("  ".join(cells))
    return lines


def _read(data: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CannotAsk(f"{url} does not answer as a picker's admin port: {error}") from error


def _ask(url: str, method: str, path: str, body: bytes | None = None) -> bytes:
    """Return the picker's answer, JSON. Raises `CannotAsk`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise CannotAsk(f"--url {url} is not an address of the form http://127.0.0.1:{ports.PICKER_ADMIN}")
    try:
        connection = http.client.HTTPConnection(parts.hostname, parts.port or ports.PICKER_ADMIN, timeout=_TIMEOUT_S)
        connection.request(method, path, body)
        response = connection.getresponse()
        data = response.read(_MOST_BYTES)
        connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CannotAsk(f"{url} does not answer as a picker's admin port ({why}): start one, or give --url") from error
    if response.status in (404, 405):
        raise CannotAsk(f"{url} has no debug pages: start the picker with --enable-debug-endpoints")
    if response.status != 200:
        raise CannotAsk(f"{url} answers {response.status}: {data[:500].decode('utf-8', 'replace')}")
    return data


def _body(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise CannotAsk(f"{path}: {error.strerror or error}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME: VALUE")
    return name.strip().lower(), value.strip()


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 100_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of decisions")
    return int(text)


_EXAMPLES = """examples:
  treeline pick explain request.json       where a request would go, and why
  echo '{"model": "tiny", "prompt": "hello"}' | treeline pick explain --path /v1/completions
  treeline pick explain --last 5           the last five decisions"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="treeline pick explain",
        description="Asks a running picker (with --enable-debug-endpoints) where a request would go, and prints for "
        "each endpoint its rank and its cost, or the filter that drops it. Nothing is sent to an engine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("body", nargs="?", default="-", metavar="FILE", help="the request's body (default: stdin)")
    parser.add_argument(
        "--url",
        default=f"http://127.0.0.1:{ports.PICKER_ADMIN}",
        help="the picker's admin port, on this machine or forwarded to it (default %(default)s)",
    )
    parser.add_argument("--path", default="/v1/chat/completions", help="the request's path (default %(default)s)")
    parser.add_argument(
        "--header", type=_header, action="append", default=[], metavar="NAME: VALUE", help="a header; may be repeated"
    )
    parser.add_argument("--last", type=_count, metavar="N", help="instead: the last N decisions that were taken")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser
