"""Joined deltas equal the full text up to the stop, however the ids are split."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cpu import reference_s
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from treeline_runtime.messages import FinishReason
from treeline_runtime.tokens import UNDECIDED_PUSHES, Delta, IncrementalDetokenizer, StopFinder

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The end.",
    "Grüße aus Köln, 你好世界, привет, 👩‍👩‍👧 🎉🎉, naïve café",
    "tab\tnewline\n\n  spaces   and \x01 control",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece style: a prefix space that decoding strips, bytes for unknown characters."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ["▁", "▁The", "▁fox", "a", "b", "e", "n", "d", "▁end", "<|end|>"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace()}
LENGTH = FinishReason("length")


def decode(name: str, ids: list[int]) -> str:
    text: str = TOKENIZERS[name].decode(ids, skip_special_tokens=True)
    return text


def feed(name: str, pieces: list[list[int]], stop: tuple[str, ...] = (), trim: bool = True) -> tuple[str, str | None]:
    """Return the joined deltas and the matched stop. The generation ends with the last piece."""
    detokenizer = IncrementalDetokenizer(lambda ids: decode(name, ids), stop=stop, no_stop_trim=not trim)
    text, matched = "", None
    for i, piece in enumerate(pieces):
        delta = detokenizer.push(piece, LENGTH if i == len(pieces) - 1 else None)
        assert matched is None or delta == Delta(""), "something came after the stop"
        text += delta.text
        matched = matched or delta.matched
        if trim and stop and matched is None:
            assert not any(s in text for s in stop), "a stop string leaked"
    return text, matched


def truncated(text: str, stop: tuple[str, ...], trim: bool) -> tuple[str, str | None]:
    """Apply the rule naively: the shortest beginning of the text that ends with a stop string."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest) if trim else end], longest
    return text, None


def splits(ids: list[int]) -> list[list[list[int]]]:
    """Yield splits: token by token, all at once, at every single point, and with empty pieces."""
    ways = [[[i] for i in ids], [ids], [[], ids, []]]
    ways += [[ids[:cut], ids[cut:]] for cut in range(len(ids) + 1)]
    return ways


STOPS = st.lists(st.sampled_from(["\n", "ab", "b", "aba", " end", "The", "é", "好", "a", "\ufffd", "d."]), max_size=3)


@st.composite
def id_lists(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Draw random ids: incomplete characters, invalid bytes and special tokens anywhere. With byte fallback only valid
    runs of bytes decode piecewise to the same text, so there texts are encoded."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        return name, draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24))
    ids: list[int] = []
    for text in draw(st.lists(st.text(max_size=6), max_size=4)):
        ids += tokenizer.encode(text).ids
        if draw(st.booleans()):
            ids.append(tokenizer.token_to_id("<|end|>"))
    return name, ids


@settings(max_examples=300, deadline=None)
@given(named=id_lists(), data=st.data(), stop=STOPS.map(tuple), trim=st.booleans())
def test_joined_deltas_are_the_text_for_any_ids_splits_and_stops(
    named: tuple[str, list[int]], data: st.DataObject, stop: tuple[str, ...], trim: bool
) -> None:
    name, ids = named
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pieces = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    assert feed(name, pieces, stop, trim) == truncated(decode(name, ids), stop, trim)


def test_an_invalid_run_of_bytes_keeps_released_text() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    ids = [tokenizer.token_to_id(token) for token in ("<0x41>", "<0x80>", "b")]
    assert decode("metaspace", ids) == "\ufffd\ufffdb"
    assert feed("metaspace", [[i] for i in ids]) == ("A\ufffdb", None)


def test_text_is_sent_as_soon_as_it_is_certain() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(lambda ids: decode("byte_level", ids), stop=["END"])
    ids = [tokenizer.token_to_id(c) for c in "xENyEND!"]
    deltas = [detokenizer.push([i]) for i in ids]
    assert [d.text for d in deltas] == ["x", "", "", "ENy", "", "", "", ""]
    assert [d.matched for d in deltas] == [None] * 6 + ["END", None]


def test_a_character_is_sent_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    detokenizer = IncrementalDetokenizer(lambda ids: decode("metaspace", ids))
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "a🎉".encode()]
    assert [detokenizer.push([i]).text for i in ids] == ["a", "", "", "", "🎉"]


def test_a_stop_token_is_not_text_unless_requested() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    x, y = (tokenizer.token_to_id(c) for c in "xy")
    finish = FinishReason("stop", matched=y)
    for no_trim, expected in [(False, "x"), (True, "xy")]:
        detokenizer = IncrementalDetokenizer(lambda ids: decode("byte_level", ids), no_stop_trim=no_trim)
        assert detokenizer.push([x, y], finish).text == expected
    by_text = IncrementalDetokenizer(lambda ids: decode("byte_level", ids))
    assert by_text.push([x, y], FinishReason("stop", matched="z")).text == "xy"


