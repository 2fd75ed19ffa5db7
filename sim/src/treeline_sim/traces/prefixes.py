"""Traces of single requests that share the beginnings of their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count

from treeline_sim.model.text import Text
from treeline_sim.routers import TraceRequest
from treeline_sim.traces.base import Draw, Trace, merged


def generated_shared_prefix(draw: Draw) -> Iterator[TraceRequest]:
    """SGLang's benchmark of that name (`bench_serving --dataset-name generated-shared-prefix`) with its defaults: 64
    system prompts of 2,048 tokens, 16 questions of 128 for each, 256 tokens of output, in random order. After 1,024
    requests the next 1,024 come, with new system prompts, so each list is used once, as in the benchmark."""
    times = draw.arrivals()
    while True:
        systems = [draw.text(2048) for _ in range(64)]
        order = [system for system in systems for _ in range(16)]
        draw.rng.shuffle(order)
        for system in order:
            yield draw.request(next(times), system.extended(128, draw.rng), 256)


def _groups(draw: Draw, groups: int, each: int, shared: int, own: int, output: int) -> Iterator[TraceRequest]:
    prompts = []
    for _ in range(groups):
        prefix = draw.text(shared)
        prompts += [prefix.extended(own, draw.rng) for _ in range(each)]
    for at in draw.arrivals():
        yield draw.request(at, draw.rng.choice(prompts), output)


def groups_150x5(draw: Draw) -> Iterator[TraceRequest]:
    """llm-d's comparison of precise and approximate prefix routing on eight pods of two H100: 150 groups of 5 prompts,
    6,000 tokens shared in a group and 1,200 of its own, 1,000 out, each prompt repeated; the repeated tokens fill 73 %
    of the memory of all pods. There the rate climbs from 3 to 60 requests a second.
    """
    return _groups(draw, 150, 5, 6000, 1200, 1000)


def groups_83x8k(draw: Draw) -> Iterator[TraceRequest]:
    """llm-d's second one, on four pods of four H100: 83 groups of 3 prompts, 8,000 tokens shared and 1,000 of its own;
    37 % of the memory. The length of the output is not published with it; 1,000 is taken from the first."""
    return _groups(draw, 83, 3, 8000, 1000, 1000)


def bursts(draw: Draw) -> Iterator[TraceRequest]:
    """Bursts of 16 requests with a common prefix, as from agents that fan out, best-of-n and batches of one document: a
    new prefix of 2k to 16k tokens, 100 to 300 tokens of its own for each, all within 50 ms; 64 to 256 out. Our own: we
    know of no published trace.
    """

    def burst(begin: float) -> Iterator[TraceRequest]:
        prefix = draw.text(draw.log_between(2048, 16_384))
        for offset in sorted(draw.rng.uniform(0.0, 0.05) for _ in range(16)):
            prompt = prefix.extended(draw.between(100, 300), draw.rng)
            yield draw.request(begin + offset, prompt, draw.between(64, 256))

    return merged((begin, burst(begin)) for begin in draw.arrivals(draw.rate / 16))


def zipf_systems(draw: Draw) -> Iterator[TraceRequest]:
    """Applications behind one gateway: 500 system prompts of 500 to 8,000 tokens, the n-th most popular with a share
    of 1 ÷ n (Zipf's law with exponent 1, which requests for web objects follow nearly: Breslau et al., INFOCOM 1999);
    100 to 600 tokens of the user's, 100 to 300 out."""
    systems = [draw.text(draw.log_between(500, 8000)) for _ in range(500)]
    weights = list(accumulate(1 / rank for rank in range(1, len(systems) + 1)))
    for at in draw.arrivals():
        system = draw.rng.choices(systems, cum_weights=weights)[0]
        yield draw.request(at, system.extended(draw.between(100, 600), draw.rng), draw.between(100, 300))


def mooncake_like(draw: Draw) -> Iterator[TraceRequest]:
    """The shape of Mooncake's published traces (Qin et al., FAST 2025): prompts of some 12k tokens and 340 out, in
    blocks of 512; a third of them continue an earlier prompt (its blocks and more), the others share only a system
    prompt of one to four blocks. Arrivals come in waves: the rate is half to one and a half of the mean, for ten
    seconds each. For the files themselves: `--trace-file`.
    """
    systems = [draw.text(512 * n) for n in (1, 2, 4)]
    earlier: list[Text] = []
    now, rate = 0.0, draw.rate
    wave = 0.0
    for number in count():
        now += draw.rng.expovariate(rate)
        if now >= wave:
            wave, rate = now + 10.0, draw.rate * draw.rng.uniform(0.5, 1.5)
        before = draw.rng.choice(earlier) if earlier and draw.rng.random() < 0.35 else draw.rng.choice(systems)
        grown = min(draw.log_between(512, 32_768), max(512, 120_000 - before.tokens))
        request = draw.request(now, before.extended(grown, draw.rng), draw.log_between(50, 1200))
        if len(earlier) < 400:
            earlier.append(request.whole)
        else:
            earlier[number % 400] = request.whole
        yield request


def shuffled_documents(draw: Draw) -> Iterator[TraceRequest]:
    """Retrieval with a ranking for each question: 300 documents of 500 to 3,000 tokens, popular by Zipf's law; after a
    system prompt of 400 come four of them in any order, and a question of 20 to 100; 50 to 300 out. Two prompts with
    the same documents share those before the first that differs. Our own."""
    system, documents = draw.text(400), [draw.text(draw.log_between(500, 3000)) for _ in range(300)]
    weights = list(accumulate(1 / rank for rank in range(1, len(documents) + 1)))
    for at in draw.arrivals():
        prompt, chosen = system, set[int]()
        while len(chosen) < 4:
            number = draw.rng.choices(range(len(documents)), cum_weights=weights)[0]
            if number not in chosen:
                chosen.add(number)
                prompt = prompt.joined(documents[number])
        yield draw.request(at, prompt.extended(draw.between(20, 100), draw.rng), draw.between(50, 300))


def jumping_popularity(draw: Draw) -> Iterator[TraceRequest]:
    """A topic that changes at once: of 200 texts of 1,000 to 12,000 tokens one has a third of all requests for 5 to 30
    s, then another; the others come evenly. 50 to 400 tokens of the user's, 100 to 300 out. Our own.
    """
    texts = [draw.text(draw.log_between(1000, 12_000)) for _ in range(200)]
    popular, until = texts[0], 0.0
    for at in draw.arrivals():
        if at >= until:
            popular, until = draw.rng.choice(texts), at + draw.rng.uniform(5.0, 30.0)
        text = popular if draw.rng.random() < 1 / 3 else draw.rng.choice(texts)
        yield draw.request(at, text.extended(draw.between(50, 400), draw.rng), draw.between(100, 300))


def unequal_pods(draw: Draw) -> Iterator[TraceRequest]:
    """A pool that grew over the years: 100 system prompts of 500 to 8,000 tokens, evenly; 100 to 1,000 tokens of the
    user's, 100 to 400 out. Every second pod takes 2.5 times as long and has 1 / 2.5 of the memory, as an A100 beside an
    H200. Our own."""
    systems = [draw.text(draw.log_between(500, 8000)) for _ in range(100)]
    for at in draw.arrivals():
        system = draw.rng.choice(systems)
        yield draw.request(at, system.extended(draw.between(100, 1000), draw.rng), draw.between(100, 400))


TRACES = (
    Trace(
        "generated-shared-prefix",
        "SGLang's: 64 system prompts of 2k, 16 questions for each",
        rate=160.0,
        requests=8192,
        generate=generated_shared_prefix,
    ),
    Trace(
        "150x5",
        "llm-d's: 150 groups of 5 prompts, 6k shared, 1.2k own, 1k out, memory 73 % full",
        rate=24.0,
        requests=4000,
        generate=groups_150x5,
        working_set_tokens=150 * 6000 + 750 * 2200,
        pressure=0.73,
    ),
    Trace(
        "83x8k",
        "llm-d's second: 83 groups of 3 prompts, 8k shared, 1k own, 1k out, memory 37 % full",
        rate=24.0,
        requests=4000,
        generate=groups_83x8k,
        working_set_tokens=83 * 8000 + 249 * 2000,
        pressure=0.37,
    ),
    Trace("bursts", "16 siblings at once, each time of a new prefix", rate=60.0, requests=8000, generate=bursts),
    Trace("zipf", "500 system prompts, few of them popular", rate=120.0, requests=8000, generate=zipf_systems),
    Trace("mooncake-like", "long prompts that grow, in waves", rate=16.0, requests=4000, generate=mooncake_like),
    Trace("shuffled-documents", "four of 300 documents in any order", 48.0, 6000, shuffled_documents),
    Trace(
        "jumping",
        "one of 200 texts has a third of all requests, and each 5 to 30 s another",
        120.0,
        8000,
        jumping_popularity,
    ),
    Trace(
        "unequal-pods",
        "100 system prompts, every second pod 2.5 times as slow",
        90.0,
        8000,
        unequal_pods,
        slower=(1.0, 2.5),
    ),
)
