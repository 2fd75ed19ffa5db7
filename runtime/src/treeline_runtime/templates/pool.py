"""Worker processes that render chat templates, with limits of time and memory.

A worker is started when needed, renders one request at a time, and is killed when it passes its deadline, dies, or
answers nonsense; the next request starts another. Waiting is bounded in number and time. Threads may share a pool; a
thread with a running event loop must not wait here (see `chat`).
"""

from __future__ import annotations

import atexit
import logging
import threading
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from treeline_wire.chat import TemplateBusyError, TemplateError, failed, refused
from treeline_wire.template_env import utc_now

from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.pool import ConfinedPool, PoolClosedError
from treeline_runtime.confined.process import ConfinedProcess, Killed
from treeline_runtime.templates.worker import Answer, Request

_MAX_TEMPLATES: Final = 64
"""Templates that a worker keeps compiled; with more, new workers replace it."""

logger = logging.getLogger(__name__)


class PoolLimits(NamedTuple):
    """`seconds` and `memory_bytes`: of one rendering; `waiting` requests wait for at most `wait_seconds`."""

    seconds: float = 2.0
    memory_bytes: int = 256 << 20
    workers: int = 2
    waiting: int = 64
    wait_seconds: float = 10.0


class TemplatePool:
    """At most `limits.workers` processes. They end with `close` or this process."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self.limits = limits or PoolLimits()
        self._workers = ConfinedPool(
            partial(_Worker, self.limits), keep=lambda worker: len(worker.templates) <= _MAX_TEMPLATES
        )
        self._waiting = 0
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self.limits.workers)
        atexit.register(self.close)

    def render(self, key: int, source: str, variables: dict[str, Any]) -> str:
        """Implements `chat.Renderer`. Raises `TemplateError`, including `TemplateBusyError`."""
        try:
            kind, text = self._answer(key, source, variables)
        except Killed as error:
            raise self._too_much(str(error)) from None
        except UnicodeEncodeError:
            raise TemplateError("a text contains half of a surrogate pair", user_error=True) from None
        except PoolClosedError:
            raise TemplateBusyError("chat templates are no longer rendered") from None
        except OSError as error:
            raise TemplateBusyError(f"no process can be started to render chat templates: {error}") from error
        if kind is Answer.RENDERED:
            return text
        if kind is Answer.RAISED:
            raise refused(text)
        if kind is Answer.FAILED:
            raise failed(text)
        logger.error("the chat template does not compile: %s", text)
        raise TemplateError("the model's chat template does not compile", user_error=False)

    def _too_much(self, why: str) -> TemplateError:
        logger.warning("a chat template was stopped: it passed its limits (%s)", why)
        return TemplateError(
            f"the model's chat template needs more than {self.limits.seconds:g} s or "
            f"{self.limits.memory_bytes >> 20} MiB for this request: send less",
            user_error=True,
        )

    def _answer(self, key: int, source: str, variables: dict[str, Any]) -> tuple[Answer, str]:
        """A worker's answer. Also raises msgspec's errors for values that MessagePack lacks."""
        now = utc_now().timestamp()
        known = msgspec.msgpack.encode(Request(key, now, None, variables))
        self._take_slot()
        try:
            with self._workers.lend() as worker:
                request = known
                if key not in worker.templates:
                    request = msgspec.msgpack.encode(Request(key, now, source, variables))
                answer = worker.render(request)
                worker.templates.add(key)
                return answer
        finally:
            self._slots.release()

    def close(self) -> None:
        """Ends all workers, also while rendering. Later requests raise `TemplateBusyError`."""
        atexit.unregister(self.close)
        self._workers.close()

    def pids(self) -> list[int]:
        return self._workers.pids()

    def _take_slot(self) -> None:
        if self._slots.acquire(blocking=False):
            return
        with self._lock:
            if self._waiting >= self.limits.waiting:
                raise TemplateBusyError("too many chat templates are being rendered")
            self._waiting += 1
        try:
            if not self._slots.acquire(timeout=self.limits.wait_seconds):
                raise TemplateBusyError("too many chat templates are being rendered")
        finally:
            with self._lock:
                self._waiting -= 1


class _Worker(ConfinedProcess):
    """Knows its compiled templates. Raises OSError if it cannot be started."""

    def __init__(self, limits: PoolLimits) -> None:
        self.templates: set[int] = set()
        super().__init__("treeline_runtime.templates.worker", ProcessLimits(limits.seconds, limits.memory_bytes))

    def render(self, request: bytes) -> tuple[Answer, str]:
        """Sends a frame and waits for the answer. Raises `Killed` if none comes in time."""
        reply = self.ask(request)
        if not reply or reply[0] > max(Answer):
            raise Killed("it answered nonsense")
        return Answer(reply[0]), str(memoryview(reply)[1:], "utf-8", "replace")
