"""Where the models' tokenizers come from."""
