"""Loads the model and starts what computes it, on one rank or on all ranks of a group."""

from __future__ import annotations

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.models.loader import architecture_of, resolve_device
from treeline_runtime.models.shards import check_ranks
from treeline_runtime.scheduler.administration import Residence, load
from treeline_runtime.scheduler.peers import Peers
from treeline_runtime.scheduler.processors import NO_PROCESSORS, Processors
from treeline_runtime.scheduler.ranks.group import Followers
from treeline_runtime.scheduler.ranks.protocol import Group, together
from treeline_runtime.scheduler.reports import Transport
from treeline_runtime.scheduler.resolve import resolve
from treeline_runtime.scheduler.scheduler import Scheduler


def start(
    config: SchedulerConfig,
    transport: Transport,
    processors: Processors = NO_PROCESSORS,
    peers: Peers | None = None,
) -> Scheduler:
    """Returns a warm scheduler with the model that `config` names, on rank 0 of its group. Raises ModelError,
    ConfigError or GroupFailed. processors: in addition to `config`'s. peers: data-parallel ranks that share experts."""
    processors = processors.with_named(config.logit_processor)
    group: Followers | None = None
    if config.ranks > 1:
        check_ranks(architecture_of(config)[0], config.tp_size, config.pp_size, config.ep_size)
        group = Followers(config, resolve_device(config.device), transport.fail)
        config = group.config
    if peers is not None:
        peers.meet(resolve_device(config.device))
    try:
        model, _ = together(group, lambda: load(config, group, peers))
        scheduler = Scheduler(config, model, transport, processors=processors, group=group, peers=peers)
        del model  # the scheduler's alone: it may have to let go of it
        try:
            scheduler.residence.warm_up()
            if config.host_cache is not None:
                together(group, lambda: None)  # all ranks have opened the memory of the pages
            scheduler.adapters.load_now(config.lora_modules)
        except BaseException:
            scheduler.close()
            raise
    except BaseException:
        if group is not None:
            group.close()
        raise
    return scheduler


def begin(config: SchedulerConfig, group: Group) -> Residence:
    """The same on another rank. Raises ModelError, ConfigError or GroupFailed on all ranks."""
    model, _ = together(group, lambda: load(config, group))
    residence = Residence(config, resolve(config, model, group), model, group)
    del model
    residence.warm_up()
    return residence
