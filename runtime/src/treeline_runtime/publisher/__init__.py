"""What this runtime sends to routers: KV events, snapshots, load. Pure: index, stream, load; sockets: process."""
