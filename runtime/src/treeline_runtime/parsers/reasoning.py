"""Parsers of reasoning between two markers before the answer.

White space around markers belongs to the format: templates write it again for the next turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from treeline_runtime.parsers.source import BrokenError, Source, Steps, markers
from treeline_runtime.parsers.tools import attempt


@dataclass(frozen=True)
class Tags:
    """The markers of a model family's reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"
    always: bool = False
    """The output begins within the reasoning, whether or not it repeats the opening marker."""
    special: bool = False
    """Its markers are special tokens."""
    interrupting: tuple[str, ...] = ()
    """Markers of calls that also end the reasoning, if tools are parsed: some models forget to close it."""

    def begins_inside(self, prompt: str) -> bool:
        """Whether an output after `prompt` begins within the reasoning."""
        end = prompt.rstrip()
        return end.endswith(self.opening) or (self.always and not end.endswith(self.closing))

    def steps(self, source: Source, *, inside: bool, tools: bool) -> Steps[None]:
        if inside:
            yield from source.drop_space()
            try:
                yield from source.one_of((self.opening,))
            except BrokenError:
                source.think(source.release())
        elif not (yield from attempt(source, self._opened(source))):
            yield from source.rest(source.say)
            return
        source.settle()
        yield from source.drop_space()
        interrupting = self.interrupting if tools else ()
        marker = yield from source.until(markers(self.closing, *interrupting), source.think)
        source.settle()
        if marker in interrupting:
            source.say(marker)
        else:
            yield from source.drop_space()
        yield from source.rest(source.say)

    def _opened(self, source: Source) -> Steps[None]:
        yield from source.space()
        yield from source.expect(self.opening)


_QWEN: Final = Tags(interrupting=("<tool_call>",))
_ALWAYS: Final = Tags(always=True)

FAMILIES: Final = {
    "deepseek_r1": _ALWAYS,
    "deepseek_v3": Tags(interrupting=("<｜tool▁calls▁begin｜>",)),  # V3.1 and later, where the template opens it
    "glm45": _QWEN,
    "glm47": _QWEN,
    "interns1": _QWEN,
    "kimi": Tags("◁think▷", "◁/think▷"),
    "kimi_k2": Tags(interrupting=("<|tool_calls_section_begin|>",)),
    "mimo": _QWEN,
    "minimax": _ALWAYS,
    "minimax_m2": _ALWAYS,
    "mistral": Tags("[THINK]", "[/THINK]", special=True, interrupting=("[TOOL_CALLS]",)),
    "nemotron_3": Tags(),
    "nemotron_v3": Tags(),
    "olmo3": Tags(),
    "qwen3": _QWEN,
    "qwen3_thinking": Tags(always=True, interrupting=("<tool_call>",)),
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
    "step3": _ALWAYS,
    "step3p5": _ALWAYS,
}
"""Tags by SGLang's and vLLM's names, with `_` for `-`."""
