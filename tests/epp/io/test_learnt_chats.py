"""Joined chats equal the template's rendering byte for byte, and templates that depend on more than the places of texts
are detected."""

from __future__ import annotations

import functools
import logging
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from treeline_epp.keyers import learnt_chats
from treeline_epp.keyers.learnt_chats import LearntTemplate
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_wire.chat import ChatTemplate, NeedsWorkerError, TemplateError
from treeline_wire.dialects import dialect_of
from treeline_wire.errors import PromptError
from treeline_wire.prompt import prompt_of_chat
from treeline_wire.template_trace import mark
from treeline_wire.tokenizer import TokenizerBundle
from wire.template_corpus import corpus
from wire.test_template_corpus import SPECIAL, bodies

ROOT = Path(__file__).parents[3]
FAMILIES = {path.stem: path.read_text() for path in sorted((ROOT / "tests" / "wire" / "templates").glob("*.jinja"))}
PATIENCE_S = 60.0
LOOP = "{% for m in messages %}BODY{% endfor %}"
TEXTS = (
    "",
    "A",
    " A",
    "A\n",
    "\u2003A",
    "None",
    "user",
    "content",
    "é 日本語 😀 e\u0301 \x00\u2028",
    mark(0),
    mark(1) + "A",
    "<think>\nB\n</think>\n\nC",
    "</think>",
    "<tool_response>D</tool_response>",
    "{{ 7 * 7 }}<|im_end|>",
    "{% for %}",
    "x" * 300,
)
ROLES = ("system", "user", "assistant", "developer", "tool", "function", "USER")


def rendered(template: ChatTemplate, body: dict[str, Any], engine: str = "treeline") -> str | None:
    try:
        return prompt_of_chat(body, template, dialect_of(engine, "completions")).text
    except (PromptError, TemplateError, NeedsWorkerError):
        return None


def both(source: str, **how: Any) -> tuple[ChatTemplate, LearntTemplate]:
    full = ChatTemplate(source, special_tokens=SPECIAL, inline_seconds=PATIENCE_S, **how)
    return full, LearntTemplate(source, special_tokens=SPECIAL, inline_seconds=PATIENCE_S, **how)


