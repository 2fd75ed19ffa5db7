"""Hostile templates are refused or stopped, in time and within memory; honest ones with large inputs are not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from treeline_wire.budget import Limits
from treeline_wire.chat import ChatTemplate, TemplateError

from .hostile import REFUSED, SECONDS

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """What happened to each hostile template, in a process that may use one gigabyte."""
    script = str(Path(__file__).parent / "hostile.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return {outcome["name"]: outcome for outcome in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_template_is_refused_in_time(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    assert outcome["error"], f"it rendered {outcome['rendered']} characters"
    assert "MemoryError" not in outcome["error"], "the budget must act before the machine does"
    assert outcome["render_s"] < SECONDS + 2
    assert outcome["compile_s"] < 15


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_long_conversations_and_messages_are_within_the_limits(path: Path) -> None:
    template = ChatTemplate(path.read_text(), special_tokens=SPECIAL, limits=Limits(seconds=60))
    many = [
        {"role": ("user", "assistant")[i % 2], "content": f"turn {i} " + "word " * 20} for i in range(601)
    ]
    long = [{"role": "system", "content": "s " * 99_999}, {"role": "user", "content": "日本語 x\n" * 300_000}]
    tools = [
        {"function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
    ] * 50
    assert "turn" in template.render(many, tools=tools)
    assert "日本語" in template.render(long, tools=tools)


def test_messages_are_data_and_never_a_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", special_tokens={})
    evil = "{{ 1 + 1 }}{% for x in range(9) %}{% endfor %}{# c #}{{ ''.__class__ }}"
    assert template.render([{"role": "user", "content": evil}]) == evil


def test_a_template_cannot_change_what_it_is_given() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages[0].content.append('b') }}", special_tokens={}).render(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_a_template_sees_no_objects_of_ours() -> None:
    class Leak:
        secret = "s"

    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].content.secret }}", special_tokens={})
    assert template.render([{"role": "user", "content": Leak()}]) == "<Leak>"


def test_errors_say_whose_fault_it_is() -> None:
    def error_of(source: str, **options: Any) -> TemplateError:
        with pytest.raises(TemplateError) as caught:
            ChatTemplate(source, special_tokens={}).render([{"role": "user", "content": "x"}], **options)
        return caught.value

    raised = error_of("{{ raise_exception('no ' ~ messages[0].role) }}")
    assert (str(raised), raised.user_error) == ("no user", True)
    assert error_of("{{ messages[0].missing.field }}").user_error
    assert error_of("{{ messages[0].content + 1 }}").user_error
    assert error_of("x", continue_final_message=True).user_error
    assert not error_of("{% for %}").user_error
    assert not error_of("{{ messages[0]['__class__'].mro() }}").user_error
    assert not error_of("{{ 'x' * 99999999 }}").user_error


def test_no_messages_is_the_callers_fault() -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate("x", special_tokens={}).render([])
    assert caught.value.user_error


def test_deeply_nested_requests_are_refused() -> None:
    nested: Any = "x"
    for _ in range(500):
        nested = [nested]
    with pytest.raises(TemplateError, match="nests"):
        ChatTemplate("{{ messages }}", special_tokens={}).render([{"role": "user", "content": nested}])
