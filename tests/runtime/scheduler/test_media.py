"""Images in prompts: answers are those of a plain computation, and the encoder runs only where it must."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.media_engine import IMAGE, MediaHarness, Picture, ids_of, plain_answer, plain_logits
from support.runtime_engine import VOCAB, Harness, prompt, write_config
from treeline_runtime.core import Batch
from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams, SleepReq, WakeReq
from treeline_runtime.scheduler import drafting, ngrams
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.media import Intake
from treeline_runtime.server.metrics import Metrics

TEXT = prompt(1, 9)


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    return Picture(tmp_path_factory.mktemp("items"), 1, 5, 7)


@pytest.fixture(scope="module")
def dog(cat: Picture) -> Picture:
    """An image as large as the cat's."""
    return Picture(cat.path.parent, 2, 5, 7)


@pytest.fixture(scope="module")
def film(cat: Picture) -> Picture:
    return Picture(cat.path.parent, 3, 3, 4, frames=3)


@pytest.mark.parametrize("chunk", [4, 12, 256])
@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_those_of_a_plain_computation(
    tiny: Path, cat: Picture, dog: Picture, film: Picture, chunk: int, depth: int
) -> None:
    engine = MediaHarness(tiny, chunked_prefill_size=chunk, overlap_depth=depth)
    asked: dict[str, Any] = {
        "one": [TEXT, cat, prompt(2, 6)],
        "text": [prompt(3, 40)],
        "first": [dog, prompt(2, 6)],
        "last": [TEXT, film],
        "two": [TEXT, cat, [7], dog, prompt(2, 6)],
        "twice": [cat, cat, prompt(4, 3)],
        "all": [TEXT, film, [3], cat, dog, prompt(5, 5), film, [1, 2]],
    }
    for rid, parts in asked.items():
        engine.ask(rid, parts, return_logprob=True)
    engine.run()
    for rid, parts in asked.items():
        output = plain_answer(engine.model, parts, 6)
        assert engine.tokens(rid) == output, rid
        expected = plain_logits(engine.model, parts, output[:-1])[-6:].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert [p for p, _ in engine.logprobs(rid)] == pytest.approx(expected.tolist(), abs=1e-5), rid


@pytest.mark.parametrize("before", range(4, 10))
def test_images_of_one_size_share_no_page(tiny: Path, cat: Picture, dog: Picture, before: int) -> None:
    """A page of four tokens may end anywhere in the image."""
    engine = MediaHarness(tiny)
    engine.answer("cat", [prompt(1, before), cat, [1]])
    parts = [prompt(1, before), dog, [1]]
    assert engine.answer("dog", parts) == plain_answer(engine.model, parts, 6)
    assert engine.last("dog").cached_tokens == before // 4 * 4


def test_the_same_image_is_shared(tiny: Path, cat: Picture, dog: Picture) -> None:
    engine = MediaHarness(tiny)
    engine.answer("cat", [TEXT, cat, prompt(2, 6)])
    engine.answer("dog", [TEXT, dog, prompt(2, 6)])
    assert engine.last("dog").cached_tokens == 8
    assert engine.encoder.encoded == [cat.digest, dog.digest]
    engine.answer("again", [TEXT, cat, prompt(2, 6)])
    assert engine.last("again").cached_tokens == (len(TEXT) + cat.count + 5) // 4 * 4
    assert engine.tokens("again") == engine.tokens("cat")
    assert engine.encoder.encoded == [cat.digest, dog.digest]


def test_the_encoder_does_not_run_where_the_prefix_covers_the_image(tiny: Path, cat: Picture) -> None:
    engine = MediaHarness(tiny)
    engine.answer("first", [TEXT, cat, prompt(2, 6)])
    engine.executor.embeddings._rows.clear()  # type: ignore[union-attr]
    assert engine.answer("second", [TEXT, cat, prompt(2, 6), [5, 6]]) == plain_answer(
        engine.model, [TEXT, cat, prompt(2, 6), [5, 6]], 6
    )
    assert engine.encoder.encoded == [cat.digest]


