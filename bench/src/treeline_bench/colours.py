"""Colours of all plots."""

OURS = "#1b6e53"
OTHER = "#7d898f"
REFERENCE = "#b5482a"
