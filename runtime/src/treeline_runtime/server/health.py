"""Whether a request would work: what /health_generate asks, and what /ready and /live know between such questions.

A failed request proves nothing: its prompt may be one that overflows, and then a client that sends a few of those would
take a server out of rotation. So failures alone only raise a suspicion. After `FAILURES` in a row, with no answer
between them, the engine has to answer a prompt of ours. While it cannot, `problem` says why; any answer, to us or to a
client, ends that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from treeline_runtime.messages import BatchTextOut, GenerateReq, SamplingParams
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import Generations
from treeline_runtime.server.openai import new_rid
from treeline_runtime.server.service import Service

logger = logging.getLogger(__name__)

FAILURES = 3
"""Requests that fail one after the other before the engine is checked."""
RETRY_S = 5.0
"""Between two checks of an engine that fails them."""
TIMEOUT_S = 30.0
"""For the answer to a check: it waits its turn among the requests that run."""
TOKENS = 4
"""More than one: the first comes from the prompt alone, the others read the cache back."""


class EngineHealth:
    """`on_batch` sees every output; `watch` runs as a task; `check` may be called at any time."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._failures = 0
        self._suspected = asyncio.Event()

    @property
    def problem(self) -> str | None:
        """Why requests do not work; None while they do, as far as is known."""
        return self._service.state.problem

    @property
    def failing_s(self) -> float:
        """Seconds since the first failed check; 0 while there is no problem."""
        return 0.0 if self.problem is None else self._clock() - self._service.state.failing_since

    def on_batch(self, batch: BatchTextOut) -> None:
        for out in batch.outs:
            if out.finish is None:
                continue
            if out.finish.type in ("stop", "length"):
                self._recover()
            elif out.finish.type == "error" and out.finish.status == 500:
                self._failures += 1
                if self._failures >= FAILURES:
                    self._suspected.set()

    async def watch(self) -> None:
        """Check whenever there is a suspicion, until it is gone."""
        while True:
            await self._suspected.wait()
            try:
                await self.check()
            except ApiError as error:
                logger.error("%d requests in a row failed, and the check did: %s", self._failures, error)
                await asyncio.sleep(RETRY_S)

    async def check(self) -> None:
        """Have a few tokens generated, or a vector made. Raises ApiError 503: requests do not work, or none is accepted
        now."""
        self._service.admit()
        pools = self._service.pooling is not None
        few = SamplingParams(max_new_tokens=0 if pools else TOKENS, temperature=0.0, ignore_eos=True)
        job = Generations(rid=new_rid("health"), prompts=[GenerateReq("", [0], few, pools=pools)])
        inflight = await self._service.open(job)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._service.collect(inflight)
        except TimeoutError:
            raise self._failed(f"no answer within {TIMEOUT_S:g} s") from None
        except ApiError as error:
            if error.status in (503, 504):  # a full queue, a limit of time, or the server is stopping
                raise
            raise self._failed(str(error)) from None
        finally:
            inflight.close()
        self._recover()

    def _failed(self, why: str) -> ApiError:
        problem = f"The engine cannot answer: {why}"
        state = self._service.state
        if state.problem is None:
            state.failing_since = self._clock()
        state.problem = problem
        return ApiError(503, problem, type="server_error")

    def _recover(self) -> None:
        if self.problem is not None:
            logger.info("the engine answers again")
            self._service.state.problem = None
        self._failures = 0
        self._suspected.clear()
