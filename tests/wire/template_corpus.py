"""Chat templates in the structures that public model families use: how turns are framed, where the system goes, how
content is read, how tools, calls, results and reasoning are written. The words are our own.

`corpus()` combines them to templates, each with what is known of it by construction: whether it takes content as a
list of parts, and whether it knows the role `developer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Frame(NamedTuple):
    """The format of turns. `open` and `close` may use `role`; `names` rename roles; `ask` opens the model's turn."""

    name: str
    start: str
    open: str
    close: str
    ask: str
    names: str = "{}"


class Template(NamedTuple):
    name: str
    source: str
    lists: bool
    """As vLLM detects templates that take lists."""
    sglang_lists: bool
    developer: bool


FRAMES = (
    Frame("chatml", "", "{{ '<|im_start|>' + role + '\\n' }}", "{{ '<|im_end|>\\n' }}", "<|im_start|>assistant\n"),
    Frame("llama3", "{{ bos_token }}", "<|head|>{{ role }}<|tail|>\n\n", "<|eot|>", "<|head|>assistant<|tail|>\n\n"),
    Frame("gemma", "{{- bos_token -}}", "<turn>{{ role }}\n", "</turn>\n", "<turn>model\n", "{'assistant': 'model'}"),
    Frame("zephyr", "", "{{ '<|' ~ role ~ '|>\\n' }}", "{{ eos_token + '\\n' }}", "<|assistant|>\n"),
    Frame("phi", "", "<|{{ role }}|>", "<|end|>", "<|assistant|>"),
    Frame("vicuna", "{{ bos_token }}", "{{ role | upper }}: ", " ", "ASSISTANT:"),
    Frame("falcon", "", "{{ role | title ~ ': ' }}", "\n", "Assistant:", "{'assistant': 'falcon'}"),
    Frame(
        "deepseek", "{{ bos_token }}", "<~{{ role }}~>", "{% if m.role == 'assistant' %}<~end~>{% endif %}", "<~model~>"
    ),
    Frame(
        "command",
        "{{ bos_token }}",
        "<|TURN|><|{{ role }}|>",
        "<|OFF|>",
        "<|TURN|><|BOT|>",
        "{'assistant': 'BOT', 'user': 'USER'}",
    ),
    Frame("granite", "", "<|role|>{{ role }}<|/role|>", "<|text_end|>\n", "<|role|>assistant<|/role|>"),
    Frame("glm", "[gMASK]<sop>", "<|{{ role }}|>\n", "", "<|assistant|>\n"),
    Frame("nemotron", "", "<extra_0>{{ role | capitalize }}\n", "\n", "<extra_0>Assistant\n"),
    Frame("kimi", "", "<|im_{{ role }}|>{{ m.name or role }}<|mid|>", "<|im_end|>", "<|im_assistant|>assistant<|mid|>"),
    Frame("internlm", "{{ bos_token }}", "[{{ role | upper }}]:", "<eoh>\n", "[BOT]:", "{'assistant': 'Bot'}"),
    Frame("jamba", "<|startoftext|>", "<|bom|><|{{ role }}|> ", "<|eom|>", "<|bom|><|assistant|> "),
    Frame("harmony", "", "<|start|>{{ role }}<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "{}"),
)

INST = """{{ bos_token }}{% for m in loop_messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + TEXT + ' [/INST]' }}
{%- elif m.role == 'tool' %}{{ '[RESULT] {"content": ' + TEXT|string + '}[/RESULT]' }}
{%- elif m.tool_calls %}[CALLS] [{% for call in m.tool_calls %}{{ call.function|tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- else %}{{ ' ' + TEXT + eos_token }}{% endif %}{% endfor %}"""
"""Llama 2's and Mistral's frame: the model's turn has no header of its own."""

SYSTEMS = {
    "turn": "",
    "default": "{% if messages[0].role != 'system' %}SYSTEM_OPENYou are of help.SYSTEM_CLOSE{% endif %}",
    "hoisted": "{% if messages[0].role == 'system' %}{% set system = messages[0] %}"
    "{% set loop_messages = messages[1:] %}SYSTEM_OPEN{% for m in [system] %}{{ TEXT }}{% endfor %}"
    "TOOLS_HERESYSTEM_CLOSE{% elif tools %}SYSTEM_OPENTOOLS_HERESYSTEM_CLOSE{% endif %}",
    "first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system speaks first.') }}{% endif %}{% endfor %}",
    "developer": "{% for m in messages %}{% if m.role == 'developer' %}{% set seen = true %}{% endif %}{% endfor %}",
}

_PARTS = (
    "{% if X is string %}{{ X }}{% else %}{% for part in X %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
)
_PARTS += "{% endfor %}{% endif %}"


class Content(NamedTuple):
    """The text of a message `m`: an expression reads it, or statements write it."""

    read: str
    macro: str = ""
    lists: bool = False
    sglang_lists: bool = False
    write: str = "{{ TEXT }}"


CONTENTS = {
    "plus": Content("m['content']"),
    "trim": Content("m.content | trim"),
    "strip": Content("m['content'].strip()"),
    "branch": Content(
        "said(m)", "{% macro said(m) %}" + _PARTS.replace("X", "m.content") + "{% endmacro %}", True, True
    ),
    "given": Content(
        "shown(m['content'])", "{% macro shown(value) %}" + _PARTS.replace("X", "value") + "{% endmacro %}", True
    ),
    "loop": Content("m.content", "", True, True, _PARTS.replace("X", "m['content']")),
    "set": Content("m.content", "", True, False, "{% set content = m.content %}" + _PARTS.replace("X", "content")),
    "alias": Content("m.content", "", False, False, "{% set turn = m %}" + _PARTS.replace("X", "turn.content")),
    "word": Content("m.content", "{# no image #}", False, True),
}

TOOLS = {
    "none": "",
    "json": "{% if tools %}{{ tools | tojson }}{% endif %}",
    "indented": "{% if tools is not none and tools %}{{ tools | tojson(indent=4) }}{% endif %}",
    "lines": "{% if tools %}<tools>{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}"
    "\n</tools>{% endif %}",
    "sorted": "{% for tool in tools or [] %}{% set f = tool['function'] %}declare:{{ f['name'] }}("
    "{% for key, value in (f['parameters'] or {}).get('properties', {}) | dictsort %}{{ key }}:"
    "{{ (value['type'] or 'any') | string | upper }},{% endfor %}){% endfor %}",
    "typed": "{% macro kind(p) %}{% if p.type == 'array' %}{{ kind(p['items']) }}[]{% elif p.enum %}"
    "{{ p.enum | join('|') }}{% else %}{{ p.type }}{% endif %}{% endmacro %}"
    "{% for tool in tools or [] %}type {{ tool.function.name }} = ({% for n, p in "
    "((tool.function.parameters or {}).properties or {}).items() %}{{ n }}: {{ kind(p) }};{% endfor %})\n{% endfor %}",
}

CALLS = {
    "none": "",
    "named": '{% for call in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}",
    "whole": "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}",
    "unwrapped": "{% if m.tool_calls is defined and m.tool_calls %}{% for call in m.tool_calls %}"
    "{% if call.function %}{% set call = call.function %}{% endif %}{{ call.name ~ '(' }}"
    "{% for key, value in call.arguments | items %}{{ key }}={{ value | tojson }}, {% endfor %}){% endfor %}"
    "{% endif %}",
    "either": "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] }}\n"
    "{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}{% endfor %}",
}

RESULTS = {
    "turn": "",
    "grouped": "{% if m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}OPEN_USER{% endif %}"
    "<response>{{ TEXT }}</response>{% if loop.last or loop.nextitem.role != 'tool' %}CLOSE{% endif %}"
    "{% continue %}{% endif %}",
    "ahead": "{% if m.role == 'tool' %}{% continue %}{% endif %}{% if m.tool_calls %}"
    "{% set ns = namespace(open=true) %}{% for k in range(loop.index0 + 1, loop_messages | length) %}"
    "{% if ns.open %}{% if loop_messages[k].role == 'tool' %}{% set m2 = loop_messages[k] %}"
    "<result>{{ m2.content }}</result>{% else %}{% set ns.open = false %}{% endif %}{% endif %}{% endfor %}{% endif %}",
}

THOUGHTS = {
    "none": "",
    "member": "{% if m.reasoning_content is string and m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}",
    "last": "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.at %}<think>\n"
    "{{- m.reasoning_content.strip('\\n') }}\n</think>\n\n{% endif %}",
}
_LAST = (
    "{% set last = namespace(at=0) %}{% for m in messages[::-1] %}{% if last.at == 0 and m.role == 'user' %}"
    "{% set last.at = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
)
_ASKS = ("ASK", "ASK{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")


def corpus() -> Iterator[Template]:
    """Return all templates, always the same. Each frame meets each way to read content; the other axes rotate."""
    systems, tools, calls, results, thoughts = map(list, (SYSTEMS, TOOLS, CALLS, RESULTS, THOUGHTS))
    for f, frame in enumerate(FRAMES):
        for c, content in enumerate(CONTENTS):
            n = f * 13 + c * 7
            axes = (systems[n % 5], tools[n % 6], calls[(n // 2) % 5], results[(n // 3) % 3], thoughts[n % 3])
            yield _template(frame, content, axes, _ASKS[n % 2])
    for content in CONTENTS:
        for system in ("turn", "hoisted"):
            if content not in ("loop", "set", "alias"):  # which write what others read
                yield _inst(content, system)


def _template(frame: Frame, name: str, axes: tuple[str, str, str, str, str], ask: str) -> Template:
    system, tools, calls, results, thoughts = axes
    content = CONTENTS[name]
    shown = TOOLS[tools]
    body = (
        f"{content.macro}{{% set loop_messages = messages %}}{_LAST}{frame.start}{SYSTEMS[system]}"
        f"{shown if system != 'hoisted' else ''}"
        f"{{% for m in loop_messages %}}{RESULTS[results]}{{% set role = NAMES.get(m.role, m.role) %}}{frame.open}"
        f"{THOUGHTS[thoughts]}{content.write}{CALLS[calls]}{frame.close}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )
    opened = frame.open.replace("m.name or role", "role")
    for word, text in (
        ("TOOLS_HERE", shown),
        ("SYSTEM_OPEN", "{% set role = 'system' %}" + opened),
        ("SYSTEM_CLOSE", frame.close if "m.role" not in frame.close else ""),
        ("OPEN_USER", "{% set role = 'user' %}" + opened),
        ("CLOSE", frame.close),
        ("NAMES", frame.names),
        ("ASK", frame.ask),
        ("TEXT", content.read),
    ):
        body = body.replace(word, text)
    name = "-".join((frame.name, name, *axes))
    return Template(name, body, content.lists, content.sglang_lists, system == "developer")


def _inst(name: str, system: str) -> Template:
    content = CONTENTS[name]
    before = ""
    if system == "hoisted":
        before = (
            "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set m = messages[0] %}"
            "<<SYS>>{{ TEXT }}<</SYS>>{% endif %}"
        )
    body = f"{content.macro}{{% set loop_messages = messages %}}{before}{INST}".replace("TEXT", f"({content.read})")
    return Template(f"inst-{name}-{system}", body, content.lists, content.sglang_lists, False)
