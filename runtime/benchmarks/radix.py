"""Measures the time that the radix cache takes and the hits that it finds, beside the best possible cache.

    python runtime/benchmarks/radix.py

Prints a row of JSON for each figure:

- `radix.share.SHAPE`: time in the tree (matching, locking, inserting, evicting) ÷ time of 256 requests that share
  nothing (100 to 1,024 tokens in and out; on a CPU 64 of up to 256), so that the tree's work brings no hit; it evicts
  half of the inserted pages.
- `radix.hit_rate.NAME`, `radix.vs_optimal.NAME`: programs in the shapes of the workloads of SGLang's paper (Zheng et
  al., 2024, section 6.1), 64 of them at once, with as large a cache as there (20,480 tokens). The hit rate is prompt
  tokens found ÷ prompt tokens; the optimum is the hit rate of an unbounded cache of single tokens, which has every
  prompt and every answer as soon as it is known. The model is too small to matter: only the scheduler decides.
  `radix.hit_vs_optimal` is the mean of all.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import COMMON, SHAPES, report
from treeline_runtime import Engine, SamplingParams
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.kvcache import RadixCache, key_of
from treeline_runtime.messages import BatchTokenOut, FromScheduler, GenerateReq, ToScheduler
from treeline_runtime.models.loader import load_model
from treeline_runtime.published import ToPublisher
from treeline_runtime.scheduler import Scheduler

SMALLEST = SHAPES["tiny"] | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
AT_ONCE = 64
CACHE_TOKENS = 20_480
"""Tokens that fit beside Llama-7B in float16 (512 KiB a token) in an A10G's 24 GB, the paper's machine."""
TIMED = ("match", "pages_of", "lock", "lock_node", "unlock", "insert", "evict", "take_events")

Ids = list[int]
Ask = tuple[Ids, int]
"""A prompt, and how many tokens to produce."""
Program = Generator[list[Ask], list[Ids], None]
"""Yields requests that may run at once, is sent their answers."""


# ---- the share of time --------------------------------------------------------------------------------------


class Clock:
    """Time within some methods of an object; calls within calls count once."""

    def __init__(self, target: object, names: tuple[str, ...]) -> None:
        self.seconds = 0.0
        self._depth = 0
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return timed


def share(shape: str, count: int, longest: int, settings: dict[str, Any]) -> float:
    """The tree's share of the time of a batch of requests that share nothing."""
    rng = random.Random(0)
    prompts = [rng.choices(range(10, 4000), k=rng.randint(longest // 10, longest)) for _ in range(count)]
    lengths = [rng.randint(longest // 10, longest) for _ in range(count)]
    tokens = sum(map(len, prompts)) + sum(lengths)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_new_tokens=length) for length in lengths]
    settings = {"max_total_tokens": max(tokens // 2, 4 * longest)} | settings
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[shape] | COMMON))
        with Engine(name, load_format="dummy", context_length=8192, **settings) as engine:
            engine.generate(prompts[:4], SamplingParams(ignore_eos=True, max_new_tokens=8))
            clock = Clock(engine.scheduler.cache.tree, TIMED)
            started = time.perf_counter()
            engine.generate(prompts, params)
            return clock.seconds / (time.perf_counter() - started)


# ---- the paper's shapes -------------------------------------------------------------------------------------


class Shapes:
    """Programs as they prompt, in random tokens; `scale` multiplies how many of them there are."""

    def __init__(self, seed: int, scale: float) -> None:
        self._rng = random.Random(seed)
        self._scale = scale

    def all(self) -> dict[str, list[Program]]:
        return {
            "mmlu": self.few_shot(subjects=10, questions=20, shots=1000, question=80),
            "hellaswag": [self.select(self.ids(1800), 60, 20) for _ in range(self._count(100))],
            "react": self._react(),
            "agents": self._agents(),
            "tree_of_thought": [self.tree_of_thought() for _ in range(self._count(16))],
            "skeleton_of_thought": [self.skeleton() for _ in range(self._count(32))],
            "judge": [self.judge() for _ in range(self._count(25))],
            "json": [self.fields() for _ in range(self._count(20))],
            "multi_turn_short": [self.chat(4, 8) for _ in range(self._count(20))],
            "multi_turn_long": [self.chat(256, 512) for _ in range(self._count(20))],
            "rag": self._rag(),
        }

    def _count(self, most: int) -> int:
        return max(round(most * self._scale), 2)

    def ids(self, count: int) -> Ids:
        return self._rng.choices(range(10, 4000), k=count)

    def few_shot(self, subjects: int, questions: int, shots: int, question: int) -> list[Program]:
        """Questions behind the examples of their subject; one token each."""
        found = []
        for _ in range(self._count(subjects)):
            examples = self.ids(shots)
            found += [self._one(examples + self.ids(question), 1) for _ in range(questions)]
        self._rng.shuffle(found)
        return found

    def _one(self, prompt: Ids, length: int) -> Program:
        yield [(prompt, length)]

    def select(self, examples: Ids, question: int, ending: int) -> Program:
        """Four endings of a question, scored one beside the other."""
        asked = examples + self.ids(question)
        yield [(asked + self.ids(ending), 1) for _ in range(4)]

    def _react(self) -> list[Program]:
        instruction = self.ids(1200)

        def program() -> Program:
            said = instruction + self.ids(30)
            for _ in range(5):
                [thought] = yield [(said, 60)]
                said = said + thought + self.ids(100)

        return [program() for _ in range(self._count(20))]

    def _agents(self) -> list[Program]:
        """Five prompts with a long template in the front and the event behind it."""
        templates = [self.ids(400) for _ in range(5)]
        return [self._one(self._rng.choice(templates) + self.ids(60), 40) for _ in range(self._count(200))]

    def tree_of_thought(self) -> Program:
        """Two branches at each of four stages: 30 generations."""
        states = [self.ids(300)]
        for _ in range(4):
            asks = [(state + self.ids(20), 64) for state in states for _ in range(2)]
            answers = yield asks
            states = [prompt + answer for (prompt, _), answer in zip(asks, answers, strict=True)]

    def skeleton(self) -> Program:
        asked = self.ids(200)
        [tips] = yield [(asked, 120)]
        yield [(asked + tips + self.ids(20), 128) for _ in range(5)]

    def judge(self) -> Program:
        article = self.ids(900)
        asks = [(article + self.ids(40), 128) for _ in range(6)]
        answers = yield asks
        yield [(article + [token for answer in answers for token in answer] + self.ids(20), 2)]

    def fields(self) -> Program:
        """A page, then fields one after the other, with fixed text between them."""
        said = self.ids(900)
        for length in (8, 8, 8, 8, 24):
            [value] = yield [(said, length)]
            said = said + value + self.ids(6)

    def chat(self, shortest: int, longest: int) -> Program:
        said: Ids = []
        for _ in range(4):
            said = said + self.ids(self._rng.randint(256, 512))
            [answer] = yield [(said, self._rng.randint(shortest, longest))]
            said = said + answer

    def _rag(self) -> list[Program]:
        instruction, passages = self.ids(300), [self.ids(300) for _ in range(8)]

        def program() -> Program:
            asked = instruction + self._rng.choice(passages) + self.ids(40)
            [query] = yield [(asked, 24)]
            yield [(asked + query + self._rng.choice(passages), 96)]

        return [program() for _ in range(self._count(60))]


# ---- running programs ---------------------------------------------------------------------------------------


class InProcess:
    """Implements the scheduler's `Transport`: an inbox, and the ends of requests."""

    def __init__(self) -> None:
        self.inbox: list[ToScheduler] = []
        self.tokens: dict[str, Ids] = {}
        self.ended: list[tuple[str, int]] = []
        """Request id and cached tokens."""

    def receive(self) -> list[ToScheduler]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            for out in message.outs if isinstance(message, BatchTokenOut) else ():
                self.tokens[out.rid] += out.token_ids
                if out.finish is not None:
                    if out.finish.type not in ("stop", "length"):
                        raise SystemExit(f"a request failed: {out.finish.message}")
                    self.ended.append((out.rid, out.cached_tokens))

    def publish(self, update: ToPublisher) -> bool:
        return True

    def wake(self) -> None:
        pass

    def wait(self) -> None:
        """Returns at once: the driver calls `step` only while requests run."""


@dataclass
class Running:
    """A program, and the requests that it waits for."""

    program: Program
    rids: list[str] = field(default_factory=list)


@dataclass
class Rates:
    """Prompt tokens: all, found in the cache, and found by the best cache."""

    prompt: int = 0
    found: int = 0
    best: int = 0


class Driver:
    """Runs programs, some at once, and counts their hits."""

    def __init__(self, scheduler: Scheduler, transport: InProcess) -> None:
        self._scheduler, self._transport = scheduler, transport
        self._oracle = RadixCache(page_size=1)
        self._waiting: dict[str, Running] = {}
        self._prompts: dict[str, Ids] = {}
        self.rates = Rates()

    def run(self, programs: list[Program]) -> Rates:
        left = iter(programs)
        for program in [program for program, _ in zip(left, range(AT_ONCE), strict=False)]:
            self._advance(Running(program), None)
        while self._waiting:
            self._scheduler.step()
            ended, self._transport.ended = self._transport.ended, []
            for rid, cached in ended:
                running = self._waiting.pop(rid)
                self.rates.found += cached
                self._remember(self._prompts[rid] + self._transport.tokens[rid])
                if not any(other in self._waiting for other in running.rids):
                    answers = [self._transport.tokens[other] for other in running.rids]
                    if not self._advance(running, answers) and (program := next(left, None)) is not None:
                        self._advance(Running(program), None)
        return self.rates

    def _advance(self, running: Running, answers: list[Ids] | None) -> bool:
        """Sends the program's next requests; False if it has ended."""
        try:
            asks = next(running.program) if answers is None else running.program.send(answers)
        except StopIteration:
            return False
        running.rids = []
        for prompt, length in asks:
            rid = str(len(self._prompts))
            self.rates.prompt += len(prompt)
            # the last token of a prompt is always computed
            self.rates.best += self._oracle.match(key_of(prompt[:-1])).num_pages
            self._remember(prompt)
            self._prompts[rid], self._transport.tokens[rid] = prompt, []
            self._waiting[rid] = running
            running.rids.append(rid)
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=length)
            self._transport.inbox.append(GenerateReq(rid, prompt, params))
        return True

    def _remember(self, tokens: Ids) -> None:
        self._oracle.insert(key_of(tokens), np.zeros(len(tokens), dtype=np.int64), prompt_tokens=len(tokens))


def hit_rates(programs: list[Program], settings: dict[str, Any]) -> Rates:
    """Runs the programs on a new scheduler; returns their hit rates."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(SMALLEST | COMMON))
        shown = {"context_length": 8192, "max_total_tokens": CACHE_TOKENS, "schedule_policy": "lpm"} | settings
        config = SchedulerConfig(model=name, load_format="dummy", device="cpu", **shown)
        transport = InProcess()
        return Driver(Scheduler(config, load_model(config), transport), transport).run(programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="for the share of time (default: llama8b on CUDA, else tiny)")
    parser.add_argument("--quick", action="store_true", help="a little of each, to prove that it works")
    parser.add_argument("--set", default="{}", metavar="JSON", help='fields of the configuration, {"page_size": 1}')
    args = parser.parse_args()
    settings = json.loads(args.set)
    shape = args.shape or ("llama8b" if torch.cuda.is_available() else "tiny")
    count, longest = (16, 64) if args.quick else (64, 256) if shape == "tiny" else (256, 1024)
    report(f"radix.share.{shape}", share(shape, count, longest, settings))
    scale = 0.1 if args.quick else 1.0
    compared = []
    for name, programs in Shapes(0, scale).all().items():
        rates = hit_rates(programs, settings)
        report(f"radix.hit_rate.{name}", rates.found / rates.prompt)
        if rates.best:
            compared.append(rates.found / rates.best)
            report(f"radix.vs_optimal.{name}", compared[-1])
    report("radix.hit_vs_optimal", statistics.mean(compared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
