"""Models that read images behind the scheduler: greedy answers equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.runtime_engine import Harness
from support.runtime_media import FAMILIES, Prompt, reference
from support.runtime_models import save
from treeline_runtime.messages import GenerateReq, MediaItem, SamplingParams
from treeline_wire.media import item_digest, item_ids

pytest.importorskip("transformers")

SMALL, WIDE, LARGE = ("image", (1, 4, 4)), ("image", (1, 4, 10)), ("image", (1, 10, 12))
PROMPTS: dict[str, tuple[Any, ...]] = {
    "text": (30,),
    "one": (5, WIDE, 9),
    "two of one size": (3, LARGE, 4, LARGE, 8),
    "five": (1, SMALL, LARGE, 2, WIDE, 3, LARGE, SMALL, 7),
    "video": (4, ("video", (3, 4, 10)), 6),
}
LENGTH = 8


def ask(engine: Harness, rid: str, prompt: Prompt, folder: Path) -> None:
    ids, items = prompt.ids[:], list[MediaItem]()
    for item, output in prompt.items:
        pixels = output.numpy()
        digest = item_digest(item.kind, pixels.tobytes(), f"{item.grid}")
        pixels.tofile(folder / digest.hex())
        ids[item.start : item.start + item.count] = item_ids(digest, item.count)
        items.append(msgspec.structs.replace(item, digest=digest, path=str(folder / digest.hex())))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=LENGTH, ignore_eos=True)
    engine.inbox.append(GenerateReq(rid, ids, sampling, items=tuple(items)))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = reference(family)
    path = save(theirs, tmp_path / "model")
    expected = {}
    for name, parts in PROMPTS.items():
        prompt = Prompt(*parts, frames_apart=family != "Qwen2_5_VL")
        with torch.inference_mode():
            answer = theirs.generate(**prompt.for_transformers(), max_new_tokens=LENGTH, do_sample=False)
        expected[name] = answer[0, len(prompt.ids) :].tolist()
    assert len({*map(tuple, expected.values())}) == len(expected)
    for chunk in (4, 16, 1024):
        engine = Harness(path, load_format="auto", dtype="float32", chunked_prefill_size=chunk, mixed_chunk=chunk == 16)
        for turn in ("new", "cached"):
            for name, parts in PROMPTS.items():
                ask(engine, f"{turn} {name}", Prompt(*parts, frames_apart=family != "Qwen2_5_VL"), tmp_path)
            engine.run()
        for name in PROMPTS:
            assert engine.tokens(f"new {name}") == expected[name], (chunk, name)
            assert engine.tokens(f"cached {name}") == expected[name], (chunk, name)
            assert engine.last(f"cached {name}").cached_tokens
