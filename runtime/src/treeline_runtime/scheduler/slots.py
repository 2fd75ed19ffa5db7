"""Which adapters have a slot on the device. Pure bookkeeping: the plan of a step says what to put where.

    adapter:  known ── a request waits ──▶ waiting ── take ──▶ resident, used ── release ──▶ resident, idle ──▶ known

- A used adapter keeps its slot. An idle one gives it to the first request that needs one: the idle adapter with the
  fewest waiting tokens goes, and of equals the one that was used least recently.
- Nobody starves: requests of resident adapters pass those that wait for a slot at most `MOST_PASSING` times. Then a
  slot is kept for the other: its adapter gets no more requests, and once it is idle, the slot changes hands.
- Clients take turns, as in the queue: a client with many adapters keeps another's only one waiting for one slot to
  become idle. A slot is kept for it at once if another client has two slots more, or would have its next turn there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

MOST_PASSING = 32
"""Requests of other adapters that are admitted while one waits, before a slot is kept for it."""


Client = str | None


class AdapterSlots:
    """Adapters by digest."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[str, int] = {}
        """Of resident adapters, the least recently taken first."""
        self._used: dict[str, Counter[Client]] = {}
        """Resident adapter → its requests, by client."""
        self._waiting: dict[str, Counter[str]] = {}
        """Adapter → waiting requests → their tokens."""
        self._passed: dict[str, int] = {}
        """Adapters that were refused a slot → how many requests of others came in since."""
        self._askers: dict[str, Client] = {}
        """These adapters → whose request was refused first."""
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

    def admits(self, adapter: str, client: Client) -> bool:
        """Whether a request may come in now, or must wait for a slot, which is remembered. O(slots)."""
        if adapter in self._slots:
            return adapter not in self._kept
        if adapter in self.away:
            self.wanted = self.wanted or adapter
            return False
        if self._free or self._victim(adapter) is not None:
            return True
        self._passed.setdefault(adapter, 0)
        self._askers.setdefault(adapter, client)
        if adapter not in self._kept.values():
            self._keep(adapter, starves=False)
        return False

    def take(self, adapter: str, client: Client) -> int:
        """The slot of a request that comes in. It was just admitted."""
        assert self.admits(adapter, client), f"no slot for {adapter}"
        slot = self._slots.pop(adapter, -1)
        if slot < 0:
            slot = self._free.pop() if self._free else self._empty(self._victim(adapter))
            self.news[slot] = adapter
            self._used[adapter] = Counter()
            self._served(adapter)
        self._slots[adapter] = slot
        self._used[adapter][client] += 1
        self._count_passing()
        return slot

    def release(self, adapter: str, client: Client) -> None:
        """A request that had a slot has ended."""
        users = self._used[adapter]
        users[client] -= 1
        if not users[client]:
            del users[client]

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
        self._askers.pop(adapter, None)
        self._kept = {resident: other for resident, other in self._kept.items() if other != adapter}

    def _count_passing(self) -> None:
        self._passed = {other: count + 1 for other, count in self._passed.items()}
        starving = [other for other, count in self._passed.items() if count >= MOST_PASSING]
        if starving := [other for other in starving if other not in self._kept.values()]:
            shares = self._shares()
            for other in sorted(starving, key=lambda one: shares[self._askers[one]]):
                self._keep(other, starves=True)

    def _owner(self, resident: str) -> Iterable[Client]:
        """Whose slot this is, or will be: a client, or several with requests for one adapter."""
        return [self._askers[self._kept[resident]]] if resident in self._kept else self._used[resident]

    def _shares(self) -> Counter[Client]:
        """Client → its slots."""
        return Counter(client for resident in self._slots for client in self._owner(resident))

    def _keep(self, adapter: str, *, starves: bool) -> None:
        """Keeps a slot for an adapter, if its client is to have more of them or its turn."""
        asker, shares, kept, used = self._askers[adapter], self._shares(), self._kept, self._used
        richest = max(shares, key=shares.__getitem__, default=asker)
        changing = [one for one, other in kept.items() if self._askers[other] in used[one]]
        if starves and (idle := [one for one in self._slots if one not in kept and not used[one]]):
            may = idle
        elif shares[richest] >= shares[asker] + 2:
            may = [one for one in self._slots if richest in self._owner(one)]
        elif changing and not shares[asker]:  # from one adapter of a client to another, which has had its turn
            may = changing
        elif starves:
            may = [one for one in self._slots if one not in kept and (asker in used[one] or not shares[asker])]
        else:
            may = []
        if may:  # rather what is kept for another adapter than what has requests, and of those the fewest
            kept[min(may, key=lambda one: (one not in kept, used[one].total()))] = adapter

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
    def running(self) -> set[str]:
        return {adapter for adapter, users in self._used.items() if users}

    @property
    def waiting(self) -> Set[str]:
        return self._waiting.keys()

    def uses(self, adapter: str) -> bool:
        """Whether a request has its slot or waits."""
        return bool(self._used.get(adapter)) or adapter in self._waiting

    def check_integrity(self) -> None:
        slots = [*self._free, *self._slots.values()]
        assert len(set(slots)) == len(slots), "a slot has two owners"
        assert self._used.keys() == self._slots.keys(), "used without a slot"
        assert all(count > 0 for users in self._used.values() for count in users.values()), "released twice"
        assert self._kept.keys() <= self._slots.keys(), "a slot is kept that nobody has"
        assert len(set(self._kept.values())) == len(self._kept), "two slots are kept for one adapter"
        assert set(self._kept.values()) <= self._passed.keys() <= self._waiting.keys(), "kept for nobody who waits"
        assert self._askers.keys() == self._passed.keys(), "refused nobody"
        assert not self._passed.keys() & self._slots.keys(), "a resident adapter waits for a slot"
        assert all(self._slots[adapter] == slot for slot, adapter in self.news.items()), "news of another's slot"
