"""The worker process for chat templates: `python -m treeline_runtime.templates.worker`.

It is confined (`confined.child`). A request is a `Request` in MessagePack; an answer is one byte, an `Answer`, and a
text. See `pool`.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Any

import jinja2
import msgspec
from treeline_wire.template_env import RaisedError, TemplateEnvironment, compile_template, line_of

from treeline_runtime.confined.child import serve


class Request(msgspec.Struct, array_like=True):
    """A rendering at `now` (seconds of the epoch). `source` is sent with a `key` that is new to the worker."""

    key: int
    now: float
    source: str | None
    variables: dict[str, Any]


class Answer(enum.IntEnum):
    """The kind of a worker's answer, which says what its text is."""

    RENDERED = 1
    RAISED = 2
    """The template refused the messages; the text is its reason if that is a constant of the template."""
    FAILED = 3
    """The template does not fit the messages; the text says where, without quoting them."""
    BROKEN = 4
    """The template does not compile."""


class Worker:
    """Compiles each template once and renders."""

    def __init__(self) -> None:
        self._environment = TemplateEnvironment()
        self._templates: dict[int, tuple[jinja2.Template, frozenset[str]]] = {}

    def answer(self, request: Request) -> tuple[Answer, str]:
        """The answer to one request. Raises MemoryError."""
        if request.source is not None:
            try:
                self._templates[request.key] = compile_template(self._environment, request.source)
            except MemoryError:
                raise
            except Exception as error:
                return Answer.BROKEN, f"{type(error).__name__}: {error}"
        template, texts = self._templates[request.key]
        self._environment.clock = lambda: datetime.fromtimestamp(request.now, UTC)
        try:
            rendered = template.render(request.variables)
            rendered.encode()
            return Answer.RENDERED, rendered
        except RaisedError as error:
            return Answer.RAISED, str(error) if str(error) in texts else ""
        except MemoryError:
            raise
        except Exception as error:
            return Answer.FAILED, f"{type(error).__name__} at line {line_of(error)}"


def main() -> None:
    decode = msgspec.msgpack.Decoder(Request).decode
    worker = Worker()
    for warm in ("{{ strftime_now('%c') }}{{ [1]|tojson(indent=1) }}{{ 'x'|urlencode }}", "{{ 1 + 'x' }}"):
        worker.answer(Request(0, 0.0, warm, {}))  # triggers late imports (dates, errors)

    def answer(frame: bytearray) -> bytes:
        kind, text = worker.answer(decode(frame))
        return bytes([kind]) + text.encode(errors="replace")

    serve(answer)


if __name__ == "__main__":
    main()
