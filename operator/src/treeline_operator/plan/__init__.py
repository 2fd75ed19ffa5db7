"""The planner: pure functions from what is wanted and what is there to the writes that remain."""
