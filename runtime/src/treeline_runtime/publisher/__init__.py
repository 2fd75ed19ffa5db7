"""What this runtime tells routers: KV events, snapshots, load. Pure: index, stream, load; sockets: process."""
