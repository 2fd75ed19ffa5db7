"""What a configuration of another picker comes to, plugin by plugin and as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from treeline_epp.compat.config import GIE, LLMD, ConfigError, decode
from treeline_epp.compat.flow_plan import Plan
from treeline_epp.compat.plan import plan
from treeline_epp.compat.plugins import GATES, PLUGINS, Fate, Role
from treeline_epp.endpoints.model_server_metrics import Metric
from treeline_epp.options import options_of

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"
POLICIES = ("treeline", "random", "round_robin")
MAPPED, IGNORED, REFUSED = Fate.MAPPED, Fate.IGNORED, Fate.REFUSED

NAMED = {
    MAPPED: """max-score-picker random-picker queue-scorer kv-cache-utilization-scorer running-requests-size-scorer
        prefix-cache-scorer token-load-scorer latency-scorer load-aware-scorer active-request-scorer
        precise-prefix-cache-scorer header-based-testing-filter approx-prefix-cache-producer inflight-load-producer
        burst-prefix-cache-producer single-profile-handler openai-parser anthropic-parser sglanghttp-parser
        metrics-data-source core-metrics-extractor k8s-notification-source endpoint-notification-source
        models-data-source fcfs-ordering-policy round-robin-fairness-policy destination-endpoint-served-verifier""",
    IGNORED: """weighted-random-picker lora-affinity-scorer predicted-latency-scorer session-affinity-scorer
        no-hit-lru-scorer prefix-cache-affinity-filter utilization-filter vllmgrpc-parser predicted-latency-producer
        token-producer precise-prefix-cache-producer probabilistic-admitter passthrough-parser vllmhttp-parser
        utilization-detector concurrency-detector global-strict-fairness-policy
        edf-ordering-policy slo-deadline-ordering-policy static-usage-limit-policy
        priority-holdback-policy eviction-sheddable-filter eviction-priority-then-time-ordering
        sheddable-eviction-filter""",
    REFUSED: """context-length-aware topology-affinity-scorer slo-headroom-tier-filter label-selector-filter
        decode-filter prefill-filter topology-affinity-filter p2p-source-producer disagg-profile-handler
        data-parallel-profile-handler header-profile-handler latency-slo-admitter vertexai-parser
        file-discovery request-attribute-reporter""",
}
"""Every type of plugin that GIE 1.5 has, and what llm-d's guides add."""


def planned(text: str, *, version: str = GIE, policies: tuple[str, ...] = POLICIES, flow: bool = False) -> Plan:
    return plan(decode(f"apiVersion: {version}\nkind: EndpointPickerConfig\n{text}"), policies, flow=flow)


def why(text: str, *, flow: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        planned(text, version=LLMD, flow=flow)
    return str(error.value)


@pytest.mark.parametrize(("fate", "type"), [(fate, type) for fate, types in NAMED.items() for type in types.split()])
def test_every_plugin_is_mapped_told_to_have_no_effect_or_refused(fate: Fate, type: str) -> None:
    text = f"plugins: [{{type: {type}, name: mine}}, {{type: prefix-cache-scorer}}]"
    text += "\nschedulingProfiles: [{name: default, plugins: [{pluginRef: prefix-cache-scorer}]}]"
    if fate is REFUSED:
        assert why(text) == f"plugins[0]: {type} is refused: {PLUGINS[type].told}"
        return
    told = planned(text, version=LLMD).told
    assert told == ([] if fate is MAPPED else [f"plugins[0]: {type} has no effect: {PLUGINS[type].told}"])


def test_the_page_for_those_who_come_from_elsewhere_has_every_plugin_and_gate() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, plugin in {**PLUGINS, **GATES}.items():
        told = ("mapped", f"--policy {plugin.policy}") if plugin.policy else (plugin.fate.value, plugin.told)
        assert f"| `{name}` | {told[0]} | {told[1]} |" in page, name


DEFAULT = """
plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {type: prefix-cache-scorer},
  {type: metrics-data-source, parameters: {scheme: http, path: /metrics, insecureSkipVerify: true}},
  {type: core-metrics-extractor, parameters: {defaultEngine: sglang}}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: kv-cache-utilization-scorer, weight: 2},
    {pluginRef: prefix-cache-scorer, weight: 3}]
"""


def test_the_default_of_the_others_is_our_default() -> None:
    made = planned(DEFAULT)
    assert made.settings == {}
    assert made.told == ["weights of scorers have no effect: whatever speaks for an endpoint is counted in seconds"]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("plugins: [{type: random-picker}]", "random"),
        ("plugins: [{type: random-picker}, {type: queue-scorer}]", "random"),
        ("plugins: []", "random"),
        ("plugins: [{type: header-based-testing-filter}]", "random"),
        ("plugins: [{type: queue-scorer}, {type: max-score-picker}]", "least_load"),
        ("plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]", None),
        ("plugins: [{type: lora-affinity-scorer}]", None),
        (
            "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]\n"
            "schedulingProfiles: [{name: d, plugins: [{pluginRef: queue-scorer}, "
            "{pluginRef: prefix-cache-scorer, weight: 0}]}]",
            "least_load",
        ),
    ],
)
def test_the_policy_is_the_one_that_looks_at_the_same(text: str, policy: str | None) -> None:
    assert planned(text, policies=(*POLICIES, "least_load")).settings.get("policy") == policy


