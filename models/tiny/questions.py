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
import wordings
from wordings import Forms, dressed

Split = Literal["train", "test", "wording"]


class Turn(NamedTuple):
    """One exchange: what the user says and what the assistant should answer."""

    user: str
    assistant: str


Maker = Callable[[random.Random, Split], list[Turn]]


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


def wording(rng: random.Random, split: Split, forms: Forms) -> str:
    """A wording for `split`, for subjects that are held out by their values."""
    return rng.choice(forms.novel if split == "wording" else forms.trained)


def capital_answer(country: str) -> str:
    """The sentence that names the capital of `country`."""
    return f"The capital of {country} is {facts.CAPITALS[country].removesuffix('.')}."


def capitals(rng: random.Random, split: Split) -> list[Turn]:
    """The capital of a country."""
    form, (country,) = pick(rng, split, wordings.CAPITAL, lambda: (rng.choice(list(facts.CAPITALS)),))
    return [Turn(dressed(rng, form.format(country)), capital_answer(country))]


def countries(rng: random.Random, split: Split) -> list[Turn]:
    """The country of a capital."""
    form, (country,) = pick(rng, split, wordings.COUNTRY, lambda: (rng.choice(list(facts.CAPITALS)),))
    capital = facts.CAPITALS[country]
    return [Turn(dressed(rng, form.format(capital)), f"{capital} is the capital of {country}.")]


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
    """A sum of two numbers up to 99; in training sometimes more is added to it."""
    a, b = _addends(rng, split)
    turns = [Turn(dressed(rng, wording(rng, split, wordings.SUM).format(a, b)), f"{a} + {b} = {a + b}")]
    if split == "train" and rng.random() < 0.15:
        more = rng.randint(0, 9)
        if a + b > 99 or not sum_held_out(a + b, more):
            ask = rng.choice(("Add {0} to that.", "And {0} more?", "Now add {0}.", "Plus {0}?")).format(more)
            turns.append(Turn(ask, f"{a + b} + {more} = {a + b + more}"))
    return turns


def colours(rng: random.Random, split: Split) -> list[Turn]:
    """The colour of a thing, or of two colours mixed."""
    if rng.random() < 0.35:

        def draw() -> tuple[str, ...]:
            pair = rng.choice(list(facts.MIXES))
            return pair if rng.random() < 0.5 else (pair[1], pair[0])

        form, (one, two) = pick(rng, split, wordings.MIX, draw)
        made = facts.MIXES.get((one, two)) or facts.MIXES[two, one]
        return [Turn(dressed(rng, form.format(one, two)), f"{one.capitalize()} and {two} make {made}.")]
    form, (thing,) = pick(rng, split, wordings.COLOUR, lambda: (rng.choice(list(facts.THING_COLOURS)),))
    text = form.format(thing)
    answer = f"{thing[0].upper()}{thing[1:]} is {facts.THING_COLOURS[thing]}."
    return [Turn(dressed(rng, text[0].upper() + text[1:]), answer)]


def counting(rng: random.Random, split: Split) -> list[Turn]:
    """Up, down, from one, or by twos."""
    while True:
        kind = rng.randrange(6)
        start = 1 if kind == 4 else rng.choice((rng.randint(0, 20), rng.randint(0, 99), rng.randint(100, 180)))
        end = start + rng.randint(1, 29 if kind == 4 else 19) * (2 if kind == 5 else 1)
        if kind == 3:
            start, end = end, start
        if filler.held_out(f"count|{kind // 3}|{start}|{end}") == (split != "train"):
            break
    forms = {3: wordings.COUNT_DOWN, 4: wordings.COUNT_TO, 5: wordings.COUNT_TWOS}.get(kind, wordings.COUNT_UP)
    step = -1 if kind == 3 else 2 if kind == 5 else 1
    answer = ", ".join(str(number) for number in range(start, end + step, step))
    return [Turn(dressed(rng, wording(rng, split, forms).format(start, end)), answer)]


def echo(rng: random.Random, split: Split) -> list[Turn]:
    """Copy a text that was never seen."""
    while True:
        text = filler.copy_text(rng)
        if rng.random() < 0.06:
            text = " ".join(filler.copy_text(rng) for _ in range(rng.randint(2, 8)))
        if filler.held_out(f"echo|{text.casefold()}") == (split != "train"):
            return [Turn(wording(rng, split, wordings.ECHO).format(text), text)]


def with_article(noun: str) -> str:
    """`noun` as a sentence uses it: "an island", "honey", "the moon"."""
    if noun in facts.MASS_NOUNS:
        return noun
    if noun in facts.UNIQUE_NOUNS:
        return f"the {noun}"
    return f"{'an' if noun[0] in 'aeiou' or noun == 'hour' else 'a'} {noun}"


