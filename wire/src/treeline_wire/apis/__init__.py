"""Converts requests of other chat APIs into the chat completions that each engine makes of them."""
