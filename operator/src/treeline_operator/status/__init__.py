"""Status of pools and models, in the words of `api.conditions`. Pure, like the planner."""
