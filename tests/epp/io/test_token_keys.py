"""Keys of token ids: tokenizers that lose text are matched by what they make of a prompt, and nobody waits long."""

from __future__ import annotations

import functools
import gc
import json
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire import BAD, byte_level, tokenizer
from tokenizers import Tokenizer
from treeline_epp.index.index import Index
from treeline_epp.keyers import token_keys
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.keyers.token_keys import LONGEST_CHARS, NEW_CHARS, STRETCH_CHARS, WAITING, TokenKeys
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.parse import parse
from treeline_wire.events import BlockStored
from treeline_wire.keys import KeySelfTestError, PrefixKeys
from treeline_wire.prompt import Prompt
from treeline_wire.tokenizer import BundleError, TokenizerBundle

USABLE = ["wordpiece", "unigram_unk", "prefix_space_everywhere", "dropped_text"]  # the others reach over spaces
WORDS = st.sampled_from(["the", "Cat", "naïve", "x1", "工欲善", "don't", "(a", "b)", "3.14", "…", "😀", "_", "İi", ""])
GAPS = st.sampled_from([" ", " ", " ", "  ", "\n", " \n\n", "\t", "", "\u00a0", ", "])
TEXTS = st.lists(st.tuples(WORDS, GAPS), max_size=40).map(lambda parts: "".join(word + gap for word, gap in parts))
TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} ; {% endfor %}"


@functools.cache
def lossy(name: str) -> Tokenizer:
    return BAD[name][0]()


@functools.cache
def in_short_stretches(name: str) -> TokenKeys:
    return TokenKeys(lossy(name).to_str(), 8)


