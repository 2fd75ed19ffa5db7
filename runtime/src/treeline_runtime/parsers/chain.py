"""Parsers one behind another: what the first one calls the answer, the second one reads."""

from __future__ import annotations

from collections.abc import Callable

from treeline_runtime.parsers.source import Markers, OutputParser, Part, Said, Source, Steps, Thought


class Reading:
    """An OutputParser from the steps that read a source."""

    def __init__(self, steps: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = steps(self._source)
        next(self._steps, None)

    def feed(self, text: str) -> list[Part]:
        self._source.add(text)
        next(self._steps, None)
        return self._source.parts()

    def end(self) -> list[Part]:
        self._source.finish()
        next(self._steps, None)
        return self._source.parts()


class Chained:
    """`first`, whose `Said` goes through `second`."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Part]:
        return self._through(self._first.feed(text))

    def end(self) -> list[Part]:
        return self._through(self._first.end()) + self._second.end()

    def _through(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Said):
                found += self._second.feed(part.text)
            else:
                found.append(part)
        return found


class Without:
    """A parser whose thoughts and answers are rid of the special tokens that end turns.

    A server that takes out all special tokens (`server.prompts.Unmarked`) finds none of these any more. This one
    is for answers that it leaves alone: to clients who want to see special tokens (`skip_special_tokens: false`), and
    of tokenizers to which such a token is an ordinary one.
    """

    def __init__(self, parser: OutputParser, strays: Markers) -> None:
        self._parser = parser
        self._strays = strays
        self._held: Said | Thought | None = None
        """The end of the last text, if it may become a stray."""

    def feed(self, text: str) -> list[Part]:
        return self._rid(self._parser.feed(text))

    def end(self) -> list[Part]:
        return [*self._rid(self._parser.end()), *self._flushed()]

    def _rid(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if not isinstance(part, Said | Thought):
                found += [*self._flushed(), part]
                continue
            kind, text = type(part), part.text
            if self._held is not None and type(self._held) is not kind:
                found += self._flushed()
            if self._held is not None:
                text, self._held = self._held.text + text, None
            complete = max((stray.end() for stray in self._strays.whole.finditer(text)), default=0)
            end = self._strays.open_end(text, complete)
            if clean := self._strays.whole.sub("", text[:end]):
                found.append(kind(clean))
            if end < len(text):
                self._held = kind(text[end:])
        return found

    def _flushed(self) -> list[Part]:
        held, self._held = self._held, None
        return [] if held is None else [held]
