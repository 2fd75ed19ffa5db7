"""Jumps: a request takes what its grammar forces as tokens of its own, without sampling them.

After a jump several tokens of a running request are not computed yet; its next step computes them all. While a launched
batch holds the request, two things of that batch no longer count: what it samples, since the token in that place is
known now, and what it computes of tokens that a jump has replaced. The next step recomputes these in their own pages,
which on a device happens behind the launched batch. Pages in the tree are never touched, nor is the prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from treeline_runtime.core import Req
from treeline_runtime.grammar.jump_forward import JumpForward
from treeline_runtime.messages import FinishReason
from treeline_runtime.sampling import Constraint
from treeline_runtime.scheduler.stats import SchedulerStats
from treeline_runtime.scheduler.table import TableManager

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 64
"""Forced text that makes no jump, a single long word say, is looked at again after a token for so many characters of
it: looking takes as long as it is."""
MOST_SECONDS = 0.02
"""What it may take to look for a jump; whose takes longer jumps no more."""


class Jumps:
    """Decides whether a request jumps, and does what that changes of it."""

    def __init__(
        self, forward: Callable[[], JumpForward | None], table: TableManager, stats: SchedulerStats, least_gain: int
    ) -> None:
        """forward: None while there is no tokenizer, and where nothing jumps. least_gain: tokens; for fewer, sampling
        is as fast."""
        self._forward = forward
        self._table = table
        self._stats = stats
        self._least_gain = least_gain

    def after(self, req: Req) -> FinishReason | None:
        """Jump, if text is forced that is worth it. → why the output ends with that; None if it does not.

        Log probabilities and hidden states are of what was sampled, and a logit processor, or what tokens are excluded,
        sees each token before it is: who has one of these does not jump.
        """
        forward, constraint = self._forward(), req.constraint
        if forward is None or constraint is None or req.output_len < req.jumps_from:
            return None
        if req.return_logprob or req.return_hidden_states or req.processor is not None:
            return None
        if req.sampling.excludes:
            return None
        fixed = max(req.prompt_len, req.tree_len, len(req.tokens) - constraint.reversible)
        began = time.thread_time()
        try:
            forced = constraint.forced()
            jump = forward.jump(req.tokens, fixed, forced, req.namespace)
        except Exception:
            logger.exception("a jump failed: the request goes on without")
            return None
        if time.thread_time() - began > MOST_SECONDS:
            req.jumps_from = req.max_new_tokens  # all others have waited
        if jump is None:
            req.jumps_from = max(req.jumps_from, req.output_len + len(forced) // CHARS_PER_TOKEN)
            return None
        if jump.gain < self._least_gain or not req.stop_ids.isdisjoint(jump.append):
            return None
        kept = len(req.tokens) - jump.take_back
        append = jump.append
        room = req.max_new_tokens - (kept - req.prompt_len)
        if len(append) > room:
            if jump.take_back or room <= 0:
                return None  # text that has been said would not fit any more
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
    """Tell the constraint; where it does not allow it, it is as before."""
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