def story(words: int, seed: int = 0) -> str:
    return " ".join(f"word{(i * 7 + seed) % 1000} the cat sat" for i in range(words // 4))


@pytest.mark.parametrize("name", USABLE)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_key_of_a_text_is_the_key_of_its_tokens(name: str, text: str) -> None:
    keys = in_short_stretches(name)
    for special in (False, True):
        ids = lossy(name).encode(text, add_special_tokens=special).ids
        assert keys.prompt_key(text, special) == keys.block_key(ids)


@pytest.mark.parametrize("name", USABLE)
def test_tokenizers_that_lose_text_hold_the_property_by_tokens(name: str) -> None:
    TokenKeys(lossy(name).to_str()).self_test()


def test_a_tokenizer_whose_tokens_go_over_blanks_is_refused() -> None:
    for over_blanks in (byte_level(use_regex=False), lossy("word_ends")):
        with pytest.raises(KeySelfTestError):
            TokenKeys(over_blanks.to_str()).self_test()
    with pytest.raises(BundleError, match="not a tokenizer"):
        TokenKeys("{}")


def test_what_comes_before_and_after_a_text_is_in_its_key() -> None:
    roberta = tokenizer("roberta")
    keys = TokenKeys(roberta.to_str())
    assert keys.prompt_key("Hello there", True) == keys.block_key(roberta.encode("Hello there").ids)
    assert keys.prompt_key("", True) == keys.block_key(roberta.encode("").ids)


def test_a_request_waits_for_a_bounded_text_and_the_next_one_has_the_rest() -> None:
    keys = TokenKeys(lossy("wordpiece").to_str())
    text = story(3000)
    first = keys.affordable(Prompt(text))
    assert first.text is not None
    assert NEW_CHARS - 2 * STRETCH_CHARS < len(first.text) <= NEW_CHARS < len(text)
    assert text.startswith(first.text)
    keys.join()
    whole = Prompt(text)
    assert keys.affordable(whole) is whole
    assert keys.prompt_key(text, True).startswith(keys.prompt_key(first.text, True))
    longer = Prompt(f"{text} and so it goes on")
    assert keys.affordable(longer) is longer, "of a conversation only what is new is tokenized"
    ids = Prompt(ids=[1, 2, 3])
    assert keys.affordable(ids) is ids


def test_a_tokenizer_that_nobody_uses_any_more_is_not_kept() -> None:
    keys = TokenKeys(lossy("wordpiece").to_str())
    gone = weakref.ref(keys)
    for seed in range(3):
        keys.affordable(Prompt(story(2000, seed)))
        keys.join()
    reader = keys._stretches._reader
    if reader is not None:
        reader.join(60)
    del keys, reader
    gc.collect()
    assert gone() is None


def test_text_without_spaces_has_a_key_up_to_there() -> None:
    keys = TokenKeys(lossy("wordpiece").to_str())
    spaced, run = story(200), "工" * (2 * LONGEST_CHARS)
    for _ in range(2):
        found = keys.affordable(Prompt(f"{spaced} {run}"))
        assert found.text is not None
        assert spaced.startswith(found.text)
        keys.join()
    found = keys.affordable(Prompt(run))
    assert found.text == ""
    assert keys.prompt_key(run, False) == b""


def test_prompts_are_read_on_by_turns_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, go_on = TokenKeys(lossy("wordpiece").to_str()), threading.Event()
    read: list[str | None] = []
    stretches = keys._stretches
    keys_of = stretches.keys

    def watched(text: str, namespace: str | None) -> list[bytes]:
        assert go_on.wait(60)
        read.append(namespace)
        return list(keys_of(text, namespace))

    monkeypatch.setattr(stretches, "keys", watched)
    for seed in range(WAITING // 4):
        keys.affordable(Prompt(story(1000, seed)), f"ada{seed}", "ada")  # each with a salt of its own
    keys.affordable(Prompt(story(1000, 99)), "bob", "bob")
    go_on.set()
    keys.join()
    assert read.index("bob") <= 2
    assert len(read) == WAITING // 4 + 1


def test_what_is_remembered_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "REMEMBERED", 3)
    keys = TokenKeys(lossy("wordpiece").to_str())
    for seed in range(60):
        text = story(2000, seed)
        found = keys.affordable(Prompt(text))
        assert found.text
        ids = lossy("wordpiece").encode(found.text, add_special_tokens=False).ids
        assert keys.prompt_key(found.text, False) == keys.block_key(ids)
    keys.join()
    assert len(keys._stretches._known) == 3


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9,
        [{"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}] * 30,
        [{"type": "Prepend", "prepend": "a" * 100_000}],
    ],
)
def test_a_tokenizer_that_makes_texts_a_thousand_times_longer_is_not_used(steps: list[dict[str, object]]) -> None:
    """Nine small steps make a gigabyte of one letter, in the library, which ends the process when there is no room."""
    for name in ("wordpiece", "unigram_unk"):
        document = json.loads(lossy(name).to_str())
        document["normalizer"] = {"type": "Sequence", "normalizers": steps}
        bundle = TokenizerBundle.build(json.dumps(document))
        with pytest.raises(BundleError, match="as long"):
            PrefixKeys.from_bundle(bundle)
        with pytest.raises(BundleError, match="as long"):
            TokenKeys.from_bundle(bundle)
        keyer = PromptKeyer(bundle)
        assert keyer.keys is None
        assert keyer.problem is not None


def test_what_is_remembered_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches may be long, and of characters of four bytes that are a token each."""
    monkeypatch.setattr(token_keys, "REMEMBERED_BYTES", 100_000)
    keys = TokenKeys(lossy("wordpiece").to_str())
    for seed in range(20):
        wide = " ".join("𠀀" * 2_000 + str(seed * 100 + i) for i in range(10))
        keys.prompt_key(wide, False)
        keys.prompt_key(wide, False)
    known = keys._stretches._known
    assert 0 < sum(map(token_keys._size, known, known.values())) <= 100_000
    assert keys._stretches._bytes == sum(map(token_keys._size, known, known.values()))


def test_a_pool_with_such_a_tokenizer_is_routed_by_tokens() -> None:
    bundle = TokenizerBundle.build(lossy("wordpiece").to_str(), chat_template=TEMPLATE)
    registry = ModelRegistry()
    keyer = registry.add_keyer(bundle)
    registry.set_endpoint("pod", "pool", ("tiny",), bundle.fingerprint)
    assert isinstance(keyer.keys, TokenKeys)
    assert keyer.by_tokens
    assert keyer.problem is not None
    assert "tokenized here" in keyer.problem
    index = Index()
    pod = index.add_pod("pod", "pool")
    text = story(400)
    ids = lossy("wordpiece").encode(f"user : {text} ; ").ids
    blocks = len(ids) // 16
    index.apply(pod, BlockStored(list(range(1, blocks + 1)), None, ids[: blocks * 16], 16), keyer.keys)

    def asked(body: object, path: str) -> Request:
        request = RouteRequest({":path": path, ":method": "POST"}, json.dumps(body).encode(), None)
        parsed = parse(request, registry)
        assert isinstance(parsed, Request), parsed
        return parsed

    for _ in range(2):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "the cat"}]
        chat = asked({"model": "tiny", "messages": messages}, "/v1/chat/completions")
        assert chat.key is not None
        keyer.keys.join()
    whole = len(lossy("wordpiece").encode(f"user : {text} ; assistant : the cat ; ").ids)
    assert chat.prompt_tokens_estimate == pytest.approx(whole, abs=1)
    assert index.match("pool", None, chat.key, 0.0).hit(pod).tokens >= (blocks - 1) * 16
    other = asked({"model": "tiny", "prompt": [*ids[:64], 1, 2, 3, 4]}, "/v1/completions")
    assert other.key is not None
    assert index.match("pool", None, other.key, 0.0).hit(pod).tokens in (48, 64)


def test_a_text_that_the_tokenizer_fails_at_has_a_key_up_to_there() -> None:
    """WordPiece without a token for what it does not know raises when it meets such a word."""
    spec = json.loads(lossy("wordpiece").to_str())
    spec["model"]["unk_token"] = "[GONE]"
    keys = TokenKeys(json.dumps(spec))
    with pytest.raises(KeySelfTestError, match="Missing"):
        keys.self_test()
    known = " ".join(["the"] * 200)
    text = f"{known} \u2603 {known}"
    found = keys.affordable(Prompt(text))
    assert found.text
    assert known.startswith(found.text)
    assert keys.prompt_key(text, False) == keys.prompt_key(found.text, False)


def test_where_neither_text_nor_tokens_make_a_key_both_reasons_are_told() -> None:
    keyer = PromptKeyer(TokenizerBundle.build(lossy("word_ends").to_str()))
    assert keyer.keys is None
    assert keyer.problem is not None
    assert "word boundaries" in keyer.problem
    assert "by tokens" in keyer.problem


def test_a_tokenizer_at_which_the_library_panics_is_refused_like_any_other() -> None:
    broken = json.loads(byte_level().to_str())
    broken["model"]["continuing_subword_prefix"] = "##"  # of which its merges know nothing
    for made in (PrefixKeys, TokenKeys):
        with pytest.raises(BundleError, match="not a tokenizer"):
            made(json.dumps(broken))
    assert PromptKeyer(TokenizerBundle.build(json.dumps(broken))).keys is None


def test_ids_beyond_the_vocabulary_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "MOST_IDS", 8)
    few, all_of_them = TokenKeys(lossy("wordpiece").to_str()), in_short_stretches("wordpiece")
    assert len(few.token_bytes) == 8
    assert few.block_key([0, 7, 8, 300, 70_000]) == all_of_them.block_key([0, 7, 8, 300, 70_000])


def test_what_one_namespace_has_sent_makes_nothing_faster_for_another() -> None:
    keys = TokenKeys(lossy("wordpiece").to_str())
    whole = Prompt(story(3000))
    for namespace in ("a", "b", None):
        first = keys.affordable(whole, namespace)
        assert len(first.text or "") <= NEW_CHARS, "the rest is still to be tokenized"
        keys.join()
        assert keys.affordable(whole, namespace) is whole
