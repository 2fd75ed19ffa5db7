"""The engine model: its invariants, its equality with and without jumps, and the published figures that it must
meet."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from treeline_sim.model.engine import FOREVER, Engine, EngineConfig
from treeline_sim.model.measures import PrefillRate
from treeline_sim.model.speed import LLAMA_8B_H200, Speed
from treeline_sim.model.text import Text, token_bytes
from treeline_sim.model.work import Work
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from treeline_wire.frames import HelloRequest, ReplayItem, ReplayRequest, SnapshotChunk, SnapshotRequest

SMALL = EngineConfig(kv_tokens=2000, block_size=16, chunk_tokens=100, max_running=8)


def work_of(prompt: Text, output: int, rng: random.Random) -> Work:
    return Work(prompt, prompt.extended(output, rng), output)


def load(seed: int, block_size: int, count: int) -> list[tuple[float, Work]]:
    """Draw requests of three families with the seconds between them."""
    rng = random.Random(seed)
    shared = [Text(block_size).extended(rng.randrange(1, 150), rng) for _ in range(3)]
    return [
        (
            rng.expovariate(30),
            work_of(rng.choice(shared).extended(rng.randrange(1, 120), rng), rng.randrange(1, 90), rng),
        )
        for _ in range(count)
    ]


def play(engine: Engine, requests: list[tuple[float, Work]]) -> Iterator[tuple[float, str, int]]:
    """Yield the events in order: (time, event, request)."""
    now, at, coming = 0.0, 0.0, list(enumerate(requests))
    places = {work: number for number, (_, work) in coming}
    while coming or engine.ends_at < FOREVER:
        if coming and at + coming[0][1][0] <= engine.ends_at:
            _, (gap, work) = coming.pop(0)
            now = at = at + gap
            engine.submit(work, now)
        else:
            now = engine.ends_at
            happened = engine.advance(now)
            for what, works in (("first", happened.first), ("done", happened.done), ("refused", happened.refused)):
                yield from ((now, what, places[work]) for work in works)
        engine.check()


def configs() -> list[EngineConfig]:
    rng = random.Random("configs")
    return [
        EngineConfig(
            kv_tokens=rng.choice([640, 2000, 8000]),
            block_size=rng.choice([4, 16]),
            chunk_tokens=rng.choice([32, 100, 500]),
            max_running=rng.choice([2, 8, 64]),
            mixed=rng.random() < 0.5,
            reserve=rng.random(),
        )
        for _ in range(12)
    ]


@pytest.mark.parametrize("config", configs())
def test_every_request_begins_and_ends_once_and_memory_is_accounted_for(config: EngineConfig) -> None:
    engine = Engine(config)
    requests = load(3, config.block_size, 60)
    happened = list(play(engine, requests))
    for what in ("first", "done"):
        assert sorted(number for _, kind, number in happened if kind == what) == list(range(60))
    assert engine.cache.private == 0
    assert engine.cache.evictable == engine.cache.cached
    assert engine.output_tokens == sum(work.output_tokens for _, work in requests)


@pytest.mark.parametrize("config", configs())
def test_jumps_do_not_change_results(config: EngineConfig) -> None:
    jumps = list(play(Engine(config), load(5, config.block_size, 40)))
    steps = list(play(Engine(replace(config, max_steps=1)), load(5, config.block_size, 40)))
    assert [event[1:] for event in jumps] == [event[1:] for event in steps]
    assert [event[0] for event in jumps] == pytest.approx([event[0] for event in steps])


def test_requests_retracted_for_lack_of_memory_still_finish() -> None:
    config = EngineConfig(kv_tokens=640, block_size=16, chunk_tokens=100, max_running=64, reserve=0.0)
    engine = Engine(config)
    assert len([1 for _, what, _ in play(engine, load(2, 16, 60)) if what == "done"]) == 60
    assert engine.retractions > 0


def test_a_prompt_that_never_fits_is_refused() -> None:
    engine, rng = Engine(SMALL), random.Random(1)
    long, again = (work_of(Text(16).extended(2500, rng), 5, rng) for _ in range(2))
    short = work_of(Text(16).extended(100, rng), 5, rng)
    happened = [(what, number) for _, what, number in play(engine, [(0.0, short), (0.01, long), (9.0, again)])]
    assert sorted(happened[:3]) == [("done", 0), ("first", 0), ("refused", 1)]
    assert happened[3:] == [("refused", 2)]  # by an idle engine, too
    assert engine.waiting == 0


def test_a_full_queue_refuses() -> None:
    engine, rng = Engine(replace(SMALL, max_running=1, max_waiting=1)), random.Random(1)
    works = [work_of(Text(16).extended(100, rng), 5, rng) for _ in range(3)]
    assert [engine.submit(work, 0.0) for work in works] == [True, True, False]


def test_published_events_equal_the_engines_cache() -> None:
    engine = Engine(SMALL)
    list(play(engine, load(9, 16, 60)))
    assert engine.cache.evicted > 0
    assert engine.journal.flush(9.0) is None
    held: dict[int, int | None] = {}
    replayed = [item.seq for item in engine.journal.reply(ReplayRequest(0)) if isinstance(item, ReplayItem)]
    assert replayed == list(range(engine.journal.seq + 1))
    for batch in engine.journal._ring:
        for event in batch.events:
            apply(held, event)
    assert set(held) == {block for block in held if block in engine.cache}
    assert len(held) == engine.cache.cached
    chunks = [item for item in engine.journal.reply(SnapshotRequest()) if isinstance(item, SnapshotChunk)]
    assert {block for chunk in chunks for event in chunk.events for block in event.block_hashes} == set(held)
    (hello,) = engine.journal.reply(HelloRequest())
    assert (hello.epoch, hello.oldest, hello.newest) == (1, 0, engine.journal.seq)  # type: ignore[union-attr]


def apply(held: dict[int, int | None], event: Event) -> None:
    match event:
        case BlockStored():
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            assert event.parent_block_hash is None or event.parent_block_hash in held
            parent = event.parent_block_hash
            for block in event.block_hashes:
                assert block not in held
                held[block] = parent
                parent = block
        case BlockRemoved():
            for block in event.block_hashes:
                del held[block]
        case AllBlocksCleared():
            held.clear()


def test_siblings_wait_for_the_prefix_that_one_of_them_computes() -> None:
    engine, rng = Engine(EngineConfig(kv_tokens=100_000, block_size=16, chunk_tokens=8192)), random.Random(4)
    prefix = Text(16).extended(1600, rng)
    works = [work_of(prefix.extended(40, rng), 4, rng) for _ in range(4)]
    list(play(engine, [(0.0, work) for work in works]))
    assert [work.cached_tokens for work in works] == [0, 1600, 1600, 1600]


def test_a_report_counts_shared_tokens_of_waiting_siblings_once() -> None:
    engine, rng = Engine(EngineConfig(kv_tokens=100_000, block_size=16, chunk_tokens=400)), random.Random(4)
    prefix = Text(16).extended(1600, rng)
    for work in (work_of(prefix.extended(40, rng), 4, rng) for _ in range(4)):
        engine.submit(work, 0.0)
    engine.submit(work_of(Text(16).extended(300, rng), 4, rng), 0.0)
    assert engine.load().waiting_uncached_tokens == 1640 + 3 * 40 + 300, "the first one's are all still to be computed"
    engine.advance(engine.ends_at)
    assert engine.load().waiting_uncached_tokens == 1240 + 3 * 40 + 300, "a chunk of it is done"


def test_short_prompts_count_little_for_the_speed() -> None:
    rate = PrefillRate()
    for _ in range(20):
        rate.add(2000, 0.045)
    for _ in range(50):
        rate.add(100, 0.007)
    assert rate.tokens_per_s > 0.9 * 2000 / 0.045
    for _ in range(1000):
        rate.add(100, 0.007)
    assert rate.tokens_per_s == pytest.approx(100 / 0.007, rel=0.02)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    config = EngineConfig(kv_tokens=100_000, chunk_tokens=1000)
    engine, rng = Engine(config), random.Random(4)
    work = work_of(Text(64).extended(2500, rng), 2, rng)
    assert engine.submit(work, 0.0)
    ends = []
    while not work.written:
        ends.append(engine.ends_at)
        engine.advance(engine.ends_at)
    speed = config.speed
    chunks = [speed.prefill_s(1000), speed.prefill_s(1000, 1000), speed.prefill_s(500, 2000)]
    assert ends == pytest.approx([sum(chunks[:n]) for n in (1, 2, 3)])


def test_the_time_to_a_first_token_is_predicted() -> None:
    engine, rng = Engine(EngineConfig(kv_tokens=400_000)), random.Random(4)
    now = 0.0
    for _ in range(30):
        work = work_of(Text(64).extended(rng.randrange(500, 9000), rng), 40, rng)
        told = engine.ttft_s(work.prompt, now)
        engine.submit(work, now)
        alone = engine
        first = now
        while not work.written:
            first = alone.ends_at
            alone.advance(first)
        assert first - now == pytest.approx(told, rel=0.1)
        now = first + rng.random() * 0.05
        while engine.ends_at <= now:
            engine.advance(engine.ends_at)


DECODES_MS = {(1, 512): 3.51, (1, 4096): 3.62, (1, 32_768): 4.49, (64, 1024): 5.49, (64, 4096): 11.5}
DECODES_MS |= {(256, 1024): 11.5, (256, 2048): 19.5}


@pytest.mark.parametrize(("batch", "context"), DECODES_MS)
def test_decode_steps_of_the_8b_model_are_the_published_ones(batch: int, context: int) -> None:
    published_ms = DECODES_MS[batch, context]
    assert 1000 * LLAMA_8B_H200.step_s(batch, batch * context) == pytest.approx(published_ms, rel=0.02)


@pytest.mark.parametrize(("tokens", "published_ms"), [(1024, 18.5), (4096, 78), (8192, 167), (32_768, 938)])
def test_prefills_of_the_8b_model_are_the_published_ones(tokens: int, published_ms: float) -> None:
    assert 1000 * LLAMA_8B_H200.prefill_s(tokens) == pytest.approx(published_ms, rel=0.02)
    if tokens == 4096:
        assert tokens / LLAMA_8B_H200.prefill_s(tokens) == pytest.approx(52_400, rel=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_the_number_of_steps_in_a_period_follows_from_their_sum(seed: int) -> None:
    rng = random.Random(seed)
    speed = Speed(
        fixed_s=rng.choice([0.0, 1e-3]),
        weights_s=rng.uniform(1e-4, 1e-2),
        sequence_s=rng.choice([0, 1e-5]),
        context_s=rng.choice([0.0, 3e-8, 1e-5]),
    )
    batch, context, seconds = rng.randrange(1, 200), rng.randrange(1, 500_000), rng.uniform(0, 20)
    steps = speed.steps_in(batch, context, seconds)
    assert speed.decode_s(batch, context, steps) >= seconds * (1 - 1e-9)
    assert steps == 1 or speed.decode_s(batch, context, steps - 1) < seconds
    each = sum(speed.step_s(batch, context + at * batch) for at in range(min(steps, 50)))
    assert speed.decode_s(batch, context, min(steps, 50)) == pytest.approx(each)


def test_a_speed_without_a_step_time_is_refused() -> None:
    with pytest.raises(ValueError, match="must take time"):
        Speed(token_s=1.0)


def test_a_texts_key_is_made_of_its_tokens() -> None:
    text = Text(4).extended(10, random.Random(1))
    table = token_bytes()
    assert b"".join(table[token] for token in text.ids(0, 2, 4)) == text.key[:32]
    assert (text.tokens, len(text.blocks)) == (10, 2)
    longer = text.extended(2, random.Random(2))
    assert longer.blocks[:2] == text.blocks
    assert Text(4, bytes.fromhex(longer.key.decode())).blocks == longer.blocks


@pytest.mark.parametrize("seed", range(10))
def test_a_cancelled_request_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(kv_tokens=1600, block_size=16, chunk_tokens=rng.choice([50, 200]), max_running=8, reserve=0.1)
    engine, now = Engine(config), 0.0
    left = [work for _, work in load(seed, 16, 60)]
    open_works: list[Work] = []
    while left or engine.ends_at < FOREVER:
        action = rng.random()
        if left and (action < 0.4 or engine.ends_at == FOREVER):
            now += 0.01 if engine.ends_at == FOREVER else rng.random() * (engine.ends_at - now)
            open_works.append(left.pop())
            assert engine.submit(open_works[-1], now)
        elif open_works and action < 0.6:
            engine.abort(open_works.pop(rng.randrange(len(open_works))))
        else:
            now = engine.ends_at
            engine.advance(now)
        engine.check()
    assert (engine.waiting, engine.running, engine.cache.private) == (0, 0, 0)
    assert engine.cache.evictable == engine.cache.cached
