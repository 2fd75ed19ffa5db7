"""What a request asks for: its body, its model, its prompt's key, and why it may be refused."""
