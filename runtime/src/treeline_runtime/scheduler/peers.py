"""Data-parallel ranks that share a model's experts: they take every step together.

Each has a scheduler, a cache and all other weights of its own. But a layer's experts compute the tokens of all ranks,
so each rank says before a step what it would compute, and launches when it has heard all others: a step follows from
what all know. The row of a rank that has work calls the others, which then say what they have, or that they have
nothing; they still compute their experts. When none has anything, none says anything more, and all sleep.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from treeline_runtime.collectives import LOOPBACK, Pipeline, join, open_store
from treeline_runtime.messages import StepRow, ToScheduler
from treeline_runtime.models.moe import Exchange
from treeline_runtime.models.shards import Rank
from treeline_runtime.scheduler.ranks.protocol import GroupFailed, Launch, told

CAUSE_S = 1.0
"""Time in which the server notices that another rank has ended, after a collective has failed here."""
EAGER = Launch("eager", 0)


class SharedStep(NamedTuple):
    """A step of all ranks."""

    tokens: int
    """The most of any rank; all pad theirs to as many."""
    launch: Launch
    """A graph if every rank with work would use one of this mode: the largest of theirs."""


class Agreement:
    """One rank's view of the steps, from the rows of all ranks. Steps are numbered: no rank begins one before all have
    said their row of it, so a row is of this rank's step or of the next."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._number = 0
        self._goes_on = False
        """Whether a rank had work in the last step: then every rank says a row of the next."""
        self._rows: defaultdict[int, dict[int, StepRow]] = defaultdict(dict)

    @property
    def is_called(self) -> bool:
        """Whether this rank has to say its row, even without work."""
        return self._goes_on or bool(self._rows[self._number])

    def say(self, tokens: int, launch: Launch) -> StepRow:
        """This rank's row of the step, for all others. tokens: 0 = it has no work."""
        row = StepRow(self._number, self._rank.index, tokens, *launch)
        self.hear(row)
        return row

    def hear(self, row: StepRow) -> None:
        self._rows[row.step][row.rank] = row

    @property
    def is_complete(self) -> bool:
        return len(self._rows[self._number]) == self._rank.count

    def end(self) -> SharedStep | None:
        """Ends the complete agreement. None: no rank has work, and there is no step."""
        working = [row for row in self._rows.pop(self._number).values() if row.tokens]
        self._number += 1
        self._goes_on = bool(working)
        if not working:
            return None
        modes = {row.mode for row in working}
        launch = Launch(working[0].mode, max(row.bucket for row in working)) if len(modes) == 1 else EAGER
        return SharedStep(max(row.tokens for row in working), launch)


class Inbox(Protocol):
    """This rank's, of a `Transport`."""

    def receive(self) -> list[ToScheduler]: ...

    def wait(self) -> None: ...


class Peers:
    """The other ranks, as one sees them. Their rows come with this rank's other messages."""

    def __init__(self, rank: Rank, folder: Path, inbox: Inbox, tell: Callable[[StepRow], None]) -> None:
        """folder: where all meet; tell: sends a row to all other schedulers."""
        self._rank, self._folder = rank, folder
        self._inbox, self._tell = inbox, tell
        self._agreement = Agreement(rank)
        self._kept: list[ToScheduler] = []
        """Messages that came before the others' rows: a step is not changed once it is said."""

    def meet(self, device: torch.device) -> None:
        """Waits for all ranks and connects their devices."""
        self.agree(0, EAGER)
        store = open_store(str(self._folder / "experts"), self._rank.count)
        ranks = join(self._rank, store, self._folder.name, device, LOOPBACK, self._rank.count)
        assert not isinstance(ranks, Pipeline)
        self.exchange = Exchange(ranks)

    def receive(self) -> list[ToScheduler]:
        """The inbox's messages, but for the rows of others."""
        kept, self._kept = self._kept, []
        return kept + self._take()

    def _take(self) -> list[ToScheduler]:
        others: list[ToScheduler] = []
        for message in self._inbox.receive():
            if isinstance(message, StepRow):
                self._agreement.hear(message)
            else:
                others.append(message)
        return others

    @property
    def is_called(self) -> bool:
        """Whether another rank waits for this one."""
        return self._agreement.is_called

    def agree(self, tokens: int, launch: Launch) -> SharedStep | None:
        """Waits for all ranks' rows; see `Agreement`."""
        self._tell(self._agreement.say(tokens, launch))
        while not self._agreement.is_complete:
            self._inbox.wait()
            self._kept += self._take()
        return self._agreement.end()

    def failed(self, error: Exception) -> GroupFailed:
        """What ends this rank's process, and so the server: others wait for it in the step."""
        time.sleep(CAUSE_S)  # mostly a collective has failed, because another rank has ended: the server names that one
        return GroupFailed(told(error))