@pytest.mark.parametrize("kept", range(0, 48, 4))
def test_a_prefix_that_ends_inside_an_image_goes_on_with_the_right_rows(
    tiny: Path, cat: Picture, film: Picture, kept: int
) -> None:
    engine = MediaHarness(tiny)
    parts: list[Any] = [TEXT, cat, [8], film, prompt(2, 3)]
    whole = engine.answer("whole", parts)
    pages = engine.cache.pages_for(len(TEXT) + cat.count)
    freed = engine.cache.tree.evict(max(engine.cache.tree.num_pages - kept // 4, 0))
    engine.cache.pool.free(freed)
    assert pages
    assert engine.answer("again", parts) == whole == plain_answer(engine.model, parts, 6)
    assert engine.last("again").cached_tokens == kept


def test_requests_that_need_the_same_image_encode_it_once_and_together_with_others(
    tiny: Path, cat: Picture, dog: Picture
) -> None:
    engine = MediaHarness(tiny, prefix_cache="off")
    for rid in range(4):
        engine.ask(str(rid), [prompt(rid, 3), dog if rid == 3 else cat, [1]])
    engine.run()
    assert engine.encoder.calls == [[cat.digest, dog.digest]]
    assert (engine.stats.total_encoder_queries, engine.stats.total_encoder_hits) == (2, 0)
    assert engine.stats.total_encoded_tokens == cat.count + dog.count
    engine.answer("later", [cat, [1]])
    assert (engine.stats.total_encoder_queries, engine.stats.total_encoder_hits) == (3, 1)


def test_a_step_encodes_about_as_many_tokens_as_it_computes(tiny: Path, tmp_path: Path) -> None:
    """Prefixes end in the last page of large images, so that a step could need many of them."""
    engine = MediaHarness(tiny, chunked_prefill_size=64)
    large = [Picture(tmp_path, seed, 6, 7) for seed in range(5)]
    for i, picture in enumerate(large):
        engine.answer(f"known {i}", [[i], picture, prompt(i, 9)])
    engine.executor.embeddings._rows.clear()  # type: ignore[union-attr]
    engine.encoder.calls.clear()
    for i, picture in enumerate(large):
        engine.ask(str(i), [[i], picture, prompt(i + 50, 9)])
    engine.run()
    assert [len(call) for call in engine.encoder.calls] == [1, 1, 1, 1, 1]
    for i, picture in enumerate(large):
        assert engine.last(str(i)).cached_tokens == 40
        assert engine.tokens(str(i)) == plain_answer(engine.model, [[i], picture, prompt(i + 50, 9)], 6)


def test_no_chunk_encodes_again_what_the_one_before_it_had(
    tiny: Path, cat: Picture, dog: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeline_runtime.scheduler.embeddings.EMBEDDINGS_BYTES", 36 * 4 * 3 * 32)
    engine = MediaHarness(tiny, chunked_prefill_size=8)
    engine.answer("other", [dog])
    parts: list[Any] = [TEXT, cat, [4], dog, cat, [1]]
    assert engine.answer("all", parts) == plain_answer(engine.model, parts, 6)
    assert engine.encoder.encoded == [dog.digest, cat.digest, dog.digest, cat.digest]


def test_embeddings_that_were_used_last_are_kept(
    tiny: Path, cat: Picture, dog: Picture, film: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeline_runtime.scheduler.embeddings.EMBEDDINGS_BYTES", 75 * 4 * 3 * 32)
    engine = MediaHarness(tiny, prefix_cache="off")
    for rid, picture in enumerate((cat, dog, cat, film, cat, film)):
        engine.answer(str(rid), [picture, [1]])
    assert engine.encoder.encoded == [cat.digest, dog.digest, film.digest]


def test_small_images_in_one_page_are_encoded_together_however_little_room_there_is(tiny: Path, tmp_path: Path) -> None:
    engine = MediaHarness(tiny, page_size=16, chunked_prefill_size=16, max_total_tokens=256)
    small: list[Any] = [Picture(tmp_path, seed, 3, 2) for seed in range(9)]
    parts = [*small[:4], [1], *small[4:], [2]]
    assert engine.answer("all", parts) == plain_answer(engine.model, parts, 6)


@pytest.mark.parametrize("fault", ["missing", "short", "count"])
def test_an_item_without_its_file_fails_its_request_alone(tiny: Path, tmp_path: Path, cat: Picture, fault: str) -> None:
    engine = MediaHarness(tiny)
    bad = Picture(tmp_path, 9, 4, 4)
    if fault == "missing":
        bad.path.unlink()
    elif fault == "count":
        bad.pixels = bad.pixels[:-4]
        bad.pixels.tofile(bad.path)
    else:
        bad.pixels[:-1].tofile(bad.path)
    engine.ask("good", [TEXT, cat, [1]])
    engine.ask("bad", [TEXT, bad, [1]])
    engine.ask("text", [prompt(6, 20)])
    engine.run()
    assert engine.finish("bad").status == 500
    assert engine.tokens("good") == plain_answer(engine.model, [TEXT, cat, [1]], 6)
    assert engine.tokens("text") == plain_answer(engine.model, [prompt(6, 20)], 6)


def test_an_abort_between_the_chunks_of_an_image_leaves_nothing(tiny: Path, cat: Picture, dog: Picture) -> None:
    engine = MediaHarness(tiny, chunked_prefill_size=8)
    engine.ask("gone", [TEXT, cat, dog])
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    assert engine.answer("next", [TEXT, cat, [1]]) == plain_answer(engine.model, [TEXT, cat, [1]], 6)


def test_a_row_has_the_positions_of_its_newest_request(tiny: Path, cat: Picture) -> None:
    """Also after the device has lost everything."""
    engine = MediaHarness(tiny, max_running_requests=1)
    parts: list[Any] = [TEXT, cat, [1]]
    for turn in range(2):
        assert engine.answer(f"image {turn}", parts) == plain_answer(engine.model, parts, 6)
        assert engine.answer(f"text {turn}", [prompt(7, 20)]) == plain_answer(engine.model, [prompt(7, 20)], 6)
        engine.answer(f"last {turn}", parts)
        engine.inbox += [SleepReq("s"), WakeReq("w")]
        engine.run()
    assert [reply.ok for reply in engine.replies] == [True] * 4


def test_log_probabilities_of_a_prompt_name_placeholders(tiny: Path, cat: Picture) -> None:
    engine = MediaHarness(tiny, chunked_prefill_size=16)
    parts: list[Any] = [cat, TEXT]
    engine.ask("scored", parts, return_logprob=True, logprob_start_len=0, max_new_tokens=1)
    engine.run()
    scored = engine.outs["scored"][0].input_token_logprobs or []
    shown = [IMAGE] * cat.count + TEXT
    assert [token for _, token in scored] == shown
    logits = plain_logits(engine.model, parts).log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(shown[1:])[:, None])[:, 0]
    assert [p for p, _ in scored[1:]] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"frequency_penalty": 1.5, "bad_words": ((3, 4),)}])
