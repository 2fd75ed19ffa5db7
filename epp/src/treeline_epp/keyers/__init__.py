"""Keys of the index for prompts: by a tokenizer's text, by its tokens, or without one."""
