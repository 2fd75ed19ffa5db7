"""Requests that wait for their grammar before queueing; and jumps: forced text becomes a request's tokens without
sampling.

After a jump several tokens are not computed yet; the next step computes them all. If a launched batch holds the
request, two of its results no longer count: the sampled token, since that token is known now, and the keys and values
of replaced tokens. The next step recomputes these in the same pages, after the launched batch. Pages in the tree and
the prompt are never touched.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import GrammarBudgetError, GrammarBusyError, GrammarCompiler
from treeline_runtime.grammar.constraint import GrammarConstraint
from treeline_runtime.grammar.jump_forward import Jump, JumpForward, jump_forward
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import FinishReason
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.sampling import Constraint
from treeline_runtime.scheduler.reports import SchedulerStats
from treeline_runtime.scheduler.table import TableManager

_SMALL_VOCABULARY = 32_768
"""With so few tokens in the vocabulary, nothing is prepared before the first grammar."""


class Grammars:
    """Owns the requests that wait here. They hold no memory of the engine."""

    def __init__(
        self, config: SchedulerConfig, model: ModelConfig, wake: Callable[[], None], *, used: bool = True
    ) -> None:
        """wake: called by other threads when `take_ready` has something. used: whether outputs are text. Raises
        ConfigError."""
        self._warms = used and model.vocab_size > _SMALL_VOCABULARY
        self.jump_forward: JumpForward | None = None
        """Set once the first grammar is compiled; None if outputs neither jump nor are guessed."""

        def bundle() -> TokenizerBundle:
            return TokenizerBundle.from_dir(Path(config.model))

        def vocabulary() -> Vocabulary:
            try:
                return Vocabulary.of(bundle(), model.vocab_size, model.eos_token_ids)
            except BundleError as error:
                raise GrammarError(f"this server does not support grammars: {error}") from None

        def prepare(vocabulary: Vocabulary) -> None:
            needed = config.jump_forward or config.most_guesses
            self.jump_forward = jump_forward(bundle(), vocabulary) if needed else None

        self._compiler = GrammarCompiler(vocabulary, on_done=wake, prepare=prepare)
        self.waiting: dict[str, tuple[Req, Future[Compiled]]] = {}
        self._wanted: Counter[Future[Compiled]] = Counter()
        """Number of requests that wait for each grammar."""
        self._clients: Counter[str | None] = Counter()

    def warm(self) -> None:
        """Prepares the data that the first grammar needs, in the background, if that takes long."""
        if self._warms:
            self._compiler.warm()

    def enter(self, req: Req) -> bool:
        """Returns whether the request has a grammar and waits here. `take_ready` returns it, perhaps at once."""
        if req.sampling.grammar is None:
            return False
        future = self._compiler.get(req.sampling.grammar, req.namespace, req.client)
        self.waiting[req.rid] = req, future
        self._wanted[future] += 1
        self._clients[req.client] += 1
        return True

    def ahead(self, req: Req) -> int:
        """Counts the same client's requests that wait here, if this one has to wait here too; else 0."""
        if req.sampling.grammar is None or req.constraint is not None:
            return 0
        return self._clients[req.client]

    def leave(self, req: Req) -> None:
        """Removes a request. If no other waits for its grammar, it is not compiled, unless that has begun."""
        if req.rid not in self.waiting:
            return
        future = self._take(req)
        if future not in self._wanted:
            assert req.sampling.grammar is not None
            self._compiler.forget(req.sampling.grammar, req.namespace)

    def find(self, rid: str) -> Req | None:
        return self.waiting[rid][0] if rid in self.waiting else None

    def reqs(self) -> list[Req]:
        return [req for req, _ in self.waiting.values()]

    def take_ready(self) -> list[tuple[Req, FinishReason | None]]:
        """Requests that now have their constraint, or a reason why not; in order of arrival."""
        done = [req for req, future in self.waiting.values() if future.done()]
        return [(req, self._constrain(req, self._take(req))) for req in done]

    def fault(self, req: Req, message: str) -> FinishReason:
        """The error of a request that cannot continue. If its grammar takes too much work, that is the client's fault,
        and the grammar is refused for a while; otherwise ours, with `message`."""
        grammar, constraint = req.sampling.grammar, req.constraint
        if grammar is None or not isinstance(constraint, GrammarConstraint) or not (why := constraint.gave_up):
            return FinishReason("error", message=message, status=500)
        message = f"a token of this grammar takes too much work after some outputs ({why}): make it simpler"
        self._compiler.outgrown(grammar, constraint.compiled, message, req.namespace)
        return FinishReason("error", message=message, status=400)

    def close(self) -> None:
        self._compiler.close()

    def _take(self, req: Req) -> Future[Compiled]:
        future = self.waiting.pop(req.rid)[1]
        self._clients[req.client] -= 1
        self._wanted[future] -= 1
        if not self._wanted[future]:
            del self._wanted[future]
        return future

    def _constrain(self, req: Req, future: Future[Compiled]) -> FinishReason | None:
        grammar = req.sampling.grammar
        assert grammar is not None
        try:
            error = future.exception()  # raising the cached error itself would keep this request alive
            if error is None:
                compiled = future.result()
                req.constraint = self._compiler.constraint(compiled, stop_ids=req.stop_ids, after=grammar.after)
                return None
        except Exception as fault:
            error = fault
        if isinstance(error, GrammarError):
            return FinishReason("error", message=str(error), status=400, param=req.sampling.grammar_param)
        if isinstance(error, GrammarBusyError):
            status = 429 if isinstance(error, GrammarBudgetError) else 503
            return FinishReason("error", message=str(error), status=status)
        return FinishReason("error", message=f"internal error: {error!r}", status=500)


logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 64
"""Forced text without a jump, such as a single long word, is checked again only after a token per so many characters,
since checking takes linear time."""
MOST_SECONDS = 0.02
"""The most time to look for a jump; a request that takes longer jumps no more."""


class Jumps:
    """Looks for forced text, decides on jumps and applies them."""

    def __init__(
        self,
        forward: Callable[[], JumpForward | None],
        table: TableManager,
        stats: SchedulerStats,
        least_gain: int | None,
    ) -> None:
        """forward: None without a tokenizer. least_gain: in tokens; for fewer, sampling is as fast. None: no jumps."""
        self._forward = forward
        self._table = table
        self._stats = stats
        self._least_gain = least_gain

    def allowed(self, req: Req) -> bool:
        """Whether its forced text is not sampled. Log probabilities, hidden states, logit processors and excluded
        tokens concern sampled tokens."""
        if self._least_gain is None or req.constraint is None:
            return False
        return not (req.return_logprob or req.return_hidden_states or req.processor or req.sampling.excludes)

    def forced(self, req: Req, fixed: int) -> Jump | None:
        """The tokens of text that is forced now, where the first `fixed` tokens stay. None: there are none, or they are
        not looked for."""
        forward, constraint = self._forward(), req.constraint
        if forward is None or constraint is None or req.output_len < req.jumps_from:
            return None
        began = time.thread_time()
        try:
            forced = constraint.forced()
            jump = forward.jump(req.tokens, fixed, forced, req.namespace)
        except Exception:
            logger.exception("jump-forward failed; the request continues token by token")
            return None
        if time.thread_time() - began > MOST_SECONDS:
            req.jumps_from = req.max_new_tokens  # all others have waited
        if jump is None:
            req.jumps_from = max(req.jumps_from, req.output_len + len(forced) // CHARS_PER_TOKEN)
        return jump

    def after(self, req: Req) -> FinishReason | None:
        """Jumps if enough text is forced. Returns why the output ends with that; None if it does not."""
        constraint, least = req.constraint, self._least_gain
        if constraint is None or least is None or not self.allowed(req):
            return None
        jump = self.forced(req, max(req.prompt_len, req.tree_len, len(req.tokens) - constraint.reversible))
        if jump is None or jump.gain < least or not req.stop_ids.isdisjoint(jump.append):
            return None
        kept = len(req.tokens) - jump.take_back
        append = jump.append
        room = req.max_new_tokens - (kept - req.prompt_len)
        if len(append) > room:
            if jump.take_back or room <= 0:
                return None  # sent text would no longer fit
            append = append[:room]
        if not _accepts(constraint, req.tokens[kept:], append):
            return None
        self._stats.on_jump(len(append) - jump.take_back)
        req.replace_tokens(kept, append)
        if req.row >= 0:
            self._table.write_tokens(req.row, kept, append)
        if constraint.finished:
            return FinishReason("stop")
        return FinishReason("length") if req.output_len >= req.max_new_tokens else None


def _accepts(constraint: Constraint, gone: Sequence[int], append: Sequence[int]) -> bool:
    """Tells the constraint; if it refuses, it is unchanged."""
    constraint.rollback(len(gone))
    for taken, token in enumerate(append):
        try:
            constraint.accept(token)
        except Exception:
            constraint.rollback(taken)
            for before in gone:
                constraint.accept(before)
            return False
    return True
