"""Measure rendering a chat template, without sockets. Prints JSON rows {metric, value}.

    python runtime/benchmarks/chat.py [--count 20000]

A ChatML template and a conversation of ten messages with 4,096 characters in all, as JSON gives them. `render_us` is
what the picker does: it renders in its own process, within bounds. `worker_us` is what a runtime does where a template
is not a plain one: the same text by a worker process, there and back. Each is the median of single calls, in wall time,
after a first one that is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable

from treeline_runtime.templates.pool import TemplatePool
from treeline_wire.chat import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A recursive loop is no part of the inline language; here it recurses into nothing.
NOT_PLAIN = CHATML.replace("in messages", "in messages recursive")
CHARS = 4096
TURNS = 10


def conversation() -> list[dict[str, str]]:
    """Ten messages with `CHARS` characters of content."""
    text = "the quick brown fox jumps over the lazy dog " * CHARS
    sizes = [CHARS // TURNS + (1 if turn < CHARS % TURNS else 0) for turn in range(TURNS)]
    roles = ["system", *("user" if turn % 2 else "assistant" for turn in range(1, TURNS))]
    return [{"role": role, "content": text[:size]} for role, size in zip(roles, sizes, strict=True)]


def median_us(call: Callable[[], str], count: int) -> float:
    """The median time of one call, in microseconds."""
    call()
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6


def row(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    count = parser.parse_args().count
    messages = conversation()
    plain = ChatTemplate(CHATML, special_tokens={})
    with contextlib.closing(TemplatePool()) as pool:
        other = ChatTemplate(NOT_PLAIN, special_tokens={}, pool=pool)
        assert plain.not_inline is None
        assert other.not_inline is not None
        assert plain.render(messages) == other.render(messages)
        row("chat.render_us.4k", median_us(lambda: plain.render(messages), count))
        row("chat.worker_us.4k", median_us(lambda: other.render(messages), count // 10))
    return 0


if __name__ == "__main__":
    sys.exit(main())
