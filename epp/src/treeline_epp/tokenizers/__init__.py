"""The sources of the models' tokenizers."""
