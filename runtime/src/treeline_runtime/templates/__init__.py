"""Rendering of chat templates in worker processes."""
