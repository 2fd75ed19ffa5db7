"""Turns as chat templates write them: the extracted pieces reproduce the template's text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from treeline_lang.errors import Refused, TemplateError
from treeline_lang.templates import TEMPLATES, ChatTemplate, Message, derive
from treeline_lang.transcript import Transcript
from wire.template_corpus import corpus

ROOT = Path(__file__).parents[2]
FAST = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
CHAT = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi there"), ("user", "And?"), ("assistant", "So.")]
CHATS = {"with a system": [*CHAT, ("user", "Bye")], "without": [*CHAT[1:], ("user", "Bye")], "one turn": CHAT[1:2]}
FILES = {path.stem: path.read_text() for path in sorted((ROOT / "tests" / "wire" / "templates").glob("*.jinja"))}
FILES["tiny"] = (ROOT / "models" / "tiny" / "chat_template.jinja").read_text()


def render(source: str, messages: list[dict[str, str]], opened: bool) -> str:
    """Render by transformers."""
    return str(FAST.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=opened))


def pieces(source: str, start: str = "") -> ChatTemplate:
    async def rendered(messages: list[dict[str, str]], opened: bool) -> str:
        return render(source, messages, opened)

    return asyncio.run(derive(rendered, start))


def messages(chat: list[tuple[Any, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def written(template: ChatTemplate, chat: list[tuple[Any, str]], lead: str | None = "") -> str:
    """Write a chat as a program does. lead: the model's text before its answer."""
    assert lead is not None
    transcript = Transcript()
    for role, content in chat:
        transcript.begin(role, template)
        transcript.append(lead * (role == "assistant") + content)
        transcript.end(role, template)
    transcript.begin("assistant", template)
    return transcript.text


def lead_of(source: str, template: ChatTemplate) -> str | None:
    """Return the text that a template writes before a known answer, after the prompt for one: the model writes it. None
    if the template prompts in other words than it uses for a turn."""
    turns = render(source, messages([("user", "ASKED"), ("assistant", "SAID"), ("user", "LATER")]), False)
    between = turns.partition("ASKED")[2].partition("SAID")[0]
    asked = template.end("user") + template.begin("assistant", first=False)
    return between.removeprefix(asked) if between.startswith(asked) else None


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "name", ["chatml", "gemma", "granite", "harmony", "llama3", "mistral", "phi", "qwen25", "qwen3", "tiny"]
)
def test_the_pieces_of_a_familys_template_give_its_text(name: str, chat: str) -> None:
    source = FILES[name]
    template = pieces(source)
    if chat == "with a system" and "system" not in template.turns:
        with pytest.raises(
            TemplateError, match=r"no turn of the system: it (is part of the user's turn|does not show)"
        ):
            written(template, CHATS[chat])
        return
    assert written(template, CHATS[chat], lead_of(source, template)) == render(source, messages(CHATS[chat]), True)


@pytest.mark.deep
def test_the_pieces_of_a_corpus_of_templates_give_their_texts() -> None:
    agreed = 0
    for one in corpus():
        template = pieces(one.source)
        lead = lead_of(one.source, template)
        for chat in CHATS.values():
            if lead is None or (chat[0][0] == "system" and "system" not in template.turns):
                continue
            expected = render(one.source, messages(chat), True)
            assert written(template, chat, lead) == expected, one.name
            agreed += 1
    assert agreed > 300, agreed


def test_tokens_that_the_tokenizer_adds_are_not_written_twice() -> None:
    template = pieces(FILES["llama3"], start="<s>")
    without = written(template, CHATS["without"])
    assert "<s>" + without == render(FILES["llama3"], messages(CHATS["without"]), True)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not show the content of a turn once"),
        (
            "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
            "does not show the content of a turn once",
        ),
        ("{{ 'A' if add_generation_prompt }}{{ messages[0].content }}", "changes the text before it"),
    ],
)
def test_a_template_that_cannot_be_split_has_a_reason(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        pieces(source)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_for_servers_that_render_none_have_all_roles(name: str) -> None:
    text = written(TEMPLATES[name], CHATS["with a system"])
    at = [text.index(content) for _, content in CHATS["with a system"]]
    assert at == sorted(at)
    assert TEMPLATES[name].stop


def test_a_copy_of_a_transcript_is_independent() -> None:
    template, first = TEMPLATES["chatml"], Transcript()
    first.begin("user", template)
    first.append("look: ")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    first.images.append(picture)
    second = first.copy()
    second.append("more")
    second.end("user", template)
    assert (first.messages, first.role) == ([], "user")
    content = [picture, {"type": "text", "text": "look: more"}]
    assert second.messages == [{"role": "user", "content": content}]
    assert first.prompt().turn == "look: "
    assert first.prompt().images == (picture,)
    assert second.prompt().images == ()


async def test_a_server_whose_template_refuses_the_system() -> None:
    async def render(messages: list[Message], opened: bool) -> str:
        if messages[0]["role"] == "system":
            raise Refused("System role not supported")
        turns = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return turns + ("<assistant>" if opened else "")

    template = await derive(render)
    assert template.begin("user", True) == "<user>"
    assert template.missing == {"system": "System role not supported"}
