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
"""In conformance tests: the endpoints that a request may go to."""
CONFORMANCE_SERVED = "x-conformance-test-served-endpoint"
"""In conformance tests: the endpoint that answered, for the client."""

CREDENTIALS = ("api-key", "authorization", "cookie", "proxy-authorization", "x-api-key")
"""Their values let a client in: they are never used to name a client in pages, traces and messages."""

# From the client to the picker: what it cannot see in one request.
SESSION_ID = "x-session-id"
"""Requests with the same one belong together, by their client's word: as vLLM's router has it."""
FORK = "x-treeline-fork"
"""How many requests that begin like this one will follow at once."""

# Envoy metadata: namespaces and keys.
LB = "envoy.lb"
LB_SUBSET = "envoy.lb.subset_hint"
POOL_METADATA = "treeline-pool"

# Ours. The first two come with a response's first token; the edge strips what shows routing unless a setting keeps it.
CACHED_TOKENS = "x-treeline-cached-tokens"
PROMPT_TOKENS = "x-treeline-prompt-tokens"
ENDPOINT = "x-treeline-endpoint"
IGNORED = "x-treeline-ignored"
"""In a response: names of members of the request that had no effect, with commas between them."""
OVERLOADED = "x-treeline-overloaded"
"""A 503 with this header says "full, ask another", never "broken"."""
EDGE = "x-treeline-edge"
"""On every request that came through our edge. No destination beside it: no picker was asked, the edge fails open."""
ELSEWHERE = "x-treeline-elsewhere"
"""A 503 with this header says "not served here under that name, perhaps by another endpoint"."""
CLIENT = "x-treeline-client"
"""The client whose API key the edge has recognised. Set by our edge alone, which removes what the caller sends."""
ISOLATION = "x-treeline-isolation"
"""How the edge wants its clients' caches kept: one of the two values below. Absent: nothing to keep apart or to
hide."""
PER_KEY = "PerKey"
"""Every client of the edge has a cache of its own."""
SHARED = "Shared"
"""Clients share one cache, but do not know each other: no answer says how much of a prompt was cached."""
FORWARDED_FOR = "x-forwarded-for"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
"""The position in a distributed trace, by W3C's recommendation."""
