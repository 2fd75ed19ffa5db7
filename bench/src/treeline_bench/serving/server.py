"""The measured server: its address, models, and tokenizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
from tokenizers import Tokenizer
from treeline_wire.tokenizer import BundleError, TokenizerBundle

ASK_S = 10.0


class ServerError(RuntimeError):
    """The server cannot be measured; the message says what to do."""


@dataclass(frozen=True)
class Server:
    """A server that answered. `version` is empty if unknown; `root`: its model's folder."""

    name: str
    url: str
    """The URL without the API's path: `http://127.0.0.1:8000`."""
    model: str
    api_key: str
    engine: str
    version: str
    root: str

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it uses TLS."""
        parts = urlsplit(self.url)
        return parts.hostname or "", _port(parts), parts.scheme == "https"

    @property
    def base_path(self) -> str:
        return urlsplit(self.url).path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def normal_url(url: str) -> str:
    """`url` without a trailing `/v1`. Raises ServerError if it is malformed."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = _port(parts)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise ServerError(f"{url!r} is not a server's address, which looks like http://127.0.0.1:8000")
    if "@" in parts.netloc:  # nor is it sent with the load; and addresses get into results
        raise ServerError("an address has no user and password: give a key by --api-key")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def find(name: str, url: str, api_key: str, model: str) -> Server:
    """Asks a server for its models; without `model` the first counts. Raises ServerError."""
    url = normal_url(url)
    with _client(url, api_key) as client:
        entry = _entry(_models(name, url, client), name, url, model)
        return Server(
            name=name,
            url=url,
            model=str(entry["id"]),
            api_key=api_key,
            engine=str(entry.get("owned_by") or ""),
            version=_version(client),
            root=str(entry.get("root") or ""),
        )


def _client(url: str, api_key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=ASK_S, trust_env=False, follow_redirects=True)


def _models(name: str, url: str, client: httpx.Client) -> list[dict[str, Any]]:
    try:
        answer = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(
            f"{name}: nothing answers at {url} ({error}): is the server started, and this its port?"
        ) from None
    if answer.status_code in (401, 403):
        said = "the API key is not the right one" if client.headers.get("authorization") else "it wants an API key"
        raise ServerError(f"{name}: {said} ({answer.status_code}): --api-key KEY, or OPENAI_API_KEY in the environment")
    if answer.status_code == 404:
        return []  # a gateway may serve completions alone
    try:
        found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        said = answer.text[:200]
        raise ServerError(f"{name}: {url}/v1/models is not a list of models ({answer.status_code}): {said!r}") from None
    return [entry for entry in found if isinstance(entry, dict) and "id" in entry]


def _entry(models: list[dict[str, Any]], name: str, url: str, model: str) -> dict[str, Any]:
    if not models:
        if model:
            return {"id": model}
        raise ServerError(f"{name}: {url} lists no models: give --model NAME")
    for entry in models:
        if model in ("", entry["id"]):
            return entry
    served = ", ".join(str(entry["id"]) for entry in models)
    raise ServerError(f"{name} serves no model {model!r}; it has: {served}")


def _version(client: httpx.Client) -> str:
    """vLLM reports it at /version, Treeline and SGLang with other information."""
    for path in ("/version", "/server_info", "/get_server_info"):
        with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
            answer = client.get(path)
            if answer.status_code == 200 and (found := answer.json().get("version")):
                return str(found)
    return ""


def tokenizer(given: str, server: Server) -> Tokenizer:
    """The tokenizer for counting: `given` (a folder, a tokenizer.json, or a name on the Hugging Face Hub), or the
    server's own, if it serves it (Treeline) or its model is on this machine. Raises ServerError."""
    try:
        found = _given_tokenizer(given) if given else _own_tokenizer(server)
    except Exception as error:  # the library raises bare Exceptions
        raise ServerError(f"no tokenizer in {given or 'what ' + server.name + ' serves'}: {error}") from None
    if found is None:
        raise ServerError(
            f"{server.name} does not serve its tokenizer: give --tokenizer FOLDER_OR_HF_ID, or --token-ids to send "
            "numbers"
        )
    return found


def _given_tokenizer(given: str) -> Tokenizer:
    path = Path(given)
    if path.exists():
        return Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    return Tokenizer.from_pretrained(given)


def _own_tokenizer(server: Server) -> Tokenizer | None:
    with contextlib.suppress(httpx.HTTPError, BundleError), _client(server.url, server.api_key) as client:
        answer = client.get("/treeline/tokenizer")
        if answer.status_code == 200:
            return Tokenizer.from_str(TokenizerBundle.from_json(answer.content).tokenizer_json)
    local = Path(server.root) / "tokenizer.json"
    return Tokenizer.from_file(str(local)) if server.root and local.is_file() else None
