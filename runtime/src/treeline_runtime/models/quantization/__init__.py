"""Quantised weights: supported formats (`scheme`), their numbers (`fp8`), products (`product`)."""
