"""Prefix keys: tokens and text give the same bytes."""

import json
import time
import unicodedata

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import wire as support
from support.cpu import reference_s
from tokenizers import normalizers
from treeline_wire.keys import KeySelfTestError, KeyTable, PrefixKeys, escape
from treeline_wire.normalization import compile_normalizer, long_run
from treeline_wire.prompt import Prompt
from treeline_wire.tokenizer import TokenizerBundle

_FRAGMENTS = [
    "hello", "othello", " ", "  ", "   ", "\n", "\n\n", "\t", "<s>", "</s>", "<unk>", "[INST]", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<left>", "<right>", "<both>", "<both><right>", "normal", "Normal", "two words",
    "two  words", "<0x41>", "<0xE2>", "＜s＞", "▁", "▁▁", "Ġ", "e\u0301", "A\u030a", "Å", "Å",
    "ﬁ", "가", "\u1100\u1161",
    "😀", "👩‍👩‍👧", "🇩🇪", "工欲", "ещё", "مرحبا", "नमस्ते", "\x00", "\x1c", "\x85", "\u00a0", "\u3000", "\u200d",
    "\ufeff", "_", "1", "12345", "'ll", "<tool_call>", "<start_of_turn>", "\r\n", "\U00011935\U00011930", "\u0898",
]  # fmt: skip
_ALPHABET = st.one_of(
    st.characters(codec="utf-8"),
    st.characters(codec="utf-8", categories=["Mn", "Mc", "Lo", "So", "Zs", "Cc", "Cf", "Cn"]),
)
texts = st.lists(st.one_of(st.sampled_from(_FRAGMENTS), st.text(_ALPHABET, max_size=6)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def keys_of() -> "dict[str, PrefixKeys]":
    return {name: PrefixKeys(support.tokenizer(name).to_str()) for name in support.GOOD}


@pytest.mark.parametrize("name", support.GOOD)
def test_the_self_test_passes(name: str, keys_of: dict[str, PrefixKeys]) -> None:
    keys_of[name].self_test()


@pytest.mark.parametrize("name", support.GOOD)
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=texts, special=st.booleans())
def test_tokens_and_text_have_one_key(name: str, keys_of: dict[str, PrefixKeys], text: str, special: bool) -> None:
    ids = support.tokenizer(name).encode(text, add_special_tokens=special).ids
    assert keys_of[name].block_key(ids) == keys_of[name].prompt_key(text, special), (name, text)


@pytest.mark.parametrize("name", support.GOOD)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(text=texts, special=st.booleans())
def test_a_tables_keys_equal_its_sources(name: str, keys_of: dict[str, PrefixKeys], text: str, special: bool) -> None:
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(keys_of[name].table()), type=KeyTable)
    assert "vocab" not in json.loads(table.skeleton)["model"]
    keys = PrefixKeys.from_table(table)
    assert keys.prompt_key(text, special) == keys_of[name].prompt_key(text, special)
    assert keys.token_bytes == keys_of[name].token_bytes
    assert keys.table() == table


@pytest.mark.parametrize("name", support.BAD)
def test_a_tokenizer_that_loses_text_is_refused(name: str) -> None:
    build, reason = support.BAD[name]
    with pytest.raises(KeySelfTestError, match=reason):
        PrefixKeys(build().to_str()).self_test()


@pytest.mark.parametrize("name", ["roberta", "gpt35", "unigram"])
def test_a_model_without_a_type_is_read_as_the_library_does(name: str) -> None:
    """RoBERTa's tokenizer.json has no type, for example."""
    typed = support.tokenizer(name).to_str()
    document = json.loads(typed)
    del document["model"]["type"]
    keys = PrefixKeys(json.dumps(document))
    keys.self_test()
    text = "It's 12 o'clock <s> ещё"
    assert keys.prompt_key(text, True) == PrefixKeys(typed).prompt_key(text, True)
    assert keys.block_key(support.tokenizer(name).encode(text).ids) == keys.prompt_key(text, True)


def test_an_escape_is_not_text() -> None:
    assert escape(258) == b"\xff\x00\x00\x01\x02"
    with pytest.raises(UnicodeDecodeError):
        escape(258).decode()


