"""The grammar backends by name."""

from __future__ import annotations

from collections.abc import Callable

from treeline_runtime.grammar.backend import GrammarBackend
from treeline_runtime.grammar.vocabulary import Vocabulary

NewBackend = Callable[[Vocabulary], GrammarBackend]


def load_backend(name: str) -> NewBackend:
    """Imports what the backend needs, which takes its time. `name` is one of `BACKENDS`, as the settings have it."""
    return BACKENDS[name]()


def _xgrammar() -> NewBackend:
    from treeline_runtime.grammar.xgrammar_backend import XGrammarBackend
    from treeline_runtime.grammar.xgrammar_library import load

    load()
    return XGrammarBackend


def _llguidance() -> NewBackend:
    import llguidance  # noqa: F401  (a confined process can import nothing later)

    from treeline_runtime.grammar.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend


def _auto() -> NewBackend:
    from treeline_runtime.grammar.auto_backend import AutoBackend

    _xgrammar()
    _llguidance()
    return AutoBackend


BACKENDS: dict[str, Callable[[], NewBackend]] = {"auto": _auto, "xgrammar": _xgrammar, "llguidance": _llguidance}
