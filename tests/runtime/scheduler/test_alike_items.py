"""Images whose first ids are equal, as somebody may find by trying: none gets anything of another's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.media_engine import MediaHarness, Part, Picture, plain_answer
from support.runtime_engine import prompt
from treeline_runtime.kvcache import salted_key_of
from treeline_wire.media import item_ids

OTHERS = [prompt(seed, 90) for seed in range(3)]
"""Together they fill the device."""


def alike(folder: Path, rows: int, columns: int) -> tuple[Picture, Picture]:
    """Return two images of one size, of which all but the last 64 bits of the digests are equal."""
    one, other = (Picture(folder, seed, rows, columns) for seed in (1, 2))
    other.digest = one.digest[:22] + bytes(8)
    return one, other


@pytest.fixture(params=[(1, 1), (1, 2), (5, 7)], ids=str)
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Picture, Picture]:
    return alike(tmp_path, *request.param)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("before", [0, 3, 13, 14, 15, 16])
def test_no_page_is_shared_by_images_with_equal_first_ids(
    tiny: Path, pair: tuple[Picture, Picture], page_size: int, before: int
) -> None:
    engine = MediaHarness(tiny, page_size=page_size)
    text = [prompt(1, before)] if before else []
    of_one, of_other = ([*text, picture, prompt(2, 40)] for picture in pair)
    engine.answer("one", of_one)
    assert engine.answer("other", of_other) == plain_answer(engine.model, of_other, 6)
    assert engine.last("other").cached_tokens == before // page_size * page_size
    assert engine.answer("one again", of_one) == plain_answer(engine.model, of_one, 6)
    assert engine.last("one again").cached_tokens > before + pair[0].count


def test_requests_with_such_images_do_not_wait_for_each_other(tiny: Path, pair: tuple[Picture, Picture]) -> None:
    engine = MediaHarness(tiny, chunked_prefill_size=8)
    asked: dict[str, list[Part]] = {
        f"{turn} {i}": [prompt(1, 14), picture, prompt(2, 40)] for turn in range(3) for i, picture in enumerate(pair)
    }
    for rid, parts in asked.items():
        engine.ask(rid, parts)
    engine.run()
    for rid, parts in asked.items():
        assert engine.tokens(rid) == plain_answer(engine.model, parts, 6), rid


@pytest.mark.parametrize("restart", [False, True])
def test_the_tiers_below_keep_such_images_apart(
    tiny: Path, tmp_path: Path, pair: tuple[Picture, Picture], restart: bool
) -> None:
    settings: dict[str, Any] = {"max_total_tokens": 256, "host_cache": 1 << 20, "page_size": 4}
    settings |= {"disk_cache": str(tmp_path / "disk"), "disk_cache_size": 1 << 20} if restart else {}
    prompts: list[list[Part]] = [[prompt(1, 14), picture, prompt(2, 40)] for picture in pair]
    for name in "ab" if restart else "a":
        engine = MediaHarness(tiny, **settings)
        assert engine.cache.tiers is not None
        engine.cache.tiers.rates.allows = lambda _: True  # type: ignore[method-assign]
        try:
            for turn in range(4):
                for i, parts in enumerate(prompts):
                    rid = f"{name} {turn} {i}"
                    assert engine.answer(rid, parts) == plain_answer(engine.model, parts, 6), rid
                    for other, ids in enumerate(OTHERS):
                        engine.answer(f"{rid} {other}", [ids])
            assert engine.last(f"{name} 3 1").cached_tokens >= 14 + pair[0].count
        finally:
            engine.close()


def test_events_name_ids_alone(tiny: Path, tmp_path: Path) -> None:
    engine, picture = MediaHarness(tiny), Picture(tmp_path, 1, 5, 7)
    output = engine.answer("r", [prompt(1, 6), picture, prompt(2, 6)])
    ids = [*prompt(1, 6), *item_ids(picture.digest, picture.count), *prompt(2, 6), *output]
    events = [event for update in engine.updates for event in update.events]
    found = [token for event in events for token in getattr(event, "token_ids", ())]
    assert found == ids[: len(found)]
    assert len(found) >= 48


def test_keys_of_pages_have_all_items_that_begin_there() -> None:
    text, width = list(range(24)), 4 * (8 + 8)
    items = [(1, b"a"), (6, b"b"), (7, b"c")]
    plain = salted_key_of(text, 8, [])
    key = salted_key_of(text, 8, items)
    assert key[width:] == plain[width:]
    seen = {key, plain, *(salted_key_of(text, 8, items[:i]) for i in (1, 2))}
    assert len(seen | {salted_key_of(text, 8, [items[0], items[2], items[1]])}) == 5
    assert salted_key_of(text[:23], 8, items) == key[: 2 * width]


def test_namespaces_share_no_embeddings(tiny: Path, tmp_path: Path) -> None:
    """Else the time to the first token would tell a client what images others have sent."""
    engine, picture = MediaHarness(tiny), Picture(tmp_path, 1, 5, 7)
    parts: list[Part] = [prompt(1, 6), picture, prompt(2, 6)]
    for turn in range(2):
        for i, namespace in enumerate((None, "one", "other")):
            engine.ask(rid := f"{turn} {i}", parts if turn else parts[1:], namespace=namespace)
            engine.run()
            assert engine.tokens(rid) == plain_answer(engine.model, parts if turn else parts[1:], 6)
            assert len(engine.encoder.calls) == (3 if turn else i + 1)
