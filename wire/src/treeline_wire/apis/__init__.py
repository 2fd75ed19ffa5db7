"""Other chat APIs: their requests as the chat completions that each engine makes of them."""
