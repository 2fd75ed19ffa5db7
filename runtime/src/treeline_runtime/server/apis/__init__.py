"""Other chat APIs, as thin adapters: a request becomes that of a chat, and the parts of an output their events."""
