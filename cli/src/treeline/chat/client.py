"""The requests of a chat. Errors are sentences that say what to do."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec
from treeline_wire import headers

from treeline.chat.answer import AnswerReader, BadAnswer, Piece, brief, said
from treeline.printable import printable

KEYS = ("TREELINE_API_KEY", "OPENAI_API_KEY")
"""Variables of the environment; the first that is set is sent."""
CONNECT_S = 10.0
MODELS_S = 30.0
"""Seconds for listing models. Answers have no limit: the user stops them with Ctrl-C."""
LARGEST_BODY = 1 << 20
"""Bytes of an answer that is no stream."""


class ChatError(Exception):
    """An error whose message is for the user."""


class _Models(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


class Client:
    """One server. A context, which closes its connections."""

    def __init__(self, url: str) -> None:
        """Raises ChatError for an address or a key that cannot be used."""
        self.url = url
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ChatError(f"{url!r} is no URL: {error}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise ChatError(f"{url!r} is no URL of a server: it looks like http://127.0.0.1:8080")
        self._base = str(base).rstrip("/") + ("/v1" if base.path in ("", "/") else "")
        sent = {"accept-encoding": "identity", "user-agent": "treeline-chat"}
        if key := _key():
            sent["authorization"] = f"Bearer {key}"
        self._http = httpx.Client(
            headers=sent,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=not _is_here(base.host),  # a proxy of the environment does not lead to this machine
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Their names. Raises ChatError."""
        with self._response("GET", "/models", timeout=MODELS_S) as response:
            body = _whole(response)
            if response.status_code != 200:
                raise ChatError(self._refusal(response.status_code, body))
        try:
            found = msgspec.json.decode(body, type=_Models).data
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise ChatError(
                f"{self.url} answers, but not as an OpenAI-compatible server: its /v1/models is {_quoted(body)}"
            ) from None
        return [printable(model.id) for model in found]

    def ask(self, body: dict[str, Any], reader: AnswerReader) -> Generator[Piece, None, None]:
        """The answer as it comes. Closing the generator closes the connection, which ends the server's work. Raises
        ChatError."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._response("POST", "/chat/completions", json=body) as response:
            kind = response.headers.get("content-type", "")
            if response.status_code == 404:
                raise ChatError(self._no_model(str(body["model"]), _whole(response)))
            if response.status_code != 200:
                raise ChatError(self._refusal(response.status_code, _whole(response)))
            if not kind.lower().startswith("text/event-stream"):
                found = f"{brief(kind) or 'something'}: {_quoted(_whole(response))}"
                raise ChatError(f"{self.url} was asked for a stream, but sent {found}")
            reader.answer.replica = printable(response.headers.get(headers.ENDPOINT, ""))
            try:
                for chunk in response.iter_raw():
                    yield from reader.take(chunk)
                yield from reader.end()
            except BadAnswer as error:
                raise ChatError(str(error)) from None

    @contextlib.contextmanager
    def _response(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """Raises ChatError for what the network does."""
        try:
            with self._http.stream(method, self._base + path, **options) as response:
                yield response
        except httpx.ConnectTimeout:
            raise ChatError(f"{self.url} does not answer within {CONNECT_S:g} s") from None
        except httpx.ConnectError as error:
            raise ChatError(
                f"there is no server at {self.url} ({brief(str(error))}): start one with `treeline up`, name another "
                "with `treeline chat URL`, or have one started with `treeline chat MODEL`"
            ) from None
        except httpx.TimeoutException:
            raise ChatError(f"{self.url} took the request, but does not answer") from None
        except (httpx.HTTPError, UnicodeError) as error:
            raise ChatError(
                f"the connection to {self.url} broke: {brief(str(error)) or type(error).__name__}"
            ) from None

    def _no_model(self, model: str, body: bytes) -> str:
        try:
            there = self.models()
        except ChatError:
            there = []
        if not there or model in there:
            return self._refusal(404, body)
        return f"{self.url} has no model {model!r}; it has {', '.join(there)}: name one with --model"

    def _refusal(self, status: int, body: bytes) -> str:
        why = _quoted(body)
        if status in (401, 403):
            have = "the key was refused: look at" if _key() else "set"
            return f"{self.url} wants a key ({status}: {why}): {have} {' or '.join(KEYS)}"
        return f"{self.url} refused with {status}: {why}"


def _key() -> str:
    for name in KEYS:
        if key := os.environ.get(name, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise ChatError(f"{name} holds characters that no key has")
            return key
    return ""


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _whole(response: httpx.Response) -> bytes:
    body = b""
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > LARGEST_BODY:
            break
    return body[:LARGEST_BODY]


def _quoted(body: bytes) -> str:
    """Quotes an answer that is not a stream: the message of an error, else its beginning."""
    try:
        return said(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return brief(body.decode(errors="replace")) or "an empty answer"
