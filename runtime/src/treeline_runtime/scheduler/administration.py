"""Operations on the idle engine: sleep, new weights; and traces of its steps.

`Residence` owns all that is on the device: the model and its executor. Asleep, the device has no weights, KV memory or
graphs. Objects that hold addresses (attention backends, CUDA graphs) are made again afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from treeline_runtime import messages
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.kvcache.host import Slab
from treeline_runtime.kvcache.page import PageFormat, format_of
from treeline_runtime.memory import kv_heads_of_ranks
from treeline_runtime.models.adapters import Adapter, read_adapter
from treeline_runtime.models.config import ModelConfig, ModelError
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import architecture_of, load_model, resolve_device
from treeline_runtime.models.offload import Offloaded, size_of
from treeline_runtime.models.pooling import Pooling
from treeline_runtime.scheduler.audit import CacheAudits
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.drafting import Speculation
from treeline_runtime.scheduler.executor import Executor
from treeline_runtime.scheduler.peers import Peers
from treeline_runtime.scheduler.ranks.protocol import Agreed, Call, Group, as_one, together
from treeline_runtime.scheduler.resolve import TO_LOAD, Resolved, give_back, let_go, told_as_settings

AWAKE, WEIGHTS_ON_HOST, NO_WEIGHTS = 0, 1, 2
"""Levels of sleep, numbered as in vLLM."""
TO_COPY = "stop other programs, or use level 2, which reads the weights again"
WARM_UP_TOKENS = 16
"""Tokens of warm-up on a CPU, which compiles nothing and is slow on long prompts."""


def load(config: SchedulerConfig, group: Group | None, peers: Peers | None = None) -> Decoder:
    """The model, or a rank's part of it. Raises ModelError or ConfigError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with told_as_settings("the weights", resolve_device(config.device), hint=TO_LOAD):
        return load_model(config, None if group is None else group.ranks, None if peers is None else peers.exchange)


