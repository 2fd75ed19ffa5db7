"""What of the engine is on the device: the model and what computes with it, which can leave and come back.

Asleep, the device has neither weights nor KV memory nor graphs. Everything that holds addresses (attention backends,
CUDA graphs) is made again afterwards rather than mended.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from pathlib import Path

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.models.config import ModelConfig, ModelError
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import architecture_of, load_model
from treeline_runtime.models.offload import Offloaded, size_of
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.memory import TO_LOAD, give_back, let_go, told_as_settings
from treeline_runtime.scheduler.resolve import Resolved

logger = logging.getLogger(__name__)

AWAKE, WEIGHTS_ON_HOST, NO_WEIGHTS = 0, 1, 2
"""Levels of sleep; the numbers are vLLM's."""
WARM_UP_TOKENS = 16
"""On a CPU, where nothing is compiled and a large model takes seconds for a long prompt."""


class Residence:
    """Owns the model and its executor. Only an idle scheduler may call `sleep`, `wake` and `update`."""

    def __init__(self, config: SchedulerConfig, limits: Resolved, model: Decoder) -> None:
        self._config = config
        self._limits = limits
        self._architecture = architecture_of(config)
        self._model: Decoder | None = model
        self._offloaded: Offloaded | None = None
        self._executor: Executor | None = self._new_executor(model)
        self.level = AWAKE
        self._froze = False

    @property
    def executor(self) -> Executor:
        assert self._executor is not None, "asleep: requests are refused before they get here"
        return self._executor

    def warm_up(self) -> None:
        """Do what is done once, before a request pays for it. Raises ConfigError where a full step has no memory."""
        limits = self._limits
        chunk = min(limits.chunked_prefill_size, limits.context_length)
        lengths = [1, chunk] if limits.device.type == "cuda" else [min(WARM_UP_TOKENS, chunk)]
        started = time.perf_counter()
        with told_as_settings(f"a step of {chunk} prompt tokens", limits.device):
            self.executor.warm_up(lengths)
        logger.info("warmed up with %s tokens: %.1f s", " and ".join(map(str, lengths)), time.perf_counter() - started)

    def sleep(self, level: int) -> None:
        """`WEIGHTS_ON_HOST` keeps a copy of the weights in the host's memory; `NO_WEIGHTS` reads them again at `wake`,
        from where they came. On a CPU the host's memory is the device's, and the former only gives up the KV cache."""
        assert self.level == AWAKE
        self._froze = gc.get_freeze_count() > 0
        if level == NO_WEIGHTS:
            self._model = None
        elif self._limits.device.type != "cpu":
            self._offloaded = Offloaded(self._model)  # raises where the host has no room, and has changed nothing
        self._executor = None
        self.level = level
        give_back(self._limits.device)

    def wake(self) -> None:
        """Raises ModelError or ConfigError where something is missing now, memory say; then it is as asleep as it
        was."""
        assert self.level != AWAKE
        offloaded = self._offloaded
        try:
            with told_as_settings("the weights", self._limits.device, hint=TO_LOAD):
                if offloaded is not None:
                    offloaded.restore()
                elif self._model is None:
                    self._model = load_model(self._config)
            assert self._model is not None
            self._executor = self._new_executor(self._model)
            self.warm_up()
        except BaseException as error:
            let_go(error)
            self._executor = None
            if offloaded is not None:
                offloaded.release()
            elif self.level == NO_WEIGHTS:
                self._model = None
            give_back(self._limits.device)
            raise
        self._offloaded = None
        self.level = AWAKE
        if self._froze:
            gc.collect()
            gc.freeze()

    def check(self, path: str) -> None:
        """Raises ModelError unless the checkpoint at `path` has the architecture that is served."""
        if not Path(path).is_dir():
            raise ModelError(f"{path} is not a folder on the server's machine")
        found = architecture_of(dataclasses.replace(self._config, model=path))
        if found != self._architecture:
            difference = _difference(*found, *self._architecture)
            raise ModelError(f"{path} is another architecture than the one served: {difference}")

    def update(self, path: str) -> None:
        """Serve the weights at `path`, which `check` has passed. Raises ModelError or ConfigError, and then the old
        ones serve on: they stay until all of the new ones are there. While asleep: they are what `wake` reads."""
        started = time.perf_counter()
        config = dataclasses.replace(self._config, model=path, load_format="auto")
        if self.level != AWAKE:
            self._offloaded = self._model = None
            self._config, self.level = config, NO_WEIGHTS
            give_back(self._limits.device)
            return
        self.sleep(WEIGHTS_ON_HOST)
        old, old_copy = (self._model, self._offloaded), self._config
        self._model = self._offloaded = None
        self._config = config
        try:
            self.wake()
        except BaseException:
            (self._model, self._offloaded), self._config = old, old_copy
            self.wake()
            raise
        logger.info("weights from %s: %.1f s", path, time.perf_counter() - started)

    def _new_executor(self, model: Decoder) -> Executor:
        limits = self._limits
        sizes = {
            "weights": size_of(model),
            "KV pool": limits.max_total_tokens * limits.kv_bytes_per_token,
            "reserved": limits.reserved_bytes,
        }
        with told_as_settings("the KV pool, workspaces and graphs", limits.device, sizes):
            return Executor(
                self._config,
                model,
                num_rows=limits.max_running_requests,
                context_length=limits.context_length,
                num_pages=limits.num_pages,
                dtype=limits.dtype,
                kv_dtype=limits.kv_dtype,
                device=limits.device,
                largest_graph=limits.max_graph_batch,
                largest_prompt_graph=limits.max_graph_tokens,
            )


def _difference(found: ModelConfig, pools: Pooling | None, served: ModelConfig, served_pools: Pooling | None) -> str:
    """The first setting in which two architectures differ, in words."""
    for field in dataclasses.fields(found):
        here, there = getattr(found, field.name), getattr(served, field.name)
        if here != there:
            return f"{field.name} is {here!r}, not {there!r}"
    for field in dataclasses.fields(Pooling) if pools and served_pools else ():
        here, there = getattr(pools, field.name), getattr(served_pools, field.name)
        if here != there:
            return f"{field.name} of its pooling is {here!r}, not {there!r}"
    makes, made = ("vectors" if one else "text" for one in (pools, served_pools))
    return f"it makes {makes}, not {made}"
