"""Large tokenizers are read in a process of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.cpu import reference_s
from treeline_epp.keyers import made_apart
from treeline_epp.keyers.made_apart import proven_keys
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_wire.keys import KeySelfTestError, PrefixKeys
from treeline_wire.tokenizer import BundleError, TokenizerBundle

TINY = Path(__file__).parents[3] / "models/tiny"


def tiny() -> dict[str, Any]:
    return dict(json.loads((TINY / "tokenizer.json").read_text()))


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_apart, "LARGE_CHARS", 0)


def grown(tokens: int) -> str:
    """Return the tiny tokenizer with this many more tokens."""
    document = tiny()
    model = document["model"]
    vocab, merges = model["vocab"], model["merges"]
    left = [token for token in vocab if len(token) == 1][:200]
    document |= {"added_tokens": [], "post_processor": None}  # the library numbers these behind the vocabulary
    following = count(max(vocab.values()) + 1)
    longest = left
    while len(vocab) < tokens:
        longest = [a + b for a in longest[: tokens // 100] for b in left]
        for word in longest[: tokens - len(vocab)]:
            if word not in vocab:
                merges.append([word[:-1], word[-1]])
                vocab[word] = next(following)
    return json.dumps(document)


@pytest.mark.usefixtures("all_are_large")
def test_the_childs_tokenizer_equals_one_made_in_process() -> None:
    text = json.dumps(tiny())
    made, here = proven_keys(text), PrefixKeys(text)
    assert made.table() == here.table()
    assert made.prompt_key("<|user|> hello é", True) == here.prompt_key("<|user|> hello é", True)


@pytest.mark.usefixtures("all_are_large")
def test_errors_equal_those_of_reading_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not a tokenizer"):
        proven_keys("{")
    lossy = tiny()
    lossy["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(KeySelfTestError, match="drops text"):
        proven_keys(json.dumps(lossy))
    keyer = PromptKeyer(TokenizerBundle.build(json.dumps(lossy)))
    assert keyer.keys is None
    assert "drops text" in (keyer.problem or "")
    monkeypatch.setattr(made_apart, "TIMEOUT_S", 0.0)
    with pytest.raises(BundleError, match="process"):
        proven_keys(json.dumps(tiny()))


@pytest.mark.usefixtures("all_are_large")
def test_a_child_that_is_killed_leaves_a_tokenizer_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], **named)

    monkeypatch.setattr(subprocess, "Popen", Killed)
    with pytest.raises(BundleError, match=rf"status -{signal.SIGKILL:d}|failed"):
        proven_keys(json.dumps(tiny()))


async def test_a_hundred_thousand_tokens_do_not_block_the_loop() -> None:
    bundle = TokenizerBundle.build(await asyncio.to_thread(grown, 100_000))
    assert len(bundle.tokenizer_json) > made_apart.LARGE_CHARS
    # A call that lets no other thread run is processor time of the process during which the loop's has none.
    making = asyncio.ensure_future(asyncio.to_thread(PromptKeyer, bundle))
    worst, before = 0.0, time.process_time()
    while not making.done():
        await asyncio.sleep(0.001)
        now = time.process_time()
        worst, before = max(worst, now - before), now
    assert making.result().problem is None
    assert worst < 30 * reference_s()
