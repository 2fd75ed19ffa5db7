"""Which adapters have a slot on the device. Pure bookkeeping: the plan of a step says what to put where.

    adapter:  known ── a request waits ──▶ waiting ── take ──▶ resident, used ── release ──▶ resident, idle ──▶ known

- A used adapter keeps its slot. An idle one gives it to the first request that needs one: the idle adapter with the
  fewest waiting tokens goes, and of equals the one that was used least recently.
- Nobody starves: requests of resident adapters pass those that wait for a slot at most `MOST_PASSING` times. Then the
  resident adapter with the fewest running requests gets no more of them, and its slot, once idle, goes to the other.
"""

from __future__ import annotations

from collections import Counter

MOST_PASSING = 32
"""Requests of other adapters that are admitted while one waits, before a slot is kept for it."""


class AdapterSlots:
    """Adapters by digest."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[str, int] = {}
        """Of resident adapters, the least recently taken first."""
        self._used: Counter[str] = Counter()
        """Requests with a slot."""
        self._waiting: dict[str, Counter[str]] = {}
        """Adapter → waiting requests → their tokens."""
        self._passed: dict[str, int] = {}
        """Adapters that were refused a slot → how many requests of others came in since."""
        self._kept: dict[str, str] = {}
        """Resident adapter → the one that gets its slot."""
        self.news: dict[int, str] = {}
        """Slot → adapter, for what no launch has put there yet."""
        self.away: set[str] = set()
        """Adapters that are on the disk alone, or on the device and the disk."""
        self.wanted: str | None = None
        """The first of them that a request needed in the order of the queue, until it is taken from here."""

    # ---- the queue ----------------------------------------------------------------------------------------

    def wait(self, adapter: str, rid: str, tokens: int) -> None:
        """A request with so many tokens to compute waits."""
        self._waiting.setdefault(adapter, Counter())[rid] = tokens

    def leave(self, adapter: str, rid: str) -> None:
        """It waits no more. Idempotent."""
        if (line := self._waiting.get(adapter)) is None:
            return
        line.pop(rid, None)
        if not line:
            del self._waiting[adapter]
            self._served(adapter)

    # ---- the choice ---------------------------------------------------------------------------------------

    def admits(self, adapter: str) -> bool:
        """Whether a request may come in now, or must wait for a slot, which is remembered. O(slots)."""
        if adapter in self._slots:
            return adapter not in self._kept
        if adapter in self.away:
            self.wanted = self.wanted or adapter
            return False
        if self._free or self._victim(adapter) is not None:
            return True
        self._passed.setdefault(adapter, 0)
        return False

    def take(self, adapter: str) -> int:
        """The slot of a request that comes in. It was just admitted."""
        assert self.admits(adapter), f"no slot for {adapter}"
        slot = self._slots.pop(adapter, -1)
        if slot < 0:
            slot = self._free.pop() if self._free else self._empty(self._victim(adapter))
            self.news[slot] = adapter
            self._served(adapter)
        self._slots[adapter] = slot
        self._used[adapter] += 1
        self._count_passing()
        return slot

    def release(self, adapter: str) -> None:
        """A request that had a slot has ended."""
        self._used[adapter] -= 1

    def _victim(self, adapter: str) -> str | None:
        """The idle adapter whose slot `adapter` would get."""
        idle = [one for one in self._slots if not self._used[one] and self._kept.get(one, adapter) == adapter]
        # of equals `min` takes the first, the least recently taken; a slot that is kept comes before all
        return min(idle, key=lambda one: (one not in self._kept, self._waiting_tokens(one)), default=None)

    def _waiting_tokens(self, adapter: str) -> int:
        line = self._waiting.get(adapter)
        return 0 if line is None else line.total()

    def _empty(self, adapter: str | None) -> int:
        assert adapter is not None
        self._kept.pop(adapter, None)
        del self._used[adapter]
        return self._slots.pop(adapter)

    def _served(self, adapter: str) -> None:
        """It waits for no slot any more."""
        self._passed.pop(adapter, None)
        self._kept = {resident: other for resident, other in self._kept.items() if other != adapter}

    def _count_passing(self) -> None:
        for other in self._passed:
            self._passed[other] += 1
            if self._passed[other] < MOST_PASSING or other in self._kept.values():
                continue
            resident = [one for one in self._slots if one not in self._kept]
            if resident:
                self._kept[min(resident, key=self._used.__getitem__)] = other

    # ---- the device ---------------------------------------------------------------------------------------

    def told(self) -> None:
        """A step with the news was launched."""
        self.news = {}

    def drop(self, adapter: str) -> None:
        """Forgets an adapter, which nobody uses or waits for."""
        if adapter in self._slots:
            assert not self._used[adapter], f"{adapter} is in use"
            slot = self._empty(adapter)
            self.news.pop(slot, None)
            self._free.append(slot)

    def reset(self) -> None:
        """The device has lost all; no adapter is used."""
        for adapter in list(self._slots):
            self.drop(adapter)

    # ---- watching -----------------------------------------------------------------------------------------

    def needs_host(self, adapter: str) -> bool:
        """Whether a slot is about to be filled with it from the host."""
        waits = adapter in self._waiting and adapter not in self._slots
        return waits or adapter in self.news.values()

    def is_on_disk_alone(self, adapter: str | None) -> bool:
        return adapter in self.away and adapter not in self._slots

    @property
    def resident(self) -> list[str]:
        return sorted(self._slots)

    @property
    def running(self) -> list[str]:
        return [adapter for adapter, count in self._used.items() if count]

    @property
    def waiting(self) -> list[str]:
        return list(self._waiting)

    def uses(self, adapter: str) -> bool:
        """Whether a request has its slot or waits."""
        return bool(self._used[adapter]) or adapter in self._waiting

    def check_integrity(self) -> None:
        slots = [*self._free, *self._slots.values()]
        assert len(set(slots)) == len(slots), "a slot has two owners"
        assert all(adapter in self._slots for adapter, count in self._used.items() if count), "used without a slot"
        assert min(self._used.values(), default=0) >= 0, "released twice"
        assert self._kept.keys() <= self._slots.keys(), "a slot is kept that nobody has"
        assert len(set(self._kept.values())) == len(self._kept), "two slots are kept for one adapter"
        assert set(self._kept.values()) <= self._passed.keys() <= self._waiting.keys(), "kept for nobody who waits"
        assert not self._passed.keys() & self._slots.keys(), "a resident adapter waits for a slot"
        assert all(self._slots[adapter] == slot for slot, adapter in self.news.items()), "news of another's slot"
