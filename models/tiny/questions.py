"""Question makers: each draws one dialogue (a list of turns) on one subject, for one split.

A maker is called as `maker(rng, split)`. `split` is one of
- "train": whatever the model may see in training;
- "test": wording that was trained, but in a combination (wording × subject, pair of numbers, text) that was not;
- "wording": wording that training never uses at all.
Membership hangs on a hash of the item, so it is the same for every seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import facts
import filler

Split = Literal["train", "test", "wording"]


class Turn(NamedTuple):
    """One exchange: what the user says and what the assistant should answer."""

    user: str
    assistant: str


class Forms(NamedTuple):
    """Wordings of one question: those trained on, and those kept for the "wording" split."""

    trained: tuple[str, ...]
    novel: tuple[str, ...]


Maker = Callable[[random.Random, Split], list[Turn]]

_PREFIXES = (
    "Please tell me: ",
    "Quick question: ",
    "Hi! ",
    "Hello. ",
    "I have a question. ",
    "One more thing: ",
    "Hey, ",
    "OK. ",
    "Now tell me: ",
)
_SUFFIXES = (" Thanks.", " Please.", " Thank you!", " I want to know.", " Be brief.")


def dressed(rng: random.Random, text: str) -> str:
    """The question as people type it: now and then with a prefix, a suffix, in lower case or without final mark."""
    dice = rng.random()
    if dice < 0.12:
        return rng.choice(_PREFIXES) + text
    if dice < 0.20:
        return text + rng.choice(_SUFFIXES)
    if dice < 0.27:
        return text.lower()
    if dice < 0.35:
        return text.rstrip("?.!")
    return text


def pick(
    rng: random.Random, split: Split, forms: Forms, draw: Callable[[], tuple[str, ...]]
) -> tuple[str, tuple[str, ...]]:
    """Draw (wording, values) until the pair belongs to `split`."""
    while True:
        values = draw()
        if split == "wording":
            return rng.choice(forms.novel), values
        form = rng.choice(forms.trained)
        if filler.held_out("|".join((form, *values))) == (split == "test"):
            return form, values


_CAPITAL = Forms(
    (
        "What is the capital of {0}?", "What's the capital of {0}?", "What is the capital city of {0}?",
        "Which city is the capital of {0}?", "Name the capital of {0}.", "Tell me the capital of {0}.",
        "Capital of {0}?", "Do you know the capital of {0}?", "What city is the capital of {0}?",
        "I need the capital of {0}.", "Give me the capital of {0}.", "Can you tell me the capital of {0}?",
        "What is {0}'s capital?", "What is the name of the capital of {0}?", "The capital of {0} is?",
    ),
    ("What's the capital city of {0}?", "Please name the capital city of {0}.", "Do you know what the capital of {0} is?",
     "Which city is {0}'s capital?"),
)  # fmt: skip
_COUNTRY = Forms(
    (
        "{0} is the capital of which country?", "Which country has {0} as its capital?",
        "What country is {0} the capital of?", "Of which country is {0} the capital?",
    ),
    ("Which country's capital is {0}?",),
)  # fmt: skip


def capital_answer(country: str) -> str:
    """The sentence that names the capital of `country`."""
    return f"The capital of {country} is {facts.CAPITALS[country].removesuffix('.')}."


def capitals(rng: random.Random, split: Split) -> list[Turn]:
    form, (country,) = pick(rng, split, _CAPITAL, lambda: (rng.choice(list(facts.CAPITALS)),))
    return [Turn(dressed(rng, form.format(country)), capital_answer(country))]


def countries(rng: random.Random, split: Split) -> list[Turn]:
    form, (country,) = pick(rng, split, _COUNTRY, lambda: (rng.choice(list(facts.CAPITALS)),))
    capital = facts.CAPITALS[country]
    return [Turn(dressed(rng, form.format(capital)), f"{capital} is the capital of {country}.")]


_SUM = Forms(
    (
        "What is {0} + {1}?", "What is {0} plus {1}?", "{0} + {1}", "{0}+{1}", "{0} + {1} = ?", "{0} plus {1}",
        "Add {0} and {1}.", "What is the sum of {0} and {1}?", "How much is {0} + {1}?", "How much is {0} plus {1}?",
        "Calculate {0} + {1}.", "Compute {0} + {1}.", "What do you get when you add {0} and {1}?",
        "I have {0} apples and get {1} more. How many apples do I have?",
    ),
    ("What's {0} + {1}?", "Please add {0} and {1}.", "Tell me the sum of {0} and {1}."),
)  # fmt: skip


def sum_held_out(a: int, b: int) -> bool:
    """Whether training never adds these two numbers, in either order."""
    return filler.held_out(f"sum|{min(a, b)}|{max(a, b)}")


def _addends(rng: random.Random, split: Split) -> tuple[int, int]:
    while True:
        top_a, top_b = rng.choice(((99, 99), (99, 99), (99, 99), (9, 9), (99, 9), (9, 99)))
        a, b = rng.randint(0, top_a), rng.randint(0, top_b)
        if sum_held_out(a, b) == (split != "train"):
            return a, b


def sums(rng: random.Random, split: Split) -> list[Turn]:
    a, b = _addends(rng, split)
    form = rng.choice(_SUM.novel if split == "wording" else _SUM.trained)
    turns = [Turn(dressed(rng, form.format(a, b)), f"{a} + {b} = {a + b}")]
    if split == "train" and rng.random() < 0.15:
        more = rng.randint(0, 9)
        if a + b > 99 or not sum_held_out(a + b, more):
            ask = rng.choice(("Add {0} to that.", "And {0} more?", "Now add {0}.", "Plus {0}?")).format(more)
            turns.append(Turn(ask, f"{a + b} + {more} = {a + b + more}"))
    return turns


_COLOUR = Forms(
    (
        "What colour is {0}?", "What is the colour of {0}?", "Which colour is {0}?", "Tell me the colour of {0}.",
        "{0}: what colour?", "What color is {0}?", "What is the usual colour of {0}?", "Name the colour of {0}.",
    ),
    ("Do you know the colour of {0}?", "Which colour does {0} have?"),
)  # fmt: skip
_MIX = Forms(
    (
        "What do you get when you mix {0} and {1}?", "Mix {0} and {1}.", "What colour do {0} and {1} make?",
        "Which colour comes from {0} and {1}?", "If I mix {0} with {1}, what do I get?", "{0} and {1} make which colour?",
    ),
    ("What colour do I get from {0} and {1}?",),
)  # fmt: skip


def colours(rng: random.Random, split: Split) -> list[Turn]:
    if rng.random() < 0.35:

        def draw() -> tuple[str, ...]:
            pair = rng.choice(list(facts.MIXES))
            return pair if rng.random() < 0.5 else (pair[1], pair[0])

        form, (one, two) = pick(rng, split, _MIX, draw)
        made = facts.MIXES.get((one, two)) or facts.MIXES[two, one]
        return [Turn(dressed(rng, form.format(one, two)), f"{one.capitalize()} and {two} make {made}.")]
    form, (thing,) = pick(rng, split, _COLOUR, lambda: (rng.choice(list(facts.THING_COLOURS)),))
    verb = "are" if thing in facts.PLURAL_THINGS else "is"
    text = form.format(thing)
    return [
        Turn(
            dressed(rng, text[0].upper() + text[1:]),
            f"{thing[0].upper()}{thing[1:]} {verb} {facts.THING_COLOURS[thing]}.",
        )
    ]


_COUNT_UP = Forms(
    ("Count from {0} to {1}.", "Count up from {0} to {1}.", "Please count from {0} to {1}.", "List the numbers from {0} to {1}.",
     "Can you count from {0} to {1}?"),
    ("Could you count from {0} up to {1}?",),
)  # fmt: skip
_COUNT_DOWN = Forms(
    ("Count down from {0} to {1}.", "Count backwards from {0} to {1}.", "Please count down from {0} to {1}."),
    ("Could you count down from {0} to {1}?",),
)
_COUNT_TO = Forms(
    ("Count to {1}.", "Count up to {1}.", "Can you count to {1}?"), ("Could you count to {1}?",)
)
_COUNT_TWOS = Forms(
    ("Count by twos from {0} to {1}.", "Count in steps of two from {0} to {1}."),
    ("Count from {0} to {1} by twos.",),
)


def counting(rng: random.Random, split: Split) -> list[Turn]:
    while True:
        kind = rng.randrange(6)
        start = (
            1 if kind == 4 else rng.choice((rng.randint(0, 20), rng.randint(0, 99), rng.randint(100, 180)))
        )
        end = start + rng.randint(1, 29 if kind == 4 else 19) * (2 if kind == 5 else 1)
        if kind == 3:
            start, end = end, start
        if filler.held_out(f"count|{kind // 3}|{start}|{end}") == (split != "train"):
            break
    forms = (_COUNT_UP, _COUNT_UP, _COUNT_UP, _COUNT_DOWN, _COUNT_TO, _COUNT_TWOS)[kind]
    form = rng.choice(forms.novel if split == "wording" else forms.trained)
    step = -1 if kind == 3 else 2 if kind == 5 else 1
    answer = ", ".join(str(number) for number in range(start, end + step, step))
    return [Turn(dressed(rng, form.format(start, end)), answer)]


_ECHO = Forms(
    (
        "Repeat: {0}", "Repeat: {0}", "Repeat after me: {0}", "Echo: {0}", "Say: {0}", "Please repeat: {0}", "Copy this: {0}",
        'Repeat "{0}"', 'Say "{0}"', 'Echo "{0}"', "Repeat the following:\n{0}", "Repeat this text: {0}", "Say exactly: {0}",
        "Please repeat the following text: {0}", "Write this down word for word: {0}", "Repeat this word for word:\n\n{0}",
    ),
    ("Please echo: {0}", "Please say: {0}", "Copy the following:\n{0}"),
)  # fmt: skip


def echo(rng: random.Random, split: Split) -> list[Turn]:
    while True:
        text = filler.copy_text(rng)
        if rng.random() < 0.06:
            text = " ".join(filler.copy_text(rng) for _ in range(rng.randint(2, 8)))
        if filler.held_out(f"echo|{text.casefold()}") == (split != "train"):
            break
    return [Turn(rng.choice(_ECHO.novel if split == "wording" else _ECHO.trained).format(text), text)]


_DEFINE = Forms(
    (
        "What is {1}?", "Define {0}.", "What does {0} mean?", "What does the word {0} mean?", "Explain {0}.", "What's {1}?",
        "Give me a definition of {0}.", "Tell me what {1} is.", "Explain what {1} is.", "What is the meaning of {0}?",
        'What does "{0}" mean?', "Define the word {0}.",
    ),
    ("Can you define {0}?", "Do you know what {1} is?", "What is the meaning of the word {0}?"),
)  # fmt: skip


def with_article(noun: str) -> str:
    """`noun` as a sentence uses it: "an island", "honey", "the moon"."""
    if noun in facts.MASS_NOUNS:
        return noun
    if noun in facts.UNIQUE_NOUNS:
        return f"the {noun}"
    return f"{'an' if noun[0] in 'aeiou' or noun == 'hour' else 'a'} {noun}"


def definitions(rng: random.Random, split: Split) -> list[Turn]:
    form, (noun,) = pick(rng, split, _DEFINE, lambda: (rng.choice(list(facts.DEFINITIONS)),))
    subject = with_article(noun)
    answer = f"{subject[0].upper()}{subject[1:]} is {facts.DEFINITIONS[noun]}."
    return [Turn(dressed(rng, form.format(noun, subject)), answer)]


def _name(rng: random.Random) -> str:
    return rng.choice(facts.NAMES) if rng.random() < 0.7 else filler.pseudo_word(rng).capitalize()


def _word(rng: random.Random) -> str:
    return rng.choice((rng.choice(filler.NOUNS), rng.choice(filler.ADJECTIVES), filler.pseudo_word(rng)))


def _number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((9, 99, 99, 999, 9999)))


_FIELDS: dict[str, Callable[[random.Random], str | int | bool]] = {
    "name": _name, "age": lambda rng: rng.randint(1, 99), "city": lambda rng: rng.choice(facts.CITIES),
    "country": lambda rng: rng.choice([name for name in facts.CAPITALS if name.isalpha()]),
    "colour": lambda rng: rng.choice(facts.COLOURS), "job": lambda rng: rng.choice(facts.JOBS),
    "food": lambda rng: rng.choice(facts.FOODS), "pet": lambda rng: rng.choice(facts.ANIMALS), "id": _number, "count": _number,
    "price": _number, "size": lambda rng: rng.choice(("small", "medium", "large")), "title": _word,
    "code": filler.pseudo_word, "active": lambda rng: rng.random() < 0.5, "score": lambda rng: rng.randint(0, 100),
    "year": lambda rng: rng.randint(1900, 2099), "day": lambda rng: rng.choice(facts.DAYS), "status": _word, "quantity": _number,
}  # fmt: skip
_OBJECT = Forms(
    (
        "Give me a JSON object with {0}.", "Write a JSON object with {0}.", "Return JSON with {0}.", "Make a JSON object with {0}.",
        "Create JSON with {0}.", "I need a JSON object with {0}.", "Give me JSON with {0}.", "As JSON: {0}",
        "Answer only with a JSON object that has {0}.", "Produce a JSON object with {0}.", "Turn this into JSON: {0}",
    ),
    ("Please give me a JSON object with {0}.", "Write JSON with {0}."),
)  # fmt: skip
_ARRAY = Forms(
    (
        "Give me a JSON array with {0}.",
        "Write a JSON array of {0}.",
        "Make a JSON list with {0}.",
        "Return a JSON array with {0}.",
    ),
    ("Please give me a JSON array with {0}.",),
)


def _joined(parts: Sequence[str], rng: random.Random) -> str:
    if len(parts) == 1:
        return parts[0]
    if rng.random() < 0.25:
        return ", ".join(parts)
    return f"{', '.join(parts[:-1])}{rng.choice((' and ', ' and ', ', and '))}{parts[-1]}"


def json_objects(rng: random.Random, split: Split) -> list[Turn]:
    while True:
        value: object
        if rng.random() < 0.2:
            draw = rng.choice((_name, _word, _number, _FIELDS["colour"], _FIELDS["food"], _FIELDS["city"]))
            items = [draw(rng) for _ in range(rng.randint(1, 6))]
            value, said, forms = items, [str(item) for item in items], _ARRAY
        else:
            keys = rng.sample(list(_FIELDS), rng.randint(1, 5)) if rng.random() < 0.8 else ["name", "age"]
            record = {key: _FIELDS[key](rng) for key in keys}
            link = rng.choice((" ", " ", " ", " = ", ": ", " set to "))
            quote = '"' if rng.random() < 0.15 else ""
            said = [f"{key}{link}{_spoken(item, quote)}" for key, item in record.items()]
            value, forms = record, _OBJECT
        answer = json.dumps(value)
        if filler.held_out(f"json|{answer}") == (split != "train"):
            break
    form = rng.choice(forms.novel if split == "wording" else forms.trained)
    return [Turn(form.format(_joined(said, rng)), answer)]


def _spoken(item: str | int | bool, quote: str) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    return f"{quote}{item}{quote}" if isinstance(item, str) else str(item)


_SPELL = Forms(
    (
        "Spell {0}.",
        "Spell the word {0}.",
        "How do you spell {0}?",
        'Spell "{0}".',
        "Please spell {0}.",
        "Can you spell {0}?",
    ),
    ("Please spell the word {0}.", "Could you spell {0}?"),
)


def spelling(rng: random.Random, split: Split) -> list[Turn]:
    while True:
        word = rng.choice(
            (_word, _name, lambda r: r.choice(list(facts.DEFINITIONS)), lambda r: r.choice(facts.CITIES))
        )(rng)
        if filler.held_out(f"spell|{word.casefold()}") == (split != "train"):
            break
    form = rng.choice(_SPELL.novel if split == "wording" else _SPELL.trained)
    return [Turn(form.format(word), "-".join(word))]


_NEXT = Forms(
    (
        "What {0} comes {2} {1}?",
        "Which {0} is {2} {1}?",
        "Which {0} comes right {2} {1}?",
        "Name the {0} {2} {1}.",
    ),
    ("What is the {0} {2} {1}?",),
)


def calendar(rng: random.Random, split: Split) -> list[Turn]:
    def draw() -> tuple[str, ...]:
        unit, names = rng.choice((("day", facts.DAYS), ("month", facts.MONTHS)))
        return unit, rng.choice(names), rng.choice(("after", "before"))

    form, (unit, name, side) = pick(rng, split, _NEXT, draw)
    names = facts.DAYS if unit == "day" else facts.MONTHS
    other = names[(names.index(name) + (1 if side == "after" else -1)) % len(names)]
    return [Turn(dressed(rng, form.format(unit, name, side)), f"{other} comes {side} {name}.")]