def test_a_policy_that_there_is_not_is_told() -> None:
    made = planned("plugins: [{type: queue-scorer}]")
    assert made.settings == {}
    assert made.told == ["what endpoints hold of a prompt counts, too, though no scorer asks for it"]


@pytest.mark.parametrize(
    ("types", "policy"),
    [
        ("prefix-cache-scorer session-affinity-scorer", "session_affinity"),
        ("session-affinity-filter queue-scorer", "session_affinity"),
        ("lora-affinity-scorer prefix-cache-scorer", "lora_affinity"),
        ("random-picker session-affinity-scorer", "random"),
        ("random-picker session-affinity-filter", "session_affinity"),
    ],
)
def test_affinities_are_policies_where_there_are_such(types: str, policy: str) -> None:
    text = "plugins: [" + ", ".join(f"{{type: {type}}}" for type in types.split()) + "]"
    policies = (*POLICIES, "session_affinity", "lora_affinity")
    made = planned(text, policies=policies)
    assert made.settings["policy"] == policy
    assert not any("has no effect" in sentence for sentence in made.told)


def test_parameters_of_a_plugin_that_becomes_a_policy_are_told() -> None:
    text = "plugins: [{type: session-affinity-scorer, parameters: {cookieName: mine}}]"
    made = planned(text, policies=(*POLICIES, "session_affinity"))
    assert made.told == ["plugins[0].parameters of session-affinity-scorer have no effect: cookieName"]


def test_of_two_affinities_one_decides_and_a_weight_of_nothing_is_no_wish() -> None:
    text = "plugins: [{type: session-affinity-scorer}, {type: lora-affinity-scorer}]\n"
    policies = (*POLICIES, "session_affinity", "lora_affinity")
    made = planned(text, policies=policies)
    assert made.settings["policy"] == "session_affinity"
    assert made.told == ["one policy decides, session_affinity, and not lora_affinity as well"]
    refs = "{pluginRef: session-affinity-scorer, weight: 0}, {pluginRef: lora-affinity-scorer}"
    text += f"schedulingProfiles: [{{name: d, plugins: [{refs}]}}]"
    assert planned(text, policies=policies).settings["policy"] == "lora_affinity"


FLOW = """
featureGates: [flowControl]
plugins: [{type: concurrency-detector, name: limit, parameters: {maxConcurrency: 40}}, {type: prefix-cache-scorer},
  {type: fcfs-ordering-policy}, {type: round-robin-fairness-policy}]
saturationDetector: {pluginRef: limit}
flowControl:
  maxBytes: 1Gi
  defaultRequestTTL: 90s
  noEndpointRequestTTL: 5m
  enableEviction: true
  defaultPriorityBand: {maxBytes: 64Mi, maxRequests: "1k", orderingPolicyRef: fcfs-ordering-policy}
  priorityBands: [{priority: 3, maxRequests: 7}]
"""


