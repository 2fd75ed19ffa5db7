"""The form of an `EndpointPickerConfig`: strict, and any text is a configuration or refused with a path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.compat.config import GIE, LLMD, ConfigError, decode
from treeline_epp.compat.plan import plan
from treeline_epp.compat.plugins import PLUGINS

HEAD = f"apiVersion: {GIE}\nkind: EndpointPickerConfig\n"


def why(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        decode(text)
    return str(error.value)


WHOLE = """
featureGates: [dataLayer]
plugins:
- {name: cached, type: prefix-cache-scorer, parameters: {autoTune: true}}
- {type: queue-scorer}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: cached, weight: 3}, {pluginRef: queue-scorer, weight: 2.5}]
saturationDetector: {pluginRef: utilization-detector}
parser: {pluginRef: openai-parser}
dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]}
flowControl:
  maxBytes: 1Gi
  maxRequests: 1000
  defaultRequestTTL: 60s
  defaultPriorityBand: {priority: 0, maxBytes: 1e9, fairnessPolicyRef: a, orderingPolicyRef: b}
  priorityBands: [{priority: -1}]
  usageLimitPolicyPluginRef: c
"""
OF_LLMD = {
    "requestHandler: {parsers: [{pluginRef: openai-parser}]}": "requestHandler",
    "dataLayer: {discovery: {pluginRef: file-discovery}}": "discovery",
    "dataLayer: {injectDefaults: false}": "injectDefaults",
    "flowControl: {noEndpointRequestTTL: 5s}": "noEndpointRequestTTL",
    "flowControl: {enableEviction: true}": "enableEviction",
}


@pytest.mark.parametrize("version", [GIE, LLMD])
def test_every_member_of_both_versions_is_read(version: str) -> None:
    config = decode(f"apiVersion: {version}\nkind: EndpointPickerConfig{WHOLE}")
    assert config.plugins is not None
    assert config.scheduling_profiles is not None
    assert (config.plugins[0].name, config.plugins[1].type) == ("cached", "queue-scorer")
    assert config.scheduling_profiles[0].plugins[1].weight == 2.5
    assert config.flow_control is not None
    assert (config.flow_control.max_bytes, config.flow_control.default_request_ttl) == ("1Gi", "60s")


@pytest.mark.parametrize("text", OF_LLMD)
def test_what_is_llm_ds_alone_is_not_gies(text: str) -> None:
    decode(f"apiVersion: {LLMD}\nkind: EndpointPickerConfig\n{text}\n")
    assert f"unknown field `{OF_LLMD[text]}`" in why(HEAD + text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is empty"),
        ("a: [", "no YAML"),
        ("[]", "Expected `object`, got `array`"),
        (f"apiVersion: {GIE}", "missing required field `kind`"),
        (f"apiVersion: {GIE}\nkind: Pool", "kind: must be EndpointPickerConfig"),
        ("apiVersion: v1\nkind: EndpointPickerConfig", "apiVersion: must be inference.networking.x-k8s.io/v1alpha1 or"),
        (HEAD + "extra: 1", "contains unknown field `extra`"),
        (HEAD + "plugins:\n- {type: a, weight: 1}", "plugins[0]: contains unknown field `weight`"),
        (HEAD + "plugins:\n- {name: a}", "plugins[0]: missing required field `type`"),
        (HEAD + "plugins: {}", "plugins: Expected `array | null`, got `object`"),
        (HEAD + "plugins:\n- {type: a, type: b}", "plugins[0].type: occurs twice"),
        (HEAD + "parser: {pluginRef: ''}", "parser.pluginRef: Expected `str` of length >= 1"),
        (HEAD + "kind: EndpointPickerConfig", "kind: occurs twice"),
        (HEAD + "plugins:\n- {type: a, parameters: [1]}", "plugins[0].parameters: Expected `object | null`"),
        (HEAD + "plugins: &a [*a]", "more than"),
        (
            HEAD + "".join(f"l{at}: &l{at} [{', '.join([f'*l{at - 1}' if at else 'x'] * 9)}]\n" for at in range(9)),
            "more than 20000 values",
        ),
        (HEAD + "x: " + "[" * 2000 + "]" * 2000, "no YAML: nested more than 100 deep"),
        (HEAD + "#" * (1024 * 1024), "more than 1048576 characters"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, told: str) -> None:
    assert told in why(text)


NAMES = (
    "kind",
    "plugins",
    "type",
    "name",
    "parameters",
    "schedulingProfiles",
    "pluginRef",
    "weight",
    "dataLayer",
    "sources",
    "flowControl",
    "maxBytes",
    "maxNumOfEndpoints",
    "engineConfigs",
    "scheme",
    "path",
    "queuedRequestsSpec",
    "featureGates",
    "parser",
)


def _trees() -> st.SearchStrategy[Any]:
    names = st.sampled_from(NAMES)
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(sorted(PLUGINS))
    )
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4))


@settings(max_examples=60)
@given(_trees(), st.sampled_from([GIE, LLMD]))
def test_any_document_is_planned_or_refused(tree: Any, version: str) -> None:
    document = tree if isinstance(tree, dict) else {"plugins": tree}
    text = json.dumps({**document, "apiVersion": version, "kind": "EndpointPickerConfig"})
    try:
        config = decode(text)
        plan(config, ("treeline", "random"))
    except ConfigError:
        return
    assert config.api_version == version


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        decode(text)
