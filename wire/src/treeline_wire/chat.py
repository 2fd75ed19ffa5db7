"""Chat templates: messages to prompt text, as `transformers` renders them, but bounded."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


class TemplateError(ValueError):
    """Rendering failed. `user_error`: the request is at fault (400), not the template (500)."""

    def __init__(self, message: str, *, user_error: bool) -> None:
        self.user_error = user_error
        super().__init__(message)


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _Raised(Exception):
    pass


def _raise(message: str) -> None:
    raise _Raised(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.now(UTC).strftime(format)


class ChatTemplate:
    """A compiled chat template. Raises `TemplateError` when `source` cannot be compiled."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = env.from_string(source)
        except Exception as error:
            raise TemplateError(f"the chat template does not compile: {error}", user_error=False) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render the messages. Raises `TemplateError`."""
        try:
            return self._template.render(
                messages=[{k: v for k, v in m.items() if v is not None} for m in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **(self._special_tokens | template_kwargs),
            )
        except Exception as error:
            raise TemplateError(f"the chat template failed: {error}", user_error=True) from error