def test_flow_control_becomes_its_flags() -> None:
    made = planned(FLOW, version=LLMD, flow=True)
    assert made.settings == {
        "flow_control": "requests",
        "flow_endpoint_requests": 40,
        "flow_ttl_seconds": 90.0,
        "hold_empty_pool_seconds": 300.0,
        "flow_max_bytes": 64 << 20,
        "flow_max_requests": 1000,
    }
    told = "\n".join(made.told)
    for words in ("all priorities together", "priorityBands have no effect", "enableEviction has no effect"):
        assert words in told
    assert "detector" not in told, "it is heeded"
    made = planned(FLOW.replace("maxConcurrency: 40", "maxConcurrency: 40, headroom: 0.2"), version=LLMD, flow=True)
    assert "plugins[0].parameters of concurrency-detector have no effect: headroom" in made.told
    made = planned("featureGates: [flowControl]\nplugins: [{type: prefix-cache-scorer}]", flow=True)
    assert made.settings == {"flow_control": "wait"}


@pytest.mark.parametrize(
    ("flow", "held_s"),
    [("", 60.0), ("flowControl: {}", 60.0), ("flowControl: {defaultRequestTTL: 90s}", 90.0)],
)
def test_requests_wait_for_an_empty_pool_of_llmd_as_long_as_for_room(flow: str, held_s: float) -> None:
    text = f"featureGates: [flowControl]\nplugins: [{{type: prefix-cache-scorer}}]\n{flow}"
    made = planned(text, version=LLMD, flow=True)
    assert made.settings["hold_empty_pool_seconds"] == held_s


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("90s", "soon", "flowControl.defaultRequestTTL: 'soon' is no duration"),
        ("90s", "0s", "flowControl.defaultRequestTTL: must be above 0 and at most 3600 s"),
        ("5m", "2h", "flowControl.noEndpointRequestTTL: must be above 0 and at most 3600 s"),
        ("64Mi", "many", "flowControl.defaultPriorityBand.maxBytes: 'many' is no quantity"),
        ('"1k"', "0", "flowControl.defaultPriorityBand.maxRequests: must be at least 1"),
        ("40", "0", "maxConcurrency of limit: must be a whole number of at least 1"),
    ],
)
def test_bounds_of_flow_control_that_cannot_be_are_refused(old: str, new: str, told: str) -> None:
    assert told in why(FLOW.replace(old, new), flow=True)


def test_parameters_with_a_meaning_become_settings_and_others_are_told() -> None:
    made = planned(
        "plugins:\n"
        "- {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}\n"
        "- {type: prefix-cache-scorer, parameters: {blockSizeTokens: 64, autoTune: false}}\n"
        "- {type: metrics-data-source, parameters: {path: /prometheus/metrics}}\n"
        "- type: core-metrics-extractor\n"
        "  parameters:\n"
        "    engineConfigs:\n"
        "    - {name: vllm, queuedRequestsSpec: 'vllm:num_requests_waiting'}\n"
        "    - {name: mine, queuedRequestsSpec: 'q{a=b}', runningRequestsSpec: r, kvUsageSpec: k, loraSpec: l}\n"
    )
    assert made.settings == {
        "fallback_endpoints": 2,
        "model_server_metrics_path": "/prometheus/metrics",
        "total_queued_requests_metric": Metric("q", {"a": "b"}),
        "total_running_requests_metric": Metric("r"),
        "kv_cache_usage_percentage_metric": Metric("k"),
    }
    told = "; ".join(made.told)
    assert "plugins[1].parameters of prefix-cache-scorer have no effect: autoTune, blockSizeTokens" in told
    assert "plugins[3].parameters.engineConfigs[1]: loraSpec have no effect" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plugins: [{type: my-own-scorer}]", "plugins[0]: 'my-own-scorer' is not known: its code is not here"),
        ("plugins: [{type: queue-scorer}, {type: queue-scorer}]", "plugins[1].name: there is another plugin"),
        ("featureGates: [flowControl]", "featureGates[0]: requests do not wait in this picker"),
        ("featureGates: [other]", "featureGates[0]: 'other' is not known"),
        ("flowControl: {maxRequests: 10}", "flowControl: needs the feature gate flowControl: add it to featureGates"),
        ("schedulingProfiles: [{name: a}, {name: b}]", "schedulingProfiles[1]: there is one way to choose"),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: x}]}]",
            "schedulingProfiles[0].plugins[0].pluginRef: there is no plugin 'x'",
        ),
        (
            "flowControl: {priorityBands: [{priority: 1, orderingPolicyRef: mine}]}",
            "flowControl.priorityBands[0].orderingPolicyRef: there is no plugin 'mine'",
        ),
        (
            "flowControl: {saturationDetector: {pluginRef: mine}}",
            "flowControl.saturationDetector.pluginRef: there is no plugin 'mine'",
        ),
        ("parser: {pluginRef: vertexai-parser}", "parser.pluginRef: vertexai-parser is refused: paths of Vertex"),
        (
            "dataLayer: {discovery: {pluginRef: file-discovery}}",
            "dataLayer.discovery.pluginRef: file-discovery is refused",
        ),
        (
            "plugins: [{type: random-picker, parameters: {maxNumOfEndpoints: 5}}]",
            "plugins[0].parameters.maxNumOfEndpoints: must be a whole number from 1 to 4",
        ),
        (
            "plugins: [{type: metrics-data-source, parameters: {scheme: https}}]",
            "plugins[0].parameters.scheme: engines are asked over plain HTTP only",
        ),
        ("plugins: [{type: metrics-data-source, parameters: {path: x}}]", "'x' is no path"),
        (
            "plugins: [{type: core-metrics-extractor, parameters: {engineConfigs: [{name: a}, {name: b}]}}]",
            "engineConfigs[1]: metrics of one engine can be named",
        ),
        (
            "plugins: [{type: core-metrics-extractor, parameters: {engineConfigs: [{kvUsageSpec: 'a{b'}]}}]",
            "engineConfigs[0].kvUsageSpec: ",
        ),
        ("plugins: [{type: core-metrics-extractor, parameters: {engineConfigs: {}}}]", "must be a list of objects"),
    ],
)
def test_what_would_choose_otherwise_is_refused_with_its_place(text: str, told: str) -> None:
    assert told in why(text)


