"""Compares the prompt tokens that engines had cached, by their own counts, with those that an ideal cache would
have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeline_bench.context import BenchmarkError

from support.real_engines.oracle import Oracle
from support.real_engines.server import Server
from support.real_engines.traffic import Exchange


@dataclass
class Measured:
    """Prompt tokens as the server counts them: all, cached ones, and those that an endless cache would have."""

    cached: int = 0
    prompt: int = 0
    possible: int = 0

    def take(self, exchanges: Sequence[Exchange], engine: Server) -> None:
        """Count an exchange. Raises BenchmarkError if it was not answered, or its prompt differs."""
        oracle = Oracle(engine.block_tokens)
        sequences: list[tuple[int, int, list[int]]] = []
        for exchange in exchanges:
            record = exchange.record
            if record.error or record.cached_tokens < 0:
                raise BenchmarkError(f"a request failed: {record.error or 'no count of cached tokens'} {record.detail}")
            prompt = engine.tokens(exchange.messages)
            if len(prompt) != record.prompt_tokens:
                raise BenchmarkError(f"a prompt of {record.prompt_tokens} tokens has {len(prompt)} by /tokenize")
            whole = [*exchange.messages, {"role": "assistant", "content": exchange.answer}]
            sequences += [(record.sent_ns, 1, prompt), (record.done_ns, 0, engine.tokens(whole, answer_next=False))]
            self.prompt += record.prompt_tokens
            self.cached += record.cached_tokens
        for _, asked, tokens in sorted(sequences):
            self.possible += oracle.cached_tokens(tokens) if asked else 0
            oracle.remember(tokens)
