"""Default ports. Event, replay, load and transfer ports count up by data-parallel rank."""

RUNTIME_HTTP = 8000
RUNTIME_METRICS = 9600
RUNTIME_ADMIN = 9700
EVENTS = 5557
REPLAY = 5657
LOAD = 5757
KV_TRANSFER = 5857
"""Cached pages for other runtimes."""
EXT_PROC = 9002
EDS = 9003
PICKER_ADMIN = 9004
PEERS = 9005
"""Messages between pickers of a pool, over UDP."""
METRICS = 9090
"""The picker's metrics."""
GATEWAY = 8080
RANKS = 29500
"""Where the first of several machines that compute one model awaits the others."""
