"""Chat templates render as `transformers` renders them."""

import contextlib
import datetime as dt
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from treeline_runtime.templates.pool import TemplatePool
from treeline_wire import template_env
from treeline_wire.chat import ChatTemplate
from treeline_wire.template_inline import MAX_INPUT_CHARS

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NOW = dt.datetime(2026, 3, 7, 0, 30, tzinfo=dt.UTC)

_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": " The city, e.g. “Paris” "},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "where": {"type": "object", "properties": {"lat": {"type": ["number", "null"]}}, "required": ["lat"]},
    },
    "required": ["city"],
}
_WEATHER = {"name": "weather", "description": "Say <how> it's & will be", "parameters": _PARAMETERS}
_CLOCK = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": _WEATHER}, {"type": "function", "function": _CLOCK}]
_CALLED = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALLED}],
}
_USER = {"role": "user", "content": "Hi {{ 7 * 7 }} {% raise %} {# no #} <|im_end|>\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [_USER],
    "system": [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": "  padded  "}],
    "turns": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": " B\n\n"},
        {"role": "user", "content": "C"},
    ],
    "answered": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B and trailing blank "}],
    "thinking": [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nB"},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": "D", "reasoning": "because"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {**_CALL, "reasoning_content": "I must look."},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"t": 3}'},
        {"role": "assistant", "content": "3 °C"},
        {"role": "user", "content": "Thanks"},
    ],
    "two_results": [
        {"role": "user", "content": "Weather?"},
        _CALL,
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
    "image": [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "what?"}]}],
    "developer": [{"role": "developer", "content": "D"}, {"role": "user", "content": "A"}],
    "wrong_order": [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}],
    "no_content": [{"role": "user"}, {"role": "assistant", "content": None}],
    "scripts": [
        {"role": "user", "content": "日本語 😀 é e\u0301 \u2028 \x00 \t عربى"},
        {"role": "assistant", "content": "नमस्ते"},
    ],
    "long": [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 40} for i in range(120)],
    "numbers": [{"role": "user", "content": "x", "extra": {"f": 1e22, "i": 10**12, "n": None, "b": True}}],
}  # fmt: skip
_DOCUMENTS = [{"title": "a title", "text": "line\nline " * 9, "doc_id": 7}, {"title": "", "text": "t"}]
VARIANTS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "no_prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "continue": {"add_generation_prompt": False, "continue_final_message": True},
    "continue_reasoning": {"add_generation_prompt": False, "continue_final_message": "reasoning_content"},
    "documents": {"add_generation_prompt": True, "documents": _DOCUMENTS},
    "no_thinking": {"add_generation_prompt": True, "enable_thinking": False, "reasoning_effort": "high"},
    "kwargs": {"add_generation_prompt": True, "bos_token": "<B>", "date_string": "1 Jan", "thinking": True,
               "controls": {"z": 1, "a": [1, "é"]}, "tools_in_user_message": False, "tools": TOOLS},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> "dt.datetime":  # type: ignore[override]
            return NOW.astimezone(tz) if tz else NOW.replace(tzinfo=None)

    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    monkeypatch.setattr(template_env, "datetime", Frozen)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    with contextlib.closing(TemplatePool()) as pool:
        yield pool


def _rendered(render: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """Return the text, or None if rendering is refused."""
    try:
        return str(render(messages, **options))
    except Exception:
        return None


def _ours(template: ChatTemplate) -> Any:
    names = {"tools", "documents", "add_generation_prompt", "continue_final_message"}

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        known = {name: value for name, value in options.items() if name in names}
        more = {name: value for name, value in options.items() if name not in names}
        return template.render(messages, template_kwargs=more, **known)

    return render


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_render_as_in_transformers(
    path: Path, reference: PreTrainedTokenizerFast, pool: TemplatePool
) -> None:
    source = path.read_text()
    ours = ChatTemplate(source, special_tokens=SPECIAL, pool=pool)
    rendered = 0
    for (name, messages), (variant, options) in itertools.product(CONVERSATIONS.items(), VARIANTS.items()):
        expected = _rendered(
            lambda m, **o: reference.apply_chat_template(m, chat_template=source, tokenize=False, **o),
            messages,
            options,
        )
        got = _rendered(_ours(ours), messages, options)
        assert got == expected, (name, variant)
        rendered += expected is not None
    assert rendered >= 20, "most conversations must render, or nothing is compared"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_worker_renders_what_is_rendered_inline(path: Path, pool: TemplatePool) -> None:
    """Real templates are plain ones, except for one made of rare idioms."""
    inline = ChatTemplate(path.read_text(), special_tokens=SPECIAL, inline_seconds=60.0)
    assert (inline.not_inline is None) == (path.stem != "idioms"), inline.not_inline
    either = ChatTemplate(path.read_text(), special_tokens=SPECIAL, pool=pool)
    large = {"template_kwargs": {"padding": "x" * MAX_INPUT_CHARS}}  # no template reads it
    for name, messages in CONVERSATIONS.items():
        assert _rendered(inline.render, messages, large) is None, "it is too large to be rendered inline"
        expected = _rendered(inline.render, messages, {})
        if inline.not_inline is None:
            assert _rendered(either.render, messages, large) == expected, name


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Niue"])
def test_dates_are_utc_wherever_the_process_runs(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real clock
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H') }}", special_tokens={}, inline_seconds=60.0)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        before = dt.datetime.now(dt.UTC)
        rendered = template.render([{"role": "user", "content": ""}])
        after = dt.datetime.now(dt.UTC)
    time.tzset()
    assert rendered in {f"{moment:%Y-%m-%d %H}" for moment in (before, after)}
