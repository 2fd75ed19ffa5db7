"""From prompts to keys of the index: by a tokenizer's text, by its tokens, or without one."""
