"""Follows what the pickers of a gateway stream of the demand for its pools."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import msgspec
from treeline_wire.signals import MOST_LINE_BYTES, PATH, SILENT_S, PoolSignals, Signals, decode, merged

from treeline_operator.plan.replicas import Heard

log = logging.getLogger(__name__)

Address = tuple[str, int]
_CONNECT_S: Final = 3.0
_AGAIN_S: Final = (0.25, 5.0)


@dataclass(slots=True)
class HttpSource:
    """How a picker is listened to."""

    session: aiohttp.ClientSession

    async def lines(self, address: Address) -> AsyncIterator[Signals]:
        """What it says, until it says no more: a line has a bounded length, and nothing is heard for a bounded time.
        Raises OSError, or `msgspec.MsgspecError` for what cannot be read."""
        host, port = address
        where = f"[{host}]" if ":" in host else host
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=SILENT_S)
        try:
            async with self.session.get(f"http://{where}:{port}{PATH}", timeout=timeout) as answer:
                if answer.status != 200:
                    raise ConnectionError(f"it answered {answer.status}")
                rest = bytearray()
                async for chunk in answer.content.iter_any():
                    rest += chunk
                    *whole, rest = rest.split(b"\n")
                    if whole:
                        yield decode(bytes(whole[-1]))  # each says all there is
                    if len(rest) > MOST_LINE_BYTES:
                        raise ConnectionError(f"a line is longer than {MOST_LINE_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise ConnectionError(str(exc) or type(exc).__name__) from exc


@dataclass(slots=True)
class Following:
    """The pickers of one gateway, each listened to by a task of its own; `told` is called after each thing said."""

    source: HttpSource
    told: Callable[[], None]
    clock: Callable[[], float]
    _tasks: dict[Address, asyncio.Task[None]] = field(default_factory=dict)
    _said: dict[Address, tuple[float, Signals]] = field(default_factory=dict)

    def set(self, addresses: Iterable[Address]) -> None:
        """Listen to exactly these."""
        wanted = set(addresses)
        for address in self._tasks.keys() - wanted:
            self._tasks.pop(address).cancel()
            self._said.pop(address, None)
        for address in wanted - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._follow(address), name=f"signals of {address[0]}")

    def heard(self, pool: str) -> Heard | None:
        """What they say of a pool together; None while none of them says anything of it."""
        told: list[PoolSignals] = []
        missing = not self._tasks
        for address in self._tasks:
            at, said = self._said.get(address, (float("-inf"), Signals()))
            one = said.pools.get(pool)
            if self.clock() - at > SILENT_S or not said.synced or one is None:
                missing = True
            else:
                told.append(one)
        return Heard(merged(told), whole=not missing) if told else None

    async def stop(self) -> None:
        """Stop listening."""
        tasks = list(self._tasks.values())
        self.set(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, address: Address) -> None:
        failures = 0
        while True:
            try:
                async for signals in self.source.lines(address):
                    failures = 0
                    self._said[address] = self.clock(), signals
                    self.told()
                why = "it has ended"
            except (OSError, msgspec.MsgspecError) as exc:
                why = str(exc)
            except Exception as exc:
                log.exception("signals of %s cannot be followed", address[0])
                why = type(exc).__name__
            failures += 1
            log.log(logging.INFO if failures == 3 else logging.DEBUG, "signals of %s: %s", address[0], why)
            base, cap = _AGAIN_S
            await asyncio.sleep(min(cap, base * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0))
