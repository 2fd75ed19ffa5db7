"""Gemma 3 and InternVL behind the scheduler: answers and their log probabilities equal those of transformers, and no
image of Gemma's is cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from support.runtime_engine import Harness
from support.runtime_models import save
from support.runtime_towers import FAMILIES, Prompt, reference
from treeline_runtime.config import ConfigError
from treeline_runtime.core import Batch
from treeline_runtime.messages import GenerateReq, MediaItem, SamplingParams
from treeline_runtime.scheduler.launched import Launched
from treeline_wire.media import item_digest, item_ids

pytest.importorskip("transformers")

A, B, C = (1, 1), (2, 2), (3, 3)
PROMPTS: dict[str, tuple[int | tuple[int, int], ...]] = {
    "text": (30,),
    "one": (5, A, 9),
    "one with the same beginning": (5, A, 4),
    "two of one size": (3, B, 4, (2, 4), 8),
    "five without text between": (1, A, B, C, A, B, 7),
}
LENGTH = 8


def shown(prompt: Prompt, folder: Path) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return ids and items as the server sends them."""
    ids, items = prompt.ids[:], list[MediaItem]()
    for item, output in prompt.items:
        pixels = output.numpy()
        digest = item_digest(item.kind, pixels.tobytes(), f"{item.shape}")
        pixels.tofile(folder / digest.hex())
        ids[item.start : item.start + item.count] = item_ids(digest, item.count)
        items.append(msgspec.structs.replace(item, digest=digest, path=str(folder / digest.hex())))
    return ids, tuple(items)


def of(family: str, name: str) -> Prompt:
    parts = PROMPTS[name]
    if family == "Gemma3":  # one picture each
        parts = tuple((1, part[1]) if isinstance(part, tuple) else part for part in parts)
    return Prompt(family, *parts)


def ask(engine: Harness, rid: str, prompt: Prompt, folder: Path, length: int = LENGTH) -> None:
    ids, items = shown(prompt, folder)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
    engine.inbox.append(GenerateReq(rid, ids, sampling, items=items, return_logprob=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = reference(family)
    path = save(theirs, tmp_path / "model")
    expected = {}
    for name in PROMPTS:
        prompt = of(family, name)
        with torch.inference_mode():
            asked = {"max_new_tokens": LENGTH, "do_sample": False, "output_scores": True}
            answer = theirs.generate(**prompt.for_transformers(), **asked, return_dict_in_generate=True)
        tokens = answer.sequences[0, len(prompt.ids) :].tolist()
        scores = [scores[0].log_softmax(0)[token].item() for scores, token in zip(answer.scores, tokens, strict=True)]
        expected[name] = tokens, scores
    for chunk, page, mixed in ((12, 4, False), (16, 8, True), (1024, 16, False)):
        engine = Harness(
            path,
            load_format="auto",
            dtype="float32",
            chunked_prefill_size=chunk,
            page_size=page,
            mixed_chunk=mixed,
        )
        for turn in ("new", "cached"):
            for name in PROMPTS:
                ask(engine, f"{turn} {name}", of(family, name), tmp_path)
            engine.run()
        for name in PROMPTS:
            for turn in ("new", "cached"):
                tokens, scores = expected[name]
                assert engine.tokens(f"{turn} {name}") == tokens, (chunk, turn, name)
                found = [score for score, _ in engine.logprobs(f"{turn} {name}")]
                assert found == pytest.approx(scores, abs=1e-4), (chunk, turn, name)
            cached = engine.last(f"cached {name}").cached_tokens
            inside = [item for item, _ in of(family, name).items if item.start < cached < item.start + item.count]
            assert family != "Gemma3" or not inside
            assert cached or page == 16


@pytest.mark.parametrize("before", range(9))
def test_chunks_end_before_an_image_or_behind_it(before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(reference("Gemma3"), tmp_path / "model")
    engine = Harness(path, load_format="auto", dtype="float32", chunked_prefill_size=12, page_size=4, mixed_chunk=True)
    for number in range(5):  # which leave less of a step than an image needs
        ask(engine, f"long {number}", Prompt("Gemma3", 2 + number), tmp_path, length=60)
    for _ in range(3):
        engine.step()
    prompt = Prompt("Gemma3", before, (1, 1), (1, 2), 3, (1, 3), 9)
    edges, compute = set[int](), engine._compute

    def watched(batch: Batch) -> Launched:
        edges.update(end for req, end in zip(batch.reqs, batch.ends, strict=True) if req.rid == "a")
        return compute(batch)

    monkeypatch.setattr(engine, "_compute", watched)
    ask(engine, "a", prompt, tmp_path)
    engine.run()
    for item, _ in prompt.items:
        assert edges.isdisjoint(range(item.start + 1, item.start + item.count))
    assert len({edge for edge in edges if edge < len(prompt.ids)}) >= 3


def test_a_chunk_smaller_than_an_image_is_refused_at_the_start(tmp_path: Path) -> None:
    path = save(reference("Gemma3"), tmp_path / "model")
    with pytest.raises(ConfigError, match="chunked_prefill_size 8 is less than the 9 tokens of an image"):
        Harness(path, load_format="auto", chunked_prefill_size=8, page_size=4)
