"""Plugins of GIE 1.5 and llm-d's router by type: what each comes to here.

A plugin is MAPPED where the picker has what it does, IGNORED where leaving it out changes only how good a choice is,
REFUSED where requests would go where they must not, or something downstream would miss what it wrote.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Fate(enum.Enum):
    """What becomes of a plugin."""

    MAPPED = "mapped"
    IGNORED = "ignored"
    """A warning says what is done instead."""
    REFUSED = "refused"
    """The picker does not start."""


class Role(enum.Enum):
    """Where a configuration may refer to a plugin; the rest only by listing it."""

    PICKER = "picker"
    SCORER = "scorer"
    OTHER = "other"


class Signal(enum.Enum):
    """What a scorer looks at."""

    CACHE = "cache"
    LOAD = "load"
    NONE = "none"


class Plugin(NamedTuple):
    """A type of plugin. `told` says what is done here. `policy` does what it did: where there is one of that name, the
    plugin is mapped to it."""

    fate: Fate
    told: str
    role: Role = Role.OTHER
    signal: Signal = Signal.NONE
    policy: str = ""


def _mapped(told: str) -> Plugin:
    return Plugin(Fate.MAPPED, told)


def _ignored(told: str) -> Plugin:
    return Plugin(Fate.IGNORED, told)


def _refused(told: str) -> Plugin:
    return Plugin(Fate.REFUSED, told)


def _scorer(signal: Signal, told: str, fate: Fate = Fate.MAPPED, policy: str = "") -> Plugin:
    return Plugin(fate, told, Role.SCORER, signal, policy)


def _picker(told: str, fate: Fate = Fate.MAPPED) -> Plugin:
    return Plugin(fate, told, Role.PICKER)


_LOAD, _CACHE, _NEITHER = Signal.LOAD, Signal.CACHE, Signal.NONE
_APART = "prefill and decode on different endpoints are not picked here; take the one that serves whole requests"
_CLUSTERS = "endpoints of other clusters are not picked here; put one picker into each cluster"
_TARGETS = (
    "x-slo-ttft-ms and x-slo-tpot-ms are not read; --max-ttft-seconds bounds the wait of requests that may be shed"
)
_BY_POD = "pods are chosen by an InferencePool's selector or by --endpoint-selector; make a pool for each kind"
_SHARED = "where requests wait in the picker, clients of one priority share the endpoints evenly, by tokens"
_NO_DEADLINES = "where requests wait in the picker, a client's go in the order in which they came, not by deadlines"
_NOTHING_HELD_BACK = "nothing is held back for a priority: where requests wait in the picker, the higher one goes first"
_SATURATED = "an endpoint is saturated by the time that what waits there takes (--max-ttft-seconds)"
_NO_EVICTION = "requests that run are not ended for others"
_FOLLOWED = "pods and endpoints are followed live"

PLUGINS: dict[str, Plugin] = {
    # Pickers.
    "max-score-picker": _picker("the endpoint with the least cost; equal ones share at random"),
    "random-picker": _picker("--policy random"),
    "weighted-random-picker": _picker(
        "the endpoint with the least cost: a burst spreads, as each choice counts as load at once", Fate.IGNORED
    ),
    # Scorers.
    "queue-scorer": _scorer(_LOAD, "what waits at an endpoint is part of its cost"),
    "kv-cache-utilization-scorer": _scorer(_LOAD, "what a request would evict is part of an endpoint's cost"),
    "running-requests-size-scorer": _scorer(_LOAD, "slots that are taken are part of an endpoint's cost"),
    "token-load-scorer": _scorer(_LOAD, "tokens that wait are part of an endpoint's cost"),
    "load-aware-scorer": _scorer(_LOAD, "what waits at an endpoint is part of its cost"),
    "active-request-scorer": _scorer(_LOAD, "each choice counts as load from the moment it is made"),
    "latency-scorer": _scorer(_LOAD, "the cost is the predicted time to first token and more; no sidecar predicts it"),
    "predicted-latency-scorer": _scorer(
        _LOAD, f"the cost is the predicted time to first token; {_TARGETS}", Fate.IGNORED
    ),
    "prefix-cache-scorer": _scorer(_CACHE, "what an endpoint holds of the prompt is part of its cost"),
    "precise-prefix-cache-scorer": _scorer(
        _CACHE, "KV events are followed where engines publish them (docs/engines.md); --tokenizer for vLLM and SGLang"
    ),
    "lora-affinity-scorer": _scorer(
        _NEITHER,
        "an adapter's requests go where its prefixes are; which adapters wait or run is not read",
        Fate.IGNORED,
        "lora_affinity",
    ),
    "no-hit-lru-scorer": _scorer(
        _NEITHER, "prompts that nobody holds go where their cost is least, and equal ones share at random", Fate.IGNORED
    ),
    "session-affinity-scorer": _scorer(
        _NEITHER,
        "a conversation goes where its prefix is; x-session-token is neither read nor written",
        Fate.IGNORED,
        "session_affinity",
    ),
    "mm-embeddings-cache-scorer": _scorer(
        _NEITHER,
        "the prompt before its first image is matched; who holds an image's embedding is not known",
        Fate.IGNORED,
    ),
    "context-length-aware": _refused(_BY_POD),
    "topology-affinity-scorer": _refused(
        "where endpoints run is not known; have the proxy limit the choice by its subset"
    ),
    "header-label-affinity-scorer": _refused(_BY_POD),
    "endpoint-attribute-scorer": _refused(_BY_POD),
    # Filters.
    "prefix-cache-affinity-filter": _ignored(
        "an endpoint that holds more of the prompt is kept while it costs no more than 5 ms or 10 % above the best"
    ),
    "utilization-filter": _ignored("a full endpoint costs more; it is not left out"),
    "decode-filter": _refused(
        "llm-d.ai/role is not read, so pods that only prefill would get requests: leave them out by the pool's "
        "selector or --endpoint-selector, and the filter, too"
    ),
    "prefill-filter": _refused(_APART),
    "encode-filter": _refused(_APART),
    "slo-headroom-tier-filter": _refused(_TARGETS),
    "header-based-testing-filter": _mapped("--conformance-headers"),
    "label-selector-filter": _refused(_BY_POD),
    "by-label": _refused(_BY_POD),
    "by-label-selector": _refused(_BY_POD),
    "endpoint-attribute-filter": _refused(_BY_POD),
    "topology-affinity-filter": _refused(
        "where endpoints run is not known; have the proxy limit the choice by its subset"
    ),
    "session-affinity-filter": Plugin(
        Fate.REFUSED,
        "sessions are not pinned: a conversation goes where its prefix is, as long as that is worth the wait there",
        policy="session_affinity",
    ),
    # Producers of what scorers look at.
    "approx-prefix-cache-producer": _mapped("what was sent where is remembered, by itself, in the tree of prefixes"),
    "precise-prefix-cache-producer": _ignored(
        "KV events are followed where engines publish them (docs/engines.md); --tokenizer for vLLM and SGLang"
    ),
    "burst-prefix-cache-producer": _mapped("siblings of a burst see each other's choices, from the first on"),
    "inflight-load-producer": _mapped("each choice counts as load from the moment it is made"),
    "predicted-latency-producer": _ignored(f"rates are measured by the picker itself; {_TARGETS}"),
    "token-producer": _ignored("prompts are matched as text; --tokenizer MODEL=URI says where a model's tokenizer is"),
    "tokenizer": _ignored("prompts are matched as text; --tokenizer MODEL=URI says where a model's tokenizer is"),
    "mm-embeddings-cache-producer": _ignored("who holds an image's embedding is not known"),
    "session-id-producer": _ignored("sessions are not told apart: a conversation goes where its prefix is"),
    "p2p-source-producer": _refused(
        "x-kv-cache-source-host-port is not written; leave it out where no engine reads it"
    ),
    # Profile handlers and what decides for them.
    "single-profile-handler": _mapped("there is one way to choose"),
    "disagg-profile-handler": _refused(_APART),
    "pd-profile-handler": _refused(_APART),
    "disagg-headers-handler": _refused(_APART),
    "prefill-header-handler": _refused(_APART),
    "prefix-based-pd-decider": _refused(_APART),
    "always-disagg-pd-decider": _refused(_APART),
    "always-disagg-multimodal-decider": _refused(_APART),
    "data-parallel-profile-handler": _refused(
        "x-data-parallel-host-port is not written; give the ranks' ports to the pool: each is an endpoint of its own"
    ),
    "header-profile-handler": _refused("there is one way to choose; run a picker for each"),
    "slo-aware-profile-handler": _refused(_TARGETS),
    # Admission.
    "latency-slo-admitter": _refused(_TARGETS),
    "probabilistic-admitter": _ignored(
        "requests that may be shed are refused when every endpoint's wait is longer than --max-ttft-seconds, not before"
    ),
    # Parsers.
    "openai-parser": _mapped("bodies are read by their path: OpenAI's, Anthropic's and SGLang's /generate"),
    "anthropic-parser": _mapped("bodies are read by their path: OpenAI's, Anthropic's and SGLang's /generate"),
    "sglanghttp-parser": _mapped("bodies are read by their path: OpenAI's, Anthropic's and SGLang's /generate"),
    "vllmhttp-parser": _ignored("bodies are read by their path; prompts of vLLM's own paths have no prefix here"),
    "passthrough-parser": _ignored("bodies are read where their path is known; all others go by load alone"),
    "vllmgrpc-parser": _ignored("gRPC of engines is not read: its calls go by load alone"),
    "vertexai-parser": _refused("paths of Vertex AI are not read; have the proxy rewrite them to OpenAI's"),
    # Data layer.
    "metrics-data-source": _mapped("engines that push no load have their metrics page read"),
    "core-metrics-extractor": _mapped("the metrics of vLLM, SGLang, TensorRT-LLM and Triton are known"),
    "model-server-protocol-metrics": _mapped("the metrics of vLLM, SGLang, TensorRT-LLM and Triton are known"),
    "models-data-source": _mapped("engines are asked for /v1/models"),
    "models-data-extractor": _mapped("engines are asked for /v1/models"),
    "k8s-notification-source": _mapped(_FOLLOWED),
    "endpoint-notification-source": _mapped(_FOLLOWED),
    "file-discovery": _refused("give the file's endpoints by --endpoints-file, which is another format (--help)"),
    "dcgm-data-source": _ignored("what GPUs report is not read: engines say how busy they are"),
    "dcgm-extractor": _ignored("what GPUs report is not read: engines say how busy they are"),
    "topology-extractor": _ignored("where endpoints run is not looked at"),
    "local-syncer": _ignored("how pickers know of each other's choices is told in epp/README.md"),
    # Saturation, flow control, eviction.
    "utilization-detector": _ignored(_SATURATED),
    "concurrency-detector": _ignored(_SATURATED),
    "global-strict-fairness-policy": _ignored(_SHARED),
    "round-robin-fairness-policy": _mapped(_SHARED),
    "program-aware-fairness": _ignored(_SHARED),
    "fcfs-ordering-policy": _mapped("where requests wait in the picker, a client's go in the order in which they came"),
    "edf-ordering-policy": _ignored(_NO_DEADLINES),
    "slo-deadline-ordering-policy": _ignored(_NO_DEADLINES),
    "static-usage-limit-policy": _ignored(_NOTHING_HELD_BACK),
    "priority-holdback-policy": _ignored(_NOTHING_HELD_BACK),
    "soft-reflective-ceiling-policy": _ignored(_NOTHING_HELD_BACK),
    "eviction-sheddable-filter": _ignored(_NO_EVICTION),
    "eviction-priority-then-time-ordering": _ignored(_NO_EVICTION),
    "sheddable-eviction-filter": _ignored(_NO_EVICTION),
    "priority-then-time-eviction-order-policy": _ignored(_NO_EVICTION),
    # The rest.
    "destination-endpoint-served-verifier": _mapped("--conformance-headers"),
    "request-attribute-reporter": _refused(
        "x-gateway-inference-request-cost is not written; Envoy's access log has the tokens of the prompt"
    ),
    "agent-identity": _refused("agents are not told apart; leave it out"),
    "disaggregatedset-rollout-screener": _refused(_APART),
    "disaggregatedset-rollout-pod-extractor": _refused(_APART),
    "multicluster-file-discovery": _refused(_CLUSTERS),
    "multicluster-metrics-extractor": _refused(_CLUSTERS),
    "multicluster-metrics-data-source": _refused(_CLUSTERS),
    "multicluster-approx-prefix-cache-producer": _refused(_CLUSTERS),
    "multicluster-session-affinity-filter": _refused(_CLUSTERS),
    "multicluster-kv-cache-utilization-scorer": _refused(_CLUSTERS),
    "multicluster-prefix-cache-scorer": _refused(_CLUSTERS),
    "multicluster-queue-scorer": _refused(_CLUSTERS),
}

CONFORMANCE = frozenset({"header-based-testing-filter", "destination-endpoint-served-verifier"})
"""These ask for `--conformance-headers`."""
GATES = {
    "flowControl": _mapped("--flow-control, with the bounds that flowControl gives"),
    "dataLayer": _mapped("engines are always asked"),
    "enableLegacyMetrics": _mapped("engines are always asked"),
    "prepareDataPlugins": _mapped("prefixes are always looked up before endpoints are compared"),
    "haPopulateNonLeaderDatastore": _mapped("there is no leader: every replica knows its endpoints"),
}
"""Feature gates, as plugins."""
