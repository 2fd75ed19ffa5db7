"""What this runtime tells routers: KV events, snapshots, load. Pure: mirror, feed, load; sockets: process."""
