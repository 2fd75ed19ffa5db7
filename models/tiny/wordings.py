"""How questions are worded: requests composed of a wrapper and a stem, and plain questions.

One composed wording in nine is kept from training (by hash), so that a model can be asked in words it never saw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import filler

WRAPPERS = (
    "{S}.",
    "{S}.",
    "Please {s}.",
    "Can you {s}?",
    "Could you {s}?",
    "Would you {s}?",
    "I want you to {s}.",
    "I would like you to {s}.",
    "{S}, please.",
    "You should {s}.",
)
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


class Forms(NamedTuple):
    """Wordings of one question: those trained on, and those kept for the "wording" split."""

    trained: tuple[str, ...]
    novel: tuple[str, ...]


def _wrapped(stem: str, wrapper: str) -> str:
    return wrapper.replace("{S}", stem[0].upper() + stem[1:]).replace("{s}", stem)


def forms(stems: Sequence[str], trained: Sequence[str] = (), novel: Sequence[str] = ()) -> Forms:
    """Every stem in every wrapper, split by hash (the bare imperative is always trained), and whole wordings."""
    requests = [_wrapped(stem, wrapper) for stem in stems for wrapper in WRAPPERS]
    bare = {_wrapped(stem, WRAPPERS[0]) for stem in stems}
    kept = [text for text in requests if text not in bare and filler.held_out(f"wording|{text}", 11)]
    # Whole wordings are few beside the composed ones: give them a third of the weight.
    share = max(1, len(requests) // (2 * len(trained))) if trained else 1
    return Forms(
        tuple(text for text in requests if text not in kept) + tuple(trained) * share,
        tuple(kept) + tuple(novel),
    )


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


def _echo_forms() -> Forms:
    verbs = ("repeat", "echo", "say", "copy", "write", "print", "type", "output")
    tails = (
        ": {0}",
        ": {0}",
        " this: {0}",
        ' "{0}"',
        ' the word "{0}"',
        " the following: {0}",
        " the following:\n{0}",
        " the following text: {0}",
        " this text:\n\n{0}",
        " exactly: {0}",
        " after me: {0}",
        " word for word: {0}",
        " this sentence: {0}",
    )
    openings = ("{S}", "{S}", "Please {s}", "Now {s}", "Can you {s}", "Could you {s}", "I want you to {s}")
    requests = [_wrapped(verb, opening) + tail for verb in verbs for opening in openings for tail in tails]
    kept = {text for text in requests if filler.held_out(f"wording|{text}", 11)} - {"Repeat: {0}"}
    trained = [text for text in requests if text not in kept]
    return Forms((*trained, *["Repeat: {0}"] * 60, *["{0}\n\nRepeat the text above."] * 10), tuple(sorted(kept)))


CAPITAL = forms(
    (
        "name the capital of {0}",
        "tell me the capital of {0}",
        "give me the capital of {0}",
        "name the capital city of {0}",
        "tell me which city is the capital of {0}",
        "tell me what the capital of {0} is",
    ),
    (
        "What is the capital of {0}?",
        "What's the capital of {0}?",
        "What is the capital city of {0}?",
        "Which city is the capital of {0}?",
        "Capital of {0}?",
        "Do you know the capital of {0}?",
        "What city is the capital of {0}?",
        "I need the capital of {0}.",
        "What is {0}'s capital?",
        "What is the name of the capital of {0}?",
        "The capital of {0} is?",
    ),
    (
        "What's the capital city of {0}?",
        "Do you know what the capital of {0} is?",
        "Which city is {0}'s capital?",
    ),
)
COUNTRY = forms(
    ("tell me which country has {0} as its capital", "name the country whose capital is {0}"),
    (
        "{0} is the capital of which country?",
        "Which country has {0} as its capital?",
        "What country is {0} the capital of?",
        "Of which country is {0} the capital?",
        "{0} is the capital of what?",
    ),
    ("Which country's capital is {0}?",),
)
SUM = forms(
    (
        "add {0} and {1}",
        "calculate {0} + {1}",
        "compute {0} plus {1}",
        "tell me the sum of {0} and {1}",
        "work out {0} + {1}",
        "tell me what {0} plus {1} is",
        "give me the sum of {0} and {1}",
    ),
    (
        "What is {0} + {1}?",
        "What is {0} plus {1}?",
        "{0} + {1}",
        "{0}+{1}",
        "{0} + {1} = ?",
        "{0}+{1}=",
        "{0} plus {1}",
        "What is the sum of {0} and {1}?",
        "How much is {0} + {1}?",
        "How much is {0} plus {1}?",
        "What do you get when you add {0} and {1}?",
        "I have {0} apples and get {1} more. How many apples do I have?",
    ),
    ("What's {0} + {1}?", "How much do {0} and {1} make?"),
)
COLOUR = forms(
    (
        "name the colour of {0}",
        "tell me the colour of {0}",
        "tell me which colour {0} has",
        "say what colour {0} is",
    ),
    (
        "What colour is {0}?",
        "What is the colour of {0}?",
        "Which colour is {0}?",
        "{0}: what colour?",
        "What color is {0}?",
        "What is the usual colour of {0}?",
        "Which colour does {0} have?",
    ),
    ("Do you know the colour of {0}?", "What's the colour of {0}?"),
)
MIX = forms(
    ("mix {0} and {1}", "tell me what {0} and {1} make", "tell me what you get from {0} and {1}"),
    (
        "What do you get when you mix {0} and {1}?",
        "What colour do {0} and {1} make?",
        "Which colour comes from {0} and {1}?",
        "If I mix {0} with {1}, what do I get?",
        "{0} and {1} make which colour?",
        "What colour do I get from {0} and {1}?",
    ),
    ("What do {0} and {1} make?",),
)
COUNT_UP = forms(
    (
        "count from {0} to {1}",
        "count up from {0} to {1}",
        "list the numbers from {0} to {1}",
        "write the numbers from {0} to {1}",
        "give me the numbers from {0} to {1}",
    )
)
COUNT_DOWN = forms(
    (
        "count down from {0} to {1}",
        "count backwards from {0} to {1}",
        "count from {0} down to {1}",
        "list the numbers from {0} down to {1}",
    )
)
COUNT_TO = forms(("count to {1}", "count up to {1}", "count from one to {1}", "count for me up to {1}"))
COUNT_TWOS = forms(
    (
        "count by twos from {0} to {1}",
        "count in steps of two from {0} to {1}",
        "count from {0} to {1} by twos",
        "count from {0} to {1} in steps of two",
    )
)
ECHO = _echo_forms()
DEFINE = forms(
    (
        "define {0}",
        "define the word {0}",
        "explain {0}",
        "explain what {1} is",
        "tell me what {1} is",
        "give me a definition of {0}",
        "tell me the meaning of {0}",
    ),
    (
        "What is {1}?",
        "What is {1}?",
        "What's {1}?",
        "What does {0} mean?",
        "What does the word {0} mean?",
        "What is the meaning of {0}?",
        'What does "{0}" mean?',
        "Do you know what {1} is?",
    ),
    ("What is the meaning of the word {0}?", "What exactly is {1}?"),
)
JSON_OBJECT = forms(
    (
        "give me a JSON object with {0}",
        "write a JSON object with {0}",
        "make a JSON object with {0}",
        "create a JSON object with {0}",
        "return JSON with {0}",
        "give me JSON with {0}",
        "answer only with a JSON object that has {0}",
        "produce a JSON object with {0}",
    ),
    ("As JSON: {0}", "I need a JSON object with {0}.", "Turn this into JSON: {0}", "JSON with {0}"),
    ("Write JSON for {0}.",),
)
JSON_ARRAY = forms(
    (
        "give me a JSON array with {0}",
        "write a JSON array of {0}",
        "make a JSON list with {0}",
        "return a JSON array with {0}",
    )
)
SPELL = forms(
    ("spell {0}", "spell the word {0}", 'spell "{0}"', "tell me how to spell {0}"),
    ("How do you spell {0}?", "How is {0} spelled?", "How do I spell {0}?"),
    ("What is the spelling of {0}?",),
)
NEXT = forms(
    ("name the {0} {2} {1}", "tell me which {0} comes {2} {1}"),
    (
        "What {0} comes {2} {1}?",
        "Which {0} is {2} {1}?",
        "Which {0} comes right {2} {1}?",
        "What is the {0} {2} {1}?",
    ),
    ("What's the {0} {2} {1}?",),
)
