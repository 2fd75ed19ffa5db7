"""Images in chats of every API: one place in the prompt and one source each, in the order of the conversation."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from treeline_wire.apis import anthropic, responses
from treeline_wire.apis.conversion import Context
from treeline_wire.chat import ChatTemplate
from treeline_wire.dialects import dialect_of
from treeline_wire.dialects.media_parts import bytes_of
from treeline_wire.prompt import PromptError, prompt_of_chat

LISTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<v><i></v>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
TEXTS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
A, B, C = ("data:image/png;base64," + base64.b64encode(text).decode() for text in (b"a", b"b", b"c"))


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={}, placeholders={"image": "<i>"}, inline_seconds=60.0)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        user(image({"url": A, "detail": "low"}), {"type": "text", "text": "x"}, image(B)),
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}, {"image_url": C}]},
    ],
    "add_generation_prompt": False,
}


@pytest.mark.parametrize("engine", ["treeline", "vllm", "sglang"])
def test_templates_with_lists_place_images_themselves(engine: str) -> None:
    made = prompt_of_chat(CHAT, template(LISTS), dialect_of(engine))
    assert made.text == "system:s;user:<v><i></v>x<v><i></v>;tool:r<v><i></v>;"
    assert [(item.kind, item.param, item.url) for item in made.media] == [
        ("image", "messages[1].content[0]", A),
        ("image", "messages[1].content[2]", B),
        ("image", "messages[2].content[1]", C),
    ]


def test_templates_with_texts_get_placeholders() -> None:
    made = prompt_of_chat(CHAT, template(TEXTS))
    assert made.text == "system:s;user:<i>\nx\n<i>;tool:r\n<i>;"


def test_models_without_images_refuse_them() -> None:
    for source in (LISTS, TEXTS):
        with pytest.raises(PromptError, match="only parts of type 'text'") as refused:
            prompt_of_chat(CHAT, ChatTemplate(source, special_tokens={}))
        assert refused.value.param == "messages[1].content[0]"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": "x"},
        {"type": "image_embeds", "image_embeds": "x"},
        {"type": "video_url", "video_url": {"url": A}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "image_url"},
        image(None),
        image({}),
        image({"url": None}),
        image(5),
    ],
)
def test_other_parts_are_refused_by_name(part: Any) -> None:
    with pytest.raises(PromptError) as refused:
        prompt_of_chat({"messages": [user({"type": "text", "text": "x"}, part)]}, template(LISTS))
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_have_no_images(role: str) -> None:
    """Some are merged, which would change the order of the items."""
    with pytest.raises(PromptError, match="only texts"):
        prompt_of_chat({"messages": [{"role": role, "content": [image(A)]}]}, template(LISTS))


def test_other_apis_make_the_same_chat() -> None:
    context = Context("treeline", lambda *, must_show: True)
    asked = [
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": A, "detail": "auto"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": B}]},
    ]
    made = responses.to_chat({"input": asked}, asked, context)
    assert [message["content"] for message in made.body["messages"]] == [[image({"url": A})], [image({"url": B})]]
    said = {"type": "base64", "media_type": "image/png", "data": A.partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": said}]}
    remote = {"type": "image", "source": {"type": "url", "url": "https://e.org/x"}}
    messages = [user({"type": "image", "source": said}, remote), user(result)]
    made = anthropic.to_chat({"messages": messages}, messages, context)
    assert made.complete
    assert [message["content"] for message in made.body["messages"]] == [
        [image({"url": A}), image({"url": "https://e.org/x"})],
        [image({"url": A})],
    ]
    for source in (None, {}, {"type": "file", "file_id": "f"}, {"type": "base64"}, {"type": "url", "url": 5}):
        wrong = [user({"type": "image", "source": source})]
        with pytest.raises(PromptError):
            anthropic.to_chat({"messages": wrong}, wrong, context)


@pytest.mark.parametrize(
    ("url", "data"),
    [
        (A, b"a"),
        (A.replace("data:image", "DATA:IMAGE"), b"a"),
        ("data:;base64,", b""),
        ("https://e.org/x.png", None),
        ("HTTP://e.org", None),
    ],
)
def test_urls_have_bytes_or_are_fetched(url: str, data: bytes | None) -> None:
    assert bytes_of(url, "p") == data


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://e.org/x",
        "gopher://e.org",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64,a",
        "data:image/png;base64,YQ",
        "data:image/png;base64,YQ==\n",
        "data:image/png;base64,Y Q==",
        "data:image/png;base64,YQ==YQ==",
        "data:image/png;base64,é===",
        "blob:https://e.org/x",
        "\thttps://e.org",
        " data:;base64,YQ==",
    ],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(PromptError):
        bytes_of(url, "p")


def test_bare_base64_is_taken_where_it_may_be() -> None:
    assert bytes_of("YQ==", "p", bare=True) == b"a"
    with pytest.raises(PromptError):
        bytes_of("file:///etc/passwd", "p", bare=True)
