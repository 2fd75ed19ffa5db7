"""From another picker's configuration to settings of this one, and what must be said about the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from treeline_epp.compat.config import (
    ConfigError,
    EndpointPickerConfig,
    LlmdDataLayer,
    LlmdEndpointPickerConfig,
    PluginSpec,
)
from treeline_epp.compat.flow_plan import DETECTORS, FLOW_GATE, Plan, flow_plan, references_of_flow
from treeline_epp.compat.plugins import CONFORMANCE, GATES, PLUGINS, Fate, Plugin, Role, Signal
from treeline_epp.endpoints.model_server_metrics import Metric

_LOAD_ALONE = "least_load"
"""The policy that looks at load and not at caches."""
_MOST_ENDPOINTS = 4
"""A chosen endpoint and its fallbacks."""
_SPECS = {
    "queuedRequestsSpec": "total_queued_requests_metric",
    "runningRequestsSpec": "total_running_requests_metric",
    "kvUsageSpec": "kv_cache_usage_percentage_metric",
    "cacheInfoSpec": "cache_info_metric",
}
"""Members of an engine's description, and the settings that have the same."""
_KNOWN_ENGINES = frozenset({"vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm"})


def plan(config: EndpointPickerConfig, policies: Collection[str], *, flow: bool = False) -> Plan:
    """What a configuration comes to; `policies` are those that there are, `flow`: requests can wait in the picker.

    Raises ConfigError.
    """
    made = Plan()
    gates = config.feature_gates or ()
    for at, gate in enumerate(gates):
        _judge(made, f"featureGates[{at}]", gate, GATES.get(gate), "there is no such gate")
    flowing = flow and FLOW_GATE in gates
    specs = _plugins(config)
    for at, spec in specs.values():
        path = f"plugins[{at}]"
        known = PLUGINS.get(spec.type)
        mapped = known is not None and (known.policy in policies or (flowing and spec.type in DETECTORS))
        if not mapped:
            _judge(made, path, spec.type, known, "its code is not here; docs/migrating.md lists what is known")
        assert known is not None
        if spec.type in CONFORMANCE:
            made.settings["conformance_headers"] = True
        _parameters(made, f"{path}.parameters", spec, known, mapped=mapped or known.fate is Fate.MAPPED)
    for path, ref in _references(config):
        if ref not in specs and ref not in PLUGINS:
            raise ConfigError(path, f"there is no plugin {ref!r}")
        if ref not in specs and PLUGINS[ref].fate is Fate.REFUSED and PLUGINS[ref].policy not in policies:
            _judge(made, path, ref, PLUGINS[ref], "")
    _profiles(made, config, specs, policies)
    _data_layer(made, config)
    if FLOW_GATE in gates:
        if not flow:
            raise ConfigError(f"featureGates[{gates.index(FLOW_GATE)}]", "requests do not wait in this picker")
        flow_plan(made, config, {name: spec for name, (_, spec) in specs.items()})
    elif config.flow_control is not None:
        raise ConfigError("flowControl", f"needs the feature gate {FLOW_GATE}: add it to featureGates, or leave it out")
    return made


def _judge(made: Plan, path: str, name: str, known: Plugin | None, unknown: str) -> None:
    if known is None:
        raise ConfigError(path, f"{name!r} is not known: {unknown}")
    if known.fate is Fate.REFUSED:
        raise ConfigError(path, f"{name} is refused: {known.told}")
    if known.fate is Fate.IGNORED:
        made.told.append(f"{path}: {name} has no effect: {known.told}")


def _plugins(config: EndpointPickerConfig) -> dict[str, tuple[int, PluginSpec]]:
    found: dict[str, tuple[int, PluginSpec]] = {}
    for at, spec in enumerate(config.plugins or ()):
        name = spec.name or spec.type
        if name in found:
            raise ConfigError(f"plugins[{at}].name", f"there is another plugin {name!r}")
        found[name] = at, spec
    return found


