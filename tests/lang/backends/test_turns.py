"""Prompts as turns of a chat, and templates that know fewer of them."""

from __future__ import annotations

from typing import Any

import pytest
from treeline_lang.backends.turns import turns_of
from treeline_lang.errors import Refused, Unsupported
from treeline_lang.templates import TEMPLATES, Message, derive
from treeline_lang.transcript import Prompt, Transcript

PLAIN = TEMPLATES["plain"]


def transcript(*turns: tuple[Any, str], opened: str | None = None) -> Transcript:
    made = Transcript()
    for role, text in turns:
        made.begin(role, PLAIN)
        made.append(text)
        made.end(role, PLAIN)
    if opened is not None:
        made.begin("assistant", PLAIN)
        made.append(opened)
    return made


def test_turns_and_one_that_has_begun() -> None:
    made = transcript(("system", "a"), ("user", "b"), opened="")
    asked = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert turns_of(made.prompt(), PLAIN, "It") == asked
    made.append("so")
    assert turns_of(made.prompt(), PLAIN, "It") == [*asked, {"role": "assistant", "content": "so"}]


def test_pictures_stand_before_the_text() -> None:
    made = Transcript()
    made.begin("user", PLAIN)
    made.append("What ")
    made.images.append("data:image/png;base64,AA==")
    made.append("is this?")
    made.end("user", PLAIN)
    made.begin("assistant", PLAIN)
    [turn] = turns_of(made.prompt(), PLAIN, "It")
    assert [part["type"] for part in turn["content"]] == ["image_url", "text"]
    assert turn["content"][1]["text"] == "What is this?"


@pytest.mark.parametrize("where", ["before", "between"])
def test_text_outside_of_turns_would_be_lost(where: str) -> None:
    made = Transcript()
    made.append("loose " if where == "before" else "")
    made.begin("user", PLAIN)
    made.end("user", PLAIN)
    made.append("loose " if where == "between" else "")
    made.begin("assistant", PLAIN)
    with pytest.raises(Unsupported, match="would be lost"):
        turns_of(made.prompt(), PLAIN, "It")


def test_only_the_assistant_answers() -> None:
    for prompt in (Prompt("text"), transcript(("user", "a")).prompt()):
        with pytest.raises(Unsupported, match="turn of the assistant"):
            turns_of(prompt, PLAIN, "It")


async def test_a_server_whose_template_refuses_the_system() -> None:
    async def render(messages: list[Message], opened: bool) -> str:
        if messages[0]["role"] == "system":
            raise Refused("System role not supported")
        turns = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return turns + ("<assistant>" if opened else "")

    template = await derive(render)
    assert template.begin("user", True) == "<user>"
    assert template.missing == {"system": "System role not supported"}