def test_special_tokens_of_every_source_are_escapes(keys_of: dict[str, PrefixKeys]) -> None:
    keys, start = keys_of["gpt2"], support.CHAT_TOKENS.index("<|im_start|>")
    assert keys.prompt_key("a<|im_start|>b", False) == b"a" + escape(start) + b"b"
    assert keys.block_key([start]) == keys.token_bytes[start] == escape(start)


def test_bos_is_added_on_request(keys_of: dict[str, PrefixKeys]) -> None:
    keys = keys_of["llama2_legacy"]
    bos = support.tokenizer("llama2_legacy").token_to_id("<s>")
    assert keys.prompt_key("hi", True) == escape(bos) + b" hi"
    assert keys.prompt_key("hi", False) == b" hi"
    assert keys.prompt_key("", True) == escape(bos)


def test_prompts_are_keyed_as_text_or_as_ids(keys_of: dict[str, PrefixKeys]) -> None:
    keys = keys_of["llama3"]
    ids = support.tokenizer("llama3").encode("Hello there", add_special_tokens=True).ids
    expected = keys.prompt_key("Hello there", True)
    assert keys.prompt_key_of(Prompt(text="Hello there")) == expected
    assert keys.prompt_key_of(Prompt(ids=ids, add_special_tokens=False)) == expected


def test_keys_of_blocks_concatenate(keys_of: dict[str, PrefixKeys]) -> None:
    text = "def f(x):\n    return 'Ångström 工欲' * x  # 😀"
    ids = support.tokenizer("qwen_nfc").encode(text).ids
    keys = keys_of["qwen_nfc"]
    assert b"".join(keys.block_key(ids[i : i + 4]) for i in range(0, len(ids), 4)) == keys.prompt_key(text, True)


def test_ids_beyond_the_vocabulary_are_escapes(keys_of: dict[str, PrefixKeys]) -> None:
    keys = keys_of["gpt2"]
    beyond = len(keys.token_bytes) + 5
    assert keys.block_key([0, beyond]) == keys.token_bytes[0] + escape(beyond)


def test_truncation_and_padding_in_the_file_do_not_matter() -> None:
    tokenizer = support.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    bundle = TokenizerBundle.build(tokenizer.to_str())
    PrefixKeys.from_bundle(bundle).self_test()


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normal_forms_are_the_librarys_on_every_character(form: str) -> None:
    """Python's tables and the library's are of different Unicode versions."""
    rust = getattr(normalizers, form)()
    ours = compile_normalizer({"type": form}, rust, None).normalize
    chars = [chr(c) for c in range(0x80, 0x20000) if unicodedata.category(chr(c)) in ("Mn", "Mc", "Cn", "Lo", "Lm")]
    for char in chars[::3]:
        text = f"e\u0345{char}\u0323{char}"
        assert ours(text) == rust.normalize_str(text), hex(ord(char))


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen_nfc", "llama2_legacy", "metaspace_first", "unigram"])
def test_half_a_megabyte_takes_milliseconds(name: str, keys_of: dict[str, PrefixKeys]) -> None:
    text = ("The quick brown fox jumps over the lazy dog. <b>It</b> [sleeps].\n" * 9000)[:500_000]
    keys = keys_of[name]
    best = min(_seconds(keys, text) for _ in range(9))
    assert best < 20 * reference_s(), "about a fifth of one on an idle machine"


def _seconds(keys: PrefixKeys, text: str) -> float:
    begin = time.thread_time()
    keys.prompt_key(text, True)
    return time.thread_time() - begin


def test_long_runs_of_combining_marks_are_detected() -> None:
    run = "\u0300\u0316" * 50
    assert long_run("hello a" + run) == 6
    assert long_run("a" + run + "b" + run) == 0
    assert long_run(run) == 0
    assert long_run("x" * 5_000 + "é" + run) == 5_000
    for text in ("", "plain", "漢字" * 900, "שָׁלוֹם " * 900, ("a" + "\u0300" * 15) * 900, "e\u0301" * 2_000):
        assert long_run(text) is None
