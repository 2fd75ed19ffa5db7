"""Tokenizers trained on a page of text, one for every kind that models use."""

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps. It's 12,345 o'clock; we'll see.",
    "def train(corpus):\n    for line in corpus:\n        yield line.strip()  # comment\n",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "工欲善其事,必先利其器。你好世界,世界你好。",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ",
    "नमस्ते दुनिया, यह एक परीक्षण है। مرحبا بالعالم",
    "Ångström café naïve façade coöperate élève — “quotes” … ½ ²",
    '<tool_call>{"name": "f", "arguments": {"x": [1, 2, 3]}}</tool_call> othello hello shell',
    "안녕하세요 세계 가나다라 😀👍🏽🎉",
] * 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(
    *,
    add_prefix_space: bool = False,
    use_regex: bool = True,
    split: str | None = None,
    keep_matches: bool = False,
    normalizer: Any = None,
    added: list[AddedToken] | None = None,
    bos: bool = False,
) -> Tokenizer:
    """Return a byte-level BPE like those of GPT-2, Qwen and Llama 3. `keep_matches`: drop text that `split` does not
    match, as in the files of GPT-3.5 and GPT-4o."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    if split is None:
        tokenizer.pre_tokenizer = level
    else:
        how = ("removed", True) if keep_matches else ("isolated", False)
        steps = [pre_tokenizers.Split(Regex(split), *how), level]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CHAT_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    if added:
        tokenizer.add_tokens(added)
    if bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                _bos_template(tokenizer, "<|endoftext|>", "<|im_end|>"),
            ]
        )
    return tokenizer


def sentencepiece_bpe(*, metaspace: str | None = None, split: bool = True, bos: bool = True) -> Tokenizer:
    """Return a SentencePiece-style BPE with byte fallback: Llama 2 and Mistral. `metaspace`: a scheme; None: the older
    form."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=600, limit_alphabet=120, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    learned = json.loads(trained.to_str())["model"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *BYTE_PIECES])}
    for piece in sorted(learned["vocab"], key=learned["vocab"].get):
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=split)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    if bos:
        tokenizer.post_processor = _bos_template(tokenizer, "<s>", None)
    return tokenizer


def gemma_bpe() -> Tokenizer:
    """Return a BPE with byte fallback whose normalizer writes ▁ for a space and adds none; newlines are added
    tokens."""
    tokenizer = sentencepiece_bpe(bos=False)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    runs = [AddedToken("\n" * n, normalized=False) for n in range(1, 6)]
    runs += [AddedToken("▁" * n, normalized=False) for n in range(2, 6)]
    tokenizer.add_tokens([*runs, AddedToken("<start_of_turn>", special=True, normalized=False)])
    tokenizer.post_processor = _bos_template(tokenizer, "<s>", None)
    return tokenizer


def unigram(*, byte_fallback: bool = True, normalizer: Any = None, scheme: str = "always") -> Tokenizer:
    """Return a Unigram model with SentencePiece's pieces and scores."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    learned = json.loads(trained.to_str())["model"]["vocab"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(piece, 0.0) for piece in BYTE_PIECES] if byte_fallback else []
    known = {piece for piece, _ in pieces}
    pieces += [(piece, score) for piece, score in learned if piece not in known]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = _bos_template(tokenizer, None, "</s>")
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT: loses white space and unknown words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_roberta_template() -> Tokenizer:
    """RoBERTa: byte-level BPE between <s> and </s>."""
    tokenizer = byte_level(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("<|im_end|>", 1), ("<|im_start|>", 0))
    return tokenizer


def with_prefix_space_everywhere() -> Tokenizer:
    """A prefix space before every piece of an earlier split: text is added inside."""
    tokenizer = byte_level()
    level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), level])
    return tokenizer


def with_dropped_text() -> Tokenizer:
    """Return a tokenizer that drops the spaces it splits at."""
    tokenizer = byte_level()
    steps = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def with_word_ends() -> Tokenizer:
    """CLIP: the model writes </w> at the ends of words."""
    return Tokenizer(models.BPE({"a</w>": 0, "a": 1}, [], end_of_word_suffix="</w>"))


FLAGGED = [
    AddedToken("<tool_call>", normalized=False),
    AddedToken("</tool_call>", normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=False, special=True),
    AddedToken("hello", single_word=True, normalized=False),
    AddedToken("normal", normalized=True),
    AddedToken("two words", normalized=True),
    AddedToken("<both><right>", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken("Å", normalized=True),
]

#: Tokenizers that hold the property, by name.
GOOD: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(),
    "prefix_space": lambda: byte_level(add_prefix_space=True),
    "no_regex": lambda: byte_level(use_regex=False),
    "prefix_no_regex": lambda: byte_level(add_prefix_space=True, use_regex=False),
    "roberta": with_roberta_template,
    "llama3": lambda: byte_level(split=_LLAMA3, use_regex=False, bos=True),
    "gpt35": lambda: byte_level(split=_GPT35, keep_matches=True, use_regex=False, added=FLAGGED),
    "gpt4o": lambda: byte_level(split=_GPT4O, keep_matches=True, use_regex=False),
    "qwen_nfc": lambda: byte_level(split=_LLAMA3, use_regex=False, normalizer=normalizers.NFC()),
    "nfkc": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "replace": lambda: byte_level(normalizer=normalizers.Replace("a", "bb")),
    "added": lambda: byte_level(added=FLAGGED, bos=True),
    "added_nfc_prefix": lambda: byte_level(added=FLAGGED, normalizer=normalizers.NFC(), add_prefix_space=True),
    "added_lower": lambda: byte_level(added=FLAGGED, normalizer=normalizers.Lowercase()),
    "llama2_legacy": lambda: sentencepiece_bpe(),
    "metaspace_first": lambda: sentencepiece_bpe(metaspace="first", split=False),
    "metaspace_always": lambda: sentencepiece_bpe(metaspace="always"),
    "metaspace_never": lambda: sentencepiece_bpe(metaspace="never", bos=False),
    "gemma": gemma_bpe,
    "unigram": lambda: unigram(),
    "unigram_nfkc": lambda: unigram(normalizer=normalizers.NFKC(), scheme="first"),
    "unigram_collapse": lambda: unigram(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" {2,}"), " ")])
    ),
}

#: Tokenizers that cannot hold it, by name, with a word of the reason.
BAD: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "wordpiece": (wordpiece, "WordPiece"),
    "unigram_unk": (lambda: unigram(byte_fallback=False), "no byte fallback"),
    "prefix_space_everywhere": (with_prefix_space_everywhere, "the tokens of"),
    "dropped_text": (with_dropped_text, "drops what it splits at"),
    "matches_not_all": (lambda: byte_level(split=r"\S+|[ \n\t]+", keep_matches=True, use_regex=False), "the tokens of"),
    "matches_no_private_use": (
        lambda: byte_level(split=r"[^\p{Co}\p{Cn}]+", keep_matches=True, use_regex=False),
        "the tokens of",
    ),
    "word_ends": (with_word_ends, "word boundaries"),
}


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """Return a good tokenizer, trained once."""
    return GOOD[name]()


def _bos_template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> Any:
    single = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
    names = [name for name in (bos, eos) if name]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(name, tokenizer.token_to_id(name)) for name in names]
    )