def test_penalties_see_placeholders(tiny: Path, cat: Picture, options: dict[str, Any]) -> None:
    """The most likely tokens of a prompt in which the image is text are penalised as beside the image."""
    engine = MediaHarness(tiny)
    parts: list[Any] = [TEXT, cat, [1]]
    output = engine.answer("penalised", parts, max_new_tokens=12, **options)
    expected: list[int] = []
    for _ in range(12):
        logits = plain_logits(engine.model, parts, expected)[-1].clone()
        if factor := options.get("repetition_penalty"):
            for token in {*TEXT, IMAGE, 1, *expected}:
                logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in expected:
            logits[token] -= options.get("frequency_penalty", 0.0)
        if "bad_words" in options and expected[-1:] == [3]:
            logits[4] = float("-inf")
        expected.append(int(logits.argmax()))
    assert output == expected


@pytest.mark.parametrize("chunk", [8, 256])
def test_hidden_states_of_images_are_those_of_a_plain_computation(tiny: Path, cat: Picture, chunk: int) -> None:
    engine = MediaHarness(tiny, chunked_prefill_size=chunk, enable_return_hidden_states=True)
    parts: list[Any] = [TEXT, cat, [1]]
    output = engine.answer("r", parts, return_hidden_states=True)
    states = engine.last("r").hidden_states
    assert states is not None
    rows = torch.frombuffer(bytearray(states.data), dtype=torch.float32).view(-1, states.size)
    with torch.inference_mode():
        found = engine.model.logits(rows)
    torch.testing.assert_close(found, plain_logits(engine.model, parts, output[:-1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("followed", [[], [5]])
def test_tokens_of_images_are_never_guessed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: list[int]
) -> None:
    """In the prompt each token of the vocabulary is followed by an image, at once or after another token."""
    monkeypatch.setattr(ngrams, "LENGTHS", (1,))
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 3),)),))
    monkeypatch.setattr(drafting, "WAIT", -1.0)
    dot = Picture(tmp_path, 1, 1, 1)
    parts: list[Any] = []
    for token in range(VOCAB):
        parts += [[token, *followed], dot]
    engine = MediaHarness(tiny, speculative_algorithm="NGRAM")
    launch, drafts = engine._compute, list[int]()

    def watched(batch: Batch) -> Launched:
        drafts.extend(token for req in batch.reqs for token in req.draft)
        return launch(batch)

    monkeypatch.setattr(engine, "_compute", watched)
    assert engine.answer("r", parts, max_new_tokens=12) == plain_answer(engine.model, parts, 12)
    assert {*followed} <= {*drafts} <= {*range(VOCAB)}


