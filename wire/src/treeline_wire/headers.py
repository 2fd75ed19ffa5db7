"""Names of HTTP headers and of Envoy metadata. All lower case, as HTTP/2 carries them."""

# Gateway API Inference Extension, with the llm-d spelling where it has one of its own.
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
OBJECTIVE = "x-gateway-inference-objective"
OBJECTIVE_LLMD = "x-llm-d-inference-objective"
FAIRNESS_ID = "x-gateway-inference-fairness-id"
FAIRNESS_ID_LLMD = "x-llm-d-inference-fairness-id"
MODEL_REWRITE = "x-gateway-model-name-rewrite"
MODEL_REWRITE_LLMD = "x-llm-d-model-name-rewrite"
REQUEST_ID = "x-request-id"
SELECTION = "test-epp-endpoint-selection"
"""Conformance tests: the endpoints that a request may go to."""
CONFORMANCE_SERVED = "x-conformance-test-served-endpoint"
"""Conformance tests: the endpoint that answered."""

CREDENTIALS = ("api-key", "authorization", "cookie", "proxy-authorization", "x-api-key")
"""Credentials: never used to name a client in pages, traces and messages."""

# From the client to the picker: facts that one request does not show.
SESSION_ID = "x-session-id"
"""A session id: requests with the same one belong together. The name is from vLLM's router."""
FORK = "x-treeline-fork"
"""How many requests with this prefix will follow at once."""

# Envoy metadata: namespaces and keys.
LB = "envoy.lb"
LB_SUBSET = "envoy.lb.subset_hint"
POOL_METADATA = "treeline-pool"

# Ours. The first two come with a response's first token; the edge strips what shows routing unless a setting keeps it.
CACHED_TOKENS = "x-treeline-cached-tokens"
PROMPT_TOKENS = "x-treeline-prompt-tokens"
ENDPOINT = "x-treeline-endpoint"
IGNORED = "x-treeline-ignored"
"""Response header: members of the request that had no effect, separated by commas."""
OVERLOADED = "x-treeline-overloaded"
"""A 503 with this header means "full, ask another replica", not "broken"."""
EDGE = "x-treeline-edge"
"""On every request through our edge. Without a destination beside it: the picker was not asked, and the edge fails
open."""
ELSEWHERE = "x-treeline-elsewhere"
"""A 503 with this header means "this replica does not serve that model name, another may"."""
CLIENT = "x-treeline-client"
"""The client by its API key. Only our edge sets it, and removes it from requests."""
ISOLATION = "x-treeline-isolation"
"""How the edge isolates caches: one of the two values below. Absent: no isolation needed."""
PER_KEY = "PerKey"
"""Every client has a cache of its own."""
SHARED = "Shared"
"""Clients share a cache, and answers do not say how much was cached."""
RANK = "x-data-parallel-rank"
"""The data-parallel rank that a request is for: vLLM's name. Behind our edge the picker alone sets it."""
PAGES_FROM = "x-treeline-pages-from"
"""HOST:PORT where the runtime may find pages of the prompt; with `;within=SECONDS` they are being computed, and the
runtime waits so long for the next one. The picker alone sets it."""
PREFILLER = "x-prefiller-host-port"
"""HOST:PORT of the engine that llm-d's sidecar asks for the prompt."""
ENGINES = (PREFILLER, "x-encoder-hosts-ports", "x-data-parallel-host-port", "x-kv-cache-source-host-port", PAGES_FROM)
"""Headers that name an engine, which llm-d's sidecars and our runtime read. Clients must not name any."""
FORWARDED_FOR = "x-forwarded-for"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
"""The position in a distributed trace (W3C Trace Context)."""