def _references(config: EndpointPickerConfig) -> Iterator[tuple[str, str]]:
    """`(path, name)` of whatever is referred to."""
    for at, profile in enumerate(config.scheduling_profiles or ()):
        for inner, weighted in enumerate(profile.plugins):
            yield f"schedulingProfiles[{at}].plugins[{inner}].pluginRef", weighted.plugin_ref
    for at, source in enumerate(config.data_layer.sources if config.data_layer is not None else ()):
        yield f"dataLayer.sources[{at}].pluginRef", source.plugin_ref
        for inner, extractor in enumerate(source.extractors):
            yield f"dataLayer.sources[{at}].extractors[{inner}].pluginRef", extractor.plugin_ref
    if config.saturation_detector is not None and config.saturation_detector.plugin_ref:
        yield "saturationDetector.pluginRef", config.saturation_detector.plugin_ref
    if config.parser is not None:
        yield "parser.pluginRef", config.parser.plugin_ref
    if config.flow_control is not None:
        yield from references_of_flow(config.flow_control)
    if isinstance(config, LlmdEndpointPickerConfig):
        yield from _references_of_llmd(config)


def _references_of_llmd(config: LlmdEndpointPickerConfig) -> Iterator[tuple[str, str]]:
    for at, parser in enumerate(config.request_handler.parsers if config.request_handler is not None else ()):
        yield f"requestHandler.parsers[{at}].pluginRef", parser.plugin_ref
    layer = config.data_layer
    if layer is not None:
        if layer.discovery is not None:
            yield "dataLayer.discovery.pluginRef", layer.discovery.plugin_ref
        if layer.peer_discovery is not None:
            yield "dataLayer.peerDiscovery.pluginRef", layer.peer_discovery.plugin_ref
        if layer.cross_replica_syncer_plugin_ref:
            yield "dataLayer.crossReplicaSyncerPluginRef", layer.cross_replica_syncer_plugin_ref


def _data_layer(made: Plan, config: EndpointPickerConfig) -> None:
    layer = config.data_layer
    if not isinstance(layer, LlmdDataLayer):
        return
    if layer.inject_defaults is not None:
        made.told.append("dataLayer.injectDefaults has no effect: engines are always asked for their load")
    if layer.cross_replica_sync_interval is not None:
        made.told.append(
            "dataLayer.crossReplicaSyncInterval has no effect: epp/README.md says what pickers tell each other"
        )


def _profiles(
    made: Plan, config: EndpointPickerConfig, specs: Mapping[str, tuple[int, PluginSpec]], policies: Collection[str]
) -> None:
    """The policy that chooses as the profile does, as near as there is one."""
    profiles = config.scheduling_profiles or ()
    if len(profiles) > 1:
        raise ConfigError(
            "schedulingProfiles[1]", "there is one way to choose; leave one profile, or run a picker for each"
        )
    weights: dict[str, float] = {}
    if profiles:
        for ref in profiles[0].plugins:
            weights[ref.plugin_ref] = 1.0 if ref.weight is None else ref.weight
    else:
        weights = dict.fromkeys(specs, 1.0)
    types = {name: specs[name][1].type if name in specs else name for name in weights}
    scorers = {name: PLUGINS[type] for name, type in types.items() if PLUGINS[type].role is Role.SCORER}
    counting = [scorer for name, scorer in scorers.items() if weights[name] > 0]
    others = [PLUGINS[type] for type in types.values() if PLUGINS[type].role is not Role.SCORER]
    if policy := _policy(made, counting, others, "random-picker" in types.values(), policies):
        made.settings["policy"] = policy
    if len({weights[name] for name in scorers}) > 1:
        made.told.append("weights of scorers have no effect: whatever speaks for an endpoint is counted in seconds")