@settings(max_examples=100, deadline=None)
@given(
    tail=st.lists(st.integers(0, 255), max_size=12),
    run=st.lists(st.sampled_from([0x80, 0xBF, 0xE4, 0xB8, 0xF0, 0xFF, 0xC3]), min_size=60, max_size=120),
    size=st.integers(1, 5),
)
def test_a_long_run_of_invalid_bytes_is_passed_on(tail: list[int], run: list[int], size: int) -> None:
    alphabet = TOKENIZERS["byte_level"].get_vocab()
    by_byte = {byte: alphabet[char] for byte, char in enumerate(_byte_chars())}
    ids = [by_byte[byte] for byte in [*b"ok ", *run, *tail]]
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert feed("byte_level", pieces) == (decode("byte_level", ids), None)


def _byte_chars() -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@pytest.mark.parametrize("token", ["<|end|>", "broken"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_without_text_cost_constant_time_each(name: str, token: str) -> None:
    tokenizer = TOKENIZERS[name]
    byte = "<0x80>" if name == "metaspace" else _byte_chars()[0x80]
    id = tokenizer.token_to_id(byte if token == "broken" else token)
    longest = 0

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(name, ids)

    detokenizer = IncrementalDetokenizer(counted)
    text = "".join(detokenizer.push([id], LENGTH if i == 999 else None).text for i in range(1000))
    assert text == decode(name, [id] * 1000)
    assert longest <= 4 * UNDECIDED_PUSHES


def test_a_stop_string_within_the_first_tokens_does_not_count() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.token_to_id(c) for c in "ENDxENDy"]
    for pieces in splits(ids):
        for least, expected in [
            (2, ("", "END")),
            (3, ("ENDx", "END")),
            (6, ("ENDx", "END")),
            (7, ("ENDxENDy", None)),
        ]:
            detokenizer = IncrementalDetokenizer(lambda ids: decode("byte_level", ids), stop=["END"], min_tokens=least)
            deltas = [detokenizer.push(piece) for piece in pieces] + [detokenizer.push([], LENGTH)]
            matched = next((delta.matched for delta in deltas if delta.matched), None)
            assert ("".join(delta.text for delta in deltas), matched) == expected


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=60),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=4).map(tuple),
    cut=st.integers(0, 60),
)
@example(text="abaaba", stop=("aba", "b"), cut=0)
@example(text="aab", stop=("ab", "b"), cut=0)
def test_stop_strings_that_overlap_themselves_are_found(text: str, stop: tuple[str, ...], cut: int) -> None:
    ids = [TOKENIZERS["byte_level"].token_to_id(c) for c in text]
    for trim in (True, False):
        pieces = [ids[:cut], *([id] for id in ids[cut:])]
        assert feed("byte_level", pieces, stop, trim) == truncated(text, stop, trim)


def test_many_long_stop_strings_cost_little() -> None:
    stop = [f"{'a' * 1000}{i}" for i in range(64)]
    finder = StopFinder(stop)
    started = time.thread_time()
    for _ in range(250):
        finder.feed("aaaa")
    assert finder.begun == 1000
    assert time.thread_time() - started < 500 * reference_s()  # by comparing every end with every string: 8000


# ---- ids that are withdrawn -----------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.sampled_from(list(TOKENIZERS)), st.sampled_from(TEXTS), st.data())
def test_replaced_ids_of_the_same_text_change_no_text(name: str, text: str, data: st.DataObject) -> None:
    """Each message may replace ids by others of the same text, and add more."""
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(lambda some: decode(name, some))
    told, at, released = list[int](), 0, ""
    while at < len(ids):
        at = min(at + data.draw(st.integers(1, 4)), len(ids))
        back = data.draw(st.integers(0, min(6, len(told))))
        if not (is_whole(said_bytes(name, told)) and is_whole(said_bytes(name, ids[:at]))):
            back = 0
        kept = told[: len(told) - back]
        behind = said_bytes(name, ids[:at])[len(said_bytes(name, kept)) :]
        new = split(name, behind, shortest=data.draw(st.booleans()))
        finish = LENGTH if at == len(ids) else None
        released += detokenizer.push(new, finish, withdrawn=back).text
        told = kept + new
        assert decode(name, ids).startswith(released)
    assert said_bytes(name, told) == said_bytes(name, ids)
    assert released == decode(name, ids)


def pieces(name: str) -> dict[int, bytes]:
    """Return each token's bytes."""
    tokenizer = TOKENIZERS[name]
    known = {id: piece for piece, id in tokenizer.get_vocab().items()}
    if name == "metaspace":
        return {
            id: bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
            for id, piece in known.items()
        }
    table = {char: byte for byte, char in enumerate(_byte_chars())}
    return {id: bytes(table[char] for char in piece) if piece != "<|end|>" else b"" for id, piece in known.items()}


PIECES = {name: pieces(name) for name in TOKENIZERS}


def said_bytes(name: str, ids: list[int]) -> bytes:
    return b"".join(PIECES[name][id] for id in ids)


def is_whole(data: bytes) -> bool:
    return data.decode(errors="replace").encode() == data


def split(name: str, data: bytes, *, shortest: bool) -> list[int]:
    """Return tokens of a text: the shortest ones, or the longest."""
    by_bytes = {piece: id for id, piece in sorted(PIECES[name].items(), reverse=True) if piece}
    found = list[int]()
    lengths = range(1, 9) if shortest else range(8, 0, -1)
    while data:
        length = next(n for n in lengths if data[:n] in by_bytes)
        found.append(by_bytes[data[:length]])
        data = data[length:]
    return found