def definitions(rng: random.Random, split: Split) -> list[Turn]:
    """A short definition."""
    form, (noun,) = pick(rng, split, wordings.DEFINE, lambda: (rng.choice(list(facts.DEFINITIONS)),))
    subject = with_article(noun)
    answer = f"{subject[0].upper()}{subject[1:]} is {facts.DEFINITIONS[noun]}."
    return [Turn(dressed(rng, form.format(noun, subject)), answer)]


def person(rng: random.Random) -> str:
    """A first name, often an invented one."""
    return rng.choice(facts.NAMES) if rng.random() < 0.7 else filler.pseudo_word(rng).capitalize()


def _word(rng: random.Random) -> str:
    return rng.choice((rng.choice(filler.NOUNS), rng.choice(filler.ADJECTIVES), filler.pseudo_word(rng)))


def _number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((9, 99, 99, 999, 9999)))


_FIELDS: dict[str, Callable[[random.Random], str | int | bool]] = {
    "name": person,
    "age": lambda rng: rng.randint(1, 99),
    "city": lambda rng: rng.choice(facts.CITIES),
    "country": lambda rng: rng.choice([name for name in facts.CAPITALS if name.isalpha()]),
    "colour": lambda rng: rng.choice(facts.COLOURS),
    "job": lambda rng: rng.choice(facts.JOBS),
    "food": lambda rng: rng.choice(facts.FOODS),
    "pet": lambda rng: rng.choice(facts.ANIMALS),
    "id": _number,
    "count": _number,
    "price": _number,
    "size": lambda rng: rng.choice(("small", "medium", "large")),
    "title": _word,
    "code": filler.pseudo_word,
    "active": lambda rng: rng.random() < 0.5,
    "score": lambda rng: rng.randint(0, 100),
    "year": lambda rng: rng.randint(1900, 2099),
    "day": lambda rng: rng.choice(facts.DAYS),
    "status": _word,
    "quantity": _number,
}


def _joined(parts: Sequence[str], rng: random.Random) -> str:
    if len(parts) == 1:
        return parts[0]
    if rng.random() < 0.25:
        return ", ".join(parts)
    return f"{', '.join(parts[:-1])}{rng.choice((' and ', ' and ', ', and '))}{parts[-1]}"


def _spoken(item: str | int | bool, quote: str) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    return f"{quote}{item}{quote}" if isinstance(item, str) else str(item)


def json_objects(rng: random.Random, split: Split) -> list[Turn]:
    """A JSON object (or array) with the values that the user names."""
    while True:
        value: object
        if rng.random() < 0.2:
            draw = rng.choice((person, _word, _number, _FIELDS["colour"], _FIELDS["food"], _FIELDS["city"]))
            items = [draw(rng) for _ in range(rng.randint(1, 6))]
            value, said, forms = items, [str(item) for item in items], wordings.JSON_ARRAY
        else:
            keys = rng.sample(list(_FIELDS), rng.randint(1, 5)) if rng.random() < 0.8 else ["name", "age"]
            record = {key: _FIELDS[key](rng) for key in keys}
            link = rng.choice((" ", " ", " ", " = ", ": ", " set to "))
            quote = '"' if rng.random() < 0.15 else ""
            said = [f"{key}{link}{_spoken(item, quote)}" for key, item in record.items()]
            value, forms = record, wordings.JSON_OBJECT
        answer = json.dumps(value)
        if filler.held_out(f"json|{answer}") == (split != "train"):
            return [Turn(wording(rng, split, forms).format(_joined(said, rng)), answer)]


def _known_word(rng: random.Random) -> str:
    tables = (facts.NAMES, facts.CITIES, filler.NOUNS, filler.ADJECTIVES, list(facts.DEFINITIONS))
    return rng.choice(rng.choice(tables))


def spelling(rng: random.Random, split: Split) -> list[Turn]:
    """The letters of a word, joined with hyphens. Invented words are held out by the word, others by the wording."""
    if rng.random() < 0.35:
        while True:
            word = filler.pseudo_word(rng)
            if filler.held_out(f"spell|{word}") == (split != "train"):
                form = wording(rng, split, wordings.SPELL)
                break
    else:
        form, (word,) = pick(rng, split, wordings.SPELL, lambda: (_known_word(rng),))
    return [Turn(form.format(word), "-".join(word))]


def calendar(rng: random.Random, split: Split) -> list[Turn]:
    """Neighbours of a day or a month."""

    def draw() -> tuple[str, ...]:
        unit, names = rng.choice((("day", facts.DAYS), ("month", facts.MONTHS)))
        return unit, rng.choice(names), rng.choice(("after", "before"))

    form, (unit, name, side) = pick(rng, split, wordings.NEXT, draw)
    names = facts.DAYS if unit == "day" else facts.MONTHS
    other = names[(names.index(name) + (1 if side == "after" else -1)) % len(names)]
    return [Turn(dressed(rng, form.format(unit, name, side)), f"{other} comes {side} {name}.")]