def test_members_of_llm_d_without_a_meaning_here_are_told() -> None:
    text = DEFAULT + "dataLayer: {injectDefaults: false, crossReplicaSyncInterval: 1s}"
    told = "\n".join(planned(text, version=LLMD).told)
    assert "dataLayer.injectDefaults has no effect" in told
    assert "dataLayer.crossReplicaSyncInterval has no effect" in told


def test_each_role_is_one_that_a_profile_can_have() -> None:
    roles = {type: plugin.role for type, plugin in PLUGINS.items()}
    assert {type for type, role in roles.items() if role is Role.PICKER} == {
        "max-score-picker",
        "random-picker",
        "weighted-random-picker",
    }
    refused = {type for type, plugin in PLUGINS.items() if plugin.fate is REFUSED}
    assert {type for type, role in roles.items() if role is Role.SCORER} == {
        type for type in roles if type.endswith("-scorer") and type not in refused
    }


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    head = f"apiVersion: {GIE}\nkind: EndpointPickerConfig\n"
    file.write_text(head + "plugins: [{type: random-picker, parameters: {maxNumOfEndpoints: 2}}, {type: tokenizer}]")
    words = ["--gateway", "g", "--secure-serving", "--config-file", str(file)]
    options = options_of(words)
    assert (options.policy, options.fallback_endpoints, options.conformance_headers) == ("random", 1, False)
    assert any("--tokenizer MODEL=URI" in sentence for sentence in options.ignored)
    options = options_of([*words, "--policy", "treeline", "--fallback-endpoints=0", "--enable-pprof"])
    assert (options.policy, options.fallback_endpoints) == ("predicted_ttft", 0)
    assert options.ignored[0].startswith("--enable-pprof")
    text = head + "plugins: [{type: header-based-testing-filter}, {type: destination-endpoint-served-verifier}]"
    assert options_of(["--gateway", "g", "--config-text", text]).conformance_headers


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config-file", "/nowhere.yaml"], "--config-file /nowhere.yaml: "),
        (["--config-text", "kind: x"], "--config-text: missing required field `apiVersion`"),
        (["--config-text", "x", "--config-file", "y"], "give one of them"),
    ],
)
def test_a_file_that_cannot_be_used_is_status_2_and_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as end:
        options_of(["--gateway", "g", *words])
    assert end.value.code == 2
    assert told in capsys.readouterr().err
