"""The scheduler in a thread of this process; its transport is memory.

Only this thread touches the scheduler, so a caller's Ctrl-C or cancelled task takes effect between two steps. There are
no sockets, and no other processes but those of further ranks (`ranks`).
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

import torch

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.messages import AbortReq, FromScheduler, ToScheduler
from treeline_runtime.published import ToPublisher
from treeline_runtime.scheduler import Scheduler, start
from treeline_runtime.scheduler.processors import Processors
from treeline_runtime.scheduler.ranks.protocol import GroupFailed
from treeline_runtime.scheduler.resolve import let_go

WAIT_S = 1.0
"""The longest wait for a message: copies of cached pages may be stalled."""
LOST_S = 3.0
"""Time for the thread to end after a failure; it may wait for a lost rank for ever."""

logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The scheduler has failed or was closed; the cause says why."""


class SchedulerThread:
    """Implements `Transport`. Ended by `close`; `failure` says why it ended otherwise."""

    def __init__(
        self,
        config: SchedulerConfig,
        take: Callable[[FromScheduler], None],
        on_death: Callable[[], None],
        processors: Processors,
    ) -> None:
        """Returns when the model is loaded. Raises loading errors.

        take: called in the thread with everything the scheduler sends. on_death: called when it can send no more.
        processors: in addition to the configuration's.
        """
        self._processors = processors
        self._config = config
        self._take = take
        self._on_death = on_death
        self._inbox: list[ToScheduler] = []
        self._arrived = threading.Condition()
        self._closing = False
        self._woken = False
        self.ended = False
        self._loaded = threading.Event()
        self.failure: BaseException | None = None
        self.scheduler: Scheduler | None = None
        self._thread = threading.Thread(target=self._run, name="treeline scheduler", daemon=True)
        self._thread.start()
        try:
            self._loaded.wait()
        except BaseException:  # Ctrl-C while the model loads
            self._closing = True
            raise
        if self.scheduler is None:
            assert self.failure is not None
            raise self.failure

    def tell(self, message: ToScheduler) -> None:
        """Raises EngineDead."""
        with self._arrived:
            if self.failure is not None or self._closing:
                raise self.dead()
            self._inbox.append(message)
            self._arrived.notify()

    def dead(self) -> EngineDead:
        """The error for a request that gets no answer."""
        if self.failure is None:
            return EngineDead("the engine is closed")
        error = EngineDead(f"the scheduler has failed: {self.failure!r}")
        error.__cause__ = self.failure
        return error

    def close(self) -> None:
        """Ends running requests and the thread, and frees memory. Idempotent."""
        with self._arrived:
            self._closing = True
            self._arrived.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(None if self.failure is None else LOST_S)

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except GroupFailed as failure:
            self.fail(str(failure))
        except BaseException as error:
            self.failure = error
            if self._loaded.is_set():
                logger.exception("the scheduler has failed")
            let_go(error)
        finally:
            self._closing = True
            self.scheduler = None
            self._give_back()
            self.ended = True
            self._loaded.set()
            self._on_death()

    def _serve(self) -> None:
        scheduler = self.scheduler = start(self._config, self, self._processors)
        self._loaded.set()
        try:
            scheduler.run_forever(stop=lambda: self._closing)
            self._inbox.append(AbortReq())
            while scheduler.step():
                pass
        finally:
            scheduler.close()

    def _give_back(self) -> None:
        gc.collect()  # a model and its graphs may refer to each other in circles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # ---- Transport ----------------------------------------------------------------------------------------

    def receive(self) -> list[ToScheduler]:
        if not self._inbox:
            return []
        with self._arrived:
            messages, self._inbox = self._inbox, []
        return messages

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            self._take(message)

    def publish(self, update: ToPublisher) -> bool:
        return True

    def wait(self) -> None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox or self._closing or self._woken, WAIT_S)
            self._woken = False

    def fail(self, reason: str) -> None:
        with self._arrived:
            if self.ended or self.failure is not None:
                return
            self.failure = RuntimeError(reason)
            self._closing = self.ended = True
            self._arrived.notify()
        self._loaded.set()
        self._on_death()

    def wake(self) -> None:
        with self._arrived:
            self._woken = True
            self._arrived.notify()
