"""The simulated engine: its prompts, its answers, its life."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from treeline_wire import headers
from treeline_wire.chat import ChatTemplate
from treeline_wire.prompt import Prompt, prompt_of_chat, prompt_of_completion
from treeline_wire.tokenizer import TokenizerBundle

from treeline_sim.cache import SimCache
from treeline_sim.connection import Connection, response
from treeline_sim.publisher import TOPIC, Publisher

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT_LENGTH = 1 << 20
log = logging.getLogger(__name__)


class SimCase(msgspec.Struct, frozen=True):
    """A request that will come. `held`: its prompt is in the cache from the start, on this engine."""

    path: str
    body: bytes
    held: bool


_IDLE = {b"num_requests_running": b"0", b"num_requests_waiting": b"0", b"kv_cache_usage_perc": b"0.1"}
_METRICS = b"".join(
    b'# TYPE vllm:%b gauge\nvllm:%b{model_name="sim"} %b\n' % (name, name, value) for name, value in _IDLE.items()
)
"""Of an idle vLLM, for pickers that read nothing else."""


@dataclass(frozen=True)
class SimOptions:
    """Port 0 binds any free port. A `fixed` cache never changes; otherwise a known prompt is held once served."""

    model: Path
    name: str = "tiny"
    host: str = "127.0.0.1"
    port: int = 0
    events_port: int = 0
    replay_port: int = 0
    load_port: int = 0
    block_size: int = 16
    epoch: int = 1
    fixed: bool = False
    cases: tuple[SimCase, ...] = ()


class SimEngine:
    """Answers every request at once with one completion, and counts cached tokens as its cache has them."""

    def __init__(self, options: SimOptions) -> None:
        """Tokenizes all cases. Raises BundleError, PromptError or TemplateError for what it cannot read."""
        self._options = options
        self._bundle = TokenizerBundle.from_dir(options.model)
        tokenizer = Tokenizer.from_str(self._bundle.tokenizer_json)
        self._ids = [_encode(tokenizer, self._prompt(case)) for case in options.cases]
        self.cache = SimCache(options.block_size, options.epoch)
        self._answers: dict[str, bytes] = {}
        for ids, case in zip(self._ids, options.cases, strict=True):
            if case.held:
                self.cache.store(ids)
        self._publisher = Publisher(
            self.cache, options.host, options.events_port, options.replay_port, options.load_port
        )
        self._fixed = self._fixed_answers()

    def _prompt(self, case: SimCase) -> Prompt:
        body = json.loads(case.body)
        if case.path == COMPLETIONS:
            return prompt_of_completion(body)[0]
        template = ChatTemplate.from_bundle(self._bundle)
        assert template is not None, "the model has no chat template"
        return prompt_of_chat(body, template)

    def _fixed_answers(self) -> dict[str, bytes]:
        def json_response(value: Any) -> bytes:
            return response(200, msgspec.json.encode(value))

        model = {"id": self._options.name, "object": "model", "created": 0, "owned_by": "treeline"}
        models = {"object": "list", "data": [model | {"max_model_len": CONTEXT_LENGTH}]}
        ok = json_response({"status": "ok"})
        return {
            "/health": ok,
            "/live": ok,
            "/ready": ok,
            "/metrics": response(200, _METRICS),
            "/v1/models": json_response(models),
            "/treeline/tokenizer": response(200, self._bundle.to_json()),
            "/server_info": json_response(self._server_info()),
        }

    def _server_info(self) -> dict[str, Any]:
        publisher = self._publisher
        return {
            "version": "sim",
            "served_model_name": self._options.name,
            "page_size": self._options.block_size,
            "epoch": self._options.epoch,
            "tokenizer_fingerprint": self._bundle.fingerprint,
            "draining": False,
            "kv_events": {
                "publisher": "zmq",
                "endpoint_host": self._options.host,
                "endpoint_port_base": publisher.events_port,
                "replay_endpoint_port_base": publisher.replay_port,
                "load_endpoint_port_base": publisher.load_port,
                "topic": TOPIC.decode(),
                "load_topic": "treeline.load",
                "block_size": self._options.block_size,
                "dp_size": 1,
                "curve": False,
            },
        }

    def _serve_request(self, connection: Connection, method: str, path: str, body: bytes) -> None:
        connection.write(self.answer(method, path, connection.case))

    def answer(self, method: str, path: str, case: str) -> bytes:
        """The whole response to a request; a new prompt's blocks are published, unless the cache is fixed."""
        if method == "POST" and path in (COMPLETIONS, CHAT):
            known = self._answers.get(case)
            return known if known is not None else self._serve(path, case)
        found = self._fixed.get(path)
        if found is None or method != "GET":
            return response(404, b'{"error":{"message":"not found","type":"not_found"}}')
        return found

    def _serve(self, path: str, case: str) -> bytes:
        if not case.isdecimal() or int(case) >= len(self._ids):
            return self._completion(path, cached=0, prompt=0)
        ids = self._ids[int(case)]
        cached = self.cache.matched_tokens(ids)
        if not self._options.fixed and (batch := self.cache.store(ids)) is not None:
            self._publisher.publish(*batch)
        # From the second time on the answer is always the same: nothing is ever evicted.
        self._answers[case] = self._completion(path, self.cache.matched_tokens(ids), len(ids))
        return self._completion(path, cached, len(ids))

    def _completion(self, path: str, cached: int, prompt: int) -> bytes:
        chat = path == CHAT
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": "ok"}} if chat else {"text": "ok"}
        body = {
            "id": "sim-0",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": self._options.name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 1,
                "total_tokens": prompt + 1,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
        counts = {headers.CACHED_TOKENS: str(cached), headers.PROMPT_TOKENS: str(prompt)}
        return response(200, msgspec.json.encode(body), counts)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[Mapping[str, int]], None]) -> None:
        """Serve until `stop` is set. `on_ready` gets the ports: http, events, replay, load."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self._serve_request), self._options.host, self._options.port, backlog=1024
        )
        publishing = asyncio.create_task(self._publisher.run())
        publisher = self._publisher
        on_ready(
            {
                "http": server.sockets[0].getsockname()[1],
                "events": publisher.events_port,
                "replay": publisher.replay_port,
                "load": publisher.load_port,
            }
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({stopping, publishing}, return_when=asyncio.FIRST_COMPLETED)
            if publishing in done:
                publishing.result()  # raises: it ends only by an error
        finally:
            server.close()
            for task in (stopping, publishing):
                task.cancel()
            await asyncio.gather(stopping, publishing, return_exceptions=True)


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if prompt.ids is not None:
        return prompt.ids
    assert prompt.text is not None
    ids: list[int] = tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens).ids
    return ids


async def serve(options: SimOptions) -> None:
    """Run an engine until SIGTERM or Ctrl-C."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = SimEngine(options)
    held = engine.cache.blocks
    await engine.run(stop, lambda ports: log.info("ready: %s; holding %d blocks", dict(ports), held))
