"""Recordings behind the scheduler: answers are those of the whole prompt at once, whatever chunks, pages and caches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runtime_engine import Harness, prompt
from support.runtime_models import SIZES, save
from treeline_runtime.messages import GenerateReq, MediaItem, SamplingParams, SleepReq, UpdateWeightsReq, WakeReq
from treeline_runtime.models.audio import count_of
from treeline_wire.media import item_digest, item_ids

pytest.importorskip("transformers")

BINS, CHUNK = 16, 100
TEXT = SIZES | {"head_dim": 16, "max_position_embeddings": 256}
ENCODER = {"num_mel_bins": BINS, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
ENCODER |= {"d_model": 32, "n_window": CHUNK // 2, "n_window_infer": 2 * CHUNK, "downsample_hidden_size": 8}
ENCODER |= {"output_dim": 64, "max_position_embeddings": 13}
LOADED: dict[str, Any] = {"load_format": "auto", "dtype": "float32"}
LONG, SHORT, CLICK = 317, 40, 5
"""Frames."""
PROMPTS: dict[str, list[Any]] = {
    "text": [prompt(1, 30)],
    "long": [prompt(2, 7), LONG, prompt(3, 5)],
    "another question": [prompt(2, 7), LONG, prompt(4, 9)],
    "first": [SHORT, prompt(4, 3)],
    "twice": [prompt(2, 7), LONG, [5], LONG, prompt(8, 6)],
    "several": [CLICK, CLICK, SHORT, [9], LONG, prompt(6, 6), CLICK],
}


def made(folder: Path, seed: int) -> Path:
    import transformers

    torch.manual_seed(seed)
    unset = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = transformers.Qwen3ASRConfig(
        text_config=TEXT | unset, audio_config=ENCODER, audio_token_id=122, tie_word_embeddings=False
    )
    model = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "audio_tower" in name or "projector" in name:
                parameter.mul_(6)
    return save(model, folder)


@pytest.fixture(scope="module")
def asr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("asr"), 0)


@pytest.fixture(scope="module")
def expected(asr: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    folder, found = tmp_path_factory.mktemp("sounds"), dict[str, list[int]]()
    alone = Listening(asr, chunked_prefill_size=1024, prefix_cache="off", **LOADED)
    for name, parts in PROMPTS.items():
        alone.ask(name, parts, folder)
        alone.run()
        found[name] = alone.tokens(name)
    assert len({*map(tuple, found.values())}) == len(found)
    return found


class Listening(Harness):
    def ask(self, rid: str, parts: list[Any], folder: Path, **options: Any) -> None:
        """parts: ids, and numbers of frames."""
        ids, items = list[int](), list[MediaItem]()
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            padded = torch.zeros(BINS, -(-part // CHUNK) * CHUNK)
            padded[:, :part] = torch.randn(BINS, part, generator=torch.Generator().manual_seed(part))
            digest, count = item_digest("audio", padded.numpy().tobytes(), "fake"), count_of(part, CHUNK)
            path = folder / digest.hex()
            padded.numpy().tofile(path)
            items.append(MediaItem("audio", len(ids), count, digest, (part, 1, 1), tuple(padded.shape), str(path)))
            ids += item_ids(digest, count)
        sampling = SamplingParams(**({"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True} | options))
        self.inbox.append(GenerateReq(rid, ids, sampling, items=tuple(items)))

    def encoded(self) -> int:
        return self.stats.total_encoded_tokens


@pytest.mark.parametrize("chunk", [4, 16, 256])
@pytest.mark.parametrize("settings", [{}, {"mixed_chunk": True, "overlap_depth": 1}, {"page_size": 16}], ids=str)
def test_answers_are_those_of_one_piece(
    asr: Path, tmp_path: Path, expected: dict[str, list[int]], chunk: int, settings: dict[str, Any]
) -> None:
    chunk = max(chunk, settings.get("page_size", 4))
    engine = Listening(asr, chunked_prefill_size=chunk, **(LOADED | settings))
    for turn in ("new", "cached"):
        for name, parts in PROMPTS.items():
            engine.ask(f"{turn} {name}", parts, tmp_path)
        engine.run()
    for name, answer in expected.items():
        assert engine.tokens(f"new {name}") == engine.tokens(f"cached {name}") == answer, name
        assert engine.last(f"cached {name}").cached_tokens or len(answer) < 8 or name == "first"


@pytest.mark.parametrize("kept", [0, 8, 24, 40, 48])
def test_a_prefix_may_end_inside_a_recording(
    asr: Path, tmp_path: Path, expected: dict[str, list[int]], kept: int
) -> None:
    engine = Listening(asr, **LOADED)
    engine.ask("whole", PROMPTS["twice"], tmp_path)
    engine.run()
    engine.cache.pool.free(engine.cache.tree.evict(engine.cache.tree.num_pages - kept // 4))
    engine.ask("again", PROMPTS["twice"], tmp_path)
    engine.run()
    assert engine.tokens("whole") == engine.tokens("again") == expected["twice"]
    assert engine.last("again").cached_tokens == kept


def test_a_crowd_with_few_pages_and_few_kept_embeddings(
    asr: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With retractions, aborts and files that vanish, each request ends, most with their answer."""
    monkeypatch.setattr("treeline_runtime.scheduler.embeddings.EMBEDDINGS_BYTES", 44 * 4 * 64)
    engine = Listening(asr, max_total_tokens=160, chunked_prefill_size=16, overlap_depth=1, **LOADED)
    rng, names, gone = random.Random(1), dict[str, str](), set[str]()
    for i in range(100):
        names[rid := f"r{i}"] = name = rng.choice(list(PROMPTS))
        folder = tmp_path
        if i % 10 == 7:
            (folder := tmp_path / rid).mkdir()
            gone.add(rid)
        engine.ask(rid, PROMPTS[name], folder)
        if i % 10 == 7:
            for path in folder.iterdir():
                path.unlink()
        if i % 10 == 3:
            for _ in range(rng.randrange(6)):
                engine.step()
            engine.abort(victim := rng.choice(list(names)))
            gone.add(victim)
        if i % 5 == 4:
            engine.step()
            engine.retract_one(rng)
    engine.run(max_steps=20_000)
    for rid, name in names.items():
        found = engine.tokens(rid)
        assert found == expected[name] or (rid in gone and found == expected[name][: len(found)]), rid


def test_new_weights_encode_anew(asr: Path, tmp_path: Path) -> None:
    """Also those read when the engine wakes."""
    other = made(tmp_path / "other", 1)
    theirs = Listening(other, **LOADED)
    theirs.ask("theirs", PROMPTS["long"], tmp_path)
    theirs.run()
    engine = Listening(asr, **LOADED)
    for i, before in enumerate(([], [UpdateWeightsReq("u", str(other))], [SleepReq("s"), WakeReq("w")])):
        engine.inbox += before
        engine.ask(str(i), PROMPTS["long"], tmp_path)
        engine.run()
        assert engine.encoded() == (i + 1) * count_of(LONG, CHUNK)
    assert all(reply.ok for reply in engine.replies)
    assert engine.tokens("0") != engine.tokens("1") == engine.tokens("2") == theirs.tokens("theirs")