def _policy(
    made: Plan, scorers: Sequence[Plugin], others: Sequence[Plugin], at_random: bool, policies: Collection[str]
) -> str:
    """Its name; empty for the default. What leaves endpoints out decides before any scorer, whatever the picker."""
    wished = [plugin.policy for plugin in (*others, *scorers) if plugin.policy in policies]
    pinned = any(plugin.policy in policies for plugin in others)
    signals = {scorer.signal for scorer in scorers} - {Signal.NONE}
    if not pinned and (at_random or not scorers):
        made.told.append("endpoints are chosen at random (--policy random): no scorer decides")
        return "random"
    if wished:
        if rest := sorted(set(wished) - {wished[0]}):
            made.told.append(f"one policy decides, {wished[0]}, and not {', '.join(rest)} as well")
        return wished[0]
    if signals != {Signal.LOAD}:
        return ""
    if _LOAD_ALONE in policies:
        return _LOAD_ALONE
    made.told.append("what endpoints hold of a prompt counts, too, though no scorer asks for it")
    return ""


def _parameters(made: Plan, path: str, spec: PluginSpec, known: Plugin, *, mapped: bool) -> None:
    given = dict(spec.parameters or {})
    if known.role is Role.PICKER:
        _fallbacks(made, f"{path}.maxNumOfEndpoints", given.pop("maxNumOfEndpoints", None))
    elif spec.type == "metrics-data-source":
        _page(made, path, given)
    elif spec.type == "core-metrics-extractor":
        given.pop("defaultEngine", None)
        _engines(made, f"{path}.engineConfigs", given.pop("engineConfigs", None))
    elif spec.type in DETECTORS:
        given.pop("maxConcurrency", None)
    if given and mapped:
        made.told.append(f"{path} of {spec.type} have no effect: {', '.join(sorted(given))}")


def _fallbacks(made: Plan, path: str, value: object) -> None:
    if value is None:
        return
    if type(value) is not int or not 1 <= value <= _MOST_ENDPOINTS:
        raise ConfigError(path, f"must be a whole number from 1 to {_MOST_ENDPOINTS}, got {value!r}")
    made.settings["fallback_endpoints"] = value - 1


def _page(made: Plan, path: str, given: dict[str, Any]) -> None:
    given.pop("insecureSkipVerify", None)
    scheme, page = given.pop("scheme", "http"), given.pop("path", None)
    if scheme not in ("http", ""):
        raise ConfigError(f"{path}.scheme", "engines are asked over plain HTTP only; have them serve their metrics so")
    if page in (None, "", "/metrics"):
        return
    if not isinstance(page, str) or not re.fullmatch(r"/[!-~]*", page):
        raise ConfigError(f"{path}.path", f"{page!r} is no path: it begins with a slash and has no spaces")
    made.settings["model_server_metrics_path"] = page


def _engines(made: Plan, path: str, configs: object) -> None:
    """Names of metrics of an engine that is not known. One only: the settings hold for all engines."""
    if configs is None:
        return
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ConfigError(path, "must be a list of objects")
    others = [(at, config) for at, config in enumerate(configs) if str(config.get("name")) not in _KNOWN_ENGINES]
    if len(others) < len(configs):
        made.told.append(
            f"{path}: the metrics of {', '.join(sorted(_KNOWN_ENGINES))} have the names that they give them"
        )
    if len(others) > 1:
        raise ConfigError(f"{path}[{others[1][0]}]", "metrics of one engine can be named; run a picker for each")
    for at, config in others:
        for member, setting in _SPECS.items():
            if text := config.get(member):
                made.settings[setting] = _metric(f"{path}[{at}].{member}", text)
        rest = sorted(set(config) - set(_SPECS) - {"name"})
        if rest:
            made.told.append(f"{path}[{at}]: {', '.join(rest)} have no effect")


def _metric(path: str, text: object) -> Metric:
    if not isinstance(text, str):
        raise ConfigError(path, "must be the name of a metric")
    try:
        return Metric.parse(text)
    except ValueError as error:
        raise ConfigError(path, str(error)) from None
