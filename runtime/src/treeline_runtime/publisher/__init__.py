"""The messages to routers: KV events, snapshots, load. Sockets are in `process` and `peers` only."""
