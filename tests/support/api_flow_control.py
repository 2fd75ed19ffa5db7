"""Pools with flow control: refused ones with the words of the refusal, and accepted ones."""

REFUSED_FLOW_CONTROL = [
    (
        "endpointPicker: {flowControl: {enabled: true, waitSeconds: 1.0, endpointRequests: 3}}",
        "waitSeconds and endpointRequests exclude each other: remove one of them",
    ),
    ("endpointPicker: {flowControl: {waitSeconds: 1.0}}", "set enabled, or remove waitSeconds"),
    ("endpointPicker: {flowControl: {endpointRequests: 3}}", "set enabled, or remove endpointRequests"),
    (
        "endpointPicker: {flowControl: {holdEmptyPoolSeconds: 9.0, ttlSeconds: 60.0}}",
        "ttlSeconds needs flow control: set enabled, or remove ttlSeconds",
    ),
    ("endpointPicker: {flowControl: {maxRequests: 9}}", "set enabled or holdEmptyPoolSeconds, or remove maxRequests"),
    ("endpointPicker: {flowControl: {maxBytes: 9}}", "set enabled or holdEmptyPoolSeconds, or remove maxBytes"),
    (
        "endpointPicker: {flowControl: {fairnessHeader: x-team}}",
        "fairnessHeader has no effect: set enabled or quotas, or remove it",
    ),
    (
        "endpointPicker: {flowControl: {enabled: true, fairnessHeader: authorization}}",
        "this header carries a secret, and client names appear in messages and traces: use another header",
    ),
    ("endpointPicker: {flowControl: {quotas: {}}}", "set either configMapRef or secretRef"),
    (
        "endpointPicker: {flowControl: {quotas: {configMapRef: {name: a}, secretRef: {name: b}}}}",
        "quotas are in one file: set either configMapRef or secretRef",
    ),
    (
        "{endpointPicker: {flowControl: {enabled: true, fairnessHeader: x-team}},"
        " gateway: {standalone: {apiKeysSecretRef: {name: keys}}}}",
        "clients are named by API keys: remove fairnessHeader, or gateway.standalone.apiKeysSecretRef",
    ),
]
ACCEPTED_FLOW_CONTROL = [
    "endpointPicker: {flowControl: {}}",
    "{endpointPicker: {flowControl: {enabled: true, waitSeconds: 0.5, maxRequests: 9, maxBytes: 9, ttlSeconds: 3600.0,"
    " quotas: {secretRef: {name: a}}}}, gateway: {standalone: {apiKeysSecretRef: {name: keys}}}}",
    "endpointPicker: {flowControl: {enabled: true, endpointRequests: 5, fairnessHeader: x-team}}",
    "endpointPicker: {flowControl: {holdEmptyPoolSeconds: 300.0, maxRequests: 9, maxBytes: 9}}",
    "endpointPicker: {flowControl: {fairnessHeader: x-team, quotas: {configMapRef: {name: a, key: b.json}}}}",
]
