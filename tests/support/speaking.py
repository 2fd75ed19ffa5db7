"""A checkpoint that calls tools and thinks on command: with `fake_scheduler` it repeats the last message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from support.fake_scheduler import Magic
from support.runtime_server import make_checkpoint

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# It says what the model is to say, and shows in which formats the model calls and thinks.
_TEMPLATE = (
    "SPEAK{{ messages[-1].content }}<|endoftext|>"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{% if call.function.arguments is not mapping %}{{ raise_exception('no object') }}{% endif %}"
    "<tool_call>{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)


def make_speaking_checkpoint(folder: Path) -> Path:
    make_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=True)])
    tokenizer.add_tokens(["</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = _TEMPLATE.replace("SPEAK", tokenizer.decode([Magic.SPEAK]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def says(text: str) -> list[Any]:
    """Return messages that make it answer this text."""
    return [{"role": "user", "content": text}]