def test_metrics_say_what_the_encoder_did(tiny: Path, cat: Picture) -> None:
    engine, metrics = MediaHarness(tiny, prefix_cache="off"), Metrics("m")
    for rid in range(3):
        engine.answer(str(rid), [cat, [1]])
    metrics.on_load(engine.loads[-1])
    page = metrics.render().decode()
    for name, value in {"cache_queries": 3.0, "cache_hits": 2.0, "tokens": 35.0}.items():
        assert f'treeline:encoder_{name}_total{{model_name="m"}} {value}' in page
    assert engine.loads[-1].total_encoder_us > 0


def test_audits_leave_images_out(tiny: Path, cat: Picture) -> None:
    """Their files may be gone by then."""
    engine = MediaHarness(tiny, cache_audit=1.0)
    for rid in ("image", "image again"):
        engine.answer(rid, [TEXT, cat, prompt(2, 6)])
    assert engine.last("image again").cached_tokens
    assert engine.audits.counts["tree"].audited == 0
    for rid in ("text", "text again"):
        engine.answer(rid, [prompt(3, 30)])
    assert engine.audits.counts["tree"].audited == 1


def test_what_does_not_fit_is_refused(tiny: Path, cat: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MediaHarness(tiny)
    engine.submit("ids", [1, 1 << 31, 2])
    engine.run()
    assert engine.finish("ids").message == f"the prompt has token ids outside the vocabulary of {VOCAB}"
    monkeypatch.setattr("treeline_runtime.scheduler.embeddings.EMBEDDINGS_BYTES", 30 * 4 * 3 * 32)
    engine = MediaHarness(tiny)
    engine.ask("large", [TEXT, cat])
    engine.run()
    assert engine.finish("large").status == 400
    assert engine.finish("large").message == "the image takes 35 tokens; at most 30 of one fit: make it smaller"


def test_what_does_not_go_with_images_is_named(tiny: Path, cat: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MediaHarness(tiny)
    ids, items = ids_of([TEXT, cat])
    message = GenerateReq("r", ids, SamplingParams(), items=items)
    with_drafter: Any = SimpleNamespace(speculative_draft_model_path="head")
    assert "a draft model" in str(Intake(with_drafter, engine.model).media_of(message))
    monkeypatch.setattr(engine.model, "pooler", object())
    assert "vectors of text alone" in str(Intake(engine.config, engine.model).media_of(message))


def test_models_without_an_encoder_refuse_images(tmp_path: Path, cat: Picture) -> None:
    engine = Harness(write_config(tmp_path))
    ids, items = ids_of([TEXT, cat])
    engine.inbox.append(GenerateReq("r", ids, SamplingParams(), items=items))
    engine.run()
    assert engine.finish("r") == FinishReason("error", message="this model takes no images and no videos", status=400)
