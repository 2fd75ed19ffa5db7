"""Slots of the host tier against a model that is a dictionary."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from treeline_runtime.kvcache.host import HostTier

SLOTS = 5


class Machine(RuleBasedStateMachine):
    """`ready` in order of use; `written` and `read` are what copies work on."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(SLOTS)
        self.ready: OrderedDict[bytes, int] = OrderedDict()
        self.written: dict[bytes, int] = {}
        self.read: list[bytes] = []

    digests = st.integers(0, 8).map(lambda n: bytes([n]))

    @rule(digest=digests)
    def begin_write(self, digest: bytes) -> None:
        assert (digest in self.tier) == (digest in self.ready or digest in self.written)
        if digest in self.tier:
            return
        slot, evicted = self.tier.begin_write(digest)
        unread = [one for one in self.ready if one not in self.read]
        if len(self.ready) + len(self.written) < SLOTS:
            assert evicted is None
        elif unread:
            assert evicted == unread[0], "the least recently used is evicted"
            del self.ready[evicted]
        else:
            assert slot is None
            return
        assert slot is not None
        self.written[digest] = slot

    @precondition(lambda self: self.written)
    @rule(good=st.booleans())
    def end_write(self, good: bool) -> None:
        digest, slot = self.written.popitem()
        if good:
            self.tier.end_write(digest, 7)
            self.ready[digest] = slot
        else:
            self.tier.cancel_write(digest)

    @rule(digest=digests)
    def begin_read(self, digest: bytes) -> None:
        assert self.tier.has(digest) == (digest in self.ready)
        if digest in self.ready:
            entry = self.tier.begin_read(digest)
            assert (entry.slot, entry.checksum) == (self.ready[digest], 7)
            self.read.append(digest)

    @precondition(lambda self: self.read)
    @rule()
    def end_read(self) -> None:
        digest = self.read.pop(0)
        self.tier.end_read(digest)
        if digest not in self.read:
            self.ready.move_to_end(digest)

    @rule(digests=st.lists(digests, max_size=4, unique=True))
    def touch(self, digests: list[bytes]) -> None:
        self.tier.touch(digests)
        for digest in reversed(digests):
            if digest in self.ready and digest not in self.read:
                self.ready.move_to_end(digest)

    @rule(digest=digests)
    def drop(self, digest: bytes) -> None:
        gone = digest in self.ready and digest not in self.read
        assert self.tier.drop(digest) == gone
        if gone:
            del self.ready[digest]

    @precondition(lambda self: not self.written and not self.read)
    @rule()
    def clear(self) -> None:
        assert set(self.tier.clear()) == set(self.ready)
        self.ready.clear()

    @invariant()
    def each_page_has_a_slot_of_its_own(self) -> None:
        self.tier.check_integrity()
        assert self.tier.num_pages == len(self.ready) + len(self.written)
        slots = [*self.ready.values(), *self.written.values()]
        assert len(set(slots)) == len(slots)


TestHostTier = Machine.TestCase
TestHostTier.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
