"""Other chat APIs as thin adapters: requests become chats, and parts of an output their events."""