class Residence:
    """Owns the model and its executor. `sleep`, `wake` and `update` need an idle scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: Resolved,
        model: Decoder,
        group: Group | None = None,
        peers: Peers | None = None,
    ) -> None:
        """group: the other ranks; what is done here, all of them do. peers: of them, only steps are done by all."""
        self._config = config
        self._limits = limits
        self._group = group
        self._peers = peers
        self._architecture = architecture_of(config)
        self._model: Decoder | None = model
        self._sites = model.sites
        self.adapters: dict[str, Adapter] = {}
        """On the host, by digest; of this rank."""
        self._reader = ThreadPoolExecutor(1, "treeline adapters")
        self._reads: deque[tuple[str, Future[Adapter]]] = deque()
        """Folders that are being read, or have been, in the order in which all ranks began."""
        self._offloaded: Offloaded | None = None
        self._executor: Executor | None = self._new_executor(model)
        self.level = AWAKE
        self._froze = False

    @property
    def executor(self) -> Executor:
        assert self._executor is not None, "asleep: requests should have been refused earlier"
        return self._executor

    def page_format(self) -> PageFormat:
        """The identity of the pages that the model computes with the weights as they are now."""
        config, limits, model = self._config, self._limits, self._architecture[0]
        random = config.seed if config.load_format == "dummy" else None
        drafter = config.speculative_draft_model_path
        return format_of(
            Path(config.model),
            num_layers=model.num_layers,
            page_size=limits.page_size,
            num_kv_heads=kv_heads_of_ranks(config, model),
            head_dim=model.head_dim,
            element_bytes=limits.kv_dtype.itemsize,
            drafter=None if drafter is None else (Path(drafter), limits.draft_bytes_per_token * limits.page_size),
            also=(
                limits.kv_dtype,
                limits.dtype,
                limits.device.type,
                limits.context_length,
                config.attention_backend,
                config.quantization,
                random,
                config.tp_size,
                config.pp_size,
            ),
        )

    def open_slab(self, nbytes: int, place: str | None = None) -> Slab:
        """The host memory of the tiers; on other ranks rank 0's `place`. A page has what a drafter keeps,
        which is rank 0's, too, then the parts of all ranks, stage by stage. Raises ConfigError."""
        config, part = self._config, None
        if self._group is not None:
            rank, layers = self._group.ranks.rank, self._architecture[0].num_layers
            draft = self._limits.draft_bytes_per_token * self._limits.page_size
            unit, own = (nbytes - draft) // layers // rank.count, rank.layers(layers)
            begin = draft + (own.start * rank.count + rank.index * len(own)) * unit
            part = slice(begin if rank.number else 0, begin + len(own) * unit)
        with told_as_settings(f"--host-cache {config.host_cache}", torch.device("cpu"), hint="make it smaller"):
            return Slab(self._limits.host_pages, nbytes, self._limits.device, part, place)

    def warm_up(self) -> None:
        """Does one-time work before requests pay for it. Raises ConfigError if a full step does not fit in memory."""
        limits = self._limits
        chunk = min(limits.chunked_prefill_size, limits.context_length)
        lengths = [1, chunk] if limits.device.type == "cuda" else [min(WARM_UP_TOKENS, chunk)]
        started = time.perf_counter()
        with as_one(self._group or self._peers), told_as_settings(f"a step of {chunk} prompt tokens", limits.device):
            self.executor.warm_up(lengths)
        logger.info("warmed up with %s tokens: %.1f s", " and ".join(map(str, lengths)), time.perf_counter() - started)

    def sleep(self, level: int) -> None:
        """`WEIGHTS_ON_HOST` keeps a copy of the weights in host memory; `NO_WEIGHTS` reads them again at `wake`. On a
        CPU both memories are the same, and the former frees only the KV cache."""
        self._tell(Call("sleep", level))
        with as_one(self._group):
            self._sleep(level)

    def _sleep(self, level: int) -> None:
        assert self.level == AWAKE
        self._froze = gc.get_freeze_count() > 0
        problem: Agreed | None = None
        if level == NO_WEIGHTS:
            self._model = None
        elif self._limits.device.type != "cpu":
            try:
                together(self._group, self._copy_weights)
            except Agreed as error:
                problem = error
        self._executor = None
        self.level = level
        give_back(self._limits.device)
        together(self._group, lambda: None)  # the memory of all ranks is free
        if problem is not None:
            self._wake()  # some ranks have copied their weights
            raise problem

    def _copy_weights(self) -> None:
        with told_as_settings("a copy of the weights on the host", torch.device("cpu"), hint=TO_COPY):
            self._offloaded = Offloaded(self._model)  # raises where the host has no room, and has changed nothing

    def wake(self) -> None:
        """Raises ModelError or ConfigError if something is missing now, such as memory; then it stays asleep. A group
        ends if a rank lacks memory for anything but the weights."""
        self._tell(Call("wake"))
        with as_one(self._group):
            self._wake()

    def _wake(self) -> None:
        assert self.level != AWAKE
        offloaded = self._offloaded
        try:
            together(self._group, self._bring_weights)
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

    def _bring_weights(self) -> None:
        if self._offloaded is not None:
            with told_as_settings("the weights", self._limits.device, hint=TO_LOAD):
                self._offloaded.restore()
        elif self._model is None:
            self._model = load(self._config, self._group)

    def begin_read(self, folder: str) -> Future[Adapter]:
        """All ranks read their parts of an adapter, beside steps and one adapter after the other, until `end_read`. The
        result raises ModelError."""
        self._tell(Call("begin_read", folder))
        future = self._reader.submit(self._read_adapter, folder)
        self._reads.append((folder, future))
        return future

    def _read_adapter(self, folder: str) -> Adapter:
        config, limits, layers = self._config, self._limits, self._architecture[0].num_layers
        on_cuda = limits.device.type == "cuda"
        return read_adapter(Path(folder), self._sites, layers, config.max_lora_rank, limits.dtype, pin=on_cuda)

    def end_read(self, digest: str | None = None) -> None:
        """Keeps the adapter that was begun first, which must have this digest; None: forgets it. Raises ModelError, and
        then no rank has it."""
        self._tell(Call("end_read", digest))
        folder, future = self._reads.popleft()
        if digest is None:
            return

        def own() -> Adapter:
            if (adapter := future.result()).digest != digest:
                raise ModelError(f"{folder} is being changed, or is not the same on all machines")
            return adapter

        with as_one(self._group):
            self.adapters[digest] = together(self._group, own)[0]

    def stop_reading(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def drop_adapter(self, digest: str) -> None:
        self._tell(Call("drop_adapter", digest))
        del self.adapters[digest]

    def _tell(self, call: Call) -> None:
        if self._group is not None:
            self._group.tell(call)

    def check_alone(self) -> None:
        """Raises ConfigError if its peers would have to sleep, wake or change weights at the same step."""
        if self._peers is not None:
            raise ConfigError(
                "engines that share experts (--dp-size with --ep-size) neither sleep nor change their weights: restart "
                "the server"
            )

    def check(self, path: str) -> None:
        """Raises ModelError unless the checkpoint at `path` has the served architecture."""
        if not Path(path).is_dir():
            raise ModelError(f"{path} is not a folder on the server's machine")
        found = architecture_of(dataclasses.replace(self._config, model=path))
        if found != self._architecture:
            difference = _difference(*found, *self._architecture)
            raise ModelError(f"{path} is another architecture than the one served: {difference}")

    def update(self, path: str) -> None:
        """Loads the weights at `path`, which passed `check`. Raises ModelError or ConfigError, and then keeps the old
        ones, which stay until all new ones are loaded. While asleep: `wake` will read them."""
        path = os.path.abspath(path)  # a rank's process may have another working directory
        self._tell(Call("update", path))
        with as_one(self._group):
            self._update(path)

    def _update(self, path: str) -> None:
        started = time.perf_counter()
        config = dataclasses.replace(self._config, model=path, load_format="auto")
        if self.level != AWAKE:
            self._offloaded = self._model = None
            self._config, self.level = config, NO_WEIGHTS
            give_back(self._limits.device)
            return
        self._sleep(WEIGHTS_ON_HOST)
        old, old_copy = (self._model, self._offloaded), self._config
        self._model = self._offloaded = None
        self._config = config
        try:
            self._wake()
        except Exception:
            (self._model, self._offloaded), self._config = old, old_copy
            self._wake()
            raise
        logger.info("weights from %s: %.1f s", path, time.perf_counter() - started)

    def _new_executor(self, model: Decoder) -> Executor:
        limits = self._limits
        sizes = {
            "weights": size_of(model),
            "KV pool": limits.max_total_tokens * limits.kv_bytes_per_token,
            "reserved": limits.reserved_bytes,
        }
        with (
            as_one(self._group or self._peers),
            told_as_settings("the KV pool, workspaces and graphs", limits.device, sizes),
        ):
            return Executor(self._config, model, limits, self._group, self._peers, self.adapters)


def _difference(found: ModelConfig, pools: Pooling | None, served: ModelConfig, served_pools: Pooling | None) -> str:
    pairs: list[tuple[Any, Any, str]] = [(found, served, "")]
    if pools and served_pools:
        pairs.append((pools, served_pools, " of its pooling"))
    for new, old, of in pairs:
        for field in dataclasses.fields(new):
            here, there = getattr(new, field.name), getattr(old, field.name)
            if here != there:
                return f"{field.name}{of} is {here!r}, not {there!r}"
    makes, made = ("vectors" if one else "text" for one in (pools, served_pools))
    return f"it makes {makes}, not {made}"


logger = logging.getLogger(__name__)


class Refused(Exception):
    """It cannot be done now; the message says why."""


class Busy(Refused):
    """It can be done once no request runs."""


class Profiler:
    """One trace at a time by torch's profiler, for chrome://tracing or Perfetto. `step` is called after each launch."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None
        self._folder = Path()
        self._left = 0
        self._count = 0

    def start(self, folder: str, steps: int) -> None:
        """Traces the next so many steps. Raises Refused."""
        if self._running is not None:
            raise Refused(f"a profile is running, {self._left} steps are left: POST /stop_profile ends it")
        if not 1 <= steps <= messages.MAX_PROFILE_STEPS:
            raise Refused(f"a profile has 1 to {messages.MAX_PROFILE_STEPS} steps, not {steps}")
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"cannot write to the profile folder: {error}") from None
        self._left = steps
        running = profile(activities=self._activities)
        running.start()
        self._running = running

    def step(self) -> None:
        if self._running is None:
            return
        self._left -= 1
        if self._left == 0:
            try:
                self.stop()
            except Refused:
                logger.exception("the profile is lost")

    def stop(self) -> str:
        """Returns the trace's file. Raises Refused."""
        running, self._running = self._running, None
        if running is None:
            raise Refused("no profile is running: it has ended, or was never started")
        running.stop()
        self._count += 1
        now = time.strftime("%Y%m%d-%H%M%S")
        path = self._folder / f"treeline-scheduler-{now}-{os.getpid()}-{self._count}.trace.json.gz"
        try:
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise Refused(f"the trace could not be written to {path}: {error}") from None
        logger.info("profile: %s", path)
        return str(path)


class Administration:
    """Each of `handlers` answers its message with exactly one Reply."""

    def __init__(
        self,
        residence: Residence,
        cache: CacheManager,
        audits: CacheAudits,
        profiler: Profiler,
        speculation: Speculation | None,
        *,
        is_idle: Callable[[], bool],
        reply: Callable[[messages.Reply], None],
    ) -> None:
        self._residence = residence
        self._cache = cache
        self._audits = audits
        self._speculation = speculation
        self._is_idle = is_idle
        self._reply = reply
        handlers: dict[type, Callable[[Any], dict[str, Any] | None]] = {
            messages.FlushReq: self._flush,
            messages.SleepReq: self._sleep,
            messages.WakeReq: self._wake,
            messages.UpdateWeightsReq: self._update,
            messages.StartProfileReq: lambda message: profiler.start(message.folder, message.steps),
            messages.StopProfileReq: lambda _: {"path": profiler.stop()},
        }
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            kind: functools.partial(self._answer, handler) for kind, handler in handlers.items()
        }

    def _answer(self, handler: Callable[[Any], dict[str, Any] | None], message: Any) -> None:
        """handler: returns the data of the reply."""
        started = time.perf_counter()
        try:
            reply = messages.Reply(message.id, data=handler(message))
        except (ConfigError, ModelError, Refused) as error:
            data = {"busy": True} if isinstance(error, Busy) else None
            reply = messages.Reply(message.id, ok=False, message=str(error), data=data)
        except Exception as error:
            logger.exception("a %s failed", type(message).__name__)
            reply = messages.Reply(message.id, ok=False, message=f"internal error: {error!r}")
        if not isinstance(message, messages.FlushReq):
            logger.info("%s: %s in %.2f s", message, reply.message or "done", time.perf_counter() - started)
        self._reply(reply)

    def _check_idle(self) -> None:
        if not self._is_idle():
            raise Busy("requests are running or waiting")
        if self._cache.tiers is not None and not self._cache.tiers.settle():
            raise Busy("pages are being copied, and the disk or a rank does not answer")

    def _flush(self, _: messages.FlushReq) -> None:
        self._check_idle()
        self._audits.start_over()
        self._cache.wipe()
        self._forget()

    def _sleep(self, message: messages.SleepReq) -> dict[str, Any]:
        self._residence.check_alone()
        if self._residence.level != AWAKE:
            raise Refused(f"it is already asleep, at level {self._residence.level}")
        self._check_idle()
        self._audits.drop()
        self._cache.flush()
        self._cache.slots.reset()
        self._forget()
        self._residence.sleep(message.level)
        return {"level": message.level}

    def _wake(self, _: messages.WakeReq) -> None:
        if self._residence.level == AWAKE:
            raise Refused("it is awake")
        self._residence.wake()
        self._renew()  # it may have read other weights than it had

    def _update(self, message: messages.UpdateWeightsReq) -> None:
        self._residence.check_alone()
        self._check_idle()
        self._residence.check(message.path)
        self._audits.drop()
        self._cache.flush()
        self._cache.slots.reset()
        self._forget()
        try:
            self._residence.update(message.path)
        finally:
            self._renew()

    def _forget(self) -> None:
        """Guesses know nothing that the cache does not."""
        if self._speculation is not None:
            self._speculation.forget()

    def _renew(self) -> None:
        if self._cache.tiers is not None:
            self._cache.tiers.renew(self._residence.page_format())
