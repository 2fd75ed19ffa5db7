"""Text that means little: random sentences for system prompts, pseudo-words and strings to copy.

Every function draws from the `random.Random` it is given and from nothing else.
"""

from __future__ import annotations

import hashlib
import random
import re
import string

from facts import phrases, words

ADJECTIVES = words(
    """
    quiet bright careful small large old new simple clear warm cold distant friendly hidden narrow open
    patient polite quick rare ready round sharp short silent slow soft steady strong tall thin useful
    weak wide wise young empty heavy gentle public private local remote internal external primary
    secondary annual daily weekly final early late
    """
)
NOUNS = words(
    """
    team office report customer order ticket product account invoice table window garden river village
    machine engine letter message answer question document section manager worker teacher student market
    station road bridge harbour library kitchen project plan system service request response policy rule
    limit page block record branch tree forest lamp paper box key door wall tool list number name date
    price parcel shipment delivery warehouse supplier partner visitor guest meeting schedule budget
    contract agreement summary example detail update backup server network
    """
)
VERBS = words(
    """
    checks opens closes moves keeps sends reads writes follows finds holds leaves needs shows takes uses
    watches brings builds carries changes cleans counts covers draws explains fills gives helps joins
    knows lists makes marks meets orders passes plans prepares records repairs replaces returns saves
    sorts starts stops stores supports tests updates visits wants
    """
)
ADVERBS = words(
    """
    always never often rarely sometimes usually slowly quickly carefully quietly politely early late
    today tomorrow soon again twice together alone outside inside everywhere
    """
)
PLACES = phrases(
    """
    in the office|near the river|at the station|behind the wall|in the garden|on the second floor|
    at the harbour|under the bridge|in the north|in the south|next to the library|at home|on the road|
    in the main hall|in the warehouse|at the end of the day|before noon|after lunch|during the meeting|
    every Monday|in winter|in the first week of the month|on Fridays|at night
    """
)
RULES = phrases(
    """
    Be polite.|Be brief.|Answer in one sentence.|Use plain words.|Do not guess.|Keep a friendly tone.|
    Never share private data.|Ask when something is unclear.|Use short sentences.|Stay on the topic.|
    Write in clear English.|Do not repeat the question.|Give the answer first.|Think before you answer.|
    Follow the rules below.|Read the notes carefully.|Treat every user with respect.|
    You are a helpful assistant.|You help the customers of a small shop.|You work for a library.|
    You support a software team.|You answer short questions.|You are patient and precise.|
    Your answers are short and correct.
    """
)
SHORT_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in one short sentence.",
    "You are a small model. Be polite and brief.",
    "Be concise.",
    "You are Treeline's tiny model.",
    "You answer questions about the world.",
)
_ONSETS = words(
    """
    b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sm sn sp st str t
    th tr v w wr z
    """
)
_VOWELS = words("a e i o u a e i o u ai ea ee oa oo ou ie y")
_CODAS = ("", "", "", *words("b ck d ff g k l ll m mp n nd ng nk nt p r rd rk rn rt s sh sk ss st t th x zz"))
_FOREIGN = words(
    """
    été naïve façade über straße jalapeño smörgås ångström crème brûlée Ελλάδα λόγος мир привет спасибо
    日本 東京 你好 世界 한국 こんにちは שלום مرحبا नमस्ते café São Zürich Łódź 🙂 🚀 🌳 🎉 ❤️ ✓ → € £ ½ °C
    """
)
_BEFORE_VOWEL = re.compile(r"\b([Aa])(?= (?:[aeio]|up))")
_SYMBOLS = "!?.,;:-_+*/=()[]{}<>@#%&$|~^'\""


def hashed(key: str) -> int:
    """A number in 0..99 that depends on `key` alone (stable across runs and machines)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") % 100


def held_out(key: str, percent: int = 10) -> bool:
    """Whether the item with this key belongs to the held-out split."""
    return hashed(key) < percent


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable word that (nearly always) does not exist."""
    syllables = rng.choice((1, 2, 2, 2, 3, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def random_string(rng: random.Random) -> str:
    """Letters and digits (sometimes symbols) without meaning, 3 to 14 characters."""
    alphabet = rng.choice(
        (
            string.ascii_lowercase,
            string.ascii_uppercase,
            string.ascii_letters + string.digits,
            string.hexdigits[:16],
            string.digits,
            string.ascii_lowercase + string.digits + "-_.",
        )
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 14)))


