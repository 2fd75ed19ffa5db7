"""Contracts between the rooms, and the pure functions that two sides must agree on."""
