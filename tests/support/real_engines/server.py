"""A foreign engine's real server, as a process on the CPU: its installation, its start, its requests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import httpx
import msgspec
from treeline_bench.context import ROOT, BenchmarkError


@dataclass(frozen=True)
class Installation:
    """An engine that a make target installs into an environment of its own. `variable` may name another folder."""

    engine: str
    word: str
    variable: str

    def interpreter(self) -> Path:
        """Return its Python. Raises BenchmarkError if it is not installed."""
        folder = Path(os.environ.get(self.variable, ROOT / ".cache" / self.word))
        if not (folder / ".stamp").exists():
            how = f"`make {self.word}` does that once ({self.variable} may name its folder)"
            raise BenchmarkError(f"{self.engine} is not installed: {how}")
        return folder / "bin" / "python"


@dataclass(frozen=True)
class Server:
    """One server. `blocks` is the size of its cache, `load_port` where it tells its load (0 for nowhere, and for an
    engine that tells none), `more` what else its command line has."""

    name: str
    port: int
    events_port: int
    replay_port: int
    blocks: int
    model: Path
    load_port: int = 0
    served_model: str = "tiny"
    more: tuple[str, ...] = ()

    engine: ClassVar[str]
    """The picker's name for it."""
    installation: ClassVar[Installation]
    block_tokens: ClassVar[int]
    start_s: ClassVar[float] = 300.0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def command(self, max_tokens: int = 4096) -> list[str]:
        """Return the command that starts the server; `max_tokens` is the longest prompt with its answer. Raises
        BenchmarkError."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return variables added to ours."""
        raise NotImplementedError

    def forget(self) -> None:
        """Empty its prefix cache, and make sure that its subscribers learn of it. Raises BenchmarkError."""
        raise NotImplementedError

    def tokens(self, messages: Sequence[Mapping[str, str]], *, answer_next: bool = True) -> list[int]:
        """The ids of a conversation as it renders it; `answer_next` as the prompt of an answer, else with the answer
        that it ends with. Raises BenchmarkError."""
        body = {"model": self.served_model, "messages": messages, "add_generation_prompt": answer_next}
        try:
            return msgspec.json.decode(self.ask("POST", "/tokenize", body), type=_Tokenized).tokens
        except msgspec.MsgspecError as error:
            raise BenchmarkError(f"{self.name}/tokenize: {error}") from error

    def kv_events(self, **more: object) -> str:
        """The value of `--kv-events-config`, which both engines spell alike."""
        sockets = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",  # with an address in place of the star it would connect
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "",
        }
        return json.dumps(sockets | more)

    def ask(self, method: str, path: str, body: object) -> bytes:
        """The answer to a request. Raises BenchmarkError where it is none."""
        try:
            with httpx.Client(trust_env=False, timeout=30) as http:
                return http.request(method, self.url + path, json=body).raise_for_status().content
        except httpx.HTTPError as error:
            raise BenchmarkError(f"{self.name}{path}: {error}") from error


class _Tokenized(msgspec.Struct):
    tokens: list[int]
