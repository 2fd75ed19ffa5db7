"""Requests that wait for their grammar to be compiled, before they wait for their turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import GrammarBusyError, GrammarCompiler
from treeline_runtime.grammar.jump_forward import JumpForward, jump_forward
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import FinishReason
from treeline_runtime.models.config import ModelConfig


class Grammars:
    """Owns the requests that wait here. They hold no memory of the engine."""

    def __init__(self, config: SchedulerConfig, model: ModelConfig, wake: Callable[[], None], *, jumps: bool) -> None:
        """wake: called by other threads when `take_ready` has something. jumps: whether what is forced is not sampled.
        Raises ConfigError."""
        self.jump_forward: JumpForward | None = None
        """There once the first grammar is compiled; None where nothing jumps."""

        def vocabulary() -> Vocabulary:
            try:
                bundle = TokenizerBundle.from_dir(Path(config.model))
                vocabulary = Vocabulary.of(bundle, model.vocab_size, model.eos_token_ids)
                self.jump_forward = jump_forward(bundle, vocabulary) if jumps else None
                return vocabulary
            except BundleError as error:
                raise GrammarError(f"this server cannot follow grammars: {error}") from None

        self._compiler = GrammarCompiler(config.grammar_backend, vocabulary, on_done=wake)
        self.waiting: dict[str, tuple[Req, Future[Compiled]]] = {}

    def enter(self, req: Req) -> bool:
        """→ whether the request waits here now: it has a grammar. `take_ready` gives it back, perhaps at once."""
        if req.sampling.grammar is None:
            return False
        self.waiting[req.rid] = req, self._compiler.get(req.sampling.grammar)
        return True

    def leave(self, req: Req) -> None:
        """It waits no longer, if it did."""
        self.waiting.pop(req.rid, None)

    def find(self, rid: str) -> Req | None:
        return self.waiting[rid][0] if rid in self.waiting else None

    def reqs(self) -> list[Req]:
        return [req for req, _ in self.waiting.values()]

    def take_ready(self) -> list[tuple[Req, FinishReason | None]]:
        """Requests that have their constraint now, or why they never will; in the order in which they came."""
        done = [req for req, future in self.waiting.values() if future.done()]
        return [(req, self._constrain(req, self.waiting.pop(req.rid)[1])) for req in done]

    def close(self) -> None:
        """End whatever is still being compiled."""
        self._compiler.close()

    def _constrain(self, req: Req, future: Future[Compiled]) -> FinishReason | None:
        grammar = req.sampling.grammar
        assert grammar is not None
        try:
            error = future.exception()  # to raise what is kept would tie this request to it
            if error is None:
                req.constraint = self._compiler.constraint(
                    future.result(),
                    stop_ids=req.stop_ids,
                    after=grammar.after,
                    min_tokens=req.sampling.min_new_tokens,
                )
                return None
        except Exception as fault:
            error = fault
        if isinstance(error, GrammarError):
            return FinishReason("error", message=str(error), status=400)
        if isinstance(error, GrammarBusyError):
            return FinishReason("error", message=str(error), status=503)
        return FinishReason("error", message=f"internal error: {error!r}", status=500)
