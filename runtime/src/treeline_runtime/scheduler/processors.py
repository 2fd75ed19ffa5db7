"""The server's logit processors, the ones that requests use, and the choices of delayed rows."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import msgspec
import torch

from treeline_runtime.config import ConfigError
from treeline_runtime.core import Batch
from treeline_runtime.logit_processors import split
from treeline_runtime.messages import CustomProcessor, FinishReason
from treeline_runtime.sampling import Constraint, Factory, Processing
from treeline_runtime.sampling.processor import BUILT_IN, told
from treeline_runtime.scheduler.launched import Choices

logger = logging.getLogger(__name__)

NONE_THERE = (
    "this server has no logit processors: start it with --logit-processor NAME=module:attribute, or with the NAME of "
    f"one that is built in: {', '.join(BUILT_IN)}"
)


class Processors:
    """Makes requests' processors. Immutable."""

    def __init__(self, factories: Mapping[str, Factory]) -> None:
        """factories: by name."""
        self._factories = dict(factories)

    def with_named(self, entries: Iterable[str]) -> Processors:
        """Adds imported `NAME=module:attribute` …. Raises ConfigError if one cannot be imported."""
        found = dict(self._factories)
        for text in entries:
            try:
                name, place = split(text)
                if name in found:
                    raise ValueError(f"two have the name {name!r}")
                found[name] = _find(place)
            except ValueError as error:
                raise ConfigError(f"--logit-processor {text}: {error}") from None
        if found:
            logger.info("logit processors: %s", ", ".join(found))
        return Processors(found)

    def begin(self, asked: CustomProcessor | None, vocab_size: int) -> Processing | FinishReason | None:
        """The processor that a request asks for, or why it is refused."""
        if asked is None:
            return None
        factory = self._factories.get(asked.name)
        if factory is None:
            there = f"there is no logit processor {asked.name!r}, only {', '.join(self._factories)}"
            return FinishReason("error", message=there if self._factories else NONE_THERE, status=400)
        try:
            params = msgspec.json.decode(asked.params, type=dict[str, Any])
            return Processing(asked.name, factory(params, vocab_size))
        except ValueError as error:
            message = told(f"custom_params of logit processor {asked.name!r}:", error)
            return FinishReason("error", message=message, status=400)
        except (Exception, SystemExit) as error:
            logger.exception("logit processor %r failed to begin", asked.name)
            message = told(f"logit processor {asked.name!r} failed to begin:", error)
            return FinishReason("error", message=message, status=500)


NO_PROCESSORS = Processors({})


def _find(place: str) -> Factory:
    """Raises ValueError."""
    module, colon, attribute = place.partition(":")
    if not colon:
        if place not in BUILT_IN:
            raise ValueError(f"there is no built-in {place!r}, only {', '.join(BUILT_IN)}; else NAME=module:attribute")
        return BUILT_IN[place]
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if not missing:
            logger.exception("importing %s failed", module)
        hint = " (it must be installed beside the server, or its folder be on PYTHONPATH)" if missing else ""
        raise ValueError(f"cannot import {module}: {type(error).__name__}: {error}{hint}") from None
    try:
        factory: Any = reduce(getattr, attribute.split("."), imported)
    except Exception as error:
        raise ValueError(f"cannot find {attribute} in {module}: {error}") from None
    if not callable(factory):
        raise ValueError(f"{attribute} in {module} is not a class or function: {type(factory).__name__}")
    _check_signature(factory, attribute)
    made: Factory = factory
    return made


def _check_signature(factory: Any, attribute: str) -> None:
    """Raises ValueError for classes of SGLang and vLLM, whose constructors differ, and other wrong signatures."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of C code
        return
    try:
        signature.bind({}, 1)
    except TypeError as error:
        raise ValueError(
            f"{attribute} must be callable with (params, vocab_size): {error} (see treeline_runtime.sampling.processor)"
        ) from None


def choices_of(
    batch: Batch,
    fill_masks: Callable[[Sequence[Constraint], Sequence[Sequence[int]]], tuple[torch.Tensor, dict[int, str]]],
) -> Choices:
    """The choices for a batch, given what each request has sampled by now. Ended requests choose nothing."""
    live = [(j, req) for j, i in enumerate(batch.sampling) if (req := batch.reqs[i]).finish is None]
    processors = {
        j: (req.processor.name, partial(req.processor.apply, req.tokens[req.prompt_len + req.processor.seen :]))
        for j, req in live
        if req.processor is not None
    }
    # a request that has jumped since does not use its sampled token
    bound = [(j, req) for j, req in live if req.constraint is not None and req.overtaken < 0]
    if not bound:
        return Choices([], None, {}, processors)
    drafts = {req.constraint: req.draft for _, req in bound if req.constraint is not None}
    masks, failed = fill_masks(list(drafts), list(drafts.values()))
    masked = [j for j, _ in bound]
    return Choices(masked, masks, {masked[i]: why for i, why in failed.items()}, processors)
