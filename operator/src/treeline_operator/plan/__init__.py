"""The planner: pure functions from desired and present state to the remaining writes."""