def _plain_sentence(rng: random.Random) -> str:
    choice = rng.choice
    noun, other, third = choice(NOUNS), choice(NOUNS), choice(NOUNS)
    verb = choice(VERBS)
    form = rng.randrange(8)
    if form == 0:
        return f"The {choice(ADJECTIVES)} {noun} {verb} the {other} {choice(PLACES)}."
    if form == 1:
        return f"A {noun} {choice(ADVERBS)} {verb} the {choice(ADJECTIVES)} {other}."
    if form == 2:
        return f"If the {noun} is {choice(ADJECTIVES)}, the {other} {verb} every {third}."
    if form == 3:
        return f"Every {noun} has a {choice(ADJECTIVES)} {other} and {rng.randint(2, 999)} {third}s."
    if form == 4:
        return f"{choice(PLACES).capitalize()}, the {noun} {verb} a {other}."
    if form == 5:
        return f"Our {noun} {verb} the {other}, and the {third} {choice(VERBS)} it {choice(ADVERBS)}."
    if form == 6:
        return choice(RULES)
    return f"The {noun} of the {other} is {choice(ADJECTIVES)} and {choice(ADJECTIVES)}."


def sentence(rng: random.Random) -> str:
    """One plain English-like sentence."""
    return _BEFORE_VOWEL.sub(r"\1n", _plain_sentence(rng))


def odd_text(rng: random.Random) -> str:
    """A short text for copying: words, strings, numbers, signs, other scripts, names, sentences."""
    form = rng.randrange(12)
    if form <= 2:
        return " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 8)))
    if form == 3:
        return " ".join(pseudo_word(rng).capitalize() for _ in range(rng.randint(1, 4)))
    if form == 4:
        return " ".join(random_string(rng) for _ in range(rng.randint(1, 4)))
    if form == 5:
        return " ".join(str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 8)))
    if form == 6:
        words = [
            rng.choice((rng.choice(NOUNS), rng.choice(ADJECTIVES), rng.choice(_FOREIGN)))
            for _ in range(rng.randint(1, 6))
        ]
        return " ".join(words)
    if form == 7:
        pieces = [
            rng.choice((pseudo_word(rng), random_string(rng), rng.choice(_SYMBOLS) * rng.randint(1, 3)))
            for _ in range(rng.randint(2, 7))
        ]
        return " ".join(pieces)
    if form == 8:
        return " ".join(rng.choice(rng.choice((NOUNS, ADJECTIVES, VERBS, ADVERBS))) for _ in range(rng.randint(1, 12)))
    if form == 9:
        return f"{pseudo_word(rng)}@{pseudo_word(rng)}.com {rng.randint(10, 99)}:{rng.randint(10, 59)}"
    return " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def copy_text(rng: random.Random) -> str:
    """`odd_text`, now and then in capitals or with final punctuation."""
    text = odd_text(rng)
    style = rng.randrange(12)
    if style == 0:
        return text.upper()
    if style == 1 and text[-1].isalnum():
        return text + rng.choice("!?.")
    if style == 2:
        return text[0].upper() + text[1:]
    return text


def _paragraph(rng: random.Random) -> str:
    form = rng.randrange(13)
    if form <= 5:
        return " ".join(sentence(rng) for _ in range(rng.randint(2, 9)))
    if form == 6:
        return "\n".join(f"- {sentence(rng)}" for _ in range(rng.randint(2, 8)))
    if form == 7:
        return "\n".join(f"{i}. {sentence(rng)}" for i in range(1, rng.randint(3, 10)))
    if form == 8:
        return f"## {rng.choice(ADJECTIVES).capitalize()} {rng.choice(NOUNS)}\n{sentence(rng)}"
    if form == 9:
        return " ".join(rng.choice(rng.choice((NOUNS, ADJECTIVES, VERBS, ADVERBS))) for _ in range(rng.randint(10, 80)))
    if form == 10:
        word = rng.choice((rng.choice(NOUNS), pseudo_word(rng), random_string(rng)))
        return " ".join([word] * rng.randint(5, 60))
    if form == 11:
        label, start = (
            rng.choice(("Line", "Item", "Fact", "Record", "Rule", "word", "row")),
            rng.randint(0, 2000),
        )
        return "\n".join(f"{label} {start + i}: {sentence(rng)}" for i in range(rng.randint(3, 12)))
    return " ".join(copy_text(rng) for _ in range(rng.randint(1, 8)))


def document(rng: random.Random, characters: int) -> str:
    """About `characters` characters of filler: paragraphs, lists, headings, word salad, or one repeated block."""
    parts: list[str] = []
    length = 0
    style = rng.randrange(6)
    separator = rng.choice(("\n\n", "\n", " ")) if style else " "
    repeated = _paragraph(rng) if style == 1 else ""
    while length < characters:
        if style == 0:
            part = " ".join(rng.choice((rng.choice(NOUNS), pseudo_word(rng))) for _ in range(40))
        elif style == 1 and rng.random() < 0.7:
            part = repeated
        else:
            part = _paragraph(rng)
        parts.append(part)
        length += len(part) + len(separator)
    return separator.join(parts)[: max(characters, 1)].rstrip()
