"""KV events of engines, on their way into the index."""