def said(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def learn(template: LearntTemplate, *roles: str) -> None:
    for _ in range(2):
        rendered(template, said(*((role, f"text {at}") for at, role in enumerate(roles))))


def joins(template: LearntTemplate, body: dict[str, Any]) -> bool:
    before = template.joined
    rendered(template, body)
    return template.joined > before


@pytest.mark.deep
def test_every_template_joins_what_it_renders() -> None:
    """All families and every third template of the corpus; chats with tools, calls, parts, names, prefills, too."""
    sources = [template.source for template in corpus()][::3] + list(FAMILIES.values())
    chats = bodies()
    plain = [name for name, body in chats.items() if all(m.keys() == {"role", "content"} for m in body["messages"])]
    joined = 0
    for source in sources:
        full, learnt = both(source)
        expected = {name: rendered(full, body) for name, body in chats.items()}
        for names in (chats, plain, plain):
            for name in names:
                body = chats[name]
                assert rendered(learnt, body) == expected[name], (name, source)
        joined += learnt.joined
        assert not learnt.differed
    assert joined > 10 * len(sources)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_joined_conversation_equals_its_rendering(name: str) -> None:
    """Roles in any order, texts of every kind, each shape often enough to be learnt and then used with other texts."""
    full, learnt = both(FAMILIES[name])
    rng = random.Random(name)
    for _ in range(16):
        roles = rng.choices(ROLES, weights=(4, 9, 8, 1, 2, 1, 1), k=rng.randrange(1, 8))
        switches = rng.choice(({}, {}, {"enable_thinking": False}, {"thinking": True, "custom": "a"}))
        asks = rng.random() < 0.8
        learn(learnt, *roles)
        for engine in ("treeline", "vllm", "sglang"):
            for _ in range(4):
                texts = [rng.choice(TEXTS) for _ in roles]
                body = {**said(*zip(roles, texts, strict=True)), "add_generation_prompt": asks}
                body["chat_template_kwargs"] = switches
                assert rendered(learnt, body, engine) == rendered(full, body, engine), body
    assert not learnt.differed


TURNS = st.lists(st.tuples(st.sampled_from(ROLES[:3]), st.sampled_from(TEXTS) | st.text(max_size=6)), min_size=1)


@functools.cache
def learnt_of(family: str) -> tuple[ChatTemplate, LearntTemplate]:
    return both(FAMILIES[family])


@settings(max_examples=40)
@given(st.sampled_from(sorted(FAMILIES)), TURNS)
def test_generated_joined_conversations_equal_their_renderings(name: str, turns: list[tuple[str, str]]) -> None:
    full, learnt = learnt_of(name)
    learn(learnt, *(role for role, _ in turns))
    assert rendered(learnt, said(*turns)) == rendered(full, said(*turns))
    assert not learnt.differed


DEPENDENT = {
    "length": "{{ m.content | length }}",
    "compared with each other": "{{ m.content == messages[0].content }}",
    "messages compared": "{{ m == {'role': m.role, 'content': messages[0].content} }}",
    "upper": "{{ m.content | upper }}",
    "method": "{{ m['content'].upper() }}",
    "split": "{{ m.content.split(',')[0] }}",
    "replaced": "{{ m.content | replace('a', 'b') }}",
    "joined": "{{ m.content | join('-') }}",
    "first character": "{{ m.content[0] }}",
    "slice": "{{ m.content[:3] }}",
    "character by character": "{% for c in m.content %}{{ c }}.{% endfor %}",
    "json": "{{ m | tojson }}",
    "shown": "{{ m }}",
    "shown in a list": "{{ [m.content] }}",
    "shown by ~": "{{ 'a' ~ [m.content] }}",
    "as a string": "{{ [m.content] | string }}",
    "multiplied": "{{ m.content * 2 }}",
    "key": "{{ {'A': 'B'}[m.content] }}",
    "name of a member": "{{ {m.content: 'B'}['A'] }}",
    "name that is asked for": "{% if 'A' in {m.content: 1} %}B{% endif %}",
    "unpacked": "{% set (a,) = m.content %}{{ a }}",
    "unpacked in a loop": "{% for (a,) in [m.content] %}{{ a }}{% endfor %}",
    "got": "{{ {'A': 'B'}.get(m.content) }}",
    "in a list": "{{ m.content in ['A'] }}",
    "within": "{{ m.content in 'ABC' }}",
    "what follows": "{{ (m.role + m.content).endswith('rA') }}",
    "larger": "{{ m.content > 'B' }}",
    "test": "{{ m.content is eq 'A' }}",
    "selected": "{{ messages | selectattr('content', 'equalto', 'A') | list | length }}",
    "sorted": "{{ (messages | sort(attribute='content'))[0].role }}",
    "stripped of letters": "{{ m.content.strip('A') }}",
    "trimmed of letters": "{{ m.content | trim('A') }}",
    "macro": "{% macro f(x) %}{{ x | length }}{% endmacro %}{{ f(m.content) }}",
    "namespace": "{% set ns = namespace(x=m.content) %}{{ ns.x | length }}",
    "block": "{% set x %}{{ m.content }}{% endset %}{{ x | length }}",
    "date of it": "{{ strftime_now(m.content) }}",
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_templates_that_depend_on_texts_otherwise_are_rendered(name: str) -> None:
    full, learnt = both(LOOP.replace("BODY", DEPENDENT[name] + "|{{ m.content }}"))
    learn(learnt, "user", "assistant")
    for texts in (("A", "A"), ("A", "B"), ("", "A,b"), ("rA", "ABC")):
        body = said(("user", texts[0]), ("assistant", texts[1]))
        assert rendered(learnt, body) == rendered(full, body)
    assert learnt.joined == 0


CONDITIONS = {
    "trim": ("{{ m.content | trim }}", "A", (" A", "A\n", "", "\u2003")),
    "strip": ("{{ ('\n' + m.content).lstrip('\\n') }}", "A", ("\nA", "")),
    "empty": ("{% if m.content %}[{{ m.content }}]{% endif %}", "A", ("",)),
    "equal": ("{% if m.content == 'hi' %}HI{% endif %}{{ m.content }}", "A", ("hi",)),
    "within": ("{% if '</t>' in m.content %}T{% endif %}{{ m.content }}", "A", ("a</t>",)),
    "begins": ("{% if m.content.startswith('<t>') %}T{% endif %}{{ m.content }}", "A", ("<t>a",)),
    "or": ("{{ m.content or 'nothing' }}", "A", ("",)),
    "default": ("{{ m.content | default('B', true) }}", "A", ("",)),
    "mapped": ("{{ messages | map(attribute='content') | map('trim') | join }}", "A", (" A",)),
    "members": ("{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}", "A", ()),
    "unless": ("{{ 'a' if not m.content else m.content }}", "A", ("",)),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_templates_that_join_only_most_texts_join_those(name: str) -> None:
    source, plain, others = CONDITIONS[name]
    full, learnt = both(LOOP.replace("BODY", source))
    learn(learnt, "user")
    assert joins(learnt, said(("user", plain)))
    for other in others:
        body = said(("user", other))
        assert not joins(learnt, body)
        assert rendered(learnt, body) == rendered(full, body)


def test_a_message_whose_members_are_in_another_order_is_rendered() -> None:
    full, learnt = both("{% for m in messages %}{% for k in m %}{{ k }}{% endfor %}{{ m.content }}{% endfor %}")
    learn(learnt, "user")
    turned = {"messages": [{"content": "A", "role": "user"}]}
    assert not joins(learnt, turned)
    assert rendered(learnt, turned) == rendered(full, turned) == "contentroleA"


def test_texts_may_be_written_in_any_order_and_number() -> None:
    full, learnt = both(
        "{% for m in messages[::-1] %}<{{ m.content }}{{ m.content }}{% endfor %}{{ messages[0].role }}"
    )
    learn(learnt, "user", "assistant")
    body = said(("user", "A"), ("assistant", "B"))
    assert joins(learnt, body)
    assert rendered(learnt, body) == rendered(full, body) == "<BB<AAuser"


def test_a_new_day_is_learnt_again() -> None:
    _, learnt = both("{{ strftime_now('%d %B') }}: " + LOOP.replace("BODY", "{{ m.content }}"))
    assert learnt._traced is not None
    today = learnt._traced._tracing
    learn(learnt, "user")
    assert joins(learnt, said(("user", "A")))
    today.clock = lambda: datetime(2031, 5, 1, tzinfo=UTC)
    assert not joins(learnt, said(("user", "A")))


def test_a_difference_switches_joining_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(learnt_chats, "CHECK_EVERY", 3)
    full, learnt = both(FAMILIES["chatml"])
    learn(learnt, "user")
    body = said(("user", "A"))
    [(shape, joint)] = learnt._shapes.of(None).items()
    assert joint is not None
    wrong = structs.replace(joint, trace=structs.replace(joint.trace, constants=("a", "b")))
    learnt._shapes.put(None, shape, wrong)
    with caplog.at_level(logging.ERROR):
        found = [rendered(learnt, body) for _ in range(5)]
    truth = rendered(full, body)
    assert found == ["aAb", "aAb", truth, truth, truth]
    assert learnt.differed
    assert len(caplog.records) == 1
    assert "A" not in caplog.text.replace("learnt of a", "").split("ERROR")[0]


def test_learnt_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt_chats, "MAX_SHAPES", 16)
    _, learnt = both(FAMILIES["chatml"])
    for number in range(2 * learnt_chats.MAX_SHAPES):
        learn(learnt, f"role{number}")
    assert len(learnt._shapes) == learnt_chats.MAX_SHAPES
    for number in range(2 * learnt_chats.MAX_SHAPES):
        rendered(learnt, said((f"once{number}", "A")))
    assert len(learnt._seen) <= learnt_chats.MAX_SHAPES


def test_keyers_use_learnt_chats() -> None:
    keyer = PromptKeyer(TokenizerBundle.from_dir(ROOT / "models" / "tiny"))
    assert keyer.renderer is not None
    body = said(("user", "A"))
    for _ in range(3):
        assert keyer.renderer.whole(body, dialect_of("treeline")) is not None
    assert keyer.renderer.joined == 1
