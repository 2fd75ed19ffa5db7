"""The plan of a run: servers, dataset, rate, duration."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from treeline_bench.serving.datasets import Dataset, Shape, Texts
from treeline_bench.serving.messages import Conversation, Order, Turn
from treeline_bench.serving.server import Server

WARM_UP_IN, WARM_UP_OUT = 64, 16
MARGIN = 1.1
"""Spare arrivals for a duration, since they are random."""


@dataclass(frozen=True)
class Plan:
    """A workload. An open loop has a `rate_per_s`, a closed one a `concurrency`."""

    dataset: Dataset
    shape: Shape
    seed: int
    body: dict[str, Any]
    """Members of bodies besides model, prompt and length."""
    rate_per_s: float | None = None
    concurrency: int = 64
    duration_s: float | None = None
    timeout_s: float = 300.0
    processes: int = 1
    warm_up: int = 0
    """Uncounted requests."""
    rounds: int = 1
    chat: bool = False

    def conversations(self, texts: Texts, round_: int) -> list[Conversation]:
        """The conversations of a round; rounds differ, so that no round finds the last one's prompts cached. Raises
        DatasetError."""
        shape = self.shape
        counts = "num_prompts" in self.dataset.options and shape.num_prompts is None
        if counts and self.rate_per_s is not None and self.duration_s is not None:
            shape = replace(shape, num_prompts=math.ceil(self.rate_per_s * self.duration_s * MARGIN) + 10)
        return self.dataset.make(shape, texts, random.Random(f"{self.seed} {round_} prompts"))

    def warm_up_conversations(self, texts: Texts) -> list[Conversation]:
        """Short ones, not used by any round."""
        rng = random.Random(f"{self.seed} warm up")
        return [Conversation([Turn(texts.make(WARM_UP_IN, rng), WARM_UP_IN, WARM_UP_OUT)]) for _ in range(self.warm_up)]

    def order(self, server: Server, conversations: list[Conversation], round_: int) -> Order:
        """For one server; all have the same moments."""
        moments = None
        if self.rate_per_s is not None:
            rng = random.Random(f"{self.seed} {round_} arrivals")
            moments = arrivals(len(conversations), self.rate_per_s, rng)
        base = self._base(server, conversations)
        return msgspec.structs.replace(base, arrivals=moments, concurrency=self.concurrency, seconds=self.duration_s)

    def warm_up_order(self, server: Server, texts: Texts) -> Order:
        """All at once."""
        base = self._base(server, self.warm_up_conversations(texts))
        return msgspec.structs.replace(base, concurrency=max(self.warm_up, 1))

    def _base(self, server: Server, conversations: list[Conversation]) -> Order:
        host, port, tls = server.address
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return Order(
            host=host,
            port=port,
            tls=tls,
            path=server.base_path + ("/v1/chat/completions" if self.chat else "/v1/completions"),
            headers=server.headers,
            chat=self.chat,
            fields={"model": server.model, **stream, **self.body},
            conversations=conversations,
            timeout_s=self.timeout_s,
        )

    def words(self) -> str:
        """One line for people."""
        pace = f"{self.concurrency} at once" if self.rate_per_s is None else f"{self.rate_per_s:g} requests/s"
        bound = "" if self.duration_s is None else f", {self.duration_s:g} s"
        return f"{self.dataset.name}, {pace}{bound}, seed {self.seed}"


def arrivals(count: int, rate_per_s: float, rng: random.Random) -> list[float]:
    """Moments of a Poisson process in seconds, the first at 0. Raises ValueError for a rate not above 0."""
    if rate_per_s <= 0:
        raise ValueError(f"a rate must be above 0, not {rate_per_s:g}")
    moments, now = [], 0.0
    for _ in range(count):
        moments.append(now)
        now += rng.expovariate(rate_per_s)
    return moments
