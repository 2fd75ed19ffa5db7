"""The scheduler owns requests, pages and rows, and chooses the batch of each step."""

import torch

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.models.loader import load_model, resolve_device
from treeline_runtime.scheduler.processors import NO_PROCESSORS, Processors
from treeline_runtime.scheduler.reports import Transport
from treeline_runtime.scheduler.resolve import TO_LOAD, told_as_settings
from treeline_runtime.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "Transport", "start"]


def start(config: SchedulerConfig, transport: Transport, processors: Processors = NO_PROCESSORS) -> Scheduler:
    """Returns a warm scheduler with the model that `config` names. Raises ModelError or ConfigError. processors: in
    addition to `config`'s."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    processors = processors.with_named(config.logit_processor)
    with told_as_settings("the weights", resolve_device(config.device), hint=TO_LOAD):
        model = load_model(config)
    scheduler = Scheduler(config, model, transport, processors=processors)
    del model  # the scheduler's alone: it may have to let go of it
    scheduler.residence.warm_up()
    return scheduler
