"""Compatibility with other endpoint pickers: their flags, their configuration file, their metric names."""
