"""Weights of fewer bits: which formats are served (`scheme`), what their numbers mean (`fp8`), products (`product`)."""
