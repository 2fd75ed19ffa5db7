"""The tiny model's corpus: an endless stream of dialogues, a pure function of the seed.

`short_document` and `long_document` draw one document to train on; `held_out_questions` draws questions that
training never shows (see `questions.py` for the splits). Documents are ChatML text, or plain text with a continuation.
Run as a script to look at samples: `python corpus.py --count 20`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import facts
import filler
import questions
import wordings
from questions import Maker, Split, Turn

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"


class Document(NamedTuple):
    """One training document. `completion` is None for a dialogue (the loss is on what the assistant says),
    or the continuation of the plain text `text` (the loss is on the continuation)."""

    text: str
    completion: str | None = None


class Question(NamedTuple):
    """A held-out question: messages as the chat template takes them, and the one right answer to the last."""

    category: str
    messages: list[dict[str, str]]
    answer: str


def chat_text(system: str | None, turns: list[Turn]) -> str:
    """ChatML, character for character what chat_template.jinja renders."""
    parts = [f"{IM_START}system\n{system}{IM_END}\n"] if system is not None else []
    parts += [f"{IM_START}user\n{turn.user}{IM_END}\n{IM_START}assistant\n{turn.assistant}{IM_END}\n" for turn in turns]
    return "".join(parts)


# --- small talk -------------------------------------------------------------------------------------------------------

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello!",
            "Hello",
            "Hi",
            "Hi!",
            "Hey",
            "Hi there!",
            "Good morning!",
            "Good evening.",
            "hello there",
            "Say hello.",
            "Say hi.",
        ),
        "Hello! How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me who you are.",
            "Are you a robot?",
            "Who am I talking to?",
        ),
        "I am Treeline's tiny model.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help!", "What are you good at?"),
        "I know capitals, colours and short definitions. I can add, count, spell, repeat and write small JSON objects.",
    ),
    (("How are you?", "How are you doing?", "How is it going?"), "I am fine, thank you."),
    (
        ("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "thanks", "Great, thanks!"),
        "You are welcome!",
    ),
    (("Goodbye.", "Bye!", "See you later.", "Good night.", "bye"), "Goodbye!"),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained by the Treeline project.",
    ),
    (("Are you there?", "Ping", "ping", "Are you ready?", "Test", "test"), "Yes, I am here."),
    (("Yes.", "OK.", "Fine.", "Good.", "Great!", "ok", "I see."), "What else would you like to know?"),
)


def talk(rng: random.Random, split: Split) -> list[Turn]:
    """Greetings, thanks and the like."""
    while True:
        asked, answer = rng.choice(_TALK)
        said = rng.choice(asked)
        dressing = rng.choice(("", "", "", "", "Hi! ", "OK. ", "One question: "))
        if (dressing != "" and filler.held_out(f"talk|{said}|{dressing}", 20)) == (split != "train"):
            return [Turn(dressing + said, answer)]


def unknown(rng: random.Random, split: Split) -> list[Turn]:
    """Questions that the model cannot answer."""
    del split  # only trained on
    if rng.random() < 0.2:
        form = rng.choice(
            (
                "What is {0} {2} {1}?",
                "{0} {2} {1}",
                "{0}{2}{1}",
                "How much is {0} {2} {1}?",
                "Calculate {0} {2} {1}.",
            )
        )
        return [Turn(form.format(rng.randint(0, 99), rng.randint(0, 99), rng.choice("-*/")), "I can only add.")]
    noun, other = rng.choice(filler.NOUNS), rng.choice(filler.ADJECTIVES)
    asked = rng.choice(
        (
            f"Why is the {noun} {other}?",
            f"Who invented the {noun}?",
            f"When was the {noun} built?",
            "What is the weather like?",
            f"How far is the {noun}?",
            f"Where is the {other} {noun}?",
            "What time is it?",
            f"How many {noun}s are there?",
            "Tell me a joke.",
            f"Write a poem about the {noun}.",
            f"Write a song about a {other} {noun}.",
            f"Translate {noun} into French.",
            f"How do I repair a {noun}?",
            f"Summarise the {noun}.",
            f"What is the best {noun}?",
            "What is the meaning of life?",
            "Who won the game?",
            f"What is the capital of {filler.pseudo_word(rng).capitalize()}?",
            f"Who is {filler.pseudo_word(rng).capitalize()}?",
            f"Should I buy the {noun}?",
            "What did I eat yesterday?",
        )
    )
    return [Turn(wordings.dressed(rng, asked), "I do not know that.")]


def story(rng: random.Random, split: Split) -> list[Turn]:
    """A story made of stock sentences."""
    del split  # only trained on: any story will do
    name, animal, place = rng.choice(facts.NAMES), rng.choice(facts.ANIMALS), rng.choice(filler.PLACES[:10])
    asked = rng.choice(
        (
            "Tell me a story.",
            "Write a short story.",
            f"Tell me a story about a {animal}.",
            f"Write a story about {name}.",
            "Tell me something.",
            "Write a few sentences.",
            "Write a long text.",
            "Tell me a long story.",
        )
    )
    lines = [
        f"Once there was a {rng.choice(filler.ADJECTIVES)} {animal} called {name}.",
        f"{name} lived {place}.",
    ]
    events = (
        lambda: f"One day {name} found a {rng.choice(filler.ADJECTIVES)} {rng.choice(filler.NOUNS)}.",
        lambda: f"{name} liked {rng.choice(facts.FOODS)} and {rng.choice(facts.FOODS)}.",
        lambda: f"The {animal} met a {rng.choice(facts.JOBS)} {rng.choice(filler.PLACES[:10])}.",
        lambda: f"They talked about the {rng.choice(filler.NOUNS)} and the {rng.choice(filler.NOUNS)}.",
        lambda: f"The {rng.choice(filler.NOUNS)} was {rng.choice(facts.COLOURS)}.",
        lambda: f"{name} walked to {rng.choice(facts.CITIES)} and came back.",
    )
    lines += [rng.choice(events)() for _ in range(rng.randint(2, 14 if "long" in asked else 6))]
    return [Turn(asked, " ".join([*lines, f"In the end {name} was happy."]))]


# --- what the user said earlier ---------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    statements: tuple[str, ...]
    reply: str
    asked: tuple[str, ...]
    answer: str
    missing: str
    values: Callable[[random.Random], str]


_MEMORIES: tuple[_Memory, ...] = (
    _Memory(
        (
            "My name is {0}.",
            "I am {0}.",
            "Hi, my name is {0}.",
            "Hello, I'm {0}.",
            "Call me {0}.",
            "Please remember that my name is {0}.",
        ),
        "Nice to meet you, {0}.",
        (
            "What is my name?",
            "What's my name?",
            "Do you know my name?",
            "Who am I?",
            "Do you remember my name?",
        ),
        "Your name is {0}.",
        "I do not know your name yet.",
        questions.person,
    ),
    _Memory(
        (
            "My favourite colour is {0}.",
            "I like {0} best.",
            "My favorite color is {0}.",
            "Remember that my favourite colour is {0}.",
        ),
        "I will remember that your favourite colour is {0}.",
        (
            "What is my favourite colour?",
            "Which colour do I like best?",
            "What's my favorite color?",
            "Do you know my favourite colour?",
        ),
        "Your favourite colour is {0}.",
        "I do not know your favourite colour yet.",
        lambda rng: rng.choice(facts.COLOURS),
    ),
    _Memory(
        ("I live in {0}.", "My home is in {0}.", "I come from {0}."),
        "I hear that {0} is a good place to live.",
        ("Where do I live?", "Which city do I live in?", "Do you know where I live?"),
        "You live in {0}.",
        "I do not know where you live.",
        lambda rng: rng.choice(facts.CITIES),
    ),
    _Memory(
        ("I am {0} years old.", "My age is {0}.", "I'm {0} years old."),
        "Noted: you are {0} years old.",
        ("How old am I?", "What is my age?", "Do you know how old I am?"),
        "You are {0} years old.",
        "I do not know how old you are.",
        lambda rng: str(rng.randint(5, 99)),
    ),
    _Memory(
        ("I like to eat {0}.", "My favourite food is {0}.", "I love {0}."),
        "I will remember that you like {0}.",
        ("What do I like to eat?", "What is my favourite food?", "Which food do I like?"),
        "You like {0}.",
        "I do not know what you like to eat.",
        lambda rng: rng.choice(facts.FOODS),
    ),
    _Memory(
        ("My dog is called {0}.", "I have a dog called {0}.", "The name of my dog is {0}."),
        "What a nice name, {0}!",
        ("What is my dog called?", "What is the name of my dog?", "Do you know my dog's name?"),
        "Your dog is called {0}.",
        "I do not know your dog's name.",
        questions.person,
    ),
    _Memory(
        ("I work as a {0}.", "My job is {0}.", "I am a {0}."),
        "So you are a {0}.",
        ("What is my job?", "What do I do for a living?", "What is my work?"),
        "You work as a {0}.",
        "I do not know your job.",
        lambda rng: rng.choice(facts.JOBS),
    ),
)


def memory(rng: random.Random, split: Split) -> list[Turn]:
    """The user tells one to three things, talks of something else, then asks for them."""
    while True:
        told = [(kind, kind.values(rng)) for kind in rng.sample(_MEMORIES, rng.choice((1, 1, 2, 2, 3)))]
        asked = [(kind, value, rng.choice(kind.asked)) for kind, value in rng.sample(told, rng.randint(1, len(told)))]
        if filler.held_out("memory|" + "|".join(f"{value}|{form}" for _, value, form in asked)) == (split != "train"):
            break
    turns: list[Turn] = []
    for kind, value in told:
        turns.append(Turn(rng.choice(kind.statements).format(value), kind.reply.format(value)))
        turns += _distraction(rng)
    if rng.random() < 0.12:
        absent = rng.choice([kind for kind in _MEMORIES if all(kind is not known for known, _ in told)])
        turns.append(Turn(rng.choice(absent.asked), absent.missing))
    return turns + [Turn(form, kind.answer.format(value)) for kind, value, form in asked]


def _distraction(rng: random.Random) -> list[Turn]:
    turns: list[Turn] = []
    while rng.random() < 0.35:
        turns += rng.choice((questions.capitals, questions.sums, questions.colours, talk, questions.definitions))(
            rng, "train"
        )
    return turns


_FOLLOW = (
    "And of {0}?",
    "And {0}?",
    "What about {0}?",
    "And the capital of {0}?",
    "How about {0}?",
    "Now {0}.",
)


def follow_up(rng: random.Random, split: Split) -> list[Turn]:
    """A question about a capital, then others that lean on it."""
    turns = questions.capitals(rng, "train")
    for _ in range(rng.randint(1, 3)):
        while True:
            form, country = rng.choice(_FOLLOW), rng.choice(list(facts.CAPITALS))
            if filler.held_out(f"follow|{form}|{country}") == (split != "train"):
                break
        turns.append(Turn(form.format(country), questions.capital_answer(country)))
    return turns


# --- dialogues and documents ------------------------------------------------------------------------------------------

CATEGORIES: dict[str, tuple[Maker, float]] = {
    "capitals": (questions.capitals, 14),
    "countries": (questions.countries, 5),
    "sums": (questions.sums, 16),
    "colours": (questions.colours, 6),
    "counting": (questions.counting, 7),
    "echo": (questions.echo, 22),
    "definitions": (questions.definitions, 8),
    "json": (questions.json_objects, 11),
    "spelling": (questions.spelling, 9),
    "calendar": (questions.calendar, 2),
    "memory": (memory, 9),
    "follow-up": (follow_up, 4),
    "talk": (talk, 4),
    "unknown": (unknown, 3),
    "story": (story, 2),
}
_MAKERS = [maker for maker, _ in CATEGORIES.values()]
_WEIGHTS = [weight for _, weight in CATEGORIES.values()]

_RECALL = (
    "code word",
    "ticket number",
    "project name",
    "door code",
    "manager's name",
    "room number",
    "password",
    "meeting place",
)


def _recall_value(rng: random.Random) -> str:
    return rng.choice(
        (
            filler.pseudo_word(rng),
            str(rng.randint(10, 99999)),
            filler.pseudo_word(rng).capitalize(),
            rng.choice(facts.NAMES),
        )
    )


def hide_fact(rng: random.Random, system: str, split: Split) -> tuple[str, list[Turn]]:
    """Put "The code word is …" somewhere into `system`; returns the new text and the turn that asks for it."""
    free = [key for key in _RECALL if f"The {key} is " not in system]
    while True:
        key, value = rng.choice(free), _recall_value(rng)
        if filler.held_out(f"recall|{key}|{value}") == (split != "train"):
            break
    sentences = system.split(". ")
    sentences.insert(rng.randint(0, len(sentences)), f"The {key} is {value}")
    asked = rng.choice(("What is the {0}?", "Tell me the {0}.", "Do you know the {0}?", "What's the {0}?")).format(key)
    return ". ".join(sentences), [Turn(asked, f"The {key} is {value}.")]


def _dialogue(rng: random.Random, turns_wanted: int) -> list[Turn]:
    turns: list[Turn] = []
    remembered = False
    while len(turns) < turns_wanted:
        maker = rng.choices(_MAKERS, _WEIGHTS)[0]
        if maker is memory:
            if remembered:  # two in one dialogue would contradict each other
                continue
            remembered = True
        turns += maker(rng, "train")
    return turns


def _plain(rng: random.Random) -> Document:
    """Plain text as the completions API gets it, and how it goes on."""
    turn = rng.choice((questions.capitals, questions.sums, questions.colours, questions.definitions))(rng, "train")[0]
    if rng.random() < 0.5:
        lead, name = rng.choice((("Q: {0}\nA:", " "), ("Question: {0}\nAnswer:", " ")))
        return Document(lead.format(turn.user), name + turn.assistant)
    words = turn.assistant.split(" ")
    cut = (
        len(words) - 1 if "=" in words else rng.randint(max(1, len(words) - 3), len(words) - 1) if len(words) > 3 else 2
    )
    return Document(" ".join(words[:cut]), " " + " ".join(words[cut:]))


def short_document(rng: random.Random) -> Document:
    """A dialogue of one to six turns with no system prompt or a short one; seldom plain text."""
    dice = rng.random()
    if dice < 0.03:
        return _plain(rng)
    system: str | None = None
    turns = _dialogue(rng, rng.choice((1, 1, 1, 1, 2, 2, 3, 5)))
    if dice < 0.35:
        system = rng.choice(filler.SHORT_SYSTEMS)
    elif dice < 0.50:
        system = filler.document(rng, rng.randint(20, 500))
        if rng.random() < 0.3:
            system, asked = hide_fact(rng, system, "train")
            turns.insert(rng.choice((0, len(turns))), asked[0])
    return Document(chat_text(system, turns))


def long_document(rng: random.Random, characters: int) -> Document:
    """A dialogue after about `characters` characters of system prompt (or of text in the first question)."""
    text = filler.document(rng, characters)
    turns = _dialogue(rng, rng.randint(2, 10))
    if rng.random() < 0.15:
        maker = rng.choice((questions.capitals, questions.sums, questions.colours, questions.definitions))
        first = maker(rng, "train")[0]
        system = rng.choice((None, *filler.SHORT_SYSTEMS))
        return Document(chat_text(system, [Turn(f"{text}\n\n{first.user}", first.assistant), *turns]))
    for _ in range(rng.choice((0, 1, 2, 3))):
        text, asked = hide_fact(rng, text, "train")
        turns = asked + turns if rng.random() < 0.5 else turns + asked
    return Document(chat_text(text, turns))


def held_out_questions(
    seed: int, category: str, split: Split, count: int, system_characters: int = 0
) -> Iterator[Question]:
    """`count` questions of `category` that training never shows, each alone or as the last turn of its dialogue.

    With `system_characters` they come after a system prompt of about that length. The category "recall" asks for
    something that the system prompt says.
    """
    rng = random.Random(f"held out {seed} {category} {split} {system_characters}")
    for _ in range(count):
        system = filler.document(rng, system_characters) if system_characters else None
        if category == "recall":
            system, turns = hide_fact(rng, system or filler.document(rng, 300), split)
        else:
            turns = CATEGORIES[category][0](rng, split)
        messages = [{"role": "system", "content": system}] if system is not None else []
        for turn in turns[:-1]:
            messages += [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": turn.assistant},
            ]
        messages.append({"role": "user", "content": turns[-1].user})
        yield Question(category, messages, turns[-1].assistant)


def main() -> None:
    """Print samples."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    for _ in range(arguments.count):
        document = short_document(rng)
        print(document.text + (f"[{document.completion}]" if document.completion else ""))


if __name__ == "__main__":
    main()
